"""One token per row from its logits, by the row's own rule."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.program import randomness, sampling
from jaxspec.program.active import Active


def forbid_early_stop(
    logits: Float[Array, "token vocab"],
    position: Int[Array, " token"],
    active: Active,
    axes: tuple[str, ...] | None = None,
) -> Float[Array, "token vocab"]:
    """Mask stop ids at positions below the request's `min_tokens`.

    Args:
        axes: Mesh axes that split the vocabulary, inside `shard_map`.
    """
    is_early = active.is_active & (position < active.min_total)
    first = 0 if axes is None else jax.lax.axis_index(axes) * logits.shape[1]
    return sampling.mask_tokens(logits, active.stop_ids - first, is_early)


def choose_token(
    logits: Float[Array, "token vocab"],
    position: Int[Array, " token"],
    active: Active,
    *,
    role: int,
) -> tuple[Int[Array, " token"], Float[Array, "token vocab"] | None]:
    """Draw the token at `position`; returns it and the probabilities it came from.

    Args:
        position: Absolute position of the token drawn. Keys the coupled rows' noise;
            the others' uniforms are keyed by the round's start and the distance to it.
        active: One entry per row of `logits`.
        role: Which uniform an uncoupled row uses. Coupled rows always race with the
            `SAMPLE` noise, whoever draws.

    Returns:
        Probabilities are zeros in a batch without sampled rows, and None where the
        program has none.
    """
    greedy = sampling.argmax(logits)
    if active.is_greedy:
        return greedy, None

    def draw() -> tuple[Array, Array]:
        probs = sampling.distribution(logits, active.controls)
        start = active.num_tokens
        uniform = randomness.uniform(active.seed, start, role, position - start)
        drawn = sampling.draw(probs, uniform)
        drawn = jax.lax.cond(
            active.is_coupled.any(),
            lambda: jnp.where(active.is_coupled, race(probs, position, active), drawn),
            lambda: drawn,
        )
        return jnp.where(active.is_sampled, drawn, greedy), probs

    return jax.lax.cond(
        active.is_sampled.any(), draw, lambda: (greedy, jnp.zeros_like(logits))
    )


def race(
    probs: Float[Array, "token vocab"], position: Int[Array, " token"], active: Active
) -> Int[Array, " token"]:
    """The coupled sample: a function of seed, position and probabilities alone."""
    noise = randomness.exponential(
        active.seed, position, randomness.SAMPLE, probs.shape[1]
    )
    return sampling.race(probs, noise)

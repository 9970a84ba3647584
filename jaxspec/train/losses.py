"""Losses between the draft's distribution and the target's, at every token.

A draft token is accepted with probability sum(min(p, q)), where p is the target's
distribution and q the draft's. The LK losses maximize this probability. KL is smooth,
and has a useful gradient even where the distributions do not overlap yet. References:
Leviathan et al. 2023, arXiv:2211.17192 (acceptance); "LK losses", arXiv:2602.23881.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOSSES = ("lk", "kl", "tv", "nla")
# Rate at which the hybrid loss moves its weight from KL to 1 - acceptance.
_ETA = 3.0


class Comparison(NamedTuple):
    """Comparison of target and draft at every token.

    Attributes:
        divergence: KL(target || draft) over the tokens that the draft can propose,
            times the target's probability of them.
        acceptance: Probability that a draft is accepted.
        agrees: Whether both have the same most likely token.
    """

    divergence: Float[Array, " token"]
    acceptance: Float[Array, " token"]
    agrees: Bool[Array, " token"]


def compare(
    draft: Float[Array, "token draft_vocab"],
    target: Float[Array, "token draft_vocab"],
    log_sum: Float[Array, " token"],
    best: Float[Array, " token"],
) -> Comparison:
    """Compare draft and target at every token, given their logits.

    Args:
        target: The target's logits of the tokens that the draft can propose.
        log_sum: Log of the sum of exponentials of all the target's logits.
        best: The target's largest logit.
    """
    log_draft = jax.nn.log_softmax(draft, axis=-1)
    log_target = target - log_sum[:, None]
    mass = jnp.exp(log_target)
    log_kept = jax.nn.logsumexp(log_target, axis=-1, keepdims=True)
    choice = jnp.argmax(draft, axis=-1)
    chosen = jnp.take_along_axis(target, choice[:, None], axis=-1)[:, 0]
    return Comparison(
        divergence=jnp.sum(mass * (log_target - log_kept - log_draft), axis=-1),
        acceptance=jnp.sum(jnp.minimum(mass, jnp.exp(log_draft)), axis=-1),
        agrees=chosen >= best,
    )


def mean(
    values: Float[Array, " token"], is_counted: Bool[Array, " token"]
) -> Float[Array, ""]:
    """Return the mean over the tokens that count."""
    count = jnp.maximum(is_counted.astype(jnp.float32).sum(), 1.0)
    return jnp.where(is_counted, values, 0.0).sum() / count


def loss_of(
    kind: str, found: Comparison, is_counted: Bool[Array, " token"]
) -> Float[Array, ""]:
    """Return one of `LOSSES`: the mean over the tokens that count."""
    if kind == "kl":
        return mean(found.divergence, is_counted)
    if kind == "tv":
        return mean(1 - found.acceptance, is_counted)
    if kind == "nla":
        # If the distributions do not overlap, acceptance is 0, and its logarithm has no
        # usable gradient.
        return mean(-jnp.log(jnp.maximum(found.acceptance, 1e-6)), is_counted)
    assert kind == "lk", kind
    accepted = mean(found.acceptance, is_counted)
    share = jnp.exp(-_ETA * jax.lax.stop_gradient(accepted))
    return share * mean(found.divergence, is_counted) + (1 - share) * (1 - accepted)

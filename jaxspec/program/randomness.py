"""Random numbers that depend only on a request's seed, positions and a role.

They do not depend on the step, the row or the batch: a request draws the same numbers
in any batch. Uniforms come from threefry, keyed by the position where a round starts,
so they depend on the number of tokens that earlier rounds added. The noise of the
coupled rule is keyed by the position of its own token: it is the same for any K. It has
one number per vocabulary entry, too many for threefry on CPU: `jaxspec_kernels`
computes it with a counter hash keyed by two of these words.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Roles: independent numbers at the same position.
DRAFT, ACCEPT, SAMPLE = 0, 1, 2
NUM_ROLES = 3


def purpose(role: int, index: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Combine a role and a token's index in its round; with index 0, it is the role."""
    return role + NUM_ROLES * index


def words(
    seed: UInt32[Array, "*batch 2"],
    position: Int[Array, "*batch"],
    purpose: Int[Array, "*batch"],
) -> UInt32[Array, "*batch 2"]:
    """Return two random words per entry: threefry of (seed; position, purpose)."""

    def single(seed: Array, position: Array, purpose: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), purpose)
        return jax.random.key_data(key)

    flat = jax.vmap(single)(
        seed.reshape(-1, 2), position.reshape(-1), purpose.reshape(-1)
    )
    return flat.reshape(*position.shape, 2)


def uniform(
    seed: UInt32[Array, "*batch 2"],
    position: Int[Array, "*batch"],
    role: int,
    index: Int[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Return float32 uniforms in [0, 1).

    Args:
        position: Where the round starts, not the token's: block verification uses the
            numbers of drafts past those it accepts, so the next round must not use
            them again.
        index: Which token of the round; None is the first.
    """
    index = jnp.zeros_like(position) if index is None else index
    return to_uniform(words(seed, position, purpose(role, index)))


def to_uniform(words: UInt32[Array, "*batch 2"]) -> Float[Array, "*batch"]:
    """Convert `words` to float32 uniforms in [0, 1)."""
    # 24 bits: every value is exact in float32 and 1.0 cannot come out.
    return (words[..., 0] >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)

"""Random numbers that depend on a request's seed, positions and a role, only.

Not on the step, the row, the batch or K: the same request draws the same numbers
however it is scheduled. Uniforms come from threefry. The noise of the coupled rule has
one number per vocabulary entry, for which threefry is too slow on CPU (8 ms for 256,000
entries); it comes from a counter hash that threefry keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Roles: independent numbers at the same position.
DRAFT, ACCEPT, SAMPLE = 0, 1, 2
_NUM_ROLES = 3


def words(
    seed: UInt32[Array, "*batch 2"],
    position: Int[Array, "*batch"],
    purpose: Int[Array, "*batch"],
) -> UInt32[Array, "*batch 2"]:
    """Two random words per entry: threefry of (seed; position, purpose)."""

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
    """Float32 uniforms in [0, 1).

    Args:
        position: Where the round starts, not where the token goes: block verification
            looks at drafts past the end of what it accepts, so the next round must
            not meet the same numbers again.
        index: Which token of the round; None is the first.
    """
    index = jnp.zeros_like(position) if index is None else index
    bits = words(seed, position, role + _NUM_ROLES * index)[..., 0]
    # 24 bits: every value is exact in float32 and 1.0 cannot come out.
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def exponential(
    seed: UInt32[Array, "*batch 2"],
    position: Int[Array, "*batch"],
    role: int,
    size: int,
) -> Float[Array, "*batch vocab"]:
    """Exponential noise, one number per vocabulary entry; strictly positive."""
    keys = words(seed, position, jnp.full_like(position, role))
    counter = jnp.arange(size, dtype=jnp.uint32)
    counter = counter.reshape((1,) * position.ndim + (size,))
    bits = _mix(_mix(counter + keys[..., :1]) ^ keys[..., 1:])
    # Centred in its cell, so that neither 0 nor 1 comes out.
    unit = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(unit)


def _mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits in which every input bit changes half of the output.

    References: the finaliser of MurmurHash3 (Appleby 2011).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)

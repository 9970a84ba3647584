"""Noise that draft and target model share, recomputed wherever it is needed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32


def exponential(first: Array, second: Array, ids: Array) -> Float[Array, "..."]:
    """Return exponential noise, a counter hash of two words and ids; positive."""
    return -jnp.log(uniform(first, second, ids))


def uniform(first: Array, second: Array, ids: Array) -> Float[Array, "..."]:
    """Return uniforms, a counter hash of two words and ids, between 0 and 1.

    References: the finaliser of MurmurHash3 (Appleby 2011).
    """
    bits = _mix(_mix(ids.astype(jnp.uint32) + first) ^ second)
    # Take the center of each cell, so that a uniform is never 0 or 1.
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)

"""Packs a tree's ancestor mask into bits for the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

WORD_SHIFT = 5
WORD = 1 << WORD_SHIFT  # bits of an ancestor mask in one integer


def pack_tree(
    mask: Bool[Array, "seq token token"], window: int | None
) -> tuple[Int[Array, "seq token"], Int[Array, "seq token word"]]:
    """Return the depth of every node, and its visible nodes as bits, lowest first.

    Args:
        mask: See `jaxspec_kernels.paged_attention`.
        window: Ancestors at least this number of levels above a node get no bit.
    """
    depth = mask.sum(axis=-1, dtype=jnp.int32) - 1
    if window is not None:
        mask = mask & (depth[:, :, None] - depth[:, None, :] < window)
    missing = -mask.shape[2] % WORD
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, missing))).astype(jnp.uint32)
    bits = bits.reshape(*mask.shape[:2], -1, WORD)
    place = jnp.arange(WORD, dtype=jnp.uint32)[None, None, None]
    words = (bits << place).sum(axis=-1, dtype=jnp.uint32)
    return depth, jax.lax.bitcast_convert_type(words, jnp.int32)

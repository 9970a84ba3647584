"""Known tokens of every sequence, in the same pages as its keys and values.

A page that two sequences share holds their common tokens once: a cached page's tokens
are already on the device and are not sent again.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TokenPages = Int[Array, "page page_size"]


def slots(
    page_table: Int[Array, "seq table"],
    position: Int[Array, "seq query"],
    is_kept: Bool[Array, "seq query"],
    *,
    num_pages: int,
    page_size: int,
) -> Int[Array, "seq query"]:
    """Return the pool's slots of positions; pads get the index past the last slot.

    Args:
        is_kept: Which positions are valid. A position without a page (its table entry
            is the pad page) or outside the table is invalid, too.
    """
    num_positions = page_table.shape[1] * page_size
    index = jnp.clip(position // page_size, 0, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, index, axis=1)
    inside = is_kept & (position >= 0) & (position < num_positions)
    found = pages * page_size + position % page_size
    return jnp.where(inside & (pages < num_pages), found, num_pages * page_size)


def write(
    token_pages: TokenPages,
    page_table: Int[Array, "seq table"],
    position: Int[Array, "seq query"],
    tokens: Int[Array, "seq query"],
    is_kept: Bool[Array, "seq query"],
) -> TokenPages:
    """Store tokens at positions of sequences."""
    num_pages, page_size = token_pages.shape
    slot = slots(
        page_table, position, is_kept, num_pages=num_pages, page_size=page_size
    )
    # Index by page and offset: for a flat view, a TPU would pad each page's few tokens
    # to 128.
    return token_pages.at[slot // page_size, slot % page_size].set(tokens, mode="drop")


def read(
    token_pages: TokenPages,
    page_table: Int[Array, "seq table"],
    position: Int[Array, "seq query"],
) -> Int[Array, "seq query"]:
    """Return the tokens at positions; junk for a position outside or without a page."""
    page_size = token_pages.shape[1]
    index = jnp.clip(position // page_size, 0, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, index, axis=1)
    return token_pages.at[pages, position % page_size].get(mode="clip")


def whole(
    token_pages: TokenPages, page_table: Int[Array, "seq table"]
) -> Int[Array, "seq position"]:
    """Return all tokens of sequences; junk past a sequence's length."""
    tokens = token_pages.at[page_table].get(mode="clip")
    return tokens.reshape(page_table.shape[0], -1)

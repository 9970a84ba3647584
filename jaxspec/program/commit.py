"""Write a round's outcome into the state: tokens, lengths, ends of sequences."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.program import history
from jaxspec.program.active import Active
from jaxspec.program.state import Rows


class Emitted(NamedTuple):
    """Tokens that a round added, after EOS, stop ids and length limits."""

    tokens: Int[Array, "seq width"]
    num_emitted: Int[Array, " seq"]
    is_done: Bool[Array, " seq"]


def truncate(
    tokens: Int[Array, "seq width"], count: Int[Array, " seq"], active: Active
) -> Emitted:
    """Cut a round's tokens at the first that ends the sequence, that one included.

    A stop id below the request's `min_tokens` does not end it; it can only be there
    when everything else is masked too.
    """
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = active.num_tokens[:, None] + offset
    is_stop = (tokens[:, :, None] == active.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= position >= active.min_total[:, None]
    is_end = is_stop | (position + 1 >= active.max_total[:, None])
    is_end &= offset < count[:, None]
    # in [0,0,1,0,1] -> first end at 2 -> 3 tokens stay
    first_end = jnp.where(is_end.any(axis=1), jnp.argmax(is_end, axis=1) + 1, count)
    count = jnp.where(active.is_active, jnp.minimum(count, first_end), 0)
    is_done = is_end.any(axis=1) | ~active.is_active
    return Emitted(tokens, count.astype(jnp.int32), is_done)


def append(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    active: Active,
    emitted: Emitted,
) -> tuple[Rows, Int[Array, "page page_size"]]:
    """Add emitted tokens to the sequences they belong to."""
    offset = jnp.arange(emitted.tokens.shape[1], dtype=jnp.int32)[None]
    is_kept = active.is_active[:, None] & (offset < emitted.num_emitted[:, None])
    token_pages = history.write(
        token_pages,
        active.page_table,
        active.num_tokens[:, None] + offset,
        emitted.tokens,
        is_kept,
    )
    row = jnp.where(active.is_active, active.row, rows.num_tokens.shape[0])
    total = active.num_tokens + emitted.num_emitted
    rows = dataclasses.replace(
        rows,
        num_tokens=rows.num_tokens.at[row].set(total, mode="drop"),
        is_done=rows.is_done.at[row].set(emitted.is_done, mode="drop"),
    )
    return rows, token_pages

"""Rows of requests on the device: admitted by a plan, updated by rounds.

A row is a request's slot in the device state, from its admission to its end. Rows hold
everything of a request between launches except its keys and values. The values that
the host sends are declared in `plan.RequestValues` and `plan.ControlValues`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.program import history
from jaxspec.program.plan import (
    COUPLED,
    TILE,
    ControlValues,
    PoolShape,
    RequestValues,
    columns,
)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ControlRows(ControlValues):
    """Controls of each request; only entries of controlled rows are valid."""

    is_controlled: Bool[Array, " row"]


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows(RequestValues):
    """One entry per admitted request."""

    num_tokens: Int[Array, " row"]  # 0 until the prompt's last tile has been read
    is_done: Bool[Array, " row"]
    page_table: Int[Array, "row table"]  # pads hold the number of pages
    controls: ControlRows
    # The table of layers with a sliding window; None if they use the other one.
    local_page_table: Int[Array, "row table"] | None = None


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Active(RequestValues):
    """One entry per sequence of a launch; pads have `is_active` False."""

    row: Int[Array, " seq"]
    is_active: Bool[Array, " seq"]
    num_tokens: Int[Array, " seq"]
    last_tokens: Int[Array, "seq 2"]  # the two newest known tokens
    page_table: Int[Array, "seq table"]
    local_page_table: Int[Array, "seq table"] | None = None
    # Static: no sequence of the launch samples.
    all_greedy: bool = field(default=False, metadata={"static": True})

    @property
    def is_sampled(self) -> Bool[Array, " seq"]:
        """Sequences that do not take the argmax."""
        return self.is_active & (self.temperature > 0)

    @property
    def is_coupled(self) -> Bool[Array, " seq"]:
        """Sampled sequences under the rule "coupled": draft and target share noise."""
        return self.is_sampled & (self.rule == COUPLED)

    def repeat(self, times: int) -> "Active":
        """Repeat the entry of every sequence `times` times, for one entry per token."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), self)


def init_rows(pool: PoolShape) -> Rows:
    """Return rows without requests, as numpy arrays, which need no compilation.

    Every leaf is an array of its own, as donation requires.
    """
    rows = pool.num_rows

    def empty(record: Any) -> dict[str, np.ndarray]:
        found = columns(record).items()
        return {name: one.of(rows, pool.vocab_size).empty() for name, one in found}

    def page_table() -> np.ndarray:
        return np.full((rows, pool.table_len), pool.num_pages, np.int32)

    controls: Any = ControlRows  # of numpy arrays, as the rows are
    form: Any = Rows
    return form(
        num_tokens=np.zeros((rows,), np.int32),
        is_done=np.ones((rows,), bool),
        page_table=page_table(),
        local_page_table=None if pool.unit_pages is None else page_table(),
        controls=controls(is_controlled=np.zeros((rows,), bool), **empty(ControlRows)),
        **empty(Rows),
    )


def dummy_rows(
    pool: PoolShape,
    pages: Sequence[int] | np.ndarray,
    context: int,
    temperature: float,
) -> Rows:
    """Return rows in the middle of their texts, as numpy arrays, to time programs.

    Args:
        pages: Page ids that all rows share, or [row, page]; the pages' contents are
            lost.
        context: Tokens of each text.
    """
    rows = init_rows(pool)
    table = np.full_like(rows.page_table, pool.num_pages)
    table[:, : np.shape(pages)[-1]] = pages
    lengths = np.full_like(rows.num_tokens, context)
    return dataclasses.replace(
        rows,
        num_tokens=lengths,
        num_prompt=lengths.copy(),
        max_total=np.full_like(rows.max_total, pool.max_model_len),
        is_done=np.zeros_like(rows.is_done),
        page_table=table,
        local_page_table=None if pool.unit_pages is None else table.copy(),
        temperature=np.full_like(rows.temperature, temperature),
    )


class Tiles(NamedTuple):
    """Prompt tiles of one launch."""

    tokens: Int[Array, "tile token"]  # right-aligned
    row: Int[Array, " tile"]
    start: Int[Array, " tile"]
    length: Int[Array, " tile"]
    is_last: Array

    @property
    def position(self) -> Int[Array, "tile token"]:
        """Position of every token; pads come before `start`."""
        offset = jnp.arange(TILE, dtype=jnp.int32)[None] - TILE
        return (self.start + self.length)[:, None] + offset

    @property
    def is_token(self) -> Array:
        """Which entries of `tokens` are not pads: `[tile, token]`."""
        return self.position >= self.start[:, None]


def read_tiles(fields: dict[str, Array]) -> Tiles:
    """Return the plan's prompt tiles."""
    return Tiles(**{name: fields[f"tile_{name}"] for name in Tiles._fields})


def apply_plan(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    fields: dict[str, Array],
    tiles: Tiles,
    pool: PoolShape,
) -> tuple[Rows, Int[Array, "page page_size"]]:
    """Admit requests, then add new pages, then the prompt tokens of this launch."""
    row = fields["admit_row"]

    def admit(leaf: Array, values: Array) -> Array:
        return leaf.at[row].set(values, mode="drop")

    values = {
        name: admit(getattr(rows, name), fields[f"admit_{name}"])
        for name in columns(RequestValues)
    }
    rows = dataclasses.replace(
        rows,
        num_tokens=admit(rows.num_tokens, jnp.zeros_like(row)),
        is_done=admit(rows.is_done, jnp.zeros_like(row, bool)),
        controls=_admit_controls(rows.controls, fields),
        **values,
    )
    # A new request must not reach the pages of the row's previous request.
    no_pages = jnp.full((row.shape[0], pool.table_len), pool.num_pages, jnp.int32)

    def update(page_table: Array, name: str) -> Array:
        update_row, update_index, update_page = fields[name]
        page_table = admit(page_table, no_pages)
        return page_table.at[update_row, update_index].set(update_page, mode="drop")

    page_table, local = update(rows.page_table, "page_update"), rows.local_page_table
    if local is not None:
        local = update(local, "local_page_update")
    token_pages = history.write(
        token_pages,
        page_table.at[tiles.row].get(mode="clip"),
        tiles.position,
        tiles.tokens,
        tiles.is_token & (tiles.row < pool.num_rows)[:, None],
    )
    rows = dataclasses.replace(rows, page_table=page_table, local_page_table=local)
    return rows, token_pages


def _admit_controls(controls: ControlRows, fields: dict[str, Array]) -> ControlRows:
    """Clear the controls of each admitted row's previous request; store the new."""
    row = fields["admit_row"]
    cleared = controls.is_controlled.at[row].set(jnp.zeros_like(row, bool), mode="drop")
    controls = dataclasses.replace(controls, is_controlled=cleared)
    if "control_row" not in fields:
        return controls
    row = fields["control_row"]
    values = {
        name: getattr(controls, name)
        .at[row]
        .set(fields[f"control_{name}"], mode="drop")
        for name in columns(ControlValues)
    }
    is_controlled = cleared.at[row].set(jnp.ones_like(row, bool), mode="drop")
    return dataclasses.replace(controls, is_controlled=is_controlled, **values)


def gather(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    row: Int[Array, " seq"],
    num_tokens: Array | None = None,
    *,
    all_greedy: bool = False,
) -> Active:
    """Return the entries of some rows; a row index past the end gives an inactive pad.

    Args:
        num_tokens: Replaces the rows' own count (a prompt that was just read).
        all_greedy: Every sequence takes the argmax, whatever its temperature.
    """

    def take(leaf: Array) -> Array:
        return leaf.at[row].get(mode="clip")

    is_row = row < rows.num_tokens.shape[0]
    known = take(rows.num_tokens) if num_tokens is None else num_tokens
    newest = known[:, None] + jnp.array([[-2, -1]], jnp.int32)
    page_table, local = take(rows.page_table), rows.local_page_table
    return Active(
        row=row,
        is_active=is_row & ~take(rows.is_done),
        num_tokens=known,
        last_tokens=history.read(token_pages, page_table, jnp.maximum(newest, 0)),
        page_table=page_table,
        local_page_table=None if local is None else take(local),
        all_greedy=all_greedy,
        **{name: take(getattr(rows, name)) for name in columns(RequestValues)},
    )


class Emitted(NamedTuple):
    """Tokens that a round added, after EOS, stop ids and length limits."""

    tokens: Int[Array, "seq width"]
    num_emitted: Int[Array, " seq"]
    is_done: Bool[Array, " seq"]


def truncate(
    tokens: Int[Array, "seq width"], count: Int[Array, " seq"], active: Active
) -> Emitted:
    """Cut a round's tokens at the first that ends the sequence, that one included.

    A stop id before the request's `min_tokens` does not end the sequence. It can only
    occur if all other tokens are masked too.
    """
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = active.num_tokens[:, None] + offset
    is_stop = (tokens[:, :, None] == active.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= position >= active.min_total[:, None]
    is_end = is_stop | (position + 1 >= active.max_total[:, None])
    is_end &= offset < count[:, None]
    # in [0,0,1,0,1] -> first end at 2 -> 3 tokens remain
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

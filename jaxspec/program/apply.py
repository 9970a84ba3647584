"""Read a plan on the device and bring the rows up to date with it."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.program import history
from jaxspec.program.plan import TILE, PlanLayout, PoolShape
from jaxspec.program.state import ControlRows, Rows


class Tiles(NamedTuple):
    """Prompt tiles of one launch."""

    tokens: Int[Array, "tile token"]  # right-aligned
    row: Int[Array, " tile"]
    start: Int[Array, " tile"]
    length: Int[Array, " tile"]
    is_last: Array
    is_draft_only: Array

    @property
    def position(self) -> Int[Array, "tile token"]:
        """Position of every token; pads come before `start`."""
        offset = jnp.arange(TILE, dtype=jnp.int32)[None] - TILE
        return (self.start + self.length)[:, None] + offset

    @property
    def is_token(self) -> Array:
        """Which entries of `tokens` are no pads: `[tile, token]`."""
        return self.position >= self.start[:, None]


def unpack(vector: Int[Array, " plan"], layout: PlanLayout) -> dict[str, Array]:
    """Views of the plan's fields."""
    fields = {}
    for name, shape in layout.fields.items():
        start = layout.offsets[name]
        fields[name] = vector[start : start + math.prod(shape)].reshape(shape)
    return fields


def read_tiles(fields: dict[str, Array]) -> Tiles:
    """The plan's prompt tiles."""
    return Tiles(
        tokens=fields["tile_tokens"],
        row=fields["tile_row"],
        start=fields["tile_start"],
        length=fields["tile_len"],
        is_last=fields["tile_is_last"] > 0,
        is_draft_only=fields["tile_is_draft_only"] > 0,
    )


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

    def floats(name: str) -> Array:
        return jax.lax.bitcast_convert_type(fields[name], jnp.float32)

    rows = dataclasses.replace(
        rows,
        num_tokens=admit(rows.num_tokens, jnp.zeros_like(row)),
        num_prompt=admit(rows.num_prompt, fields["admit_num_prompt"]),
        is_done=admit(rows.is_done, jnp.zeros_like(row, bool)),
        min_total=admit(rows.min_total, fields["admit_min_total"]),
        max_total=admit(rows.max_total, fields["admit_max_total"]),
        temperature=admit(rows.temperature, floats("admit_temperature")),
        top_k=admit(rows.top_k, fields["admit_top_k"]),
        top_p=admit(rows.top_p, floats("admit_top_p")),
        min_p=admit(rows.min_p, floats("admit_min_p")),
        seed=admit(
            rows.seed,
            jax.lax.bitcast_convert_type(fields["admit_seed"], jnp.uint32),
        ),
        rule=admit(rows.rule, fields["admit_rule"]),
        stop_ids=admit(rows.stop_ids, fields["admit_stop_ids"]),
        controls=_admit_controls(rows.controls, fields),
    )
    # A new request must not reach the pages of the row's last one.
    no_pages = jnp.full((row.shape[0], pool.table_len), pool.num_pages, jnp.int32)
    page_table = admit(rows.page_table, no_pages)
    update_row, update_index, update_page = fields["page_update"]
    page_table = page_table.at[update_row, update_index].set(update_page, mode="drop")
    token_pages = history.write(
        token_pages,
        page_table.at[tiles.row].get(mode="clip"),
        tiles.position,
        tiles.tokens,
        tiles.is_token & (tiles.row < pool.num_rows)[:, None],
    )
    return dataclasses.replace(rows, page_table=page_table), token_pages


def _admit_controls(controls: ControlRows, fields: dict[str, Array]) -> ControlRows:
    """Forget the controls of each admitted row's last request, then note the new."""
    row = fields["admit_row"]
    cleared = controls.is_controlled.at[row].set(jnp.zeros_like(row, bool), mode="drop")
    controls = dataclasses.replace(controls, is_controlled=cleared)
    if "control_row" not in fields:
        return controls
    row = fields["control_row"]

    def admit(name: str, values: Array) -> Array:
        leaf = getattr(controls, name)
        if values.dtype != leaf.dtype:
            values = jax.lax.bitcast_convert_type(values, leaf.dtype)
        return leaf.at[row].set(values, mode="drop")

    names = ("penalties", "bias_ids", "bias_values", "allowed", "bad_words")
    return dataclasses.replace(
        controls,
        is_controlled=cleared.at[row].set(jnp.ones_like(row, bool), mode="drop"),
        **{name: admit(name, fields[f"control_{name}"]) for name in names},
    )

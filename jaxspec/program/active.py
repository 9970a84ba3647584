"""The rows of the state that take part in this launch, gathered side by side."""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.program import history
from jaxspec.program.plan import COUPLED
from jaxspec.program.state import Rows


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Active:
    """One entry per sequence of the launch; pads have `is_active` False."""

    row: Int[Array, " seq"]
    is_active: Bool[Array, " seq"]
    num_tokens: Int[Array, " seq"]
    num_prompt: Int[Array, " seq"]
    last_tokens: Int[Array, "seq 2"]  # the two newest known tokens
    page_table: Int[Array, "seq table"]
    min_total: Int[Array, " seq"]
    max_total: Int[Array, " seq"]
    temperature: Float[Array, " seq"]
    top_k: Int[Array, " seq"]
    top_p: Float[Array, " seq"]
    min_p: Float[Array, " seq"]
    seed: UInt32[Array, "seq 2"]
    rule: Int[Array, " seq"]
    stop_ids: Int[Array, "seq stop"]
    # Static: no sequence of the launch samples.
    is_greedy: bool = field(default=False, metadata={"static": True})

    @property
    def is_sampled(self) -> Bool[Array, " seq"]:
        """Sequences that do not take the argmax."""
        return self.is_active & (self.temperature > 0)

    @property
    def is_coupled(self) -> Bool[Array, " seq"]:
        """Sampled sequences whose noise draft and target share."""
        return self.is_sampled & (self.rule == COUPLED)

    def repeat(self, times: int) -> "Active":
        """Every sequence `times` times in a row: one entry per token."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), self)


def gather(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    row: Int[Array, " seq"],
    num_tokens: Array | None = None,
    *,
    is_greedy: bool = False,
) -> Active:
    """Entries of the given rows; a row index past the end gives an inactive pad.

    Args:
        num_tokens: Replaces the rows' own count (a prompt that has just come in).
        is_greedy: No sequence samples, whatever the rows say.
    """

    def take(leaf: Array) -> Array:
        return leaf.at[row].get(mode="clip")

    is_row = row < rows.num_tokens.shape[0]
    known = take(rows.num_tokens) if num_tokens is None else num_tokens
    newest = known[:, None] + jnp.array([[-2, -1]], jnp.int32)
    page_table = take(rows.page_table)
    return Active(
        row=row,
        is_active=is_row & ~take(rows.is_done),
        num_tokens=known,
        num_prompt=take(rows.num_prompt),
        last_tokens=history.read(token_pages, page_table, jnp.maximum(newest, 0)),
        page_table=page_table,
        min_total=take(rows.min_total),
        max_total=take(rows.max_total),
        temperature=take(rows.temperature),
        top_k=take(rows.top_k),
        top_p=take(rows.top_p),
        min_p=take(rows.min_p),
        seed=take(rows.seed),
        rule=take(rows.rule),
        stop_ids=take(rows.stop_ids),
        is_greedy=is_greedy,
    )

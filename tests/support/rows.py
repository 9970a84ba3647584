"""Make the rows of a launch by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.backend import Backend
from jaxspec.program.plan import (
    MAX_STOP_IDS,
    NO_TOKEN,
    Column,
    PoolShape,
    TokenControls,
    columns,
)
from jaxspec.program.propose import ProposerContext
from jaxspec.program.rows import Active, ControlRows
from jaxspec.program.tree.tree import Tree


def make_active(count: int, **fields: Any) -> Active:
    """Return `count` sequences; each field is one value for all, or one per sequence.

    Args:
        fields: Fields of `Active`. `stop_ids` may be short lists; defaults are greedy
            sequences of ten tokens without stop ids.
    """
    given = dict(
        row=np.arange(count),
        num_tokens=10,
        num_prompt=5,
        min_total=0,
        max_total=1000,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        rule=0,
        salt=(0, 0),
        is_active=True,
    )
    stop_ids = np.full((count, MAX_STOP_IDS), NO_TOKEN)
    for index, ids in enumerate(fields.pop("stop_ids", [[]] * count)):
        stop_ids[index, : len(ids)] = ids
    seeds = np.random.default_rng(7).integers(0, 2**32, (count, 2), dtype=np.uint32)
    seeds = fields.pop("seed", seeds)
    assert not fields.keys() - given.keys(), fields.keys() - given.keys()
    given |= fields

    given |= dict(seed=seeds, stop_ids=stop_ids)

    def side_by_side(value: Any, one: Column) -> Any:
        return jnp.asarray(np.broadcast_to(value, (count, *one.shape)), one.dtype)

    return Active(
        row=side_by_side(given["row"], Column()),
        num_tokens=side_by_side(given["num_tokens"], Column()),
        is_active=side_by_side(given["is_active"], Column(bool)),
        last_tokens=jnp.zeros((count, 2), jnp.int32),
        page_table=jnp.zeros((count, 1), jnp.int32),
        **{n: side_by_side(given[n], one) for n, one in columns(Active).items()},
    )


def make_control_rows(
    controls: list[TokenControls | None], vocab_size: int
) -> ControlRows:
    """Return a row per request; rows without controls have an earlier request's."""
    left = TokenControls(presence_penalty=9.0, bias=((3, 7.0),), allowed=(5,))
    asked = [(one or left).values(vocab_size) for one in controls]

    def side_by_side(name: str, one: Column) -> Any:
        made = one.of(len(asked), vocab_size).empty()
        for entry, values in zip(made, asked, strict=True):
            value = getattr(values, name)
            entry[: len(value)] = value
        return jnp.asarray(made)

    return ControlRows(
        is_controlled=jnp.asarray([one is not None for one in controls]),
        **{name: side_by_side(name, one) for name, one in columns(ControlRows).items()},
    )


def make_context(
    active: Active, tree: Tree, pool: PoolShape, **changes: Any
) -> ProposerContext:
    """Return what a proposer reads of a launch without prompts, on one device."""
    given: dict[str, Any] = dict(
        active=active,
        token_pages=jnp.zeros((1, pool.page_size), jnp.int32),
        tree=tree,
        wanted_levels=jnp.full(active.row.shape, tree.num_levels, jnp.int32),
        pool=pool,
        prompts=None,
        backend=lambda axes: Backend(),
        adjuster=lambda axes: None,
    )
    return ProposerContext(**given | changes)

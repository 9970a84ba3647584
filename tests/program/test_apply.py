"""A plan on the device: who is admitted, which pages and tokens come in.

`gather` of the rows (`active.py`) is checked on the result: it is how they are read.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.program.active import gather
from jaxspec.program.apply import apply_plan, read_tiles, unpack
from jaxspec.program.plan import (
    COUPLED,
    MAX_STOP_IDS,
    NO_TOKEN,
    TILE,
    PlanLayout,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.state import Rows, init_rows, init_token_pages
from tests.program.test_plan import ADMISSION

POOL = PoolShape(num_rows=4, num_pages=60, page_size=4, max_model_len=50, vocab_size=70)
SHAPE = StepShape(num_seqs=4, num_draft_tokens=1, chunk=2 * TILE)
LAYOUT = PlanLayout(SHAPE, POOL)


@jax.jit
def apply_vector(
    rows: Rows, token_pages: jax.Array, vector: jax.Array
) -> tuple[Rows, jax.Array]:
    fields = unpack(vector, LAYOUT)
    return apply_plan(rows, token_pages, fields, read_tiles(fields), POOL)


def apply(rows: Rows, plan: StepPlan) -> Rows:
    vector = jnp.asarray(LAYOUT.pack(plan))
    after, token_pages = apply_vector(rows, used_tokens(), vector)
    if not plan.tiles:
        assert (token_pages == used_tokens()).all()
    return after


def tokens_after(rows: Rows, plan: StepPlan) -> np.ndarray:
    """Every row's tokens by position."""
    vector = jnp.asarray(LAYOUT.pack(plan))
    after, token_pages = apply_vector(rows, used_tokens(), vector)
    assert changed_rows(rows, after) == {}
    return by_position(after, token_pages)


def by_position(rows: Rows, token_pages: jax.Array) -> np.ndarray:
    found = np.array(token_pages)[np.asarray(rows.page_table)]
    return found.reshape(POOL.num_rows, -1)


def used_tokens() -> jax.Array:
    pages = init_token_pages(POOL)
    return jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape) + 1000


def used_rows() -> Rows:
    """Rows in which every leaf differs everywhere, as if others had run before."""
    leaves, tree = jax.tree.flatten(init_rows(POOL))
    filled = [
        jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)
        if leaf.dtype != bool
        else jnp.ones_like(leaf)
        for leaf in leaves
    ]
    return jax.tree.unflatten(tree, filled)


def changed_rows(before: Rows, after: Rows) -> dict[str, list[int]]:
    changes = {}
    for field in dataclasses.fields(Rows):
        pair = [np.asarray(getattr(rows, field.name)) for rows in (before, after)]
        differs = (pair[0] != pair[1]).reshape(POOL.num_rows, -1).any(axis=1)
        if differs.any():
            changes[field.name] = np.flatnonzero(differs).tolist()
    return changes


def test_an_empty_plan_changes_nothing():
    rows = used_rows()
    assert changed_rows(rows, apply(rows, StepPlan())) == {}


def test_an_admission_overwrites_its_row_alone():
    rows = used_rows()
    after = apply(rows, StepPlan(admissions=[ADMISSION]))
    assert {row for rows in changed_rows(rows, after).values() for row in rows} == {3}
    for name in ("num_prompt", "min_total", "max_total", "top_k", "rule"):
        assert getattr(after, name)[3] == getattr(ADMISSION, name)
    for name in ("temperature", "top_p", "min_p"):
        assert getattr(after, name)[3] == np.float32(getattr(ADMISSION, name))
    assert after.seed[3].tolist() == list(ADMISSION.seed)
    stops = [1, 15] + [NO_TOKEN] * (MAX_STOP_IDS - 2)
    assert after.stop_ids[3].tolist() == stops
    assert (int(after.num_tokens[3]), bool(after.is_done[3])) == (0, False)
    # The last request's pages may be another's by now.
    assert (after.page_table[3] == POOL.num_pages).all()


def test_pages_come_after_the_admission_that_clears_the_table():
    plan = StepPlan(admissions=[ADMISSION], pages=[(3, 0, 11), (1, 2, 12)])
    after = apply(used_rows(), plan)
    assert after.page_table[3].tolist() == [11] + [POOL.num_pages] * 12
    assert changed_rows(used_rows(), after)["page_table"] == [1, 3]
    assert after.page_table[1, 2] == 12


def test_tiles_write_their_tokens_and_no_pads():
    rows = used_rows()
    tiles = [
        Tile(row=1, start=5, tokens=np.array([91, 92, 93]), is_last=True),
        Tile(row=2, start=0, tokens=np.arange(200, 232), is_last=False),
    ]
    found = tokens_after(rows, StepPlan(tiles=tiles))
    expected = by_position(rows, used_tokens())
    expected[1, 5:8] = [91, 92, 93]
    expected[2, :TILE] = np.arange(200, 232)
    assert found.tolist() == expected.tolist()


def test_a_tile_at_the_end_of_the_context_stays_inside():
    tile = Tile(row=0, start=49, tokens=np.array([77]), is_last=True)
    found = tokens_after(used_rows(), StepPlan(tiles=[tile]))
    expected = by_position(used_rows(), used_tokens())
    expected[0, 49] = 77
    assert found.tolist() == expected.tolist()


def test_tokens_without_a_page_are_written_nowhere():
    rows = dataclasses.replace(
        used_rows(), page_table=jnp.full((4, 13), POOL.num_pages, jnp.int32)
    )
    tile = Tile(row=1, start=5, tokens=np.array([91, 92, 93]), is_last=True)
    vector = jnp.asarray(LAYOUT.pack(StepPlan(tiles=[tile])))
    _, token_pages = apply_vector(rows, used_tokens(), vector)
    assert (token_pages == used_tokens()).all()


def test_gathered_sequences_are_their_rows():
    rows = dataclasses.replace(
        used_rows(),
        num_tokens=jnp.array([9, 1, 3, 50], jnp.int32),
        is_done=jnp.array([False, True, False, False]),
        rule=jnp.array([COUPLED, 0, 0, COUPLED], jnp.int32),
        temperature=jnp.array([0.5, 0.5, 0.5, 0.0], jnp.float32),
    )
    order = [3, 0, 1, POOL.num_rows]
    active = gather(rows, used_tokens(), jnp.array(order, jnp.int32))
    # A done row and the pad take no part.
    assert active.is_active.tolist() == [True, True, False, False]
    assert active.is_sampled.tolist() == [False, True, False, False]
    assert active.is_coupled.tolist() == [False, True, False, False]
    history = by_position(rows, used_tokens())
    newest = [history[3, 48:50].tolist(), history[0, 7:9].tolist()]
    assert active.last_tokens[:2].tolist() == newest
    for name in ("page_table", "min_total", "max_total", "top_k", "seed", "stop_ids"):
        expected = np.asarray(getattr(rows, name))[order[:3]]
        assert np.asarray(getattr(active, name))[:3].tolist() == expected.tolist()
    # A prompt that has just come in: its length is not in the rows yet.
    active = gather(
        rows,
        used_tokens(),
        jnp.array([2], jnp.int32),
        num_tokens=jnp.array([20], jnp.int32),
    )
    assert active.num_tokens.tolist() == [20]
    assert active.last_tokens.tolist() == [history[2, 18:20].tolist()]


def test_repeated_sequences_stay_side_by_side():
    row = jnp.array([2, 0], jnp.int32)
    active = gather(used_rows(), used_tokens(), row).repeat(3)
    assert active.row.tolist() == [2, 2, 2, 0, 0, 0]
    assert active.seed.shape == (6, 2)
    assert active.controls.top_k.tolist() == active.top_k.tolist()

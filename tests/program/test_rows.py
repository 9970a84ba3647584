"""A plan on the device: admitted requests, new pages and tokens.

`gather`, which reads them, is checked on the result.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.plan import (
    COUPLED,
    MAX_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_IDS,
    NO_TOKEN,
    TILE,
    Features,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
    TokenControls,
)
from jaxspec.program.rows import Rows, apply_plan, gather, init_rows, read_tiles
from jaxspec.program.state import init_token_pages
from jaxspec.program.wire import PlanLayout
from tests.kernels.oracle import UNOPTIMISED
from tests.support.plans import ADMISSION, with_controls

POOL = PoolShape(num_rows=4, num_pages=60, page_size=4, max_model_len=50, vocab_size=70)
SHAPE = StepShape(num_seqs=4, num_levels=1, max_prompt_tokens=2 * TILE)
LAYOUT = PlanLayout(SHAPE, POOL)
CONTROLLED = dataclasses.replace(
    SHAPE, max_prompt_tokens=8 * TILE, features=Features(has_controls=True)
)


@partial(jax.jit, compiler_options=UNOPTIMISED)
def apply_vector(
    rows: Rows, token_pages: jax.Array, vector: jax.Array
) -> tuple[Rows, jax.Array]:
    fields = LAYOUT.read(vector)
    return apply_plan(rows, token_pages, fields, read_tiles(fields), POOL)


def apply(rows: Rows, plan: StepPlan) -> Rows:
    vector = jnp.asarray(LAYOUT.pack(plan))
    after, token_pages = apply_vector(rows, used_tokens(), vector)
    if not plan.tiles:
        assert (token_pages == used_tokens()).all()
    return after


def tokens_after(rows: Rows, plan: StepPlan) -> np.ndarray:
    """Return every row's tokens by position."""
    vector = jnp.asarray(LAYOUT.pack(plan))
    after, token_pages = apply_vector(rows, used_tokens(), vector)
    assert changed_rows(rows, after) == {}
    return by_position(after, token_pages)


def by_position(rows: Rows, token_pages: jax.Array) -> np.ndarray:
    found = np.array(token_pages)[np.asarray(rows.page_table)]
    return found.reshape(POOL.num_rows, -1)


def used_tokens() -> jax.Array:
    pages = jax.eval_shape(lambda: init_token_pages(POOL))
    tokens = np.arange(pages.size, dtype=pages.dtype).reshape(pages.shape) + 1000
    return jnp.asarray(tokens, pages.dtype)


def used_rows() -> Rows:
    """Return rows with distinct values, as if earlier requests had left them."""
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(np.arange(leaf.size).reshape(leaf.shape), leaf.dtype)
            if leaf.dtype != bool
            else jnp.ones(leaf.shape, bool)
        ),
        jax.eval_shape(lambda: init_rows(POOL)),
    )


def changed_rows(before: Rows, after: Rows) -> dict[str, list[int]]:
    """Return the numbers of the rows that differ, by the name of the field."""
    changes = {}
    leaves = (jax.tree.leaves_with_path(rows) for rows in (before, after))
    for (path, old), (_, new) in zip(*leaves, strict=True):
        differs = np.asarray(old) != np.asarray(new)
        differs = differs.reshape(POOL.num_rows, -1).any(axis=1)
        if differs.any():
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            changes[name] = np.flatnonzero(differs).tolist()
    return changes


def test_an_empty_plan_changes_nothing():
    rows = used_rows()
    assert changed_rows(rows, apply(rows, StepPlan())) == {}


def test_admission_overwrites_only_its_row():
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
    # The pages of the row's last request may belong to another request now.
    assert (after.page_table[3] == POOL.num_pages).all()


def check_forgotten_controls() -> None:
    apply_vector.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    rows = used_rows()
    assert rows.controls.is_controlled.all()
    changes = changed_rows(rows, apply(rows, StepPlan(admissions=[ADMISSION])))
    found = {name: rows for name, rows in changes.items() if "controls" in name}
    assert found == {"controls.is_controlled": [3]}


def test_admission_without_controls_clears_the_last_requests():
    check_forgotten_controls()


CONTROLS = TokenControls(
    presence_penalty=-0.5,
    frequency_penalty=1.25,
    repetition_penalty=1.1,
    bias=((5, -100.0), (69, 2.5)),
    allowed=(0, 31, 32, 69),
    bad_words=((7,), (1, 2, 3)),
    logprob_token_ids=(69, 0, 69),
)


def test_admitted_controls_are_kept_in_their_rows():
    layout = PlanLayout(CONTROLLED, POOL)
    asked = [
        with_controls(2, CONTROLS),
        dataclasses.replace(ADMISSION, row=1),
        with_controls(0, TokenControls()),
    ]
    vector = jnp.asarray(layout.pack(StepPlan(admissions=asked)))

    @partial(jax.jit, compiler_options=UNOPTIMISED)
    def run(rows: Rows) -> Rows:
        fields = layout.read(vector)
        tiles = read_tiles(fields)
        return apply_plan(rows, used_tokens(), fields, tiles, POOL)[0]

    rows = used_rows()
    after = run(rows)
    kept = jax.tree.map(np.asarray, after.controls)
    assert kept.is_controlled.tolist() == [True, False, True, True]
    changes = changed_rows(rows, after)
    assert changes["controls.bad_words"] == changes["controls.allowed"] == [0, 2]
    np.testing.assert_array_equal(kept.penalties[2], np.array([-0.5, 1.25, 1.1], "f4"))
    pads = [NO_TOKEN] * (MAX_BIAS - 2)
    assert kept.bias_ids[2].tolist() == [5, 69, *pads]
    assert kept.bias_values[2, :2].tolist() == [-100.0, 2.5]
    # The masks of 70 tokens take three words.
    assert kept.allowed[2].tolist() == [2**31 + 1, 1, 2**5]
    words = kept.bad_words[2]
    assert words[:2, -3:].tolist() == [[NO_TOKEN, NO_TOKEN, 7], [1, 2, 3]]
    assert (words[:2, :-3] == NO_TOKEN).all() and (words[2:] == NO_TOKEN).all()
    pads = [NO_TOKEN] * (MAX_LOGPROB_TOKEN_IDS - 3)
    assert kept.logprob_token_ids[2].tolist() == [69, 0, 69, *pads]
    # By default, controls allow everything.
    assert kept.penalties[0].tolist() == [0, 0, 1]
    assert (kept.bias_ids[0] == NO_TOKEN).all()
    assert (kept.bad_words[0] == NO_TOKEN).all()
    bits = np.unpackbits(kept.allowed[0].view(np.uint8), bitorder="little")
    assert bits[: POOL.vocab_size].all()


def test_pages_come_after_the_admission_that_clears_the_table():
    plan = StepPlan(admissions=[ADMISSION], pages=[(3, 0, 11), (1, 2, 12)])
    after = apply(used_rows(), plan)
    assert after.page_table[3].tolist() == [11] + [POOL.num_pages] * 12
    assert changed_rows(used_rows(), after)["page_table"] == [1, 3]
    assert after.page_table[1, 2] == 12


@pytest.mark.parametrize(
    "tiles",
    [
        {(1, 5): [91, 92, 93], (2, 0): [*range(200, 200 + TILE)]},
        {(0, POOL.max_model_len - 1): [77]},
    ],
)
def test_tiles_write_their_tokens_and_no_pads(tiles):
    expected = by_position(used_rows(), used_tokens())
    plan = StepPlan()
    for (row, start), tokens in tiles.items():
        expected[row, start : start + len(tokens)] = tokens
        given = np.array(tokens)
        plan.tiles.append(Tile(row=row, start=start, tokens=given, is_last=True))
    assert tokens_after(used_rows(), plan).tolist() == expected.tolist()


def test_tokens_without_a_page_are_written_nowhere():
    rows = dataclasses.replace(
        used_rows(), page_table=jnp.full((4, 13), POOL.num_pages, jnp.int32)
    )
    tile = Tile(row=1, start=5, tokens=np.array([91, 92, 93]), is_last=True)
    vector = jnp.asarray(LAYOUT.pack(StepPlan(tiles=[tile])))
    _, token_pages = apply_vector(rows, used_tokens(), vector)
    assert (token_pages == used_tokens()).all()


def test_gathered_sequences_equal_their_rows():
    rows = dataclasses.replace(
        used_rows(),
        num_tokens=jnp.array([9, 1, 3, 50], jnp.int32),
        is_done=jnp.array([False, True, False, False]),
        rule=jnp.array([COUPLED, 0, 0, COUPLED], jnp.int32),
        temperature=jnp.array([0.5, 0.5, 0.5, 0.0], jnp.float32),
    )
    order = [3, 0, 1, POOL.num_rows]
    gathered = jax.jit(gather, compiler_options=UNOPTIMISED)
    active = gathered(rows, used_tokens(), jnp.array(order, jnp.int32))
    # A row whose request is done, and a pad, are not active.
    assert active.is_active.tolist() == [True, True, False, False]
    assert active.is_sampled.tolist() == [False, True, False, False]
    assert active.is_coupled.tolist() == [False, True, False, False]
    history = by_position(rows, used_tokens())
    newest = [history[3, 48:50].tolist(), history[0, 7:9].tolist()]
    assert active.last_tokens[:2].tolist() == newest
    for name in ("page_table", "min_total", "max_total", "top_k", "seed", "stop_ids"):
        expected = np.asarray(getattr(rows, name))[order[:3]]
        assert np.asarray(getattr(active, name))[:3].tolist() == expected.tolist()
    # The length of a prompt that was just read is an argument: the rows do not have it
    # yet.
    active = gathered(
        rows,
        used_tokens(),
        jnp.array([2], jnp.int32),
        num_tokens=jnp.array([20], jnp.int32),
    )
    assert active.num_tokens.tolist() == [20]
    assert active.last_tokens.tolist() == [history[2, 18:20].tolist()]

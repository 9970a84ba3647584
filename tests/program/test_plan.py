"""A plan survives the way through its vector, and a result the way back."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.apply import unpack
from jaxspec.program.plan import (
    MAX_STOP_IDS,
    NO_TOKEN,
    TILE,
    Admission,
    Features,
    PlanLayout,
    PoolShape,
    StepPlan,
    StepResult,
    StepShape,
    Tile,
    TokenControls,
)

POOL = PoolShape(num_rows=5, num_pages=40, page_size=4, max_model_len=50, vocab_size=70)
SHAPE = StepShape(num_seqs=4, num_draft_tokens=3, chunk=2 * TILE)
LAYOUT = PlanLayout(SHAPE, POOL)
PAD_ROW = POOL.num_rows

ADMISSION = Admission(
    row=3,
    num_prompt=6,
    min_total=9,
    max_total=20,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    seed=(2**32 - 1, 7),
    rule=2,
    stop_ids=(1, 15),
)
PLAN = StepPlan(
    decode=[(4, 3), (0, 1)],
    tiles=[
        Tile(row=3, start=0, tokens=np.arange(100, 132), is_last=False),
        Tile(
            row=2,
            start=8,
            tokens=np.array([7, 8, 9]),
            is_last=True,
            is_draft_only=True,
        ),
    ],
    admissions=[ADMISSION],
    pages=[(4, 2, 17), (3, 0, 39)],
)


def with_controls(row: int, controls: TokenControls) -> Admission:
    return dataclasses.replace(ADMISSION, row=row, controls=controls)


def fields_of(plan: StepPlan) -> dict[str, np.ndarray]:
    fields = unpack(jnp.asarray(LAYOUT.pack(plan)), LAYOUT)
    return {name: np.asarray(values) for name, values in fields.items()}


def test_entries_stand_in_order_and_pads_after_them():
    fields = fields_of(PLAN)
    assert fields["decode_row"].tolist() == [4, 0, PAD_ROW, PAD_ROW]
    assert fields["decode_draft"].tolist() == [3, 1, 0, 0]
    assert fields["page_update"][:, :2].T.tolist() == [[4, 2, 17], [3, 0, 39]]
    assert (fields["page_update"][0, 2:] == PAD_ROW).all()
    assert fields["tile_row"].tolist() == [3, 2]
    assert fields["tile_start"].tolist() == [0, 8]
    assert fields["tile_len"].tolist() == [TILE, 3]
    assert fields["tile_is_last"].tolist() == [0, 1]
    assert fields["tile_is_draft_only"].tolist() == [0, 1]
    assert fields["admit_row"].tolist() == [3, PAD_ROW]


def test_tile_tokens_are_right_aligned():
    tokens = fields_of(PLAN)["tile_tokens"]
    assert tokens[0].tolist() == list(range(100, 132))
    assert tokens[1].tolist() == [0] * (TILE - 3) + [7, 8, 9]


def test_an_admission_keeps_every_value():
    fields = fields_of(PLAN)
    for name in ("min_total", "max_total", "top_k", "rule"):
        assert fields[f"admit_{name}"][0] == getattr(ADMISSION, name)
    for name in ("temperature", "top_p", "min_p"):
        bits = fields[f"admit_{name}"][:1].view(np.float32)
        assert bits[0] == np.float32(getattr(ADMISSION, name))
    assert fields["admit_seed"][0].view(np.uint32).tolist() == [2**32 - 1, 7]
    stops = fields["admit_stop_ids"][0]
    assert stops.tolist() == [1, 15] + [NO_TOKEN] * (MAX_STOP_IDS - 2)


def test_an_empty_plan_names_nobody():
    fields = fields_of(StepPlan())
    for name in ("decode_row", "tile_row", "admit_row"):
        assert (fields[name] == PAD_ROW).all()
    assert (fields["page_update"][0] == PAD_ROW).all()


def test_vectors_share_no_memory():
    before = LAYOUT.pack(PLAN).copy()
    LAYOUT.pack(PLAN)[:] = 9
    assert LAYOUT.pack(PLAN).tolist() == before.tolist()


ALL_FEATURES = Features(
    has_controls=True, has_grammar=True, num_logprobs=2, num_prompt_logprobs=3
)


@pytest.mark.parametrize("chunk", [0, TILE])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("features", [Features(), ALL_FEATURES], ids=["none", "all"])
def test_fields_fill_the_vector_without_gaps(chunk, drafts, features):
    shape = StepShape(
        num_seqs=2, num_draft_tokens=drafts, chunk=chunk, features=features
    )
    layout = PlanLayout(shape, POOL)
    covered = np.zeros(layout.size, int)
    for name, field_shape in layout.fields.items():
        start = layout.offsets[name]
        covered[start : start + int(np.prod(field_shape))] += 1
    assert (covered == 1).all()


def test_more_pages_than_a_launch_can_need_are_a_bug():
    count = LAYOUT.max_page_updates
    LAYOUT.pack(StepPlan(pages=[(0, 0, 0)] * count))
    with pytest.raises(AssertionError, match="page updates"):
        LAYOUT.pack(StepPlan(pages=[(0, 0, 0)] * (count + 1)))


def test_a_result_is_read_by_sequence_and_tile():
    # [tokens x 4, emitted, drafts, accepted, done] of each sequence, then [token, done]
    # of each tile
    rows = np.arange(4 * 8).reshape(4, 8)
    rows[:, 7] = [0, 1, 1, 0]
    tiles = np.array([[50, 1], [60, 0]])
    vector = np.concatenate([rows.reshape(-1), tiles.reshape(-1)]).astype(np.int32)
    result = StepResult.unpack(vector, SHAPE)
    assert result.tokens.tolist() == rows[:, :4].tolist()
    assert result.num_emitted.tolist() == rows[:, 4].tolist()
    assert result.num_draft.tolist() == rows[:, 5].tolist()
    assert result.num_accepted.tolist() == rows[:, 6].tolist()
    assert result.is_done.tolist() == [False, True, True, False]
    assert result.tile_token.tolist() == [50, 60]
    assert result.tile_is_done.tolist() == [True, False]
    assert result.logprobs is result.tile_logprobs is result.prompt_logprobs is None


def test_log_probabilities_come_after_their_tokens():
    shape = dataclasses.replace(SHAPE, features=ALL_FEATURES)
    sizes = [4 * 8, 4 * 4 * 6, 2 * TILE * 8, 2 * 2, 2 * 6]
    parts = [np.full(size, number, np.int32) for number, size in enumerate(sizes)]
    result = StepResult.unpack(np.concatenate(parts), shape)
    found = result.logprobs, result.prompt_logprobs, result.tile_logprobs
    leadings = (4, 4), (2, TILE), (2,)
    for number, one, leading in zip((1, 2, 4), found, leadings, strict=True):
        assert one is not None
        assert one.own.shape == one.rank.shape == leading
        tops = 3 if number == 2 else 2
        assert one.top_ids.shape == one.top.shape == (*leading, tops)
        for values in one:
            assert (values.view(np.int32) == number).all()
    assert (result.tile_token == 3).all()


def test_the_token_after_a_tile_is_told_for_its_log_probability():
    shape = dataclasses.replace(SHAPE, features=ALL_FEATURES)
    layout = PlanLayout(shape, POOL)
    tiles = [dataclasses.replace(PLAN.tiles[0], next_token=77), PLAN.tiles[1]]
    vector = layout.pack(dataclasses.replace(PLAN, tiles=tiles))
    fields = unpack(jnp.asarray(vector), layout)
    assert fields["tile_next_token"].tolist() == [77, NO_TOKEN]


@pytest.mark.parametrize(("length", "pages"), [(48, 12), (49, 13), (1, 1)])
def test_the_page_table_holds_the_longest_sequence(length, pages):
    pool = PoolShape(
        num_rows=1, num_pages=99, page_size=4, max_model_len=length, vocab_size=16
    )
    assert pool.table_len == pages

"""Plans and results are equal after packing into a vector and unpacking."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.plan import (
    MAX_LOGPROB_TOKEN_IDS,
    NO_TOKEN,
    TILE,
    Features,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.wire import PlanLayout, ResultLayout, StepResult
from tests.support.plans import ADMISSION, POOL

SHAPE = StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=2 * TILE)
LAYOUT = PlanLayout(SHAPE, POOL)
PAD_ROW = POOL.num_rows

PLAN = StepPlan(
    decode=[(4, 3), (0, 1)],
    tiles=[
        Tile(row=3, start=0, tokens=np.arange(100, 132), is_last=False),
        Tile(row=2, start=8, tokens=np.array([7, 8, 9]), is_last=True),
    ],
    admissions=[ADMISSION],
    pages=[(4, 2, 17), (3, 0, 39)],
)


def test_entries_are_in_order_with_pads_after_them():
    fields = LAYOUT.read(jnp.asarray(LAYOUT.pack(PLAN)))
    assert fields["decode_row"].tolist() == [4, 0, PAD_ROW, PAD_ROW]
    assert fields["decode_wanted_levels"].tolist() == [3, 1, 0, 0]
    assert fields["page_update"][:, :2].T.tolist() == [[4, 2, 17], [3, 0, 39]]
    assert (fields["page_update"][0, 2:] == PAD_ROW).all()
    assert fields["tile_row"].tolist() == [3, 2]
    assert fields["tile_start"].tolist() == [0, 8]
    assert fields["tile_length"].tolist() == [TILE, 3]
    assert fields["tile_is_last"].tolist() == [0, 1]
    assert fields["admit_row"].tolist() == [3, PAD_ROW]
    # Tokens are right-aligned.
    tokens = fields["tile_tokens"].tolist()
    assert tokens == [[*range(100, 132)], [0] * (TILE - 3) + [7, 8, 9]]


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
        num_seqs=2, num_levels=drafts, max_prompt_tokens=chunk, features=features
    )
    layout = PlanLayout(shape, POOL)
    covered = np.zeros(layout.size, int)
    for name, field in layout.fields.items():
        start = layout.offsets[name]
        covered[start : start + int(np.prod(field.shape))] += 1
    assert (covered == 1).all()


def test_too_many_page_updates_fail_an_assertion():
    count = LAYOUT.max_page_updates
    LAYOUT.pack(StepPlan(pages=[(0, 0, 0)] * count))
    with pytest.raises(AssertionError, match="page updates"):
        LAYOUT.pack(StepPlan(pages=[(0, 0, 0)] * (count + 1)))


def random_result(shape: StepShape) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 2 if field.dtype is bool else 99, field.shape).astype(
            field.dtype
        )
        for name, field in ResultLayout(shape).fields.items()
    }


def through(values: dict[str, np.ndarray], shape: StepShape) -> StepResult:
    """Pack `values` as the device does, and unpack them as the host does."""
    layout = ResultLayout(shape)
    parts = layout.flatten({name: jnp.asarray(one) for name, one in values.items()})
    return StepResult.unpack(np.asarray(jnp.concatenate(parts)), shape)


def test_a_result_is_read_by_sequence_and_tile():
    values = random_result(SHAPE)
    result = through(values, SHAPE)
    assert result.tokens.shape == (4, 4)
    assert result.tile_token.shape == (2,)
    for name, expected in values.items():
        found = getattr(result, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, name)
    assert result.logprobs is result.tile_logprobs is result.prompt_logprobs is None


def test_logprobs_belong_to_their_tokens():
    shape = dataclasses.replace(SHAPE, features=ALL_FEATURES)
    values = random_result(shape)
    result = through(values, shape)
    leadings = dict(logprobs=(4, 4), prompt_logprobs=(2, TILE), tile_logprobs=(2,))
    for name, leading in leadings.items():
        one, top = getattr(result, name), 3 if "prompt" in name else 2
        num_chosen = 0 if "prompt" in name else MAX_LOGPROB_TOKEN_IDS
        assert one.own.shape == one.rank.shape == leading
        assert one.top_ids.shape == one.top.shape == (*leading, top)
        table = values[name]
        np.testing.assert_array_equal(one.own.view(np.int32), table[..., 0])
        np.testing.assert_array_equal(one.rank, table[..., 1])
        np.testing.assert_array_equal(one.top_ids, table[..., 2 : 2 + top])
        end = 2 + 2 * top
        np.testing.assert_array_equal(one.top.view(np.int32), table[..., 2 + top : end])
        np.testing.assert_array_equal(one.chosen.view(np.int32), table[..., end:])
        assert one.chosen.shape == (*leading, num_chosen)


def test_a_result_without_prompts_leaves_tiles_out():
    shape = dataclasses.replace(SHAPE, max_prompt_tokens=0)
    values = random_result(shape)
    left_out = {name: one for name, one in values.items() if "tile" not in name}
    assert through(left_out, shape).tile_token.shape == (0,)
    with pytest.raises(KeyError):
        through({name: values[name] for name in ("tokens", "is_done")}, shape)


def test_next_token_of_a_tile_is_sent_for_its_logprob():
    shape = dataclasses.replace(SHAPE, features=ALL_FEATURES)
    layout = PlanLayout(shape, POOL)
    tiles = [dataclasses.replace(PLAN.tiles[0], next_token=77), PLAN.tiles[1]]
    vector = layout.pack(dataclasses.replace(PLAN, tiles=tiles))
    fields = layout.read(jnp.asarray(vector))
    assert fields["tile_next_token"].tolist() == [77, NO_TOKEN]


def test_plan_holds_the_number_of_rounds():
    shape = StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=0, max_rounds=4)
    layout = PlanLayout(shape, POOL)
    for plan in (StepPlan(), StepPlan(decode=[(1, 2)], num_rounds=3)):
        fields = layout.read(jnp.asarray(layout.pack(plan)))
        assert fields["num_rounds"].shape == ()
        assert int(fields["num_rounds"]) == plan.num_rounds
    for number in (0, 5):
        with pytest.raises(AssertionError):
            layout.pack(StepPlan(num_rounds=number))
    # The limit on page updates covers every token that the rounds may add.
    single = PlanLayout(dataclasses.replace(shape, max_rounds=1), POOL)
    assert "num_rounds" not in single.fields
    with pytest.raises(AssertionError):
        single.pack(StepPlan(num_rounds=2))
    assert layout.max_page_updates == 4 * (2 * 4 * 4 // 4 + 1)


@pytest.mark.parametrize("num_rounds", [1, 3, 4])
def test_rounds_are_read_in_their_order(num_rounds):
    shape = StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=0, max_rounds=4)
    layout = ResultLayout(shape)
    random = np.random.default_rng(0)
    rounds = random.integers(0, 2, (4, layout.size), np.int32)
    vector = np.concatenate([np.array([num_rounds], np.int32), rounds.reshape(-1)])
    result = StepResult.unpack(vector, shape)
    assert len(result.rounds) == num_rounds
    assert result.rounds[0] is result
    single = dataclasses.replace(shape, max_rounds=1)
    for one, part in zip(result.rounds, rounds, strict=False):
        alone = StepResult.unpack(part, single)
        for name in layout.fields:
            np.testing.assert_array_equal(getattr(one, name), getattr(alone, name))

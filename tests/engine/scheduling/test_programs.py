"""A few compiled programs suffice: one of them fits every launch."""

import dataclasses
import itertools
from typing import Any

import pytest

from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.scheduling.programs import (
    FIRST_CHUNK,
    GREEDY,
    SAMPLED,
    EveryProgram,
    Shapes,
)
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import TILE, Features, StepShape
from tests.support.loops import SomePrograms, make_config

LOGPROBS = Features(num_logprobs=3)
CONTROLS = Features(has_controls=True, all_greedy=True)
GRAMMAR = Features(has_grammar=True)
PROMPTS = Features(num_prompt_logprobs=2)
SOME = (GREEDY, SAMPLED, LOGPROBS, CONTROLS, GRAMMAR, PROMPTS)
DEFAULT: dict[str, Any] = dict(
    max_num_seqs=8, max_num_batched_tokens=512, num_draft_tokens=5
)
PLAIN = dict[str, Any](DEFAULT, num_draft_tokens=0)


def make_shapes(programs: EveryProgram | None = None, **changes: Any) -> Shapes:
    num_pages = max(48, changes.get("max_num_seqs", 1))
    config = make_config(**(dict(num_pages=num_pages) | changes))
    return Shapes(config, SpeculationPolicy(config.speculative), programs)


def find(shapes: Shapes, *need: Any, **options: Any) -> StepShape | None:
    """Select a compiled program, and request a better one if it is missing."""
    found = shapes.select(*need, **options)
    shapes.request_compile(found.missing)
    return found.shape


def draft_prefill(shapes: Shapes, num_tiles: int) -> StepShape | None:
    found = shapes.select_draft_prefill(num_tiles)
    shapes.request_compile(found.missing)
    return found.shape


def is_able(shape: StepShape, seqs: int, drafts: int, tokens: int, need: Features):
    return (
        shape.num_seqs >= seqs
        and shape.num_levels >= drafts
        and shape.max_prompt_tokens >= tokens
        and (need.all_greedy or not shape.features.all_greedy)
        and (shape.features.has_controls or not need.has_controls)
        and (shape.features.has_grammar or not need.has_grammar)
        and (shape.features.num_logprobs is not None or need.num_logprobs is None)
        and (
            shape.features.num_prompt_logprobs is not None
            or need.num_prompt_logprobs is None
        )
    )


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 256])
def test_server_has_at_most_12_programs_or_20_with_all_features(
    max_num_seqs, num_draft_tokens
):
    shapes = make_shapes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_draft_tokens=num_draft_tokens,
    )
    listed = shapes.all()
    assert len(set(listed)) == len(listed) <= 12
    every = shapes.all(features=SOME)
    assert len(set(every)) == len(every) <= 20
    assert set(listed) < set(every)


def test_the_default_server_has_these_programs():
    names = [shape.name for shape in make_shapes(**DEFAULT).all()]
    assert names[0] == "8x5+512_sampled", "the first one serves everything"
    assert sorted(names) == [
        "1x0+128_sampled",
        "1x0_greedy",
        "1x5_greedy",
        "1x5_sampled",
        "4x5_greedy",
        "4x5_sampled",
        "8x5+512_sampled",
        "8x5+64_sampled",
        "8x5_greedy",
        "8x5_sampled",
        "draft-prefill+512",
        "draft-prefill+64",
    ]


@pytest.mark.parametrize("max_num_seqs", [8, 256])
def test_first_program_serves_requests_and_second_adds_drafts(max_num_seqs):
    sizes = DEFAULT | {"max_num_seqs": max_num_seqs}
    first, second, *_ = make_shapes(**sizes).all()
    only_first = make_shapes(SomePrograms(first), **sizes)
    for features in (GREEDY, SAMPLED):
        assert only_first.find(1, 0, TILE, features) == first
        assert only_first.find(1, DEFAULT["num_draft_tokens"], 0, features) == first
    assert not only_first.can_draft_prefill
    assert make_shapes(SomePrograms(first, second), **sizes).can_draft_prefill


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_every_launch_has_a_listed_program_that_serves_it(
    max_num_seqs, num_draft_tokens
):
    shapes = make_shapes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_draft_tokens=num_draft_tokens,
    )
    # Requests with different features share a launch.
    needs = {one | other for one, other in itertools.product(SOME, SOME)}
    listed, met = shapes.all(features=needs, with_on_demand=True), set()
    for need in needs:
        if not need.all_greedy:
            first = shapes.all(features=[need])[0]
            assert is_able(first, max_num_seqs, num_draft_tokens, 512, need)
        for seqs, drafts, tokens in itertools.product(
            range(max_num_seqs + 1),
            range(num_draft_tokens + 1),
            (0, 32, 64, 128, 160, 512),
        ):
            if need.num_prompt_logprobs is not None and not tokens:
                continue  # launches without prompts have no prompt logprobs
            found = shapes.find(seqs, drafts, tokens, need)
            assert found is not None
            assert found in listed
            assert is_able(found, seqs, drafts, tokens, need)
            met.add(found)
    assert met == set(listed) - set(shapes.draft_prefills), (
        "a program that no launch needs"
    )


def test_plain_decoding_uses_plain_programs():
    """The plain program is requested when K becomes 0, and used once it is compiled."""
    shapes, plain = make_shapes(**DEFAULT), make_shapes(**PLAIN)
    for num_seqs, form in itertools.product(range(1, 9), (GREEDY, SAMPLED)):
        found = shapes.find(num_seqs, 0, 0, form)
        assert found == plain.find(num_seqs, 0, 0, form) or form == SAMPLED
        assert found is not None
        assert found.num_seqs <= 2 * num_seqs
    late = set(shapes.all(with_on_demand=True)) - set(shapes.all())
    assert {shape.name for shape in late} == {
        "1x0_sampled",
        "4x0_greedy",
        "4x0_sampled",
        "8x0_greedy",
        "8x0_sampled",
        "8x0+64_sampled",
    }
    # A prompt beside sequences without drafts uses no program with draft rows.
    found = shapes.find(8, 0, 64)
    assert found is not None
    assert found.name == "8x0+64_sampled"


def test_plain_program_is_not_requested_for_a_few_plain_launches():
    largest = StepShape(num_seqs=8, num_levels=5, max_prompt_tokens=512)
    programs = SomePrograms(largest)
    shapes = make_shapes(programs, **DEFAULT)
    for _ in range(2):
        assert find(shapes, 8, 0, 64, may_request_on_demand=False) == largest
        assert [shape.name for shape in programs.asked] == ["8x5+64_sampled"]
    assert find(shapes, 8, 0, 64) == largest
    assert programs.asked[-1].name == "8x0+64_sampled"
    # Once compiled, it is used.
    programs.add(programs.asked[-1])
    assert find(shapes, 8, 0, 64, may_request_on_demand=False) == programs.asked[-1]


def test_draft_prefill_uses_the_smallest_fitting_program():
    programs = SomePrograms()
    shapes = make_shapes(programs, **DEFAULT)
    small, large = shapes.draft_prefills
    assert (small.num_tiles, large.num_tiles) == (2, 16)
    assert draft_prefill(shapes, 3) is None
    assert programs.asked == [large]
    programs.add(small)
    assert draft_prefill(shapes, 3) == small, "what there is, as often as it takes"
    programs.add(large)
    programs.asked.clear()
    found = [draft_prefill(shapes, tiles) for tiles in (1, 2, 3, 16, 99)]
    assert found == [small, small, large, large, large]
    programs.there.remove(small)
    assert draft_prefill(shapes, 1) == large
    assert programs.asked == [small]
    assert draft_prefill(make_shapes(**PLAIN), 1) is None


def test_expected_prompt_length_limits_the_chunks():
    shapes = make_shapes(**DEFAULT)
    assert {shape.max_prompt_tokens for shape in shapes.all()} == {0, 64, 128, 512}
    assert {shape.max_prompt_tokens for shape in shapes.all(500)} == {0, 64, 128, 512}
    one = make_shapes(None, **(DEFAULT | dict(max_num_seqs=1)))
    assert {shape.max_prompt_tokens for shape in one.all(1)} == {0, 64}
    assert {shape.max_prompt_tokens for shape in one.all(100)} == {0, 64, 128}


def test_missing_program_is_requested_and_a_larger_one_serves():
    programs = SomePrograms()
    shapes = make_shapes(programs, **DEFAULT)
    best = StepShape(num_seqs=1, num_levels=5, max_prompt_tokens=0, features=GREEDY)
    assert find(shapes, 1, 3, 0, GREEDY) is None
    assert programs.asked == [best]
    universal = shapes.all()[0]
    programs.add(universal)
    assert find(shapes, 1, 3, 0, GREEDY) == universal  # each size is larger
    sampled = StepShape(num_seqs=1, num_levels=5, max_prompt_tokens=0)
    programs.add(sampled)
    assert find(shapes, 1, 3, 0, GREEDY) == sampled
    assert find(shapes, 2, 3, 0, GREEDY) == universal
    programs.add(best)
    programs.asked.clear()
    assert find(shapes, 1, 3, 0, GREEDY) == best
    assert not programs.asked
    assert find(shapes, 1, 5, 0, LOGPROBS) is None


# These launches have more prompt tokens than the programs that an engine compiles
# first.
LARGE: dict[str, Any] = DEFAULT | dict(
    max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=512, num_pages=2048
)


def test_larger_chunk_is_compiled_once_that_many_tokens_wait():
    shapes = make_shapes(**LARGE)
    assert shapes.max_tiles == 8192 // TILE
    first = {0, 256, 512, FIRST_CHUNK}
    assert {shape.max_prompt_tokens for shape in shapes.all(features=SOME)} == first
    listed = shapes.all(features=SOME, with_on_demand=True)
    assert {shape.max_prompt_tokens for shape in listed} == first | {8192}
    for need in (SAMPLED, LOGPROBS, GRAMMAR, PROMPTS):
        chunks = [shape.max_prompt_tokens for shape in shapes.with_prompts(16, 5, need)]
        assert chunks[-2:] == [FIRST_CHUNK, 8192]
        assert shapes.all(features=[need])[0].max_prompt_tokens == FIRST_CHUNK
    assert {shape.max_prompt_tokens for shape in shapes.draft_prefills} == {
        256,
        FIRST_CHUNK,
    }
    late = {shape.max_prompt_tokens: shapes.is_on_demand(shape) for shape in listed}
    assert late[8192] and not late[FIRST_CHUNK]
    # Prompts of greedy requests are prefilled in programs that can sample.
    assert {shape.max_prompt_tokens for shape in shapes.all(features=[GREEDY])} == {
        0,
        256,
        FIRST_CHUNK,
    }


def test_large_chunk_is_requested_by_waiting_tokens():
    programs = SomePrograms()
    shapes = make_shapes(programs, **LARGE)
    programs.add(shapes.all()[0])
    for may in (True, False):
        find(shapes, 1, 0, FIRST_CHUNK, SAMPLED, may_request_on_demand=may)
        assert not programs.asked
        for tokens in (FIRST_CHUNK + 1, 10**6):
            find(shapes, 1, 0, tokens, SAMPLED, may_request_on_demand=may)
            assert programs.asked == [
                dataclasses.replace(shapes.all()[0], max_prompt_tokens=8192)
            ]
            programs.asked.clear()
            programs.version += 1  # otherwise, the missing program is requested once


def test_largest_chunk_is_limited_by_all_sequences():
    shapes = make_shapes(None, **(LARGE | dict(max_model_len=300)))
    assert shapes.max_tiles * TILE == 16 * 320
    small = make_shapes(None, **(LARGE | dict(max_model_len=128)))
    assert small.max_tiles * TILE == FIRST_CHUNK


def test_with_prompts_returns_compiled_programs_smallest_first():
    shapes = make_shapes(**DEFAULT)
    assert [one.max_prompt_tokens for one in shapes.with_prompts(2, 5, SAMPLED)] == [
        64,
        512,
    ]
    assert [one.max_prompt_tokens for one in shapes.with_prompts(1, 0, SAMPLED)] == [
        64,
        128,
        512,
    ]
    programs = SomePrograms()
    shapes = make_shapes(programs, **DEFAULT)
    assert shapes.with_prompts(1, 0, SAMPLED) == []
    assert not programs.asked
    find(shapes, 1, 0, 5 * TILE - 1, SAMPLED)
    assert [one.name for one in programs.asked] == ["8x5+512_sampled"]


@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
def test_batch_invariant_launches_use_one_program(features):
    """One program for all launches keeps the sizes of matrix products equal."""
    shapes = make_shapes(batch_invariant=True, **DEFAULT)
    only, draft_prefill = shapes.all(features=[features, SAMPLED])
    assert [draft_prefill] == shapes.draft_prefills
    assert (only.num_seqs, only.num_levels) == (8, 5)
    for seqs, drafts, tiles in itertools.product(range(1, 9), range(6), range(4)):
        assert shapes.find(seqs, drafts, tiles * TILE, features) == only
        assert shapes.with_prompts(seqs, drafts, features) == [only]
    # A more general program may round differently, so it is not used in its place.
    general = make_shapes(**DEFAULT).find(1, 5, 0, LOGPROBS)
    assert general is not None and general.features.covers(features)
    waiting = make_shapes(SomePrograms(general), batch_invariant=True, **DEFAULT)
    assert waiting.find(1, 5, 0, features) is None


@pytest.mark.parametrize("is_invariant", [False, True])
def test_only_plain_requests_without_prompts_run_several_rounds_per_launch(
    is_invariant,
):
    """The number of rounds is data, so single rounds use the same programs."""
    options = DEFAULT | dict(batch_invariant=is_invariant)
    single = make_shapes(**options).all(features=SOME, with_on_demand=True)
    several = make_shapes(num_scheduler_steps=4, **options)
    shapes = several.all(features=SOME, with_on_demand=True)
    assert [dataclasses.replace(one, max_rounds=1) for one in shapes] == single
    assert any(one.max_rounds > 1 for one in shapes) != is_invariant
    for one in shapes:
        is_plain = one.features in (GREEDY, SAMPLED)
        is_looped = is_plain and not (
            one.max_prompt_tokens or one.is_draft_prefill or is_invariant
        )
        assert one.max_rounds == (4 if is_looped else 1)
    assert len({one.name for one in shapes}) == len(shapes)


def test_programs_with_drafts_verify_the_configured_tree():
    """Programs without drafts, or for one path, verify a chain of equal size."""
    chain = make_shapes(**DEFAULT).all(features=SOME, with_on_demand=True)
    leaves = make_shapes(**DEFAULT, speculative_keys={"num_side_leaves": 1})
    listed = leaves.all(features=SOME, with_on_demand=True)
    assert [dataclasses.replace(one, template=None) for one in listed] == chain
    for shape in listed:
        if shape.is_draft_prefill:
            continue
        is_plain = shape.features.needs_one_path or not shape.num_levels
        assert shape.tree.is_chain == is_plain
        assert shape.tree.num_levels == shape.num_levels
        assert shape.num_slots == 11
        assert ("t10" in shape.name) != is_plain
    assert leaves.tree(0).num_rows == 1
    assert leaves.tree(2) == leaves.tree(5)
    assert make_shapes(**DEFAULT).tree(2).num_rows == 3


ALONE = "[(0,), (0, 0), (1,), (1, 0), (0, 0, 0)]"
SHORT = "[(0,), (1,), (1, 0), (1, 1), (1, 0, 0)]"


@pytest.mark.parametrize(
    ("keys", "has_chains"),
    [
        ({"num_side_leaves": 2}, True),
        ({"speculative_token_tree": ALONE}, True),
        # The longest path of this tree is not the main chain.
        ({"speculative_token_tree": SHORT}, False),
        ({}, False),
    ],
)
def test_rounds_can_run_without_side_branches(keys, has_chains):
    assert not make_shapes(**DEFAULT, speculative_keys=keys).has_chains, "K is fixed"
    shapes = make_shapes(**DEFAULT, controller=ADAPTIVE, speculative_keys=keys)
    assert shapes.has_chains == has_chains
    every = shapes.all(with_on_demand=True)
    soon, levels = shapes.all(), max(one.num_levels for one in every)
    drafting = [one for one in every if one.num_levels and not one.max_prompt_tokens]
    chains = [one for one in drafting if one.tree.is_chain]
    if not has_chains:
        assert not chains or chains == drafting
        return
    # For every program with a tree, one with a chain is compiled on demand.
    whole = [one for one in drafting if one not in chains]
    assert {dataclasses.replace(one, template=None) for one in whole} == set(chains)
    assert len(whole) == len(chains) and not set(chains) & set(soon)
    for features in (GREEDY, SAMPLED):
        found = shapes.find(4, levels, 0, features, has_side_branches=False)
        assert found is not None and found in chains
        assert found.features == features
        other = shapes.find(4, levels, 0, features)
        assert other is not None and not other.tree.is_chain


def test_chain_rounds_use_tree_program_until_compiled():
    keys = {"num_side_leaves": 1}
    changes: dict[str, Any] = DEFAULT | dict(controller=ADAPTIVE, speculative_keys=keys)
    every = make_shapes(**changes).all(with_on_demand=True)
    programs = SomePrograms(*[one for one in every if not one.tree.is_chain])
    shapes = make_shapes(programs, **changes)
    found = find(shapes, 4, 5, 0, GREEDY, has_side_branches=False)
    assert found is not None and not found.tree.is_chain
    (wanted,) = programs.asked
    assert wanted.tree.is_chain and wanted.num_levels == 5
    programs.add(wanted)
    assert find(shapes, 4, 5, 0, GREEDY, has_side_branches=False) == wanted


def test_select_requests_no_compilation():
    programs = SomePrograms()
    shapes = make_shapes(programs, **DEFAULT)
    found = shapes.select(4, 5, 64, GREEDY)
    assert found.shape is None and found.missing is not None
    assert shapes.find(4, 5, 64, GREEDY) is None
    assert shapes.select_draft_prefill(1).missing is not None
    assert not programs.asked
    for _ in range(2):
        shapes.request_compile(found.missing, None)
        assert programs.asked == [found.missing], "once until the programs change"
    programs.add(found.missing)
    assert shapes.select(4, 5, 64, GREEDY) == (found.missing, None)

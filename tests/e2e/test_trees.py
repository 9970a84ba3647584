"""Side branches and trees: counts by node, prefix hits, aborts, and near ties.

Properties of all proposers are in `tests/conformance`; `test_lossless.py` compares
greedy texts on every path of the engine.
"""

from typing import Any

import pytest

from jaxspec.config.token_tree import Hits, Place, count_ranks
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.conformance import claims, proposers
from tests.support import pair
from tests.support.engines import (
    generate,
    make_engine,
    tokens_of,
    with_draft,
    with_settings,
)

LENGTH = 48
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SUFFIX = "suffix, leaves"
NAMES = (
    *("leaves", "tree", "n-gram, tree", SUFFIX, "n-gram + draft model, leaves"),
    "tree, scanned",
)
# A tree covers everything that side leaves would.
QUICK = [
    name if name == "tree" else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]
DRAFTED = [pytest.param("leaves", marks=pytest.mark.slow), "tree"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return random and repetitive prompts."""
    random = pair.prompts(6)
    return random + [(prompt * 40)[:40] for prompt in pair.prompts(4, longest=15)]


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    return tokens_of(generate(pair.plain_engine(), prompts, GREEDY))


def ranks_of(engine: LLMEngine) -> dict[Place, Hits]:
    """Return the counts of accepted drafts by depth and rank."""
    speculative = engine.config.speculative
    assert speculative is not None and speculative.parents is not None
    return count_ranks(speculative.parents, engine.stats.tree_ends)


def check_ranks(engine: LLMEngine) -> None:
    """Compare counts by depth and rank with the tokens, except those of last rounds."""
    ranks, stats, ended = ranks_of(engine), engine.stats, 10
    first = [ranks[Place(False, depth, 0)] for depth in (1, 2, 3)]
    assert 0 <= stats.num_draft_rounds - first[0].compared <= ended
    for hits, kept in zip(first, stats.accepted_per_position, strict=False):
        assert 0 <= kept - hits.kept <= ended
    others = sum(hits.kept for hits in ranks.values()) - sum(
        ranks.get(Place(False, depth, 0), Hits(0, 0)).kept for depth in range(1, 17)
    )
    assert 0 <= stats.num_side_tokens - others <= 3 * ended
    # At most one sibling equals the target's token.
    siblings = [hits for place, hits in ranks.items() if place[:2] == (False, 1)]
    assert sum(hits.kept for hits in siblings) <= siblings[0].compared


def seeded(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            seed=number,
            max_tokens=LENGTH,
            ignore_eos=True,
            **claims.CONTROLS[number % len(claims.CONTROLS)],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("name", QUICK)
def test_counts_by_node_match_the_tokens(name, prompts, texts):
    engine = proposers.engine(name)
    assert tokens_of(generate(engine, prompts, GREEDY)) == texts
    stats = engine.stats
    assert stats.num_side_tokens > 5
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    check_ranks(engine)
    engine.scheduler.check_idle()


@pytest.mark.parametrize("name", DRAFTED)
def test_correct_draft_is_accepted_along_the_main_chain(name, prompts):
    engine = with_draft(proposers.first_engine(name), pair.draft("same"))
    generate(engine, prompts, GREEDY)
    for place, hits in ranks_of(engine).items():
        is_first = not (place.is_side or place.rank)
        assert hits.kept == (hits.compared if is_first else 0), place


@pytest.mark.slow
def test_bfloat16_texts_differ_only_at_near_ties():
    """In a side branch, attention sums in another order, which rounds differently."""
    prompts = pair.prompts(30, seed=5)
    prompts += [(one * 40)[:40] for one in pair.prompts(30, longest=15, seed=6)]
    engine = proposers.make("tree", dtype="bfloat16")
    plain = make_engine(
        pair.target(), **pair.settings(has_one_shape=True, dtype="bfloat16")
    )
    params = GREEDY.clone()
    params.logprobs = 5
    outputs = generate(plain, prompts, params)
    num_parted = 0
    for output, said in zip(
        outputs, tokens_of(generate(engine, prompts, GREEDY)), strict=True
    ):
        (one,) = output.outputs
        assert one.logprobs is not None
        for own, other, near in zip(one.token_ids, said, one.logprobs, strict=True):
            if own != other:
                # Logits are below 8, and the bound is twice the value of a logit's last
                # bit.
                assert near[own].logprob - near[other].logprob <= 2**-4
                num_parted += 1
                break
    params = seeded(len(prompts))
    expected = tokens_of(generate(plain, prompts, params))
    found = tokens_of(generate(engine, prompts, params))
    num_parted += sum(a != b for a, b in zip(found, expected, strict=True))
    assert num_parted < 0.1 * 2 * len(prompts)
    assert engine.stats.num_side_tokens > 100


@pytest.mark.parametrize("name", QUICK)
def test_pages_that_end_with_a_side_branch_are_cached(name, prompts, texts):
    """A prompt that continues an earlier text has prefix hits on its pages."""
    num_filled = 0
    fresh = proposers.engine(name)
    engine = proposers.with_config(fresh, enable_prefix_caching=True)
    size = engine.config.page_size
    params = GREEDY.clone()
    params.extra_args = {"return_token_origins": True}
    rest = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    if name == SUFFIX:  # suffix lookups propose few drafts, and fewer side branches
        prompts = [(one * 40)[:40] for one in pair.prompts(40, longest=15, seed=6)]
        texts = tokens_of(generate(pair.plain_engine(), prompts, GREEDY))
    else:
        prompts, texts = prompts[-6:], texts[-6:]
    for prompt, text in zip(prompts, texts, strict=True):
        (first,) = generate(engine, [prompt], params)
        assert tokens_of([first]) == [text]
        longer = prompt + text[:30]
        (output,) = generate(engine, [longer], rest)
        assert tokens_of([output]) == [text[30:46]]
        found = output.num_cached_tokens or 0
        assert found == (len(longer) - 1) // size * size
        origins = first.outputs[0].token_origins
        assert origins is not None
        num_filled += sum(
            one.origin == "leaf" and place % size == 0 and place <= found
            for place, one in enumerate(origins, start=len(prompt) + 1)
        )
    assert num_filled > 1, "no page ends with a leaf"


@pytest.mark.parametrize("name", QUICK)
def test_abort_after_a_side_branch_leaves_other_requests_alone(name, prompts, texts):
    """Other requests reuse its row and pages."""
    engine, gone = proposers.engine(name), set()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    finished = {}
    while engine.has_unfinished_requests():
        before = engine.stats.num_side_tokens
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        running = [request.request_id for request in engine.scheduler.running]
        if engine.stats.num_side_tokens > before and running and len(gone) < 4:
            gone.add(int(running[0]))
            engine.abort_request(running[0])
    engine.scheduler.check_idle()
    assert len(gone) == 4
    remaining = {
        index: texts[index] for index in range(len(prompts)) if index not in gone
    }
    assert {index: finished[index] for index in remaining} == remaining


CONTROLLED: dict[str, dict[str, Any]] = {
    "penalties": dict(presence_penalty=0.5, repetition_penalty=1.3),
    "bad words": dict(bad_words=["K", "L M"]),
    "logprobs": dict(logprobs=2),
    "grammar": dict(
        structured_outputs=StructuredOutputsParams(regex="[A-Z]{4,40}"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("control", CONTROLLED)
def test_requests_with_controls_use_only_the_main_chain(name, control, prompts):
    """Before and after them, requests without controls use the tree."""
    engine = proposers.engine(name)
    asked = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, **CONTROLLED[control]
    )
    params = [asked if index % 3 == 0 else GREEDY for index in range(len(prompts))]
    with pair.recorded(engine) as rounds:
        found = tokens_of(generate(engine, prompts, params))
    plain = with_settings(pair.plain_engine())
    assert found == tokens_of(generate(plain, prompts, params))
    forms = {
        (shape.features.needs_one_path, shape.tree.is_chain)
        for _, shape, _ in rounds
        if shape.num_levels
    }
    assert forms == {(True, True), (False, False)}
    assert engine.stats.num_side_tokens > 0

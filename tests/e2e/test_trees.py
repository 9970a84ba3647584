"""Drafts beside drafts, as leaves and in trees, lose nothing and bring tokens.

Greedy texts on every path of the engine are in `test_lossless.py`; here are sampled
ones, what ends a text within a tree, and requests that have the spine alone.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec.config.token_tree import MAX_NODES, Hits, Place, count_ranks, read_paths
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.e2e import pair
from tests.e2e.lossless import LARGEST, TREE
from tests.e2e.test_distribution import CONTROLS as LAW_CONTROLS
from tests.e2e.test_distribution import check_law, laws_of, levels_after, sample
from tests.e2e.test_seeded import CONTROLS
from tests.engines import (
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
    with_draft,
    with_settings,
)

LENGTH = 48
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "leaves": dict(draft="noisy", num_side_leaves=2),
    "tree": dict(draft="noisy", tree=TREE),
    "ngram tree": dict(lookup=(3, 1), tree=TREE),
    "suffix leaves": dict(suffix={}, num_side_leaves=1),
    "both leaves": dict(draft="noisy", lookup=(3, 1), num_side_leaves=1),
    "scanned tree": dict(draft="noisy", tree=TREE, scan_layers=True),
}
# As large as a tree may be, eight levels deep.
LARGE_KINDS: dict[str, dict[str, Any]] = {
    "largest tree": dict(draft="noisy", tree=LARGEST),
}
# A tree has all that leaves have; of these alone, greedy texts are in every run.
FAST = ("tree",)
DRAFTED = [pytest.param("leaves", marks=pytest.mark.slow), "tree"]


@functools.cache
def first_engine(kind: str) -> LLMEngine:
    settings = dict((KINDS | LARGE_KINDS)[kind])
    draft, tree = settings.pop("draft", None), settings.get("tree")
    settings.setdefault(
        "num_draft_tokens", len(read_paths(tree)) if tree else pair.NUM_DRAFT
    )
    return make_engine(
        pair.target(),
        draft and pair.draft(draft),
        has_one_shape=True,
        **settings,
        **pair.SETTINGS,
    )


def engine_of(kind: str, **changes: Any) -> LLMEngine:
    """A fresh engine over shared executables."""
    return with_settings(first_engine(kind), **changes)


def kinds(*fast: str) -> list[Any]:
    return [
        pytest.param(kind, marks=() if kind in fast else pytest.mark.slow)
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Random ones, and ones that repeat themselves."""
    random = pair.prompts(6)
    return random + [(prompt * 40)[:40] for prompt in pair.prompts(4, longest=15)]


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    return tokens_of(generate(pair.plain_engine(), prompts, GREEDY))


def ranks_of(engine: LLMEngine) -> dict[Place, Hits]:
    """What became of drafts by place."""
    speculative = engine.config.speculative
    assert speculative is not None and speculative.parents is not None
    return count_ranks(speculative.parents, engine.stats.tree_ends)


def check_ranks(engine: LLMEngine) -> None:
    """Counts by depth and rank are those of tokens, but for each text's last round."""
    ranks, stats, ended = ranks_of(engine), engine.stats, 10
    first = [ranks[Place(False, depth, 0)] for depth in (1, 2, 3)]
    assert 0 <= stats.num_draft_rounds - first[0].compared <= ended
    for hits, kept in zip(first, stats.accepted_per_position, strict=False):
        assert 0 <= kept - hits.kept <= ended
    others = sum(hits.kept for hits in ranks.values()) - sum(
        ranks.get(Place(False, depth, 0), Hits(0, 0)).kept for depth in range(1, 17)
    )
    assert 0 <= stats.num_beside_tokens - others <= 3 * ended
    # One token at most is what the target wants.
    siblings = [hits for place, hits in ranks.items() if place[:2] == (False, 1)]
    assert sum(hits.kept for hits in siblings) <= siblings[0].compared


def seeded(count: int, **changes: Any) -> list[SamplingParams]:
    values: dict[str, Any] = dict(max_tokens=32, ignore_eos=True) | changes
    return [
        SamplingParams(seed=number, **values, **CONTROLS[number % len(CONTROLS)])
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", kinds("leaves", "tree", "ngram tree"))
def test_greedy_texts_are_the_same_and_some_tokens_come_from_beside(
    kind, prompts, texts
):
    engine = engine_of(kind)
    assert tokens_of(generate(engine, prompts, GREEDY)) == texts
    stats = engine.stats
    assert stats.num_beside_tokens > 5
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    check_ranks(engine)
    engine.scheduler.check_idle()


@pytest.mark.parametrize("kind", kinds(*FAST))
def test_seeded_texts_are_the_same(kind, prompts):
    params = seeded(len(prompts))
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    for rule in ("standard", "block"):
        engine = engine_of(kind, rejection_sample_method=rule)
        assert tokens_of(generate(engine, prompts, params)) == expected
    assert engine.stats.num_beside_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_hundred_prompts_are_the_same(kind):
    # A suffix has few drafts, and fewer beside them: of these prompts 58 tokens. Those
    # from beside a first draft, 46, would not be enough.
    check_a_hundred_prompts(engine_of(kind), least=50 if "suffix" in kind else 100)


def check_a_hundred_prompts(engine: LLMEngine, *, least: int) -> None:
    """Greedy and seeded texts are plain decoding's.

    Args:
        least: Tokens that come from beside the spine.
    """
    prompts = pair.prompts(60, seed=5)
    prompts += [(one * 40)[:40] for one in pair.prompts(60, longest=15, seed=6)]
    for params in (GREEDY, seeded(len(prompts), max_tokens=LENGTH)):
        expected = tokens_of(generate(pair.plain_engine(), prompts, params))
        assert tokens_of(generate(engine, prompts, params)) == expected
    assert engine.stats.num_beside_tokens > least


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_texts_in_bfloat16_part_at_near_ties_alone(kind):
    """What drafts beside others see is summed in another order, and rounded so."""
    prompts = pair.prompts(30, seed=5)
    prompts += [(one * 40)[:40] for one in pair.prompts(30, longest=15, seed=6)]
    settings = pair.settings(has_one_shape=True, dtype="bfloat16")
    keys = dict(KINDS[kind])
    draft, tree = pair.draft(keys.pop("draft")), keys.get("tree")
    count = len(read_paths(tree)) if tree else pair.NUM_DRAFT
    engine = make_engine(
        pair.target(), draft, num_draft_tokens=count, **keys, **settings
    )
    plain = make_engine(pair.target(), **settings)
    told = GREEDY.clone()
    told.logprobs = 5
    outputs = generate(plain, prompts, told)
    num_parted = 0
    for output, said in zip(
        outputs, tokens_of(generate(engine, prompts, GREEDY)), strict=True
    ):
        (one,) = output.outputs
        assert one.logprobs is not None
        for own, other, near in zip(one.token_ids, said, one.logprobs, strict=True):
            if own != other:
                # Logits are below 8: so much is two of their last bits.
                assert near[own].logprob - near[other].logprob <= 2**-4
                num_parted += 1
                break
    params = seeded(len(prompts), max_tokens=LENGTH)
    expected = tokens_of(generate(plain, prompts, params))
    found = tokens_of(generate(engine, prompts, params))
    num_parted += sum(a != b for a, b in zip(found, expected, strict=True))
    assert num_parted < 0.1 * 2 * len(prompts)
    assert engine.stats.num_beside_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE_KINDS)
def test_the_largest_trees_change_nothing(kind):
    """Wider than a page and a window, and than what is left of some sequences."""
    engine = engine_of(kind)
    speculative = engine.config.speculative
    assert speculative is not None and speculative.num_nodes == MAX_NODES
    check_a_hundred_prompts(engine, least=100)
    check_ends(with_settings(engine))


@pytest.mark.parametrize("kind", DRAFTED)
def test_a_draft_equal_to_the_target_is_kept_whole(kind, prompts, texts):
    engine = with_draft(first_engine(kind), pair.draft("same"))
    assert tokens_of(generate(engine, prompts, GREEDY)) == texts
    assert engine.stats.acceptance_rate == 1.0
    assert engine.stats.num_beside_tokens == 0
    for place, hits in ranks_of(engine).items():
        is_first = not (place.is_side or place.rank)
        assert hits.kept == (hits.compared if is_first else 0), place
    params = seeded(len(prompts))
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    assert tokens_of(generate(engine, prompts, params)) == expected
    assert engine.stats.acceptance_rate == 1.0


def check_ends(engine: LLMEngine) -> None:
    """Lengths that cut a path anywhere, and sequences as long as there may be."""
    prompts = pair.prompts(8, longest=30)
    lengths = [
        SamplingParams(temperature=0, max_tokens=1 + index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    expected = tokens_of(generate(pair.plain_engine(), prompts, lengths))
    assert tokens_of(generate(engine, prompts, lengths)) == expected
    longest = pair.SETTINGS["max_model_len"]
    full = [(one * longest)[: longest - 20] for one in prompts[:4]]
    until = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = tokens_of(generate(pair.plain_engine(), full, until))
    assert [len(tokens) for tokens in expected] == [20] * len(full)
    assert tokens_of(generate(engine, full, until)) == expected
    engine.scheduler.check_idle()


@pytest.mark.parametrize("kind", kinds(*FAST))
def test_texts_end_within_paths(kind):
    check_ends(engine_of(kind))


@pytest.mark.parametrize("kind", DRAFTED)
def test_stop_ids_end_texts_on_paths_and_wait_for_min_tokens(kind, prompts):
    for min_tokens in (0, 9):
        params = SamplingParams(
            temperature=0,
            max_tokens=LENGTH,
            min_tokens=min_tokens,
            stop_token_ids=[45, 41],
        )
        expected = generate(pair.plain_engine(), prompts, params)
        found = generate(engine_of(kind), prompts, params)
        assert list(map(told, found)) == list(map(told, expected))


def told(output: RequestOutput) -> tuple[Any, ...]:
    (one,) = output.outputs
    return list(one.token_ids), one.text, one.finish_reason, one.stop_reason


@pytest.mark.parametrize("kind", DRAFTED)
def test_a_requests_own_number_of_drafts(kind, prompts, texts):
    params = []
    for index in range(len(prompts)):
        own = GREEDY.clone()
        own.extra_args = {"num_speculative_tokens": index % 4}
        params.append(own)
    outputs = generate(engine_of(kind), prompts, params)
    assert tokens_of(outputs) == texts
    for index, output in enumerate(outputs):
        metrics = output.outputs[0].spec_decode_metrics
        assert (metrics is None) == (index % 4 == 0)


@pytest.mark.parametrize("kind", DRAFTED)
def test_stop_strings_and_tokens_origins(kind, prompts, texts):
    """A stop string anywhere in a path; what came from beside is a draft's, too."""
    engine = engine_of(kind)
    shown = generate(pair.plain_engine(), prompts, GREEDY)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=LENGTH,
            ignore_eos=True,
            stop=[one.outputs[0].text[10 + index : 13 + index]],
            extra_args={"return_token_origins": True},
        )
        for index, one in enumerate(shown)
    ]
    plain = [own.clone() for own in params]
    for own in plain:
        own.extra_args = None
    expected = generate(pair.plain_engine(), prompts, plain)
    found = generate(engine, prompts, params)
    assert list(map(told, found)) == list(map(told, expected))


@pytest.mark.parametrize("kind", kinds("tree"))
def test_pages_that_leaves_have_filled_are_found_again(kind, prompts, texts):
    """By a prompt that goes on from an earlier text, which it keeps to."""
    fresh, num_filled = engine_of(kind), 0
    config = replace(fresh.config, enable_prefix_caching=True)
    engine = LLMEngine(config, runner=fresh.runner, tokenizer=fresh.tokenizer)
    size = config.page_size
    told = GREEDY.clone()
    told.extra_args = {"return_token_origins": True}
    rest = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    if "suffix" in kind:  # whose drafts are few, and fewer beside them
        prompts = [(one * 40)[:40] for one in pair.prompts(40, longest=15, seed=6)]
        texts = tokens_of(generate(pair.plain_engine(), prompts, GREEDY))
    else:
        prompts, texts = prompts[-6:], texts[-6:]
    for prompt, text in zip(prompts, texts, strict=True):
        (first,) = generate(engine, [prompt], told)
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


@pytest.mark.parametrize("kind", kinds("tree"))
def test_requests_that_leave_after_a_leaf_take_nothing_along(kind, prompts, texts):
    """Others go on with their places and pages."""
    engine, gone = engine_of(kind), set()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    finished = {}
    while engine.has_unfinished_requests():
        before = engine.stats.num_beside_tokens
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        running = [request.request_id for request in engine.scheduler.running]
        if engine.stats.num_beside_tokens > before and running and len(gone) < 4:
            gone.add(int(running[0]))
            engine.abort_request(running[0])
    engine.scheduler.check_idle()
    assert len(gone) == 4
    stayed = {index: texts[index] for index in range(len(prompts)) if index not in gone}
    assert {index: finished[index] for index in stayed} == stayed


CONTROLLED: dict[str, dict[str, Any]] = {
    "penalties": dict(presence_penalty=0.5, repetition_penalty=1.3),
    "bad words": dict(bad_words=["K", "L M"]),
    "logprobs": dict(logprobs=2),
    "grammar": dict(
        structured_outputs=StructuredOutputsParams(regex="[A-Z]{4,40}"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTED)
@pytest.mark.parametrize("name", CONTROLLED)
def test_requests_that_ask_something_of_tokens_have_the_spine(kind, name, prompts):
    """Beside others that have the tree before and after them."""
    engine = engine_of(kind)
    asked = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, **CONTROLLED[name]
    )
    params = [asked if index % 3 == 0 else GREEDY for index in range(len(prompts))]
    with pair.recorded(engine) as rounds:
        found = tokens_of(generate(engine, prompts, params))
    plain = with_settings(pair.plain_engine())
    assert found == tokens_of(generate(plain, prompts, params))
    trees = {
        (shape.features.needs_one_path, shape.tree.is_chain)
        for _, shape, _ in rounds
        if shape.num_draft_tokens
    }
    assert trees == {(True, True), (False, False)}
    assert engine.stats.num_beside_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTED)
def test_several_rounds_in_a_launch_say_the_same(kind, prompts, texts):
    settings = dict(KINDS[kind])
    tree = settings.get("tree")
    draft = pair.draft(settings.pop("draft"))
    engine = make_engine(
        pair.target(),
        draft,
        num_draft_tokens=len(read_paths(tree)) if tree else pair.NUM_DRAFT,
        num_scheduler_steps=4,
        has_one_shape=True,
        **settings,
        **pair.SETTINGS,
    )
    quiet = GREEDY.clone()
    quiet.output_kind = RequestOutputKind.FINAL_ONLY
    assert tokens_of(generate(engine, prompts, quiet)) == texts
    assert engine.stats.num_beside_tokens > 5


LAW_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"
LAW_PROMPT = [2, 7, 3, 11, 5, 7, 3, 11, 9, 7, 3]


@pytest.fixture(scope="module")
def micro() -> Any:
    return make_micro(seed=3)


@pytest.fixture(scope="module")
def levels(micro) -> list[np.ndarray]:
    return levels_after(micro, LAW_PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["leaves", "tree", "ngram tree"])
def test_every_position_follows_the_target(kind, micro, levels):
    is_lookup = kind.startswith("ngram")
    tree = LAW_TREE if kind.endswith("tree") else None
    engine = make_engine(
        micro,
        None if is_lookup else make_draft_of(micro, num_layers=2),
        num_draft_tokens=len(read_paths(tree)) if tree else 3,
        num_side_leaves=2 if kind == "leaves" else 0,
        tree=tree,
        lookup=(2, 1) if is_lookup else None,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_pages=1024,
        max_model_len=32,
        has_one_shape=True,
    )
    for rule in ("standard", "block", "seeded"):
        drawn = sample(engine, rule, 700, prompt=LAW_PROMPT)
        for controls, tokens in zip(LAW_CONTROLS, drawn, strict=True):
            check_law(tokens, laws_of(levels, controls), (rule, controls))

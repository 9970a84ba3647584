"""Heads propose: any loses nothing, a right one is believed, and each is fed right.

One program per kind, whose parameters are arguments: random heads and heads that are
right about everything run in it, and it tells its drafts. Of EAGLE-3 it is one for
sampled requests as well; those of the others are in the slow tests.
"""

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.runner import Runner
from jaxspec.program.propose import Observer, proposers_of
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from tests.e2e import heads, pair
from tests.e2e.heads import KINDS, NUM_DRAFT
from tests.e2e.test_distribution import (
    FEWER,
    check_law,
    laws_of,
    levels_after,
    make_law_engine,
    sample,
)
from tests.e2e.test_distribution import PROMPT as LAW_PROMPT
from tests.engines import (
    MICRO,
    OneGreedyProgramRunner,
    OneProgramRunner,
    generate,
    load_weights,
    make_engine,
    make_micro,
    tokens_of,
    with_params,
    with_settings,
)

LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SETTINGS: dict[str, Any] = dict(
    max_num_seqs=8, num_pages=160, max_num_batched_tokens=64, rule="block"
)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
ALL = [*KINDS]
RUNNERS: dict[str, type[Runner]] = {
    kind: OneProgramRunner if kind == "eagle3" else OneGreedyProgramRunner
    for kind in KINDS
}
ONE = ["eagle3", *(slow(kind) for kind in KINDS if kind != "eagle3")]


@functools.cache
def first_engine(kind: str) -> LLMEngine:
    """Of one program, which tells its drafts, and so is not kept."""
    engine = heads.make_head_engine(kind, runner=RUNNERS[kind], **SETTINGS)
    engine.runner.cache = ProgramCache(None)
    with heads.told_drafts():
        generate(engine, [[5, 6, 7]], replace_tokens(GREEDY, 2))
    heads.heard()
    return engine


def replace_tokens(params: SamplingParams, count: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, max_tokens=count, ignore_eos=True
    )


def engine_of(kind: str, **changes: Any) -> LLMEngine:
    """A fresh engine over the shared program."""
    return with_settings(first_engine(kind), **changes)


def with_config(engine: LLMEngine, **changes: Any) -> LLMEngine:
    """A fresh engine whose host is told something else of the same device."""
    config = replace(engine.config, **changes)
    return LLMEngine(config, runner=engine.runner, tokenizer=engine.tokenizer)


@functools.cache
def prompts() -> list[list[int]]:
    """More than run at once, of a token to more than a chunk."""
    return pair.prompts(10, longest=70)


def params_of(count: int, *, is_greedy: bool = False) -> list[SamplingParams]:
    """Greedy and seeded requests in turn, or greedy ones alone."""
    seeded: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True, temperature=0.8)
    return [
        GREEDY
        if index % 2 or is_greedy
        else SamplingParams(seed=index, top_p=0.9, **seeded)
        for index in range(count)
    ]


@functools.cache
def plain_texts(*, is_greedy: bool = False) -> list[list[int]]:
    params = params_of(len(prompts()), is_greedy=is_greedy)
    return tokens_of(generate(pair.plain_engine(), prompts(), params))


def check_drafts(engine: LLMEngine, prompt: list[int], text: list[int]) -> int:
    """Every draft of one request is what the head says, fed by hand.

    Returns:
        How many have been looked at.
    """
    whole, rounds = prompt + text, []
    for _, count, drafts in heads.heard():
        if count <= len(whole):
            rounds.append((whole[:count], drafts))
    assert rounds
    every = heads.replay(engine, rounds)
    for index, (known, drafts) in enumerate(rounds):
        for place, token in enumerate(drafts):
            logits = every[place][index]
            assert logits[token] > logits.max() - 1e-4, (len(known), place)
    return sum(len(drafts) for _, drafts in rounds)


@pytest.mark.parametrize("kind", ALL)
def test_texts_are_those_of_plain_decoding(kind):
    """Of a random head, which is seldom right; in batches, and chunk by chunk."""
    engine = engine_of(kind)
    (proposer,) = proposers_of(engine.config)
    assert isinstance(proposer, Observer)
    is_greedy = RUNNERS[kind] is OneGreedyProgramRunner
    params = params_of(len(prompts()), is_greedy=is_greedy)
    expected = plain_texts(is_greedy=is_greedy)
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert engine.stats.num_draft_tokens > 100
    assert engine.stats.acceptance_rate < 0.5
    engine.scheduler.check_idle()
    heads.heard()


@pytest.mark.parametrize("kind", ALL)
def test_drafts_are_what_the_head_says_of_the_whole_text(kind):
    """Positions and hidden states: after prompts, chunks, and rounds of any end."""
    engine = engine_of(kind)
    for prompt in ([7], prompts()[-1], list(range(3, 36)) * 3):
        heads.heard()
        (text,) = tokens_of(generate(engine, [prompt], replace_tokens(GREEDY, 12)))
        assert check_drafts(engine, prompt, text) > 20


@functools.cache
def chain_target() -> Any:
    """Parameters of the target whose token follows from the one before."""
    options: Any = jnp.dtype(jnp.float32), make_mesh(1), TARGET_MESH_AXES
    return load_weights(heads.target_of("chain"), *options)


def right_engine(kind: str, params: Any) -> LLMEngine:
    """A head that is right about that target."""
    return with_params(first_engine(kind), params, chain_target())


@functools.cache
def cycle() -> list[int]:
    """Tokens that the target says one after the other, for ever."""
    return heads.longest_cycle(heads.successors(heads.target_of("chain")))


def check_all_accepted(engine: LLMEngine, num_drafts: int) -> None:
    tokens = cycle()
    assert len(tokens) > 4, "drafts out of step might be right"
    # Not from the first on: what comes before the last token does not matter.
    some = [[9, 3, one] for one in tokens[:4]] + [[11] * 40 + tokens[:1], tokens[:1]]
    own = GREEDY.clone()
    own.extra_args = {"num_speculative_tokens": num_drafts}
    texts = tokens_of(generate(engine, some, own))
    for prompt, text in zip(some, texts, strict=True):
        start = tokens.index(prompt[-1]) + 1
        wanted = [tokens[(start + place) % len(tokens)] for place in range(LENGTH)]
        assert text == wanted
    assert engine.stats.num_draft_tokens > 50
    assert engine.stats.acceptance_rate == 1.0
    heads.heard()


@pytest.mark.parametrize("kind", ALL)
def test_a_head_that_is_right_about_everything_is_accepted_whole(kind):
    """EAGLE-3's first draft, by the hidden state alone, which no later one has."""
    engine = first_engine(kind)
    params = heads.right_params(kind, engine.config.head_config)
    check_all_accepted(right_engine(kind, params), 1 if kind == "eagle3" else NUM_DRAFT)


def test_an_eagle3_head_that_goes_by_tokens_is_accepted_whole():
    params = heads.right_by_tokens(first_engine("eagle3").config.head_config)
    check_all_accepted(right_engine("eagle3", params), NUM_DRAFT)


STEM = [5, 9, 33, 12, 8, 40, 7, 22, 19, 3, 50, 31, 6, 17, 60, 25]


@pytest.mark.parametrize("kind", ["eagle3", slow("eagle"), slow("medusa")])
def test_a_cached_page_is_only_found_with_the_token_after_it(kind):
    """A head's row at a page's end is made of that token; of Medusa's nothing is."""
    engine = engine_of(kind)
    size = engine.config.page_size
    assert len(STEM) % size == 0
    tails = [[4, 4], [21, 30, 4], [4, 44]]
    # All pages but the last; where the next token is the same, that too.
    pages = [0, 4, 4] if kind == "medusa" else [0, 3, 4]
    for tail, count in zip(tails, pages, strict=True):
        heads.heard()
        prompt = STEM + tail
        (output,) = generate(engine, [prompt], replace_tokens(GREEDY, 10))
        assert output.num_cached_tokens == count * size
        check_drafts(engine, prompt, list(output.outputs[0].token_ids))
    engine.scheduler.check_idle()


@pytest.mark.parametrize("kind", ONE)
def test_preemption_cached_prefixes_and_aborts_change_nothing(kind):
    engine = with_config(engine_of(kind), num_pages=40)
    family = [STEM * 3 + prompt[:12] for prompt in prompts()]
    params = params_of(len(family), is_greedy=kind != "eagle3")
    engine.add_request("gone", STEM, replace_tokens(GREEDY, 40))
    for _ in range(3):
        engine.step()
    engine.abort_request("gone")
    found = tokens_of(generate(engine, family, params))
    assert found == tokens_of(generate(pair.plain_engine(), family, params))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hits > 0
    engine.scheduler.check_idle()
    heads.heard()


@pytest.mark.parametrize("kind", ONE)
def test_an_engine_that_slept_drafts_as_before(kind):
    engine = engine_of(kind)
    prompt, params = STEM, replace_tokens(GREEDY, 8)
    (text,) = tokens_of(generate(engine, [prompt], params))
    drafts = heads.heard()
    engine.sleep(level=1)
    engine.wake_up()
    assert tokens_of(generate(engine, [prompt], params)) == [text]
    assert heads.heard() == drafts


def micro_head(kind: str) -> Any:
    """A head for the micro target; of EAGLE-3, one with the target's embedding."""
    sizes: dict[str, Any] = dict(
        target_hidden_size=MICRO["hidden_size"], vocab_size=MICRO["vocab_size"]
    )
    sizes["draft_vocab_size"] = MICRO["vocab_size"]
    if kind == "eagle":
        sizes |= dict(hidden_size=MICRO["hidden_size"], has_embedding=False)
    if kind == "eagle3":
        sizes |= dict(
            hidden_size=MICRO["hidden_size"],
            draft_vocab_size=11,
            has_embedding=False,
            norm_before_residual=False,
        )
    if kind == "medusa":
        sizes |= dict(lm_heads=0)
    config = heads.config_of(kind, **sizes)
    return config, heads.random_params(config, seed=2)


@functools.cache
def law_engine(kind: str, *, has_leaves: bool = False) -> LLMEngine:
    return make_law_engine(
        make_micro(seed=3),
        has_draft=False,
        head=micro_head(kind),
        num_side_leaves=2 if has_leaves else 0,
    )


@functools.cache
def levels() -> list[np.ndarray]:
    return levels_after(make_micro(seed=3), LAW_PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_position_follows_the_target(kind, rule):
    """Also where the head can say 11 of 16 tokens."""
    counted = sample(law_engine(kind), rule, 700, every=FEWER)
    for controls, tokens in zip(FEWER, counted, strict=True):
        check_law(tokens, laws_of(levels(), controls), (kind, rule, controls))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_follow_the_target_as_well(kind):
    engine = law_engine(kind, has_leaves=True)
    for rule in ("standard", "block", "seeded"):
        counted = sample(engine, rule, 700, every=FEWER)
        for controls, tokens in zip(FEWER, counted, strict=True):
            check_law(tokens, laws_of(levels(), controls), (kind, rule, controls))
    assert with_settings(engine).stats.num_beside_tokens == 0


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"
SHAPED: dict[str, dict[str, Any]] = {
    "eagle": dict(num_side_leaves=2),
    "eagle3": dict(num_side_leaves=2),
    "medusa": dict(tree=TREE, num_draft_tokens=9),
}


@pytest.mark.parametrize("kind", ["medusa", slow("eagle"), slow("eagle3")])
def test_drafts_stand_beside_drafts(kind):
    """Leaves of all, any tree of Medusa's: texts stay as they are."""
    engine = heads.make_head_engine(
        kind, runner=OneGreedyProgramRunner, **(SETTINGS | SHAPED[kind])
    )
    params = params_of(len(prompts()), is_greedy=True)
    expected = plain_texts(is_greedy=True)
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert engine.stats.num_beside_tokens > 0
    engine.scheduler.check_idle()
    if kind != "medusa":
        return
    # One that is right beside the spine, three levels deep: its path is taken whole.
    config = engine.config.head_config
    params = heads.right_params(kind, config, is_second=True)
    right = with_params(engine, params, chain_target())
    (text,) = tokens_of(generate(right, [[9, 3, cycle()[0]]], GREEDY))
    assert text == [cycle()[(1 + place) % len(cycle())] for place in range(LENGTH)]
    assert right.stats.num_accepted_tokens == 0
    # The first token is the prompt's; the last round has room for fewer.
    assert right.stats.num_beside_tokens == LENGTH - 1 - right.stats.num_draft_rounds
    assert right.stats.num_draft_rounds == -(-(LENGTH - 1) // 4)


CONTROLLED: dict[str, dict[str, Any]] = {
    "penalties": dict(presence_penalty=0.5, repetition_penalty=1.3),
    "bad words": dict(bad_words=["K", "L M"]),
    "logprobs": dict(logprobs=2, prompt_logprobs=1),
    "stop": dict(stop=["KK", "A"], stop_token_ids=[45, 41]),
    "grammar": dict(
        structured_outputs=StructuredOutputsParams(regex="[A-Z]{4,40}"),
    ),
}


@functools.cache
def shaped_engine(kind: str, **options: Any) -> LLMEngine:
    """In programs as users have them, of the largest shape alone."""
    options = SETTINGS | options
    return heads.make_head_engine(kind, has_one_shape=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLLED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_requests_ask_of_tokens_holds(kind, name):
    """Of a trimmed vocabulary, a grammar may allow nothing."""
    own: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True) | CONTROLLED[name]
    params = [
        SamplingParams(temperature=0, **own)
        if index % 2
        else SamplingParams(temperature=0.9, seed=index, **own)
        for index in range(len(prompts()))
    ]
    engine = with_settings(shaped_engine(kind))
    plain = with_settings(pair.plain_engine())
    found = generate(engine, prompts(), params)
    expected = generate(plain, prompts(), params)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.stats.num_draft_tokens > 20
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_k_as_chosen_and_several_rounds_change_nothing(kind):
    several = dict(controller="adaptive"), dict(num_scheduler_steps=4)
    for options in (*several, SHAPED[kind]):
        engine = with_settings(shaped_engine(kind, **options))
        params = params_of(len(prompts()))
        assert tokens_of(generate(engine, prompts(), params)) == plain_texts()
        assert engine.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft_devices", [8, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices_say_the_same(kind, draft_devices):
    model = make_micro(seed=3, num_attention_heads=8, num_key_value_heads=4)
    some = [prompt[:9] for prompt in ([2, 7, 3, 11, 5], [4] * 9, [13, 2])]
    params = [replace_tokens(GREEDY, 16)] * 3
    expected = tokens_of(generate(make_engine(model), some, params))
    config, _ = micro_head(kind)
    if kind in ("eagle", "eagle3"):
        config = replace(config, num_q_heads=8, num_kv_heads=2)
    engine = heads.split_engine(model, config, draft_devices)
    assert tokens_of(generate(engine, some, params)) == expected
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_says_the_same_with_and_without(kind):
    plain = make_engine(pair.target(), dtype="bfloat16", **pair.SETTINGS)
    engine = heads.make_head_engine(kind, dtype="bfloat16", **SETTINGS)
    expected = tokens_of(generate(plain, prompts(), GREEDY))
    assert tokens_of(generate(engine, prompts(), GREEDY)) == expected
    assert engine.stats.num_draft_tokens > 0

"""Heads compute their drafts from the right tokens and hidden states.

With forced acceptance, drafts become text; `heads.replay` computes the expected drafts.
Properties of all proposers are in `tests/conformance`.
"""

import functools
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.propose import Observer, proposers_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from tests.conformance import claims, proposers
from tests.conformance.claims import STEM
from tests.support import heads, pair
from tests.support.engines import (
    OneGreedyProgramRunner,
    generate,
    load_weights,
    tokens_of,
    with_params,
    with_settings,
)
from tests.support.heads import KINDS, NUM_DRAFT, Round

LENGTH = 24
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def greedy(count: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def check_drafts(engine: LLMEngine, rounds: list[Round]) -> None:
    """Compare the drafts of a text with `heads.replay`."""
    every = heads.replay(engine, rounds)
    for index, (known, drafts) in enumerate(rounds):
        for place, token in enumerate(drafts):
            logits = every[place][index]
            assert logits[token] > logits.max() - 1e-4, (len(known), place)
    assert sum(len(drafts) for _, drafts in rounds) > 5


def check_all_drafts(engine: LLMEngine) -> None:
    """Check drafts after prompts of one token to several chunks, and any rounds."""
    lengths = set()
    for prompt in ([7], pair.prompts(10, longest=70)[-1], list(range(3, 36)) * 3):
        _, rounds = heads.forced_rounds(with_settings(engine), prompt, greedy())
        lengths |= {len(drafts) for _, drafts in rounds}
        check_drafts(engine, rounds)
    assert lengths == set(range(NUM_DRAFT + 1))


@pytest.mark.parametrize("kind", [*KINDS, "dflash"])
def test_drafts_equal_those_computed_from_the_whole_text(kind):
    engine = proposers.forced_engine(kind)
    (proposer,) = proposers_of(engine.config)
    assert isinstance(proposer, Observer)
    check_all_drafts(engine)


@functools.cache
def chain_target() -> Any:
    """Return parameters of a target whose next token depends only on the last one."""
    options: Any = jnp.dtype(jnp.float32), make_mesh(1), TARGET_MESH_AXES
    return load_weights(heads.target_of("chain"), *options)


def right_engine(kind: str, params: Any) -> LLMEngine:
    """Return an engine on `chain_target` whose head, with `params`, is always right."""
    return with_params(proposers.first_engine(kind), params, chain_target())


@functools.cache
def cycle() -> list[int]:
    """Return the tokens that `chain_target` repeats forever, in order."""
    return heads.longest_cycle(heads.successors(heads.target_of("chain")))


def check_all_accepted(engine: LLMEngine, num_drafts: int) -> None:
    tokens = cycle()
    assert len(tokens) > 4, "shifted drafts might be right"
    # Any last token is a valid start: earlier tokens do not matter.
    some = [[9, 3, one] for one in tokens[:4]] + [[11] * 40 + tokens[:1], tokens[:1]]
    own = greedy()
    own.extra_args = {"num_speculative_tokens": num_drafts}
    texts = tokens_of(generate(engine, some, own))
    for prompt, text in zip(some, texts, strict=True):
        start = tokens.index(prompt[-1]) + 1
        wanted = [tokens[(start + place) % len(tokens)] for place in range(LENGTH)]
        assert text == wanted
    assert engine.stats.num_draft_tokens > 50
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("kind", [slow("eagle"), "eagle3", slow("medusa")])
def test_correct_head_has_every_draft_accepted(kind):
    """EAGLE-3 has one draft here: later ones lack the target's hidden state."""
    engine = proposers.first_engine(kind)
    params = heads.right_params(kind, engine.config.head_config)
    check_all_accepted(right_engine(kind, params), 1 if kind == "eagle3" else NUM_DRAFT)


def test_correct_eagle3_head_that_reads_tokens_has_every_draft_accepted():
    params = heads.right_by_tokens(proposers.first_engine("eagle3").config.head_config)
    check_all_accepted(right_engine("eagle3", params), NUM_DRAFT)


@pytest.mark.parametrize(
    "kind", ["eagle3", slow("eagle"), slow("medusa"), slow("dflash")]
)
def test_cached_page_requires_the_same_next_token(kind):
    """EAGLE's keys of a page depend on the next token; other heads' do not."""
    engine = with_settings(proposers.forced_engine(kind))
    size = engine.config.page_size
    assert len(STEM) % size == 0
    tails = [[4, 4], [21, 30, 4], [4, 44]]
    # All pages but the last are prefix hits; so is the last if the next token is equal.
    pages = [0, 4, 4] if kind in ("medusa", "dflash") else [0, 3, 4]
    for tail, count in zip(tails, pages, strict=True):
        output, rounds = heads.forced_rounds(engine, STEM + tail, greedy(14))
        assert output.num_cached_tokens == count * size
        check_drafts(engine, rounds)
    engine.scheduler.check_idle()


@pytest.mark.parametrize(
    "kind", ["eagle3", slow("eagle"), slow("medusa"), slow("dflash")]
)
def test_drafts_are_the_same_after_sleep(kind):
    engine = with_settings(proposers.forced_engine(kind))
    params = greedy()
    params.seed = 3  # decides which drafts are accepted
    _, rounds = heads.forced_rounds(engine, STEM, params)
    engine.sleep(level=1)
    engine.wake_up()
    assert heads.forced_rounds(engine, STEM, params)[1] == rounds


def test_every_draft_of_a_correct_medusa_side_branch_is_accepted():
    """The head's second choice is always right, at all three levels."""
    first = proposers.first_engine("medusa, tree")
    params = heads.right_params("medusa", first.config.head_config, is_second=True)
    right = with_params(first, params, chain_target())
    (text,) = tokens_of(generate(right, [[9, 3, cycle()[0]]], greedy()))
    assert text == [cycle()[(1 + place) % len(cycle())] for place in range(LENGTH)]
    assert right.stats.num_accepted_tokens == 0
    # The first token is sampled after the prompt, and the last round has room for fewer
    # drafts.
    assert right.stats.num_side_tokens == LENGTH - 1 - right.stats.num_draft_rounds
    assert right.stats.num_draft_rounds == -(-(LENGTH - 1) // 4)


@pytest.mark.long_suite(name="lossless")
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_drafts_for_gemma_3_equal_those_computed_from_the_whole_text(kind):
    """For Gemma 3, the head reads hidden states of other layers."""
    changes = dict(target_layers=(1, 5, 7)) if kind != "medusa" else {}
    settings = pair.settings(
        config=heads.config_of(kind, **changes),
        target=pair.GEMMA3,
        runner=OneGreedyProgramRunner,
    )
    engine = heads.make_head_engine(kind, **settings)
    params = claims.mixed_params(len(claims.prompts()), is_greedy=True)
    texts = claims.plain_texts(pair.GEMMA3, is_greedy=True)
    assert tokens_of(generate(engine, claims.prompts(), params)) == texts
    check_all_drafts(heads.make_head_engine(kind, **settings | heads.FORCED))

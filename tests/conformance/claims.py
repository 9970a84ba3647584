"""Conformance checks: properties that every proposer of drafts must have.

Each check is a function of a proposer's name. `test_claims.py` lists the proposers that
each check runs on, and gives a reason for every proposer that it skips.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec.config import methods
from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.speculation.policy import (
    Choice,
    RoundEstimates,
    SpeculationPolicy,
)
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.sharding import make_mesh
from tests.conformance import distribution, proposers
from tests.conformance.proposers import PROPOSERS
from tests.support import pair
from tests.support.engines import (
    OneProgramRunner,
    OneShapeRunner,
    generate,
    make_engine,
    tokens_of,
    with_draft,
    with_settings,
)
from tests.support.rounds import constant_times

LENGTH = 32
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
# Sampling parameters that seeded requests use in turn.
CONTROLS: list[dict[str, Any]] = [
    dict(temperature=0.9),
    dict(temperature=1.3, top_k=20),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=1.0, min_p=0.05),
]
# A prefix that prompts share, longer than a page, so that they have prefix hits.
STEM = [5, 9, 33, 12, 8, 40, 7, 22, 19, 3, 50, 31, 6, 17, 60, 25]
BOTH_RULES = ("draft model", "tree")
# Tokens that are frequent in the target's texts: as stop tokens, they end texts.
FREQUENT = [45, 41]


@functools.cache
def prompts() -> list[list[int]]:
    """Return prompts of one token to three chunks; the last ones are repetitive."""
    repeating = [(one * 40)[:40] for one in pair.prompts(3, longest=15)]
    return pair.prompts(10, longest=70) + repeating


def mixed_params(
    count: int, *, is_greedy: bool = False, has_own_numbers: bool = True
) -> list[SamplingParams]:
    """Return greedy and seeded parameters, some with at most 1 or 0 drafts.

    Args:
        is_greedy: Whether all requests are greedy.
        has_own_numbers: Whether some requests set their number of drafts.
    """
    params = []
    for index in range(count):
        own: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True, temperature=0)
        if not (index % 2 or is_greedy):
            own |= dict(seed=index) | CONTROLS[index // 2 % len(CONTROLS)]
        wish = (None, None, 1, 0)[index // 2 % 4] if has_own_numbers else None
        if wish is not None:
            own["extra_args"] = {"num_speculative_tokens": wish}
        params.append(SamplingParams(**own))
    return params


@functools.cache
def plain_texts(
    family: str = pair.GEMMA2,
    *,
    is_greedy: bool = False,
    dtype: str = "float32",
    has_own_numbers: bool = True,
) -> list[list[int]]:
    """Return texts of plain decoding; check greedy ones with HuggingFace's argmax."""
    params = mixed_params(
        len(prompts()), is_greedy=is_greedy, has_own_numbers=has_own_numbers
    )
    engine = with_settings(proposers.plain_engine(family, dtype))
    texts = tokens_of(generate(engine, prompts(), params))
    if dtype == "float32":
        for prompt, text, own in zip(prompts(), texts, params, strict=True):
            if not own.temperature:
                margin = pair.greedy_margin(prompt, text, model=pair.target(family))
                assert margin > pair.MIN_MARGIN, "near tie: choose other prompts"
    return texts


def check_side_branches(name: str, engine: LLMEngine) -> None:
    has_any = engine.stats.num_side_tokens > 0
    if name != "medusa, tree":  # random weights: few branches are accepted
        assert has_any == PROPOSERS[name].has_side_branches


# Minimum number of drafts where it is not 100: lookups find 61 in these texts.
FEWEST = {"suffix, leaves": 60}


def texts_equal_plain_decoding(name: str) -> None:
    """Check texts in batches, in chunks, and for every requested number of drafts.

    The acceptance rule for unseeded requests has no effect on these requests, which are
    greedy or seeded. For some proposers the check runs with both rules.
    """
    proposer = PROPOSERS[name]
    texts = plain_texts(proposer.family, is_greedy=proposer.is_greedy)
    params = mixed_params(len(prompts()), is_greedy=proposer.is_greedy)
    for rule in ("standard", "block") if name in BOTH_RULES else ("block",):
        engine = proposers.engine(name, rejection_sample_method=rule)
        outputs = generate(engine, prompts(), params)
        assert tokens_of(outputs) == texts
        assert engine.stats.num_draft_tokens > FEWEST.get(name, 100)
        if proposer.head is None:
            assert engine.stats.num_accepted_tokens > 0
        assert engine.stats.acceptance_rate < proposer.at_most
        check_side_branches(name, engine)
        engine.scheduler.check_idle()
        for output, own in zip(outputs, params, strict=True):
            wish = (own.extra_args or {}).get("num_speculative_tokens")
            metrics = output.outputs[0].spec_decode_metrics
            if wish == 0:
                assert metrics is None
            elif wish == 1:
                assert metrics is not None and not any(metrics.histogram[2:])


def engines_of(name: str, **speculative: Any) -> list[LLMEngine]:
    """Return a proposer's engine, and one whose drafts are all right if possible."""
    engines = [proposers.engine(name, **speculative)]
    if PROPOSERS[name].can_be_correct:
        draft = pair.draft("same", PROPOSERS[name].family)
        correct = with_draft(proposers.first_engine(name), draft)
        engines.append(with_settings(correct, **speculative))
    return engines


def is_end_in_run(plan: StepPlan, shape: StepShape, result: Any) -> bool:
    """Return whether some sequence of a launch ended with an accepted draft token."""
    del shape
    return any(
        result.is_done[index]
        and 0 < result.num_emitted[index] == result.num_accepted[index]
        and result.num_emitted[index] <= drafts
        for index, (_, drafts) in enumerate(plan.decode)
    )


def _ended(output: RequestOutput) -> tuple[Any, ...]:
    (one,) = output.outputs
    return list(one.token_ids), one.text, one.finish_reason, one.stop_reason


def texts_end_within_rounds(name: str) -> None:
    """Texts end by length, context or stop at the same token as in plain decoding.

    For every offset within a round, some text ends there.
    """
    some = pair.prompts(12, longest=30)
    whole = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = with_settings(pair.plain_engine())
    shown = [one.outputs[0].text for one in generate(plain, some, whole)]
    longest = pair.SETTINGS["max_model_len"]
    full = [(one * longest)[: longest - 1 - index] for index, one in enumerate(some)]
    kinds: dict[str, tuple[list[list[int]], list[dict[str, Any]]]] = {
        "length": (some, [dict(max_tokens=1 + index) for index in range(12)]),
        "context": (full, [dict(max_tokens=None)] * 12),
        "stop tokens": (
            some,
            [
                dict(ignore_eos=False, stop_token_ids=FREQUENT, min_tokens=count)
                for count in (0, 6, 17) * 4
            ],
        ),
        "stop strings": (
            some,
            [
                dict(
                    stop=[text[10 + index : 13 + index]],
                    include_stop_str_in_output=index % 2 == 0,
                )
                for index, text in enumerate(shown)
            ],
        ),
    }
    for kind, (given, changes) in kinds.items():
        params = []
        for own in changes:
            both: dict[str, Any] = dict(temperature=0, max_tokens=40, ignore_eos=True)
            params.append(SamplingParams(**both | own))
        expected = [*map(_ended, generate(plain, given, params))]
        if kind == "context":
            assert [len(one[0]) for one in expected] == list(range(1, 13))
        for index, engine in enumerate(engines_of(name)):
            with pair.recorded(engine) as rounds:
                found = [*map(_ended, generate(engine, given, params))]
            assert found == expected, kind
            engine.scheduler.check_idle()
            if index == 1 and kind == "length":
                # No draft is proposed past the end of a text, even in rounds that were
                # launched before the host knew how many tokens remained.
                assert engine.stats.acceptance_rate == 1.0
            if index == 1 and kind == "stop tokens":
                assert any(is_end_in_run(*one) for one in rounds)


def preemption_caching_and_aborts_change_nothing(name: str) -> None:
    """Texts are right after preemption, prefix hits and aborts.

    The pages are too few for two requests, which share a prefix.
    """
    proposer = PROPOSERS[name]
    family = [STEM * 3 + prompt[:12] for prompt in prompts()]
    params = mixed_params(len(family), is_greedy=proposer.is_greedy)
    plain = with_settings(pair.plain_engine())
    expected = tokens_of(generate(plain, family, params))
    engine = proposers.engine(name)
    fewest = engine.config.units_per_seq
    engine = proposers.with_config(engine, num_pages=fewest)
    engine.add_request("gone", STEM, GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort_request("gone")
    with constant_times():
        assert tokens_of(generate(engine, family, params)) == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hits > 0
    engine.scheduler.check_idle()


def drafting_stops_and_resumes(name: str) -> None:
    """Texts are right while the number of drafts goes to 0 and back.

    Drafting is off while two rows run and others wait. Before it resumes, a draft model
    prefills, in tiles, the tokens that it has missed.
    """
    some, params = pair.prompts(5, seed=3), []
    for index, length in enumerate((60, 14, 14, 14, 60)):
        own: dict[str, Any] = dict(max_tokens=length, ignore_eos=True, temperature=0)
        if index % 2 == 0:
            own |= dict(temperature=0.9, seed=index)
        params.append(SamplingParams(**own))
    expected = tokens_of(generate(pair.plain_engine(), some, params))
    has_model = PROPOSERS[name].draft is not None
    for index, engine in enumerate(engines_of(name, disable_by_batch_size=2)):
        with pair.recorded(engine) as rounds:
            assert tokens_of(generate(engine, some, params)) == expected
        plain, drafting, draft_prefills = [], [], []
        for number, (plan, shape, _) in enumerate(rounds):
            if shape.is_draft_prefill:
                draft_prefills.append(number)
            elif shape.num_levels:
                assert shape.num_levels == engine.config.max_draft_tokens
                drafting.append(number)
            elif plan.decode:
                plain.append(number)
        assert len(plain) > 10 and len(drafting) > 10
        assert has_model == any(plain[0] < one < drafting[-1] for one in draft_prefills)
        assert index == 0 or engine.stats.acceptance_rate == 1.0
        engine.scheduler.check_idle()


def correct_drafts_are_all_accepted(name: str) -> None:
    """All drafts are accepted, greedy or seeded, if the draft model is the target."""
    proposer = PROPOSERS[name]
    _, engine = engines_of(name)
    texts = plain_texts(
        proposer.family, is_greedy=proposer.is_greedy, has_own_numbers=False
    )
    params = mixed_params(
        len(prompts()), is_greedy=proposer.is_greedy, has_own_numbers=False
    )
    assert tokens_of(generate(engine, prompts(), params)) == texts
    assert engine.stats.num_draft_tokens > 100
    assert engine.stats.acceptance_rate == 1.0
    assert engine.stats.num_side_tokens == 0


class RandomPolicy(SpeculationPolicy):
    """Chooses random numbers of drafts, and probes the draft model at random times."""

    def __init__(self, *arguments: Any, seed: int):
        super().__init__(*arguments)
        self.random = np.random.default_rng(seed)

    def is_due(self, num_seqs: int, max_draft_tokens: int) -> bool:
        # A choice lasts several rounds: if each changed it, draft prefill would never
        # end.
        return max_draft_tokens > 0 and self.random.random() < 0.15

    def choose(self, estimates: RoundEstimates) -> None:
        max_draft_tokens = len(estimates.seconds) - 1
        self.choice = Choice(
            num_draft_tokens=int(self.random.integers(0, max_draft_tokens + 1)),
            has_side_branches=bool(self.random.integers(2)),
        )

    def can_probe(self) -> bool:
        return self.random.random() < 0.1


def with_random_policy(engine: LLMEngine, seed: int) -> LLMEngine:
    """Return an adaptive engine with a `RandomPolicy` in place of its policy."""
    engine.policy = RandomPolicy(engine.config.speculative, seed=seed)
    engine.scheduler = engine._make_scheduler()
    return engine


def any_choice_of_k_changes_nothing(name: str) -> None:
    """Random choices of K, and of side branches in a launch, change no text."""
    is_greedy, side = PROPOSERS[name].is_greedy, PROPOSERS[name].has_side_branches
    some = pair.prompts(20, seed=3)
    params = mixed_params(len(some), is_greedy=is_greedy, has_own_numbers=False)
    expected = tokens_of(generate(pair.plain_engine(), some, params))
    engine = with_random_policy(proposers.engine(name, controller=ADAPTIVE), seed=7)
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, some, params)) == expected
    engine.scheduler.check_idle()
    made = {max((k for _, k in plan.decode), default=0) for plan, _, _ in rounds}
    assert made >= {0, 1, 2, 3}
    if side:
        drafting = [
            shape for plan, shape, _ in rounds if any(k for _, k in plan.decode)
        ]
        chains = [shape.tree.is_chain for shape in drafting]
        assert 5 < sum(chains) < len(chains) - 5
        assert engine.stats.num_side_tokens > 0


CONTROLLED: list[dict[str, Any]] = [
    dict(presence_penalty=0.5, repetition_penalty=1.3),
    dict(bad_words=["K", "L M"]),
    dict(logprobs=2, prompt_logprobs=1),
    dict(stop=["KK", "A"], stop_token_ids=[45, 41]),
    dict(structured_outputs=StructuredOutputsParams(regex="[A-Z]{4,40}")),
]
EVERY_FEATURE = Features(
    has_controls=True, num_logprobs=2, num_prompt_logprobs=2, has_grammar=True
)


class EveryFeatureRunner(OneProgramRunner):
    """Runs every launch with all features, so that all controls share one program."""

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        return super().launch(plan, replace(shape, features=EVERY_FEATURE))


def controls_hold(name: str) -> None:
    """Penalties, bad words, logprobs, stops and grammars work in one batch."""
    params = []
    for index in range(len(prompts())):
        own: dict[str, Any] = dict(temperature=0)
        if index % 2 == 0:
            own = dict(seed=index, temperature=0.9)
        own |= dict(max_tokens=24, ignore_eos=True)
        params.append(SamplingParams(**own | CONTROLLED[index % len(CONTROLLED)]))
    engine = proposers.make(name, runner=EveryFeatureRunner)
    plain = with_settings(pair.plain_engine())
    found, expected = (generate(one, prompts(), params) for one in (engine, plain))
    assert [*map(_ended, found)] == [*map(_ended, expected)]
    for output, asked in zip(found, params, strict=True):
        assert (output.outputs[0].logprobs is None) == (asked.logprobs is None)
    assert engine.stats.num_draft_tokens > 20
    engine.scheduler.check_idle()


def forms_of_rounds_change_nothing(name: str) -> None:
    """An adaptive K, and several rounds per launch, change no text."""
    params, texts = mixed_params(len(prompts())), plain_texts()
    several = dict(num_scheduler_steps=4)
    for options in (dict(controller=ADAPTIVE), several):
        engine = proposers.make(name, runner=OneShapeRunner, **options)
        assert tokens_of(generate(engine, prompts(), params)) == texts
        assert engine.stats.num_draft_tokens > 0
        engine.scheduler.check_idle()
    check_side_branches(name, engine)


def bfloat16_equals_plain_decoding(name: str) -> None:
    engine = proposers.make(name, dtype="bfloat16")
    is_greedy = PROPOSERS[name].is_greedy
    params = mixed_params(len(prompts()), is_greedy=is_greedy)
    texts = plain_texts(is_greedy=is_greedy, dtype="bfloat16")
    assert tokens_of(generate(engine, prompts(), params)) == texts
    assert engine.stats.num_draft_tokens > 20


def devices_equal_one(name: str, num_devices: int, num_draft_devices: int) -> None:
    """Texts of several devices equal those of one device.

    KV heads are split over the devices or copied to each of them, and the draft model
    is on all or some of the devices.
    """
    proposer = PROPOSERS[name]
    target = proposers.split_target(proposer.family)
    micro = [[2, 7, 3, 11, 5], [4] * 9, [13, 2]]
    some = pair.prompts(4) if proposer.family == pair.GEMMA3 else micro
    count, is_greedy = len(some), proposer.is_greedy
    params = mixed_params(count, is_greedy=is_greedy, has_own_numbers=False)
    settings: dict[str, Any] = dict(runner=proposer.runner)
    if proposer.family == pair.GEMMA3:
        settings |= pair.SETTINGS
    plain = make_engine(target, **settings)
    expected = tokens_of(generate(plain, some, params))
    engine = proposers.split_engine(name, num_devices, num_draft_devices)
    assert make_mesh(num_devices, num_draft_devices) == engine.runner.mesh
    assert tokens_of(generate(engine, some, params)) == expected
    assert engine.stats.num_draft_tokens > 20
    if proposer.draft is not None:
        assert engine.stats.num_accepted_tokens > 0
    if proposer.can_be_correct:
        correct = with_draft(engine, target)
        assert tokens_of(generate(correct, some, params)) == expected
        assert correct.stats.acceptance_rate == 1.0


def positions_follow_target(name: str, rule: str) -> None:
    """The tokens of many texts follow HuggingFace's probabilities at each position.

    For some proposers the texts are one token shorter than a whole round; the long
    suite "counts" counts the whole rounds of a draft model.
    """
    is_brief = name in ("draft model", "trimmed", "int8 draft", "int4 draft")
    length = distribution.LENGTH - is_brief
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "LONG_MATCH", 1)
        engine = proposers.micro_engine(name)
        counted = distribution.sample(engine, rule, 700, length=length)
    logits = distribution.next_logits(length)
    for own, tokens in zip(distribution.CONTROLS, counted, strict=True):
        if kept := PROPOSERS[name].micro.get("kept"):
            assert not np.isin(tokens[:, 0], kept).all()
        distributions = distribution.distributions_of(logits, own)
        distribution.check_distribution(tokens, distributions, (name, rule, own))

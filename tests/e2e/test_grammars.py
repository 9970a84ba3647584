"""Structured outputs are complete and do not depend on drafts."""

import dataclasses
import functools
import gc
import itertools
import re
import threading
import time
from functools import partial
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from jaxspec.engine import grammar_matcher, structured_output
from jaxspec.engine.grammar_matcher import Matcher, grammar_of_regex
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.structured_output import TokenMasks
from jaxspec.metrics import Counter
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.conformance import proposers
from tests.long_suites import members
from tests.support import pair
from tests.support.distributions import check_counts, filtered_distribution
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_engine,
    tokens_of,
    with_draft,
    with_settings,
)
from tests.support.rounds import constant_times

slow = partial(pytest.param, marks=pytest.mark.slow)

PATTERNS = [r"[A-Z]{3,6}(,[0-9]{1,3}){2,4};", r"(ABRA|CADABRA|[0-9A-C]{2}=){1,4}[<>]"]
CHOICES = ["YES", "NO", "YES,BUT", "42"]
# Programs with grammars cannot be cached on disk, so each test compiles only one.
SETTINGS: dict[str, Any] = pair.settings(max_num_seqs=4, num_pages=54)


def form_of(index: int) -> StructuredOutputsParams | None:
    """Return the structured output of a request; every fourth request has none."""
    kind = index % 4
    if kind < 2:
        return StructuredOutputsParams(regex=PATTERNS[kind])
    return StructuredOutputsParams(choice=CHOICES) if kind == 2 else None


def fits(index: int, text: str) -> bool:
    kind = index % 4
    if kind < 2:
        return re.fullmatch(PATTERNS[kind], text) is not None
    return text in CHOICES if kind == 2 else True


def params_of(count: int, **changes: Any) -> list[SamplingParams]:
    given: dict[str, Any] = dict(temperature=0, max_tokens=40) | changes
    return [
        SamplingParams(structured_outputs=form_of(index), **given)
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.prompts(16, seed=5)


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    """Return the texts of plain decoding with the same grammars."""
    engine = make_engine(pair.target(), runner=GrammarRunner, **SETTINGS)
    outputs = generate(engine, prompts, params_of(len(prompts)))
    said = [output.outputs[0] for output in outputs]
    assert all(fits(index, one.text) for index, one in enumerate(said)), said
    assert {one.finish_reason for one in said[::4]} == {"stop"}
    assert len({one.text for one in said}) > 8
    return tokens_of(outputs)


class GrammarRunner(OneProgramRunner):
    """Runs requests with and without grammars in one program."""

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        shape = dataclasses.replace(shape, features=Features(has_grammar=True))
        return super().launch(plan, shape)


@functools.cache
def made(kind: str) -> LLMEngine:
    """Return an engine; engines of all draft models share executables."""
    if kind != "noisy":
        return with_draft(made("noisy"), pair.draft(kind))
    return pair.own_engine(runner=GrammarRunner, **SETTINGS)


@pytest.fixture(scope="module", params=["noisy", slow("unrelated")])
def engine(request) -> LLMEngine:
    return made(request.param)


def assert_nothing_is_held(engine: LLMEngine) -> None:
    gc.collect()
    assert len(engine.runner.token_masks) == 0


def test_drafts_change_nothing(engine, prompts, texts):
    engine = with_settings(engine)
    assert tokens_of(generate(engine, prompts, params_of(len(prompts)))) == texts
    assert engine.stats.num_accepted_tokens
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    "kind", ["ngram", slow("ngram+noisy"), slow("two devices"), slow("suffix")]
)
def test_other_drafts_and_devices_change_nothing(kind, prompts, texts):
    settings: dict[str, Any] = dict(runner=GrammarRunner, **SETTINGS)
    if kind == "two devices":
        settings["tensor_parallel_size"] = 2
    elif kind == "suffix":
        settings["suffix"] = {}
    else:
        settings["lookup"] = (2, 1)
    draft = None if kind in ("ngram", "suffix") else pair.draft("noisy")
    engine = make_engine(pair.target(), draft, num_draft_tokens=3, **settings)
    # The prompt contains the text to be generated, so that a lookup finds it.
    assert tokens_of(generate(engine, prompts, params_of(len(prompts)))) == texts
    again = [(prompt + text)[-60:] for prompt, text in zip(prompts, texts, strict=True)]
    outputs = generate(engine, again, params_of(len(again)))
    assert all(fits(index, one.outputs[0].text) for index, one in enumerate(outputs))
    assert engine.stats.num_accepted_tokens


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_sampled_texts_match_their_grammars(engine, rule, prompts):
    engine = with_settings(engine, seed=3, rejection_sample_method=rule)
    outputs = generate(engine, prompts, params_of(len(prompts), temperature=1.0))
    for index, output in enumerate(outputs):
        assert fits(index, output.outputs[0].text), output.outputs[0]


def test_seeded_texts_do_not_depend_on_the_drafts(engine, prompts):
    params = params_of(len(prompts), temperature=1.0)
    for index, one in enumerate(params):
        one.seed = index
    texts = tokens_of(generate(with_settings(engine), prompts, params))
    for index, one in enumerate(params):
        one.extra_args = {"num_speculative_tokens": (0, 1, 3)[index % 3]}
    assert tokens_of(generate(with_settings(engine), prompts, params)) == texts


def test_next_launch_starts_while_masks_are_computed(engine, prompts):
    engine = with_settings(engine)
    masks, most = engine.runner.token_masks, 0
    asked = masks.num_questions
    for index, params in enumerate(params_of(4)):
        engine.add_request(str(index), prompts[index], params)
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, len(engine._launched))
    assert most == 1  # the launches in flight after a step
    assert masks.num_questions > asked


def test_batch_continues_when_some_requests_are_aborted(engine, prompts, texts):
    engine = with_settings(engine)
    params = params_of(len(prompts))
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, one)
    finished, step = {}, 0
    aborted = set(range(1, len(prompts), 3))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
        if step % 4 == 0 and aborted - finished.keys():
            gone = min(aborted - finished.keys())
            aborted.discard(gone)
            engine.abort_request(str(gone))
    for index, tokens in finished.items():
        assert tokens == texts[index]
    assert len(finished) < len(prompts)
    assert_nothing_is_held(engine)


def test_preempted_text_resumes(engine):
    # There are too few pages for four of these requests at the same time.
    random = np.random.default_rng(8)
    prompts = random.integers(3, 64, (6, 60)).tolist()
    params = SamplingParams(
        temperature=0,
        max_tokens=50,
        structured_outputs=StructuredOutputsParams(regex="([A-Z]{3}[0-9]){11}"),
    )
    alone = [
        tokens_of(generate(with_settings(engine), [prompt], params))[0]
        for prompt in prompts
    ]
    together = proposers.with_config(engine, num_pages=54)
    with constant_times():
        assert tokens_of(generate(together, prompts, params)) == alone
    assert together.stats.num_preemptions
    assert all(len(tokens) == 45 for tokens in alone)


def test_texts_of_a_request_with_n_have_separate_matchers(engine, prompts):
    params = SamplingParams(
        n=3, temperature=1.0, seed=4, max_tokens=40, structured_outputs=form_of(0)
    )
    (output,) = generate(with_settings(engine), prompts[:1], params)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == 3 and all(fits(0, text) for text in texts)


def test_max_tokens_cuts_a_text_at_every_offset(engine, prompts, texts):
    counts = range(1, 8)
    params = [one for count in counts for one in params_of(8, max_tokens=count)]
    outputs = generate(with_settings(engine), prompts[:8] * len(counts), params)
    expected = [tokens[:count] for count in counts for tokens in texts[:8]]
    assert tokens_of(outputs) == expected


def test_stop_string_and_min_tokens_work_with_a_grammar(engine, prompts):
    form = StructuredOutputsParams(regex="[A-F]{4},[0-9]{9}")
    cut = SamplingParams(temperature=0, stop=",", structured_outputs=form)
    # `min_tokens` exceeds what the grammar allows: a complete text ends nevertheless.
    longer = SamplingParams(
        temperature=0, min_tokens=20, max_tokens=24, structured_outputs=form
    )
    ignoring = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=17, structured_outputs=form
    )
    outputs = generate(with_settings(engine), prompts[:3], [cut, longer, ignoring])
    first, second, third = (output.outputs[0] for output in outputs)
    assert re.fullmatch("[A-F]{4}", first.text) and first.stop_reason == ","
    for one, ends in ((second, 1), (third, 3)):
        said = "".join(chr(33 + token) for token in one.token_ids[:14])
        assert re.fullmatch("[A-F]{4},[0-9]{9}", said)
        assert list(one.token_ids[14:]) == [pair.EOS] * ends
    assert (second.finish_reason, third.finish_reason) == ("stop", "length")


# This grammar comes close to the library's limit on expressions, although its masks
# take little of the library's fuel (a limit of computation).
COUNTED = r"([%-9]{1,20}:?){1,200}"
COUNTED_FORM = StructuredOutputsParams(regex=COUNTED)
FUEL = 4000


@pytest.fixture
def low_limits(monkeypatch):
    """Lower the library's limits, so that long texts of a grammar fail."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=2**40,
        step_lexer_fuel=FUEL,
        verbose_errors=False,
    )
    monkeypatch.setattr(grammar_matcher, "LIMITS", limits)
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", FUEL)


def ends_of(outputs: list[RequestOutput]) -> list[Any]:
    said = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), one.finish_reason, one.stop_reason) for one in said]


@pytest.mark.parametrize("temperature", [slow(0.0), 1.3])
def test_texts_fail_at_the_same_token_with_and_without_drafts(
    temperature, engine, prompts, low_limits
):
    params = [
        SamplingParams(
            temperature=temperature,
            seed=index if temperature else None,
            min_tokens=20,
            max_tokens=50,
            extra_args={"return_token_origins": index % 2 == 1},
            structured_outputs=form_of(2) if index % 4 == 2 else COUNTED_FORM,
        )
        for index in range(len(prompts))
    ]
    drafted = with_settings(engine)
    ends = ends_of(generate(drafted, prompts, params))
    for one in params:
        one.extra_args = {**(one.extra_args or {}), "num_speculative_tokens": 0}
    plain = with_settings(engine)
    assert ends_of(generate(plain, prompts, params)) == ends
    assert drafted.stats.num_accepted_tokens and not plain.stats.num_accepted_tokens
    reasons = [reason for _, reason, _ in ends]
    assert set(reasons[2::4]) == {"stop"}, "texts of other grammars changed"
    failed = [one for one in ends if one[1] == "error"]
    assert len({len(tokens) for tokens, _, _ in failed}) > 2
    assert all("too many" in why for _, _, why in failed)
    assert {reason for _, reason, _ in ends} <= {"stop", "length", "error"}
    for made in (drafted, plain):
        made.scheduler.check_idle()
        counted = {
            one.labels["kind"]: one.value
            for one in made.get_metrics()
            if isinstance(one, Counter) and one.name == "jaxspec:grammar_failures"
        }
        assert counted["limit"] == len(failed) == sum(counted.values())
    assert_nothing_is_held(engine)


VOCAB, PROMPT = 64, [20, 7, 33, 11, 50, 14, 9, 44, 12, 6]
EOS = 1
TEMPERATURE = 2.0  # half of the texts are frequent enough for a cell of their own
# The tokens 4 to 15 are %&'()*+,-./0
DISTRIBUTION_PATTERN = r"[%&'(]([)*]%?|\+[,-])?"


def words_of_the_form() -> list[list[int]]:
    """Return each text of the grammar as token ids, followed by the end token."""
    return [
        [ord(one) - 33 for one in word] + [EOS]
        for length in range(1, 4)
        for word in itertools.product("%&'()*+,-", repeat=length)
        if re.fullmatch(DISTRIBUTION_PATTERN, "".join(word))
    ]


def enumerated_distribution(target: Any, words: list[list[int]]) -> np.ndarray:
    """Return the probability of every text, from HuggingFace's logits and the masks."""
    following: dict[tuple[int, ...], set[int]] = {}
    for word in words:
        for cut, token in enumerate(word):
            following.setdefault(tuple(word[:cut]), set()).add(token)
    distributions = {}
    with torch.no_grad():
        for start, allowed in following.items():
            choices = sorted(allowed)
            tokens = torch.tensor([[*PROMPT, *start]]).long()
            logits = target(tokens).logits[0, -1].numpy()
            distribution = np.zeros(VOCAB)
            distribution[choices] = filtered_distribution(
                logits[None, choices], np.float32(TEMPERATURE)
            )[0]
            distributions[start] = distribution
    return np.array(
        [
            np.prod([distributions[tuple(word[:i])][t] for i, t in enumerate(word)])
            for word in words
        ]
    )


@pytest.mark.parametrize(
    ("rule", "count"),
    members(
        "grammars",
        [("standard", 600), ("standard", 2000), ("block", 2000), ("seeded", 2000)],
        is_example=lambda one: one[1] == 600,
    ),
)
def test_distribution_with_a_grammar_equals_enumeration(rule, count):
    words = words_of_the_form()
    distribution = enumerated_distribution(pair.target(), words)
    assert distribution.sum() == pytest.approx(1, abs=1e-6)
    form = StructuredOutputsParams(regex=DISTRIBUTION_PATTERN)
    settings: Any = dict(seed=11)
    if rule != "seeded":
        settings["rejection_sample_method"] = rule
    params = [
        SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=6,
            include_stop_str_in_output=True,
            structured_outputs=form,
            seed=number if rule == "seeded" else None,
        )
        for number in range(count)
    ]
    engine = with_settings(made("unrelated"), **settings)
    found = tokens_of(generate(engine, [PROMPT] * len(params), params))
    assert 0.1 < engine.stats.acceptance_rate < 0.9
    counts = np.zeros(len(words), int)
    for tokens in found:
        counts[words.index(tokens)] += 1
    check_counts(counts, distribution, rule)


HELD_FORM = r"[A-Z]{60}"


def slow_masks(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Delay the masks of a grammar; return a list of the threads that compute masks."""
    threads, compute = list[str](), Matcher.mask

    def mask(matcher: Matcher) -> np.ndarray:
        if matcher._grammar._text == grammar_of_regex(HELD_FORM):
            threads.append(threading.current_thread().name)
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        return compute(matcher)

    monkeypatch.setattr(Matcher, "mask", mask)
    return threads


@pytest.mark.parametrize("num_drafts", [slow(0), 3])
def test_slow_masks_are_computed_between_launches(
    engine, prompts, monkeypatch, num_drafts
):
    """Slow masks do not change the text, and other requests do not wait for them."""
    form = StructuredOutputsParams(regex=HELD_FORM)
    given = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    extra = {"num_speculative_tokens": num_drafts}
    held = SamplingParams(
        structured_outputs=form, max_tokens=12, extra_args=extra, **given
    )
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine = with_settings(engine)
    expected = tokens_of(generate(engine, prompts[:2], [held, plain]))
    threads = slow_masks(monkeypatch, 0.05)
    waiting: list[bool] = []
    plan = engine.scheduler.plan

    def watched() -> Any:
        launch = plan()
        is_held = engine.scheduler.rows.is_held.any()
        waiting.append(bool(is_held) and launch is not None)
        return launch

    monkeypatch.setattr(engine.scheduler, "plan", watched)
    assert tokens_of(generate(engine, prompts[:2], [held, plain])) == expected
    # The first mask is computed inside a launch, where it is found to be slow; later
    # masks are computed in the `jaxspec-masks` threads.
    assert sum(not one.startswith("jaxspec-masks") for one in threads) <= 2, threads
    assert sum(one.startswith("jaxspec-masks") for one in threads) >= 8
    assert sum(waiting) >= 4
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("num_drafts", "temperature"), [slow(0, 0.0), (0, 1.0), (3, 0.0), slow(3, 1.0)]
)
def test_late_masks_change_nothing(
    engine, prompts, monkeypatch, num_drafts, temperature
):
    """In every call, including the first ones, some masks are late."""
    params = params_of(len(prompts), temperature=temperature)
    for index, one in enumerate(params):
        one.seed = index if temperature else None
        one.extra_args = {"num_speculative_tokens": num_drafts}
    expected = ends_of(generate(with_settings(engine), prompts, params))
    random, answer, asked = np.random.default_rng(0), TokenMasks._answer, set[int]()

    def late_now_and_then(masks: TokenMasks, questions: list[Any]) -> list[Any]:
        late, rest = list[Any](), list[Any]()
        for one in questions:
            is_first = one.state.grammar_id not in asked
            asked.add(one.state.grammar_id)
            is_late = random.random() < (0.5 if is_first else 0.2)
            (late if is_late else rest).append(one)
        for one in late:
            one.state.set_late(one.num_tokens)
        return late + answer(masks, rest)

    monkeypatch.setattr(TokenMasks, "_answer", late_now_and_then)
    monkeypatch.setattr(structured_output, "NUM_SLOW_MASKS", 2)
    disturbed = with_settings(engine)
    assert ends_of(generate(disturbed, prompts, params)) == expected
    assert disturbed.stats.num_preemptions > len(prompts)
    num_tokens = sum(len(tokens) for tokens, _, _ in expected)
    assert disturbed.stats.num_generated_tokens == num_tokens
    disturbed.scheduler.check_idle()
    assert_nothing_is_held(disturbed)


def test_text_with_too_slow_masks_ends_with_an_error(engine, prompts, monkeypatch):
    slow_masks(monkeypatch, 0.05)
    monkeypatch.setattr(structured_output, "MAX_TEXT_S", 0.3)
    form = StructuredOutputsParams(regex=HELD_FORM)
    params = SamplingParams(
        structured_outputs=form, max_tokens=40, temperature=1.0, seed=7
    )
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = with_settings(engine)
    failed, other = generate(engine, prompts[:2], [params, plain])
    assert failed.outputs[0].finish_reason == "error"
    assert "(limit)" in str(failed.outputs[0].stop_reason)
    assert "CPU time" in str(failed.outputs[0].stop_reason)
    assert 1 < len(failed.outputs[0].token_ids) < 12
    (text,) = other.outputs
    assert (text.finish_reason, len(text.token_ids)) == ("length", 12)
    assert_nothing_is_held(engine)

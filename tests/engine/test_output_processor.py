"""Outputs of requests for one or several texts, and the origins of tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.detokenizer import TextStream
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.metrics import EngineMetrics, Load
from jaxspec.engine.output_processor import OriginStream, OutputProcessor
from jaxspec.engine.scheduling.launch import Advance, Progress
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.errors import RequestError
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.program.plan import TILE
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_engines import (
    EOS,
    PROMPT,
    TEXT,
    admissions,
    assert_idle,
    letters,
    make_fake_engine,
    run_all,
    run_one,
    said,
)
from tests.support.loops import make_config
from tests.support.requests import make
from tests.support.rounds import constant_times
from tests.support.token_pieces import EXAMPLES, IDS, TOKENIZER, byte_tokens, split

KINDS = list(RequestOutputKind)
DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
FINAL_ONLY = RequestOutputKind.FINAL_ONLY
WANTED = {"return_token_origins": True}


def several(kind: RequestOutputKind = FINAL_ONLY, **changes: Any) -> SamplingParams:
    return SamplingParams(n=3, max_tokens=7, output_kind=kind, **changes)


@pytest.mark.parametrize("cache", [True, False])
def test_a_final_output_has_all_texts_and_shares_the_prompt(cache):
    engine, runner = make_fake_engine(
        num_draft_tokens=2, enable_prefix_caching=cache, page_size=1, num_pages=200
    )
    prompt = PROMPT * 5
    engine.add_request("a", prompt, several())
    ((output,),) = run_all(engine).values()
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(len(completion.token_ids) == 7 for completion in output.outputs)
    assert output.prompt_token_ids == prompt
    plans = [plan for plan, shape in runner.plans if not shape.is_draft_prefill]
    num_prefilled = sum(len(tile.tokens) for plan in plans for tile in plan.tiles)
    assert num_prefilled == len(prompt) + 2
    assert_idle(engine)


def test_text_i_of_a_request_uses_seed_plus_i():
    engine, runner = make_fake_engine()
    engine.add_request("a", PROMPT, several(seed=40))
    run_all(engine)
    assert sorted(one.seed for one in admissions(runner)) == [(0, 40), (0, 41), (0, 42)]
    # Without a seed, texts differ.
    engine.add_request("a", PROMPT, several())
    run_all(engine)
    assert len({one.seed for one in admissions(runner)}) == 6
    last = 2**63 - 3
    several(seed=last)
    with pytest.raises(RequestError, match=f"seed .*to {last}.*Text i of n"):
        several(seed=last + 1)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_aborting_a_request_ends_all_its_texts(when):
    engine, _ = make_fake_engine(num_draft_tokens=2)
    engine.add_request("a", PROMPT, several(DELTA))
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=5))
    for _ in range(when):
        engine.step()
    engine.abort_request("0_a")  # texts cannot be aborted by an id of their own
    assert engine.get_num_unfinished_requests() == 4
    engine.abort_request("a")
    assert engine.get_num_unfinished_requests() == 1
    outputs = run_all(engine)
    assert outputs.keys() == {"b"}
    assert_idle(engine)


def test_rejects_ids_of_running_requests_and_texts():
    engine, _ = make_fake_engine()
    engine.add_request("a", PROMPT, several(DELTA))
    engine.add_request("0_b", PROMPT, SamplingParams(max_tokens=5))
    for name, params, message in (
        ("a", SamplingParams(), "'a' is already running"),
        ("1_a", SamplingParams(), "'1_a' is already running"),
        ("b", several(), "'0_b' is already running"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(name, PROMPT, params)
    engine.step()
    engine.abort_request("a")
    for _ in range(2):  # an id is free after an abort and after the end
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=9))
        assert list(run_all(engine)["a"][-1].outputs[0].token_ids) == said(9)
    assert_idle(engine)


def test_metrics_count_one_request_and_its_longest_text():
    engine, _ = make_fake_engine(disable_log_stats=False)
    engine.add_request("a", PROMPT, several(DELTA))
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=2))
    run_all(engine)
    engine.add_request("c", PROMPT, SamplingParams(n=2))
    engine.abort_request("c")
    found: dict[str, Any] = {one.name: one for one in engine.get_metrics()}
    for name, count, total in (
        ("params_n", 3, 1 + 2 + 3),
        ("max_num_generation_tokens", 3, 7 + 2),
        ("generation_tokens", 6, 7 * 3 + 2),
    ):
        seen = found[f"vllm:request_{name}"]
        assert (seen.count, seen.sum) == (count, total)


def wanting(**given: Any) -> SamplingParams:
    return SamplingParams(extra_args=WANTED | given.pop("extra_args", {}), **given)


def check(part: CompletionOutput) -> list[str]:
    """Return the origins of an output; check that they match its tokens and text."""
    pieces = part.token_origins
    assert pieces is not None
    assert [one.token_id for one in pieces] == list(part.token_ids)
    assert "".join(one.text for one in pieces) == part.text
    return [one.origin for one in pieces]


def histogram_of(origins: list[str], num_draft_tokens: int) -> list[int]:
    """Return a histogram of accepted drafts per step, from the origins alone."""
    counts, kept = [0] * (num_draft_tokens + 1), 0
    for origin in origins:
        if origin in ("recovered", "bonus"):
            counts[kept] += 1
        kept = kept + 1 if origin == "draft" else 0
    counts[kept] += kept > 0  # the last step, which ended with an accepted draft
    return counts


def agree(completion: CompletionOutput) -> list[str]:
    origins, counts = check(completion), completion.spec_decode_metrics
    assert counts is not None
    expected = histogram_of(origins, len(counts.histogram) - 1)
    assert counts.histogram == expected
    return origins


@pytest.mark.parametrize(
    "num_draft_tokens", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))]
)
def test_origins_match_the_counts(num_draft_tokens: int):
    seen: set[str] = set()
    for seed in range(8):
        for end in (TEXT, [*TEXT[:9], EOS, *TEXT[10:]]):
            engine, _ = make_fake_engine(
                end, seed=seed, num_draft_tokens=num_draft_tokens
            )
            origins = agree(run_one(engine, wanting(max_tokens=30)))
            assert origins[0] == "target", "the prompt's own token has no drafts"
            seen.update(origins)
    assert seen == {"draft", "recovered", "bonus", "target"}


def test_all_drafts_accepted_and_none():
    for accepts, expected in (
        (lambda low, high: high - 1, (["draft"] * 3 + ["bonus"]) * 2),
        # A round that has room for only one token has no drafts.
        (lambda low, high: low, ["recovered"] * 7 + ["target"]),
    ):
        engine, runner = make_fake_engine(num_draft_tokens=3)
        device: Any = runner.device
        device._random = SimpleNamespace(integers=accepts, random=np.zeros)
        origins = agree(run_one(engine, wanting(max_tokens=9)))
        assert origins == ["target", *expected]


def test_all_tokens_are_the_targets_without_drafts():
    for engine_drafts, own in ((0, {}), (3, {"num_speculative_tokens": 0})):
        engine, _ = make_fake_engine(num_draft_tokens=engine_drafts)
        completion = run_one(engine, wanting(max_tokens=12, extra_args=own))
        assert check(completion) == ["target"] * 12
        assert completion.text == letters(said(12))
    # There are no origins unless they are requested.
    assert run_one(engine, SamplingParams(max_tokens=5)).token_origins is None


def ask_all_kinds(
    engine: LLMEngine, **given: Any
) -> dict[str, dict[int, list[CompletionOutput]]]:
    """Return the parts by output kind and text, after checking their origins."""
    for kind in KINDS:
        engine.add_request(kind.name, PROMPT, wanting(output_kind=kind, **given))
    by_kind: dict[str, dict[int, list[CompletionOutput]]] = {}
    for name, outputs in run_all(engine).items():
        finished = [one.finished for one in outputs]
        assert finished == [False] * (len(outputs) - 1) + [True]
        for output in outputs:
            indices = [part.index for part in output.outputs]
            assert indices == sorted(set(indices))
            for part in output.outputs:
                check(part)
                by_kind.setdefault(name, {}).setdefault(part.index, []).append(part)
    assert_idle(engine)
    return by_kind


def check_kinds(by_kind: dict[str, dict[int, list[CompletionOutput]]]) -> None:
    """Check that deltas add up to the final output, and cumulative ones start it."""
    for index, (final,) in by_kind["FINAL_ONLY"].items():
        deltas = by_kind["DELTA"][index]
        assert "".join(part.text for part in deltas) == final.text
        assert sum((list(part.token_ids) for part in deltas), []) == final.token_ids
        for part in by_kind["CUMULATIVE"][index]:
            assert final.text.startswith(part.text)
            assert final.token_ids[: len(part.token_ids)] == part.token_ids
        assert by_kind["CUMULATIVE"][index][-1].token_ids == final.token_ids


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_in_every_kind_of_output(include: bool):
    # The stop string seems to start twice before it matches, so text is held back.
    text = [2, 2, 2, 5, 6, 7, 5, 6, 7, 5, 6, 9]
    stop = letters([5, 6, 7, 5, 6, 9])
    for seed in range(12):
        engine, _ = make_fake_engine(text, seed=seed, num_draft_tokens=5)
        by_kind = ask_all_kinds(
            engine, max_tokens=30, stop=stop, include_stop_str_in_output=include
        )
        check_kinds(by_kind)
        for ((*_, last),) in (texts.values() for texts in by_kind.values()):
            assert last.stop_reason == stop
        final = by_kind["FINAL_ONLY"][0][0]
        assert final.text == letters(text[3:] if include else text[3:6])
        assert len(final.token_ids) == 9


def test_several_texts_of_one_prompt():
    for seed in range(4):
        engine, _ = make_fake_engine(seed=seed, num_draft_tokens=3)
        by_kind = ask_all_kinds(engine, max_tokens=13, n=3, temperature=0.5)
        check_kinds(by_kind)
        tokens = [one.token_ids for (one,) in by_kind["FINAL_ONLY"].values()]
        assert tokens == [said(13)] * 3


def test_origins_of_a_preempted_request():
    engine, _ = make_fake_engine(num_draft_tokens=5, num_pages=30, max_model_len=80)
    for number in range(3):
        engine.add_request(str(number), PROMPT, wanting(max_tokens=60))
    with constant_times():
        every = run_all(engine)
    for outputs in every.values():
        origins = agree(outputs[-1].outputs[0])
        assert len(origins) == 60
    assert engine.stats.num_preemptions > 0


@given(ids=IDS, data=st.data())
@EXAMPLES
def test_origins_cover_texts_of_the_real_tokenizer(ids: list[int], data: Any):
    """Texts contain byte tokens, special tokens and stops; outputs have any length."""
    whole = TOKENIZER.decode(ids)
    stops = []
    if whole and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 9))])
    params = SamplingParams(stop=stops)
    stream, origins = TextStream(TOKENIZER, params, has_ends=True), OriginStream()
    known: list[int] = []
    pieces, first, start = [], 0, 0
    rounds = split(ids, data.draw(st.lists(st.integers(1, 7))))
    rounds = [part for part in rounds if part] or [[]]  # a step adds at least one token
    for index, part in enumerate(rounds):
        matched = stream.push(part)
        is_end = matched is not None or index == len(rounds) - 1
        known += part if matched is None else part[: matched[1]]
        origins.push(len(part), 0, 0)
        origins.keep(len(known))
        if is_end and matched is None:
            stream.finish()
        text = stream.visible(is_finished=is_end)[start:]
        assert stream.ends is not None
        if known[first:] or is_end:
            new = origins.of_part(
                known, stream.ends, first=first, start=start, text=text
            )
            assert "".join(one.text for one in new) == text
            pieces += new
            first, start = len(known), start + len(text)
        if is_end:
            break
    assert [one.token_id for one in pieces] == known
    assert "".join(one.text for one in pieces) == stream.text


def test_character_has_the_origin_of_its_last_byte_token():
    stream = TextStream(TOKENIZER, SamplingParams(), has_ends=True)
    origins = OriginStream()
    ids = byte_tokens("a🦉".encode())
    stream.push(ids)
    origins.push(5, 5, 5)
    assert stream.ends is not None
    pieces = origins.of_part(ids, stream.ends, first=0, start=0, text=stream.text)
    assert [one.text for one in pieces] == ["a", "", "", "", "🦉"]


class FakeRounds:
    """Passes rounds that the test makes to an output processor, as an engine would."""

    def __init__(self):
        config, self.stats = make_config(), EngineStats()
        self.metrics = EngineMetrics(config, self.stats)
        self.processor = OutputProcessor(config, TOKENIZER, self.metrics, self.stats)

    def open(self, **params: Any) -> Request:
        request = make([2] * 3, max_tokens=20)
        request.params = SamplingParams(max_tokens=20, **params)
        request.request_id = str(len(self.processor.streams))
        self.processor.open(request)
        return request

    def push(
        self, request: Request, tokens: list[int], *, is_done: bool = False
    ) -> list[RequestOutput]:
        request.output_token_ids += tokens
        if request.only_final_output and not is_done:
            return self.processor.advance(Advance(only_final=[request]), _finish)
        part = Progress(request=request, token_ids=tokens, is_done=is_done)
        return self.processor.advance(Advance(parts=[part]), _finish)


def _finish(request: Request, reason: str, stop: int | str | None) -> None:
    request.finish_reason, request.stop_reason = reason, stop


@EXAMPLES
@given(ids=IDS, sizes=st.lists(st.integers(0, 3), max_size=8))
def test_fast_path_gives_the_same_outputs_as_the_slow_path(ids, sizes):
    ways = []
    for is_fast in (True, False):
        rounds_of = FakeRounds()
        request = rounds_of.open(output_kind=DELTA)
        stream = rounds_of.processor.streams[request.request_id]
        assert stream.is_fast
        stream.is_fast = is_fast
        rounds = split(ids, sizes)
        outputs = [rounds_of.push(request, tokens) for tokens in rounds]
        outputs.append(rounds_of.push(request, [7, 8], is_done=True))
        # All values except times.
        ways.append(
            [
                [(one.finished, one.outputs, one.request_id) for one in output]
                for output in outputs
            ]
        )
        texts = [part.text for found in outputs for o in found for part in o.outputs]
        assert "".join(texts) == TOKENIZER.decode([*ids, 7, 8])
    assert ways[0] == ways[1]


@pytest.mark.parametrize(
    ("params", "is_fast"),
    [
        (dict(output_kind=DELTA), True),
        (dict(output_kind=FINAL_ONLY), True),
        (dict(output_kind=CUMULATIVE), False),
        (dict(output_kind=DELTA, stop="x"), False),
        (dict(output_kind=DELTA, logprobs=0), False),
        (dict(output_kind=DELTA, prompt_logprobs=0), False),
        (dict(output_kind=DELTA, extra_args={"return_token_origins": True}), False),
        (dict(output_kind=FINAL_ONLY, stop="x"), False),
    ],
)
def test_only_tokens_and_text_use_the_fast_path(params, is_fast):
    rounds_of = FakeRounds()
    request = rounds_of.open(**params)
    stream = rounds_of.processor.streams[request.request_id]
    assert (stream.is_fast or request.only_final_output) == is_fast


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
@pytest.mark.parametrize("has_origins", [False, True])
def test_first_token_with_several_prompt_parts(kind, has_origins):
    params = SamplingParams(
        max_tokens=3,
        logprobs=1,
        prompt_logprobs=1,
        output_kind=kind,
        extra_args={"return_token_origins": has_origins},
    )
    engine, _ = make_fake_engine()
    prompt = [2] * (TILE + 7)  # the output has the last three tokens
    engine.add_request("only", prompt, params)
    (outputs,) = run_all(engine).values()
    first, (completion,) = outputs[0], outputs[0].outputs
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(prompt)
    assert len(completion.token_ids) == len(completion.logprobs or []) == 1
    assert completion.text == letters(list(completion.token_ids))
    whole = outputs[0]
    for output in outputs[1:]:
        whole.add(output, aggregate=kind is DELTA)
    (completion,) = whole.outputs
    assert (completion.token_ids, completion.text) == (said(3), letters(said(3)))
    assert len(completion.logprobs or []) == 3


def test_inter_token_latency_is_since_the_previous_round(monkeypatch):
    rounds_of = FakeRounds()
    first, second = rounds_of.open(output_kind=DELTA), rounds_of.open(output_kind=DELTA)
    clock = SimpleNamespace(now=100.0)
    engine_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("jaxspec.engine.output_processor.time", engine_time)
    rounds_of.push(first, [5])
    clock.now = 101.0
    rounds_of.push(second, [5])
    clock.now = 103.0
    parts = []
    for request in (first, second):
        request.output_token_ids += [6]
        parts.append(Progress(request=request, token_ids=[6], is_done=False))
    rounds_of.processor.advance(Advance(parts=parts), _finish)
    metrics: dict[str, Any] = {one.name: one for one in rounds_of.metrics.read(Load())}
    waits = metrics["vllm:inter_token_latency_seconds"]
    assert (waits.count, waits.sum) == (2, 3.0 + 2.0)
    assert first.stats.num_generation_tokens == 2
    assert first.stats.last_token_ts == second.stats.last_token_ts == 103.0


def test_token_after_an_accepted_leaf_is_a_bonus_token():
    origins = OriginStream()
    origins.push(3, 3, 1, 1)
    origins.push(2, 3, 1)
    origins.push(2, 3, 0, 2)  # the second accepted leaf is a stop token
    found = ["draft", "leaf", "bonus", "draft", "recovered", "leaf", "leaf"]
    assert origins._origins == found

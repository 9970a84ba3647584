"""Sampling parameters have the same effect with drafts and without.

Requests go through whole engines, from `SamplingParams` to `RequestOutput`.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support import pair
from tests.support.distributions import controlled
from tests.support.engines import (
    StubTokenizer,
    generate,
    tokens_of,
    with_settings,
)
from tests.support.oracles import hf_logits

PROMPTS = pair.prompts(4, seed=5)
MAX_TOKENS = 14
PLAIN = {"num_speculative_tokens": 0}


@functools.cache
def general_engine() -> LLMEngine:
    return pair.own_engine(runner=pair.GeneralRunner)


def run(
    prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[RequestOutput]]:
    """Run requests; return all outputs of each one, in the order of the prompts."""
    engine = with_settings(general_engine())
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, own)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    engine.scheduler.check_idle()
    return outputs


def ask(prompt: list[int] | None = None, **fields: Any) -> CompletionOutput:
    """Run one request; return its only completion."""
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | fields
    (outputs,) = run([prompt or PROMPTS[0]], [SamplingParams(**fields)])
    (completion,) = outputs[-1].outputs
    return completion


def distributions(tokens: list[int]) -> np.ndarray:
    """Return HuggingFace's log-probabilities; row i is after the first i + 1 tokens."""
    logits = np.array(hf_logits(pair.target(), np.array(tokens)), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check_logprobs(found: Any, tokens: list[int], rows: np.ndarray, count: int) -> None:
    """Check returned logprobs against the distributions at their positions."""
    assert len(found) == len(tokens) == len(rows)
    for entry, token, row in zip(found, tokens, rows, strict=True):
        assert next(iter(entry)) == token
        ranked = np.argsort(-row)
        best = set(ranked[:count].tolist())
        assert set(entry) == best | {token}
        for candidate, one in entry.items():
            assert one.logprob == pytest.approx(row[candidate], abs=1e-4)
            assert ranked[one.rank - 1] == candidate
            assert one.decoded_token == StubTokenizer(64).decode([candidate])


CONTROLS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {token: 6.0 for token in range(10, 30, 3)}},
    "allowed": {"allowed_token_ids": list(range(7, 40, 4))},
    "bad words": {"bad_words": [chr(code) for code in range(40, 70)]},
    "together": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": {9: -100.0, 12: 2.0},
        "allowed_token_ids": list(range(5, 60, 2)),
        "bad_words": [
            "+",
            "GH",
            *(chr(code) + chr(code + 2) for code in range(72, 90)),
        ],
        "stop_token_ids": [17],
        "min_tokens": 5,
    },
}


def texts(prompts: list[list[int]], listed: list[SamplingParams]) -> list[list[int]]:
    return [list(one[-1].outputs[0].token_ids) for one in run(prompts, listed)]


def margin(prompt: list[int], tokens: list[int], params: SamplingParams) -> float:
    """Return by how much a text's tokens lead in HuggingFace's logits, at least."""
    prepared = general_engine().input_processor.prepare("0", prompt, params)
    (request,) = prepared.requests
    known, start, least = prompt + tokens, len(prompt), np.inf
    logits = hf_logits(pair.target(), np.array(known))
    for place in range(start, len(known)):
        row = np.array(logits[place - 1], np.float64)
        if request.controls is not None:
            row = controlled(row, known[:place], start, request.controls)
        if place < start + params.min_tokens:
            row[list(request.stop_ids)] = -np.inf
        best = row[known[place]]
        row[known[place]] = -np.inf
        least = min(least, best - row.max())
    return float(least)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_drafts_change_no_text_with_controls(name: str, how: str):
    """Greedy texts are the argmax of HuggingFace's logits with the same controls."""
    sampling: dict[str, Any] = {"temperature": 0}
    if how == "seeded":
        sampling = {"seed": 11, "top_p": 0.9}
    sampling |= {"max_tokens": 24, "ignore_eos": True}
    free, drafted = (SamplingParams(**sampling | one) for one in ({}, CONTROLS[name]))
    plain = drafted.clone()
    plain.extra_args = PLAIN
    prompts = PROMPTS[:2]
    found = texts(prompts, [drafted] * 2)
    assert found == texts(prompts, [plain] * 2)
    assert found != texts(prompts, [free] * 2), "the control changed nothing"
    if how == "greedy":
        for prompt, tokens in zip(prompts, found, strict=True):
            assert margin(prompt, tokens, drafted) > pair.MIN_MARGIN


@pytest.mark.parametrize(
    "make", [general_engine, pytest.param(pair.engine, marks=pytest.mark.slow)]
)
def test_rows_do_not_keep_controls_of_earlier_requests(make: Any):
    """The engine's programs have controls, or are chosen by the requests."""
    free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    engine = with_settings(make())
    controlled = [
        SamplingParams(temperature=0, max_tokens=9, **CONTROLS[name])
        for name in ("together", "bias")
    ]
    generate(engine, PROMPTS[:2], controlled)
    found = tokens_of(generate(engine, PROMPTS[2:], free))
    assert found == tokens_of(generate(pair.plain_engine(), PROMPTS[2:], free))


def test_forbidden_tokens_do_not_occur():
    allowed, bad = CONTROLS["allowed"], CONTROLS["bad words"]
    for seed in range(3):
        sampling: dict[str, Any] = {"seed": seed, "temperature": 1.5}
        tokens = ask(**sampling, **allowed).token_ids
        assert set(tokens) <= set(allowed["allowed_token_ids"])
        assert not set(bad["bad_words"]) & set(ask(**sampling, **bad).text)
    two_letters = ask(temperature=0).text[3:5]
    assert two_letters not in ask(temperature=0, bad_words=[two_letters]).text


@pytest.mark.parametrize("extra_args", [None, PLAIN], ids=["drafts", "plain"])
def test_bad_words_with_min_tokens_leave_an_allowed_token(extra_args):
    """After token 20, only the stop token is allowed, which `min_tokens` forbids."""
    end, word = 1, 20
    completion = ask(
        temperature=0,
        allowed_token_ids=[word, end],
        bad_words=[StubTokenizer(64).decode([word, word])],
        stop_token_ids=[end],
        min_tokens=6,
        extra_args=extra_args,
    )
    assert list(completion.token_ids) == [word] * 6 + [end]


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_equal_those_of_one_pass_over_the_text(count: int):
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=count,
            prompt_logprobs=count,
            temperature=temperature,
            seed=7,
            frequency_penalty=penalty,  # has no effect on logprobs
        )
        for temperature, penalty in [(0, 0), (1.2, 0), (1.2, 1.0), (0, 1.0)]
    ]
    for prompt, outputs in zip(PROMPTS, run(PROMPTS, params), strict=True):
        (completion,) = outputs[-1].outputs
        tokens = list(completion.token_ids)
        rows = distributions(prompt + tokens)[:-1]
        check_logprobs(completion.logprobs, tokens, rows[len(prompt) - 1 :], count)
        of_prompt = outputs[-1].prompt_logprobs
        assert of_prompt is not None
        assert of_prompt[0] is None
        check_logprobs(list(of_prompt)[1:], prompt[1:], rows[: len(prompt) - 1], count)
        own = [
            row[token] for row, token in zip(rows[-len(tokens) :], tokens, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-3)


def test_logprobs_of_chosen_ids_are_returned():
    """The model's own logprobs are returned; the requests of a batch differ in ids."""
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 7}
    chosen: list[Any] = [[63, 0, 31], [5], None, list(range(0, 64, 2))]
    params = [
        SamplingParams(
            logprob_token_ids=ids,
            logprobs=None if ids else 1,
            temperature=1.2 * (index % 2),
            extra_args=PLAIN if index == 1 else None,
            frequency_penalty=index // 2,
            **fields,
        )
        for index, ids in enumerate(chosen)
    ]
    for prompt, ids, outputs in zip(PROMPTS, chosen, run(PROMPTS, params), strict=True):
        (completion,) = outputs[-1].outputs
        tokens = list(completion.token_ids)
        rows = distributions(prompt + tokens)[len(prompt) - 1 : -1]
        if ids is None:
            check_logprobs(completion.logprobs, tokens, rows, 1)
            continue
        found: Any = completion.logprobs
        assert len(found) == MAX_TOKENS
        for entry, token, row in zip(found, tokens, rows, strict=True):
            assert list(entry) == list(dict.fromkeys((token, *ids)))
            for candidate, one in entry.items():
                assert one.logprob == pytest.approx(row[candidate], abs=1e-4)
        own = [row[token] for row, token in zip(rows, tokens, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-3)


def test_logprobs_in_outputs_of_every_kind_add_up():
    def outputs_of(kind: RequestOutputKind) -> list[RequestOutput]:
        fields: dict[str, Any] = dict(temperature=0, max_tokens=MAX_TOKENS)
        fields |= dict(ignore_eos=True, logprobs=2, prompt_logprobs=1)
        (outputs,) = run(PROMPTS[:1], [SamplingParams(output_kind=kind, **fields)])
        return outputs

    kinds = RequestOutputKind
    (final,) = outputs_of(kinds.FINAL_ONLY)
    cumulative, deltas = outputs_of(kinds.CUMULATIVE), outputs_of(kinds.DELTA)
    assert len(deltas) == len(cumulative) > 1
    assert cumulative[-1].outputs[0].logprobs == final.outputs[0].logprobs
    assert all(one.prompt_logprobs == final.prompt_logprobs for one in cumulative)
    assert all(one.prompt_logprobs is None for one in deltas[1:])
    for one in deltas:
        (piece,) = one.outputs
        assert piece.logprobs is not None
        assert len(piece.logprobs) == len(piece.token_ids)
    whole = deltas[0]
    for one in deltas[1:]:
        whole.add(one, aggregate=True)
    assert whole.outputs[0] == final.outputs[0]
    assert whole.prompt_logprobs == final.prompt_logprobs


def test_logprobs_end_with_the_text():
    free = ask(temperature=0, logprobs=1)
    for cut in range(2, 8):
        stop = free.text[cut : cut + 2]
        found = ask(temperature=0, logprobs=1, stop=[stop])
        count = free.text.index(stop) + 2
        assert found.token_ids == free.token_ids[:count]
        assert found.logprobs == (free.logprobs or [])[:count]
        pairs = zip(found.logprobs or [], found.token_ids, strict=True)
        own = [entry[token].logprob for entry, token in pairs]
        assert found.cumulative_logprob == pytest.approx(sum(own), abs=1e-5)

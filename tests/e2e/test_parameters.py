"""Sampling parameters have the same effect with drafts and without.

Requests go through whole engines, from `SamplingParams` to `RequestOutput`.
"""

import functools
import itertools
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
    make_engine,
    tokens_of,
    with_settings,
)
from tests.support.oracles import hf_logits

PROMPTS = pair.prompts(4, seed=5)
MAX_TOKENS = 14
PLAIN = {"num_speculative_tokens": 0}


@functools.cache
def general_engine() -> LLMEngine:
    return make_engine(
        pair.target(),
        pair.draft("noisy"),
        num_draft_tokens=pair.NUM_DRAFT,
        runner=pair.GeneralRunner,
        **pair.SETTINGS,
    )


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


def test_rows_do_not_keep_controls_of_earlier_requests():
    free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    listed = []
    for name in ("together", "bias"):
        listed.append(SamplingParams(temperature=0, max_tokens=9, **CONTROLS[name]))
    texts(PROMPTS[:2], listed)
    found = texts(PROMPTS[2:], [free] * 2)
    assert found == tokens_of(generate(pair.plain_engine(), PROMPTS[2:], free))


@pytest.mark.slow
def test_programs_without_controls_ignore_those_of_earlier_requests():
    free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    listed = []
    for name in ("together", "bias"):
        listed.append(SamplingParams(temperature=0, max_tokens=9, **CONTROLS[name]))
    engine = pair.engine()
    generate(engine, PROMPTS[:2], listed)
    found = tokens_of(generate(engine, PROMPTS[2:], free))
    assert found == tokens_of(generate(pair.plain_engine(), PROMPTS[2:], free))


def test_forbidden_tokens_do_not_occur():
    seeds = [{"seed": seed, "temperature": 1.5} for seed in range(3)]
    for sampling in seeds:
        allowed = CONTROLS["allowed"]["allowed_token_ids"]
        assert set(ask(**sampling, **CONTROLS["allowed"]).token_ids) <= set(allowed)
        words = CONTROLS["bad words"]["bad_words"]
        assert not set(words) & set(ask(**sampling, **CONTROLS["bad words"]).text)
    text = ask(temperature=0).text
    pair_of_letters = text[3:5]
    assert pair_of_letters not in ask(temperature=0, bad_words=[pair_of_letters]).text


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
    """They are the model's own logprobs; requests of a batch have different ids."""
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 7}
    chosen: list[Any] = [[63, 0, 31], [5], None, list(range(0, 64, 2))]
    params = [
        SamplingParams(
            logprob_token_ids=ids,
            logprobs=None if ids else 1,
            temperature=temperature,
            extra_args=extra_args,
            frequency_penalty=penalty,
            **fields,
        )
        for ids, temperature, penalty, extra_args in zip(
            chosen,
            (0, 1.2, 0, 1.2),
            (0, 0, 1.0, 1.0),
            (None, PLAIN, None, None),
            strict=True,
        )
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


def test_outputs_of_every_kind_add_up_to_the_same_text():
    def outputs_of(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
            output_kind=kind,
        )
        (outputs,) = run(PROMPTS[:1], [params])
        return outputs

    kinds = RequestOutputKind
    (final,) = outputs_of(kinds.FINAL_ONLY)
    cumulative, deltas = outputs_of(kinds.CUMULATIVE), outputs_of(kinds.DELTA)
    assert len(deltas) == len(cumulative) > 1
    assert cumulative[-1].outputs[0].logprobs == final.outputs[0].logprobs
    assert [one.prompt_logprobs for one in cumulative] == [final.prompt_logprobs] * len(
        cumulative
    )
    assert [one.prompt_logprobs for one in deltas[1:]] == [None] * (len(deltas) - 1)
    pieces = [one.outputs[0] for one in deltas]
    for piece in pieces:
        assert piece.logprobs is not None
        assert len(piece.logprobs) == len(piece.token_ids)
    joined = itertools.chain.from_iterable(piece.logprobs or [] for piece in pieces)
    assert list(joined) == final.outputs[0].logprobs
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
        own = [entry[token].logprob for entry, token in entries_of(found)]
        assert found.cumulative_logprob == pytest.approx(sum(own), abs=1e-5)


def entries_of(completion: CompletionOutput) -> list[tuple[Any, int]]:
    """Return pairs: each token, and its logprobs."""
    return list(zip(completion.logprobs or [], completion.token_ids, strict=True))


def test_texts_of_a_request_with_n_equal_single_requests():
    fields: dict[str, Any] = dict(temperature=1.0, logprobs=1, presence_penalty=0.5)
    fields |= dict(max_tokens=MAX_TOKENS, ignore_eos=True)
    (outputs,) = run(PROMPTS[2:3], [SamplingParams(n=3, seed=40, **fields)])
    assert [text.index for text in outputs[-1].outputs] == [0, 1, 2]
    for index, text in enumerate(outputs[-1].outputs):
        alone = ask(PROMPTS[2], seed=40 + index, **fields)
        assert text.token_ids == alone.token_ids
        assert [list(entry) for entry in text.logprobs or []] == [
            list(entry) for entry in alone.logprobs or []
        ]


def test_flat_logprobs_have_the_same_values():
    listed = ask(temperature=0, logprobs=2)
    flat = ask(temperature=0, logprobs=2, flat_logprobs=True)
    assert flat.token_ids == listed.token_ids
    assert list(flat.logprobs or []) == listed.logprobs

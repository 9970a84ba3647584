"""Beam search equals HuggingFace's, and an exhaustive search over all texts."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from jaxspec.errors import RequestError
from jaxspec.llm import LLM
from jaxspec.sampling_params import BeamSearchParams, SamplingParams
from tests.support.engines import MICRO, StubTokenizer, make_engine, make_llm
from tests.support.oracles import hf_logits, make_hf_model

VOCAB, END = 16, 1
PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [2, 9]]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_hf_model(**MICRO)


@pytest.fixture(scope="module")
def llm(model: Any) -> Iterator[LLM]:
    with make_llm(make_engine(model, has_one_shape=True, max_logprobs=VOCAB)) as made:
        yield made


def log_distributions(model: Any, texts: np.ndarray) -> np.ndarray:
    """Return log-probabilities of the next token, `[text, position, token]`."""
    with torch.no_grad():
        logits = model(torch.tensor(texts).long()).logits
    return torch.log_softmax(logits.double(), -1).numpy()


def test_wide_beam_search_finds_the_best_texts(llm: LLM, model: Any):
    """The expected result is the best of all texts of up to three tokens."""
    (prompt, _), most = PROMPTS, 3
    tails = np.array(list(itertools.product(range(VOCAB), repeat=most)))
    texts = np.concatenate([np.tile(prompt, (len(tails), 1)), tails], axis=1)
    distributions = log_distributions(model, texts)[:, len(prompt) - 1 : -1]
    each = np.take_along_axis(distributions, tails[..., None], -1)[..., 0]
    ends = np.where((tails == END).any(1), (tails == END).argmax(1) + 1, most)
    totals = {
        tuple(tail[:end].tolist()): float(own[:end].sum())
        for tail, own, end in zip(tails, each, ends, strict=True)
    }

    def score(tokens: tuple[int, ...]) -> float:
        length = len(prompt) + len(tokens) - (tokens[-1] == END)
        return totals[tokens] / length**0.7

    best = sorted(totals, key=score, reverse=True)
    params = BeamSearchParams(
        beam_width=VOCAB ** (most - 1), max_tokens=most, length_penalty=0.7
    )
    (output,) = llm.beam_search(prompt, params)
    # Texts at the end of the list may be swapped if rounding changes nearly equal
    # scores.
    found = [tuple(one.tokens[len(prompt) :]) for one in output.sequences]
    assert len(found) == len(set(found)) == VOCAB ** (most - 1)
    assert found[:20] == best[:20]
    assert any(tokens[-1] == END for tokens in found[:20])
    for one, tokens in zip(output.sequences, found, strict=True):
        assert np.isclose(one.cum_logprob, totals[tokens], rtol=1e-4, atol=1e-4)
    scores = np.array([score(tokens) for tokens in found])
    np.testing.assert_allclose(scores, [score(one) for one in best[:256]], rtol=1e-4)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_beam_search_equals_huggingface(llm: LLM, model: Any, width: int):
    """No text ends, as HuggingFace counts the length of ended texts differently."""
    most = 6
    params = BeamSearchParams(beam_width=width, max_tokens=most, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=1 + width % 2)
    model.generation_config.eos_token_id = None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=most,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ours = [one.tokens for one in output.sequences]
        assert ours == theirs.sequences.tolist()
        if width > 1:
            totals = [one.cum_logprob for one in output.sequences]
            expected = theirs.sequences_scores.numpy() * most
            np.testing.assert_allclose(totals, expected, rtol=1e-4, atol=1e-4)
        best = output.sequences[0]
        assert best.text == StubTokenizer(VOCAB).decode(best.tokens)
        assert best.finish_reason == "length"


def test_beam_search_rejects_invalid_arguments(llm: LLM):
    before = llm.llm_engine.runner.num_launches
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    for wrong in ([2, 99], [2] * 128):
        with pytest.raises(RequestError):
            llm.beam_search([[2, 3], wrong], params)
    assert llm.beam_search([], params) == []
    with pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search("x", SamplingParams())  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search(PROMPTS, params, concurrency_limit=0)
    with pytest.raises(NotImplementedError, match="lora_request"):
        llm.beam_search(PROMPTS, params, lora_request="x")
    assert llm.llm_engine.runner.num_launches == before


def test_concurrent_request_is_unaffected(llm: LLM, model: Any):
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    (waiting,) = llm.enqueue([[2, 5]], params)
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=3))
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.request_id == waiting
    (text,) = output.outputs
    assert hf_logits(model, np.array([2, 5]))[-1].argmax() == text.token_ids[0]

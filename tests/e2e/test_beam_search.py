"""Beam search on a model equals HuggingFace's.

`tests/test_beam_search.py` compares it with a search of all texts.
"""

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

VOCAB = 16
PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [2, 9]]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_hf_model(**MICRO)


@pytest.fixture(scope="module")
def llm(model: Any) -> Iterator[LLM]:
    with make_llm(make_engine(model, has_one_shape=True, max_logprobs=VOCAB)) as made:
        yield made


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

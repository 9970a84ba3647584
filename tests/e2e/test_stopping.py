"""Requests end on the device, or are aborted.

`tests/conformance` checks that texts of every proposer end where plain ones do;
`tests/engine/test_llm_engine.py` tests stop strings at every offset.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of
from tests.support.oracles import hf_logits

LENGTH = 40
# Tokens that are frequent in the target's texts: as stop tokens, they end texts.
FREQUENT = [45, 41]
STOPS = [pair.EOS, *FREQUENT]


def greedy(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(temperature=0, max_tokens=LENGTH)
    return SamplingParams(**(values | changes))


@functools.cache
def hf_text(prompt: tuple[int, ...], min_tokens: int) -> list[int]:
    """Return HuggingFace's greedy text, with `STOPS` masked before `min_tokens`."""
    known = list(prompt)
    while len(known) < len(prompt) + LENGTH:
        logits = hf_logits(pair.target(), np.array(known))[-1]
        if len(known) < len(prompt) + min_tokens:
            logits[STOPS] = -np.inf
        known.append(int(logits.argmax()))
        if known[-1] in STOPS:
            break
    return known[len(prompt) :]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.prompts(10)


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    """Return greedy texts that are not ended by end tokens."""
    return tokens_of(generate(pair.plain_engine(), prompts, greedy(ignore_eos=True)))


def test_stop_ids_are_masked_until_min_tokens(prompts):
    """Target and draft model mask stop ids, which changes the texts."""
    counts = (0, 6, 17, 0, 6, 17)
    params = [
        greedy(stop_token_ids=FREQUENT, min_tokens=min_tokens) for min_tokens in counts
    ]
    outputs = generate(pair.engine(), prompts[:6], params)
    for prompt, min_tokens, output in zip(prompts, counts, outputs, strict=False):
        (completion,) = output.outputs
        expected = hf_text(tuple(prompt), min_tokens)
        assert list(completion.token_ids) == expected
        if expected[-1] in STOPS:
            reason = None if expected[-1] == pair.EOS else expected[-1]
            assert (completion.finish_reason, completion.stop_reason) == (
                "stop",
                reason,
            )


def test_stop_ids_are_masked_in_seeded_texts_with_and_without_drafts(prompts):
    params = [
        SamplingParams(
            seed=number, max_tokens=30, stop_token_ids=FREQUENT, min_tokens=number
        )
        for number in range(len(prompts))
    ]
    plain = tokens_of(generate(pair.plain_engine(), prompts, params))
    for kind in ("noisy", "same"):
        assert tokens_of(generate(pair.engine(kind), prompts, params)) == plain
    for number, tokens in enumerate(plain):
        assert len(tokens) >= number
        assert not set(STOPS) & set(tokens[: number - 1])


def test_end_token_ends_a_text_unless_it_is_ignored(prompts, texts):
    ended = 0
    outputs = generate(pair.engine("same"), prompts, greedy())
    for output, text in zip(outputs, texts, strict=True):
        (completion,) = output.outputs
        if pair.EOS in text:
            ended += 1
            expected = text[: text.index(pair.EOS) + 1]
            assert completion.finish_reason == "stop"
            assert completion.stop_reason is None
            # The end token is one of the token ids, but is not in the text.
            assert len(completion.text) == len(expected) - 1
        else:
            expected = text
            assert completion.finish_reason == "length"
        assert list(completion.token_ids) == expected
    assert ended >= 3


@pytest.mark.parametrize("when", [0, 1, 2, 3, 5, 9])
def test_abort_leaves_other_requests_alone(when, prompts, texts):
    """Another request gets the row and pages while the aborted launch still runs."""
    engine = pair.engine("noisy")
    params = greedy(ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    for step in range(10_000):
        if step == when:
            engine.abort_request("1")
        if step == when + 4:
            engine.abort_request(["0", "4"])
        if not engine.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in engine.step()}
    for number in (2, 3, 5, 6, 7, 8, 9):
        output = outputs[str(number)]
        assert output.finished
        assert list(output.outputs[0].token_ids) == texts[number]
    engine.scheduler.check_idle()

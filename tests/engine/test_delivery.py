"""Outputs of a round: a plain delta's short way tells what the long way tells."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.delivery import Delivery
from jaxspec.engine.launch import Progress
from jaxspec.engine.metrics import EngineMetrics, Load
from jaxspec.engine.request import Request
from jaxspec.engine.stats import EngineStats
from jaxspec.metrics import Histogram
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import TILE
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.test_input_processor import make
from tests.engine.test_llm_engine import letters, make_fake_engine, run_all, said
from tests.engine.test_output import EXAMPLES, IDS, TOKENIZER, split
from tests.loops import make_config

DELTA = RequestOutputKind.DELTA


class Feed:
    """A delivery, and rounds given to it by hand."""

    def __init__(self):
        config, self.stats = make_config(), EngineStats()
        self.metrics = EngineMetrics(config, self.stats)
        self.delivery = Delivery(config, TOKENIZER, self.metrics, self.stats)

    def open(self, **params: Any) -> Request:
        request = make([2] * 3, max_tokens=20)
        request.params = SamplingParams(max_tokens=20, **params)
        request.request_id = str(len(self.delivery.streams))
        self.delivery.open(request)
        return request

    def push(
        self, request: Request, tokens: list[int], *, is_done: bool = False
    ) -> list[RequestOutput]:
        request.output_token_ids += tokens
        part = Progress(request=request, token_ids=tokens, is_done=is_done)
        return self.delivery.advance([part], _finish)


def _finish(request: Request, reason: str, stop: int | str | None) -> None:
    request.finish_reason, request.stop_reason = reason, stop


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that outputs say but times."""
    return [(output.finished, output.outputs, output.request_id) for output in outputs]


@EXAMPLES
@given(ids=IDS, sizes=st.lists(st.integers(0, 3), max_size=8))
def test_the_short_way_tells_what_the_long_way_tells(ids, sizes):
    ways = []
    for is_steady in (True, False):
        feed = Feed()
        request = feed.open(output_kind=DELTA)
        stream = feed.delivery.streams[request.request_id]
        assert stream.is_steady
        stream.is_steady = is_steady
        rounds = split(ids, sizes)
        outputs = [feed.push(request, tokens) for tokens in rounds]
        outputs.append(feed.push(request, [7, 8], is_done=True))
        ways.append([told(output) for output in outputs])
        texts = [part.text for [*found] in outputs for o in found for part in o.outputs]
        assert "".join(texts) == TOKENIZER.decode([*ids, 7, 8])
    assert ways[0] == ways[1]


@pytest.mark.parametrize(
    ("params", "is_steady"),
    [
        (dict(output_kind=DELTA), True),
        (dict(output_kind=RequestOutputKind.FINAL_ONLY), True),
        (dict(output_kind=RequestOutputKind.CUMULATIVE), False),
        (dict(output_kind=DELTA, stop="x"), False),
        (dict(output_kind=DELTA, logprobs=0), False),
        (dict(output_kind=DELTA, prompt_logprobs=0), False),
        (dict(output_kind=DELTA, extra_args={"return_token_origins": True}), False),
        (dict(output_kind=RequestOutputKind.FINAL_ONLY, stop="x"), False),
    ],
)
def test_only_tokens_and_text_go_the_short_way(params, is_steady):
    feed = Feed()
    request = feed.open(**params)
    assert feed.delivery.streams[request.request_id].is_steady == is_steady


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("has_origins", [False, True])
def test_a_first_token_that_comes_with_several_parts_of_its_prompt(kind, has_origins):
    params = SamplingParams(
        max_tokens=3,
        logprobs=1,
        prompt_logprobs=1,
        output_kind=kind,
        extra_args={"return_token_origins": has_origins},
    )
    engine, _ = make_fake_engine()
    prompt = [2] * (TILE + 7)  # what follows is what follows three tokens
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


def test_tokens_of_one_round_have_waited_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
):
    feed = Feed()
    first, second = feed.open(output_kind=DELTA), feed.open(output_kind=DELTA)
    now = [100.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731 a clock to be set
    monkeypatch.setattr("jaxspec.engine.delivery.time.monotonic", clock)
    feed.push(first, [5])
    now[0] = 101.0
    feed.push(second, [5])
    now[0] = 103.0
    for request in (first, second):
        request.output_token_ids += [6]
    feed.delivery.advance(
        [
            Progress(request=request, token_ids=[6], is_done=False)
            for request in (first, second)
        ],
        _finish,
    )
    (waits,) = (
        metric
        for metric in feed.metrics.read(Load())
        if metric.name == "vllm:inter_token_latency_seconds"
    )
    assert isinstance(waits, Histogram)
    assert (waits.count, waits.sum) == (2, 3.0 + 2.0)
    assert first.stats.num_generation_tokens == 2
    assert first.stats.last_token_ts == second.stats.last_token_ts == 103.0

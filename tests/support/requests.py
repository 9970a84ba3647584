"""Make requests for the scheduler without an engine."""

from typing import Any

from jaxspec.engine.input_processor import (
    InputProcessor,
)
from jaxspec.engine.scheduling.request import Request
from jaxspec.outputs import RequestStateStats
from jaxspec.sampling_params import (
    SamplingParams,
)
from tests.support.loops import make_config
from tests.support.stub_tokenizer import StubTokenizer


def make(prompt: Any = (2, 3, 4), *, config: dict[str, Any] | None = None, **fields):
    """Make a request; keyword arguments are its sampling parameters."""
    made = make_config(**(config or {}))
    intake = InputProcessor(made, StubTokenizer(made.model_config.vocab_size))
    return intake.prepare("0", list(prompt), SamplingParams(**fields)).requests[0]


def make_request(**changes) -> Request:
    values: dict[str, Any] = dict(
        request_id="a",
        prompt=None,
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(),
        max_total=10,
        max_draft_tokens=3,
        seed=(0, 0),
        rule=0,
        stop_ids=(),
        stats=RequestStateStats(),
        spec_metrics=None,
    )
    return Request(**(values | changes))

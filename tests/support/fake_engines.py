"""Engines with a fake device, and their expected texts."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_device import FakeRunner, repeat_truth
from tests.support.loops import make_config
from tests.support.stub_tokenizer import StubTokenizer

EOS = 1


PROMPT = [2, 3, 4]


# Tokens depend on absolute positions: after a prompt of three, the text is 3, 4, 5, ...
TEXT = list(range(2, 14))


def make_fake_engine(
    text: list[int] = TEXT,
    *,
    seed: int = 0,
    engine_seed: int = 0,
    change: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    **changes: Any,
) -> tuple[LLMEngine, FakeRunner]:
    config = change(make_config(seed=engine_seed, **changes))
    runner = FakeRunner(config, repeat_truth(text), seed=seed)
    tokenizer = StubTokenizer(config.model_config.vocab_size)
    return LLMEngine(config, runner=runner, tokenizer=tokenizer), runner


def with_suffix(config: EngineConfig) -> EngineConfig:
    """Return a configuration with suffix drafts and corpora of 8 tokens."""
    keys: dict[str, Any] = SUFFIX_DEFAULTS | {"suffix_decoding_max_corpus_tokens": 8}
    speculative = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=3,
        rejection_sample_method="coupled",
        **keys,
    )
    return dataclasses.replace(config, speculative=speculative, draft_model_config=None)


def run_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def run_one(engine: LLMEngine, params: SamplingParams, prompt: Any = PROMPT) -> Any:
    """Run one request alone; return its completion."""
    engine.add_request("only", prompt, params)
    (outputs,) = run_all(engine).values()
    assert [output.finished for output in outputs][-1]
    assert not any(output.finished for output in outputs[:-1])
    assert_idle(engine)
    return outputs[-1].outputs[0]


def assert_idle(engine: LLMEngine) -> None:
    engine.scheduler.check_idle()
    assert not engine.output_processor.streams
    assert not engine.output_processor.parents


def letters(tokens: list[int]) -> str:
    return StubTokenizer(16).decode(tokens)


def said(count: int, text: list[int] = TEXT) -> list[int]:
    return [text[position % len(text)] for position in range(3, 3 + count)]


def admissions(runner: FakeRunner) -> list[Any]:
    return [entry for plan, _ in runner.plans for entry in plan.admissions]


Use = Callable[[AsyncLLMEngine], Awaitable[Any]]


def serve(use: Use, *, delay_s: float = 0.0, **changes: Any) -> AsyncLLMEngine:
    """Run `use` with an engine with delayed launches; assert that it ends idle."""
    engine, runner = make_fake_engine(num_draft_tokens=3, **changes)
    before_launches(runner, lambda: time.sleep(delay_s))
    serving = AsyncLLMEngine(engine)

    async def run() -> None:
        await use(serving)
        deadline = time.monotonic() + 10
        while await serving.get_num_unfinished_requests():
            assert time.monotonic() < deadline, "requests remain"
            await asyncio.sleep(0.005)

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        serving.shutdown(10)
    assert_idle(engine)
    assert not any(one.collectors for one in serving._drivers)
    return serving


COUNT = 3


def make_engines(delay_s: float = 0.0, **changes: Any) -> list[LLMEngine]:
    engines = []
    for rank in range(COUNT):
        sizes = {"data_parallel_size": COUNT, "data_parallel_rank": rank}
        engine, runner = make_fake_engine(num_draft_tokens=3, **sizes, **changes)
        before_launches(runner, lambda: time.sleep(delay_s))
        engines.append(engine)
    return engines


def before_launches(runner: Any, call: Callable[[], Any]) -> None:
    """Call a function before every launch of a fake runner."""
    launch = runner.launch

    def later(*arguments: Any) -> Any:
        call()
        return launch(*arguments)

    runner.launch = later

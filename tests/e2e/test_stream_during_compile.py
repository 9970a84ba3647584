"""Streams continue while a program is compiled.

On two free cores, no gap between outputs exceeds a second, and the stream keeps 40 % of
its speed. If other processes use the cores, the allowed gap grows in proportion, and
the speed is also compared with the speed beside two busy threads, since a compiler may
use as much time. It is a long suite of its own so that no other tests run meanwhile.
"""

import gc
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.serve.launcher import freeze_heap
from tests.support.engines import users_programs

PROMPT = {"prompt_token_ids": [2, *range(400, 430)]}
STREAM, SPECIAL = "stream", "special"
NUM_CORES = min(2, os.cpu_count() or 1)
MEASURED_S = 5.0
MAX_GAP_S, MIN_SHARE = 1.0, 0.4
# Share of the speed beside busy threads that must remain. It is below 1 because a
# compiler may have more threads, and tracing holds the GIL.
MIN_SHARE_OF_CONTROL = 0.6


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    """Return the bundled pair, with all programs of plain requests compiled."""
    args = EngineArgs(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=5,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        compilation_cache_dir=None,
    )
    with users_programs():
        made = LLMEngine.from_engine_args(args)
    num_compiles = None
    while made.runner.num_compiles != num_compiles:
        num_compiles = made.runner.num_compiles
        made.add_request("plain", PROMPT, greedy(max_tokens=8))
        while made.has_unfinished_requests():
            made.step()
        made.wait_for_programs()
    # From here on, programs are compiled, not loaded from the tests' cache.
    made.runner.cache = ProgramCache(tmp_path_factory.mktemp("programs"))
    freeze_heap()  # a server does this before it serves
    yield made
    made.shutdown()
    gc.unfreeze()
    freeze_heap()  # exclude imports from collections again: see tests/conftest.py


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        **changes,
    )


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Speed and gaps of one part of a stream.

    Attributes:
        share: Share of the cores' time that this process got.
    """

    tokens_per_s: float
    gap_s: float
    share: float


def flow(engine: LLMEngine, is_over: Callable[[list[str]], bool]) -> Flow:
    """Step the engine until `is_over` returns True; return the measurements.

    `is_over` gets the ids of requests with outputs so far.
    """
    seen, num_tokens, gap_s = list[str](), 0, 0.0
    start = last = time.monotonic()
    cpu_s = time.process_time()
    while not is_over(seen):
        for output in engine.step():
            seen.append(output.request_id)
            if output.request_id == STREAM:
                now = time.monotonic()
                gap_s, last = max(gap_s, now - last), now
                num_tokens += len(output.outputs[0].token_ids)
    seconds = time.monotonic() - start
    return Flow(
        tokens_per_s=num_tokens / seconds,
        gap_s=gap_s,
        share=min((time.process_time() - cpu_s) / (seconds * NUM_CORES), 1.0),
    )


def for_a_while(engine: LLMEngine) -> Flow:
    end = time.monotonic() + MEASURED_S
    return flow(engine, lambda _: time.monotonic() > end)


def with_computing_threads(engine: LLMEngine) -> Flow:
    """Measure a stream beside busy threads without the GIL, one for each core."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)

    threads = [threading.Thread(target=compute) for _ in range(NUM_CORES)]
    for thread in threads:
        thread.start()
    try:
        return for_a_while(engine)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.long_suite(name="streams")
def test_stream_continues_during_compile(engine: LLMEngine):
    engine.add_request(STREAM, PROMPT, greedy(max_tokens=None))
    flow(engine, lambda seen: STREAM in seen)
    alone, control = for_a_while(engine), with_computing_threads(engine)
    runner = engine.runner
    num_compiles, compile_s = runner.num_compiles, runner.compile_s
    special = greedy(max_tokens=2, logprobs=1, frequency_penalty=0.5)
    engine.add_request(SPECIAL, PROMPT, special)
    compiling = flow(engine, lambda seen: SPECIAL in seen)
    measured = f"alone {alone}, control {control}, compiling {compiling}"
    print(measured)
    assert runner.num_compiles > num_compiles, "nothing was compiled"
    assert runner.compile_s - compile_s > 1.0, "the program came from a cache"
    assert compiling.gap_s * control.share < MAX_GAP_S, measured
    wanted = MIN_SHARE * alone.tokens_per_s
    lowest = min(wanted, MIN_SHARE_OF_CONTROL * control.tokens_per_s)
    assert compiling.tokens_per_s >= lowest, measured
    engine.abort_request([STREAM, SPECIAL])
    while engine.has_unfinished_requests():
        engine.step()
    engine.wait_for_programs()

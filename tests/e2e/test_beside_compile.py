"""Streams go on while a program is compiled beside them.

On two free cores no gap of a stream is longer than a second, and it keeps 40 % of its
speed. Others may use the cores too: so the gap is counted in the time that this process
got of them, and the speed compared as well with the one beside two threads that do
nothing but compute, which a compiler may do.
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
# Of the speed beside threads that compute: a compiler may have more of them, and holds
# the lock of Python while it traces.
MIN_SHARE_OF_CONTROL = 0.6


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    """The bundled pair, with all that plain requests ask for."""
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
    # What is compiled from here on is not found in the cache of the tests.
    made.runner.cache = ProgramCache(tmp_path_factory.mktemp("programs"))
    freeze_heap()  # as a server does
    yield made
    made.shutdown()
    gc.unfreeze()
    freeze_heap()  # again what all tests have imported: see tests/conftest.py


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        **changes,
    )


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A stretch of a stream.

    Attributes:
        share: Of the cores' time, what this process got.
    """

    tokens_per_s: float
    gap_s: float
    share: float


def flow(engine: LLMEngine, is_over: Callable[[list[str]], bool]) -> Flow:
    """Step until it is over, as told by the requests that have had outputs."""
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


def beside_computing(engine: LLMEngine) -> Flow:
    """Beside threads that need no lock of Python's, one for each core."""
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


@pytest.mark.slow
def test_a_stream_goes_on_beside_a_compile(engine: LLMEngine):
    engine.add_request(STREAM, PROMPT, greedy(max_tokens=None))
    flow(engine, lambda seen: STREAM in seen)
    alone, control = for_a_while(engine), beside_computing(engine)
    runner = engine.runner
    num_compiles, compile_s = runner.num_compiles, runner.compile_s
    special = greedy(max_tokens=2, logprobs=1, frequency_penalty=0.5)
    engine.add_request(SPECIAL, PROMPT, special)
    beside = flow(engine, lambda seen: SPECIAL in seen)
    told = f"alone {alone}, control {control}, beside {beside}"
    print(told)
    assert runner.num_compiles > num_compiles, "there was nothing to compile"
    assert runner.compile_s - compile_s > 1.0, "it was found somewhere"
    assert beside.gap_s * control.share < MAX_GAP_S, told
    wanted = MIN_SHARE * alone.tokens_per_s
    lowest = min(wanted, MIN_SHARE_OF_CONTROL * control.tokens_per_s)
    assert beside.tokens_per_s >= lowest, told
    engine.abort_request([STREAM, SPECIAL])
    while engine.has_unfinished_requests():
        engine.step()
    engine.wait_for_programs()

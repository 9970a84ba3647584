"""Concurrent calls on one `LLM` return the same results as calls one by one."""

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxspec.engine.engine_group import EngineGroup
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import EngineGenerateError
from jaxspec.llm import LLM
from jaxspec.sampling_params import BeamSearchParams, SamplingParams
from tests.support import pair
from tests.support.engines import make_llm, tokens_of
from tests.support.fake_engines import (
    PROMPT,
    assert_idle,
    letters,
    make_engines,
    make_fake_engine,
    said,
)

NUM_THREADS = 8


def engine_of(llm: LLM) -> LLMEngine:
    assert isinstance(llm.llm_engine, LLMEngine)
    return llm.llm_engine


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an `LLM` with drafts and one program, so that batches change no text."""
    with make_llm(pair.own_engine()) as made:
        yield made


@pytest.fixture
def group() -> Iterator[LLM]:
    """Return an `LLM` with several engines on fake devices."""
    with make_llm(EngineGroup(make_engines(delay_s=0.001))) as made:
        yield made


Call = Callable[[LLM], Any]


def generate(number: int) -> Call:
    prompts: list[Any] = [
        {"prompt_token_ids": [2, 5 + (number + one) % 9, 3 + one]}
        for one in range(1 + number % 3)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 + number % 7, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, seed=number),
        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
    ]
    return lambda llm: tokens_of(
        llm.generate(prompts, params[: len(prompts)], use_tqdm=False)
    )


def search(number: int) -> Call:
    prompt: Any = {"prompt_token_ids": [2, 5 + number % 9]}
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    return lambda llm: [
        one.tokens for one in llm.beam_search([prompt], params)[0].sequences
    ]


def enqueue(number: int) -> Call:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def call(llm: LLM) -> Any:
        for last in (3, 4 + number % 9):
            llm.enqueue([{"prompt_token_ids": [2, last]}], params)
        return tokens_of(llm.wait_for_completion(use_tqdm=False))

    return call


def look(_: int) -> Call:
    """Call methods that make no requests, and return their results."""

    def call(llm: LLM) -> Any:
        llm.reset_prefix_cache()
        llm.wait_for_programs()
        llm.llm_engine.abort_request(["none"])
        return llm.llm_engine.load().sleep_level

    return call


def run_all(llm: LLM, calls: list[list[Call]]) -> list[list[Any]]:
    """Run each list of calls in its own thread; return the results by thread."""

    def run(own: list[Call]) -> list[Any]:
        return [call(llm) for call in own]

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.mark.parametrize(
    ("makers", "num_calls"),
    [
        ((generate, search, enqueue, look), 4),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (((generate, search, enqueue, look), 10), ((generate,), 50))
        ),
    ],
)
def test_eight_threads_return_the_results_of_one(
    llm: LLM, makers: tuple[Callable[[int], Call], ...], num_calls: int
):
    calls = [
        [
            makers[(thread + number) % len(makers)](thread * num_calls + number)
            for number in range(num_calls)
        ]
        for thread in range(NUM_THREADS)
    ]
    alone = [[call(llm) for call in own] for own in calls]
    stats = engine_of(llm).stats
    num_draft_tokens = stats.num_draft_tokens
    assert run_all(llm, calls) == alone
    assert stats.num_draft_tokens > num_draft_tokens
    assert_clean(llm)


def assert_clean(llm: LLM) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    assert not (llm._unfinished or llm._finished or llm._failures)
    assert not (llm._enqueued or llm._calls)


def test_calls_share_batches(llm: LLM):
    """Requests of concurrent calls run in the same batches."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stats = engine_of(llm).stats
    before = stats.num_rounds
    llm.generate([{"prompt_token_ids": [2, 5]}], params, use_tqdm=False)
    alone = stats.num_rounds - before
    barrier = threading.Barrier(4)

    def call(number: int) -> None:
        barrier.wait()
        llm.generate([{"prompt_token_ids": [2, number]}], params, use_tqdm=False)

    before = stats.num_rounds
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4, 8)))
    assert stats.num_rounds - before < 2.5 * alone


def test_threads_get_the_texts_of_single_calls(group: LLM):
    calls = [[generate(number) for number in range(5)] for _ in range(NUM_THREADS)]
    alone = [call(group) for call in calls[0]]
    assert run_all(group, calls) == [alone] * NUM_THREADS
    assert_clean(group)


@pytest.mark.parametrize(
    "is_group", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_interrupt_ends_only_its_own_call(
    request: pytest.FixtureRequest, is_group: bool
):
    """Ctrl-C interrupts the main thread, even in the middle of a step."""
    llm: LLM = request.getfixturevalue("group" if is_group else "llm")
    prompts: list[Any] = [{"prompt_token_ids": [2, last]} for last in (5, 6)]
    endless = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    others = [[generate(number)] * 8 for number in (1, 2, 8)]
    expected = [[call(llm) for call in own] for own in others]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for delay_s in (0.003, 0.011, 0.02):
            with ThreadPoolExecutor(1) as pool:
                outputs = pool.submit(run_all, llm, others)
                timer = threading.Timer(delay_s, _thread.interrupt_main)
                with pytest.raises(KeyboardInterrupt):
                    timer.start()
                    while True:
                        llm.generate(prompts, endless, use_tqdm=False)
                assert outputs.result() == expected
    finally:
        signal.signal(signal.SIGINT, before)
    assert_clean(llm)


def test_interrupt_within_a_step_ends_only_the_call_of_its_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """The engine drops all requests, but restarts those of other calls."""
    engine = engine_of(llm)
    others = [[generate(number)] * 4 for number in range(3)]
    expected = [[call(llm) for call in own] for own in others]
    fetch, is_interrupted = engine.runner.fetch, threading.Event()
    main = threading.current_thread()

    def interrupted(result: Any, shape: Any) -> Any:
        unfinished = len(llm._unfinished)
        if threading.current_thread() is main and unfinished > 1:
            is_interrupted.set()
            raise KeyboardInterrupt
        return fetch(result, shape)

    monkeypatch.setattr(engine.runner, "fetch", interrupted)
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(run_all, llm, others)
        with contextlib.suppress(KeyboardInterrupt):
            while not outputs.done():
                generate(0)(llm)
        assert outputs.result() == expected
    assert is_interrupted.is_set()
    assert_clean(llm)


def test_failed_step_raises_in_every_affected_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_of(llm)
    barrier, fetch = threading.Barrier(3), engine.runner.fetch
    has_failed = threading.Event()

    def failing(result: Any, shape: Any) -> Any:
        if len(llm._unfinished) == 3 and not has_failed.is_set():
            has_failed.set()
            raise RuntimeError("the device is gone")
        return fetch(result, shape)

    def call(number: int) -> Any:
        barrier.wait()
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        try:
            prompt: Any = {"prompt_token_ids": [2, number]}
            return len(tokens_of(llm.generate([prompt], params, use_tqdm=False))[0])
        except (RuntimeError, EngineGenerateError) as error:
            return repr(error)

    monkeypatch.setattr(engine.policy, "max_draft_tokens", lambda *_: 0)
    monkeypatch.setattr(engine.runner, "fetch", failing)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(call, range(3)))
    assert has_failed.is_set()
    # Requests that have not been admitted yet continue.
    assert all(one == 60 or "the device is gone" in one for one in results), results
    assert sum("the device is gone" in str(one) for one in results) > 1, results
    assert_clean(llm)


def test_threads_add_and_step_an_engine_by_hand():
    """A thread's step returns the outputs of all requests, also of other threads."""
    engine, _ = make_fake_engine(num_draft_tokens=3)
    texts: dict[str, str] = {}

    def work(thread: int) -> None:
        for number in range(20):
            name = f"{thread} {number}"
            engine.add_request(name, PROMPT, SamplingParams(max_tokens=3 + number))
            while engine.is_unfinished(name):
                found = engine.step()
                texts.update(
                    {
                        one.request_id: one.outputs[0].text
                        for one in found
                        if one.finished
                    }
                )
                engine.abort_request("none")
                engine.load()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    assert texts == {
        f"{thread} {number}": letters(said(3 + number))
        for thread in range(NUM_THREADS)
        for number in range(20)
    }
    assert_idle(engine)

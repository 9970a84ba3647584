"""An `EngineGroup` acts as one engine; each of its engines has a fake device."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.engine_group import EngineGroup
from jaxspec.engine.engine_thread import MAX_FAILURES
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import EngineDeadError, EngineGenerateError, RequestError
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.app import make_app
from jaxspec.serve.settings import ServerSettings
from tests.support.fake_engines import (
    COUNT,
    PROMPT,
    assert_idle,
    before_launches,
    letters,
    make_engines,
    said,
    with_suffix,
)
from tests.support.interrupts import interrupted_at
from tests.support.processes import run_python
from tests.support.serving import COMPLETIONS, TurnsTokenizer


def unfinished(engines: list[LLMEngine]) -> list[int]:
    return [engine.get_num_unfinished_requests() for engine in engines]


def run_all(group: EngineGroup) -> dict[str, str]:
    texts = {}
    while group.has_unfinished_requests():
        for output in group.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
    return texts


def test_requests_go_to_the_least_loaded_engine():
    engines = make_engines()
    group = EngineGroup(engines)
    lengths = {str(number): 3 + number for number in range(10)}
    for name, length in lengths.items():
        group.add_request(name, PROMPT, SamplingParams(max_tokens=length))
    assert unfinished(engines) == [4, 3, 3]
    with pytest.raises(RequestError, match="'4' is already running"):
        group.add_request("4", PROMPT, SamplingParams())
    assert run_all(group) == {name: letters(said(n)) for name, n in lengths.items()}
    assert not group.has_unfinished_requests()
    assert all(engine.stats.num_generated_tokens for engine in engines)
    found = [one for one in group.get_metrics() if one.name == "vllm:prompt_tokens"]
    assert [one.labels["engine"] for one in found] == ["0", "1", "2"]
    group.shutdown()
    for engine in engines:
        assert_idle(engine)


@pytest.mark.parametrize(
    ("method", "stride"),
    [
        ("step", 11),
        pytest.param("get_num_unfinished_requests", 1, marks=pytest.mark.slow),
        pytest.param("step", 1, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_instruction_leaves_no_lock_held(method, stride):
    """Neither the group nor a thread of an engine waits forever afterwards."""
    group, number, is_interrupted = EngineGroup(make_engines(delay_s=0.001)), 0, True
    while is_interrupted:
        number += stride
        for index in range(COUNT):
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            group.add_request(f"{number}-{index}", PROMPT, params)
        if method != "step":
            group.step()
        is_interrupted = interrupted_at(number, getattr(group, method))
        thread = threading.Thread(target=run_all, args=(group,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), number
    assert number > 50
    group.shutdown()


# Main ends while engines step; a step calls a native library, as tokenizers are.
STEPPING = """
import time

from jaxspec.engine.engine_group import EngineGroup
from jaxspec.exit import call_native
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_engines
from tests.support.stub_tokenizer import StubTokenizer

decode = StubTokenizer.decode
StubTokenizer.decode = lambda *some, **named: call_native(decode, *some, **named)
group = EngineGroup(make_engines(delay_s=0.02))
for number in range(6):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    group.add_request(str(number), PROMPT, params)
for _ in range(4):
    group.step()
group._settle()
for engine, thread in group._threads.items():
    group._steps[thread.start(engine.step)] = engine
time.sleep(0.01)  # a step takes at least twice as long
"""
# A call that comes while the interpreter exits.
LATE = """
import atexit

atexit.register(lambda: late())  # before engines register: it runs after theirs

from jaxspec.engine.engine_group import EngineGroup
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_engines

group = EngineGroup(make_engines())
group.add_request("0", PROMPT, SamplingParams(max_tokens=60))

def late():
    try:
        group.step()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("script", "printed"), [(STEPPING, ""), (LATE, "The engine has been shut down")]
)
def test_interpreter_exits_while_engines_have_work(script, printed):
    done = run_python("-c", script, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_engines_step_concurrently():
    engines, meeting = make_engines(), threading.Barrier(COUNT)
    for engine in engines:
        before_launches(engine.runner, lambda: meeting.wait(10))
    group = EngineGroup(engines)
    for number in range(COUNT):
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        group.add_request(str(number), PROMPT, params)
    assert run_all(group) == dict.fromkeys("012", letters(said(40)))
    # No launch ended before every engine had one, so the launches ran concurrently.
    (count,) = {engine.stats.num_rounds for engine in engines}
    assert count >= 10
    group.shutdown()


def test_calls_between_steps_reach_every_engine():
    engines = make_engines(delay_s=0.01)
    group = EngineGroup(engines)
    for name in "abc":
        group.add_request(name, PROMPT, SamplingParams(max_tokens=60))
    group.step()
    with pytest.raises(RequestError, match="3 requests are running"):
        group.sleep()
    assert not group.is_sleeping()
    group.abort_request("b")
    assert unfinished(engines) == [1, 0, 1]
    group.add_request("d", PROMPT, SamplingParams(max_tokens=5))
    assert unfinished(engines) == [1, 1, 1]
    assert not group.reset_prefix_cache()
    assert group.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert [engine.stats.num_preemptions for engine in engines] == [1, 0, 1]
    long, short = letters(said(60)), letters(said(5))
    assert run_all(group) == {"a": long, "c": long, "d": short}
    group.sleep()
    assert [engine.is_sleeping() for engine in engines] == [True] * COUNT
    with pytest.raises(RequestError, match="is asleep"):
        group.add_request("e", PROMPT, SamplingParams())
    group.wake_up()
    assert not group.is_sleeping()
    assert group.reset_prefix_cache()
    group.shutdown()


def test_failed_step_is_reported_and_other_engines_continue():
    engines = make_engines()
    _break_next(engines[1].runner)
    group = EngineGroup(engines)
    for name in "abc":
        group.add_request(name, PROMPT, SamplingParams(max_tokens=9))
    texts, errors = {}, []
    while group.has_unfinished_requests():
        try:
            outputs = group.step()
        except RuntimeError as error:
            errors.append(str(error))
            continue
        texts |= {one.request_id: one.outputs[0].text for one in outputs}
    assert errors == ["boom"]
    assert {texts["a"], texts["c"]} == {letters(said(9))}
    group.shutdown()


def _break_next(runner: Any, count: int = 2) -> None:
    """Make the next launches fail, both with drafts and when retried without them."""
    left = [RuntimeError("boom")] * count

    def fail() -> None:
        if left:
            raise left.pop()

    before_launches(runner, fail)


def served(*, is_idle: bool = True, **changes: Any) -> Any:
    """Make a test of a coroutine function of a served group and its engines."""

    def decorate(use: Any) -> Callable[[], None]:
        def test() -> None:
            engines = make_engines(**changes)
            serving = AsyncLLMEngine(*engines)
            try:
                asyncio.run(asyncio.wait_for(use(serving, engines), 60))
            finally:
                serving.shutdown(10)
            for driver in serving._drivers:
                assert (driver.num_texts, driver.collectors) == (0, {})
            if is_idle:
                for engine in engines:
                    assert_idle(engine)

        return test

    return decorate


async def text_of(serving: AsyncLLMEngine, name: str, count: int = 9, **more: Any):
    params = SamplingParams(max_tokens=count, **more)
    text = None
    async for output in serving.generate(PROMPT, params, name):
        text = output.outputs[0].text
    return text


@served(delay_s=0.005)
async def test_streams_from_several_engines_are_complete(serving, engines):
    asked = [
        asyncio.ensure_future(text_of(serving, str(number), 60))
        for number in range(2 * COUNT)
    ]
    while sum(unfinished(engines)) < 2 * COUNT:
        await asyncio.sleep(0.001)
    assert unfinished(engines) == [2] * COUNT
    with pytest.raises(RequestError, match="'5' is already running"):
        await text_of(serving, "5")
    load = await serving.get_load()
    assert load.num_running + load.num_waiting == 2 * COUNT
    await serving.abort(["2", "3", "unknown"])
    assert sum(unfinished(engines)) == 2 * COUNT - 2
    texts = await asyncio.gather(*asked)
    whole = letters(said(60))
    assert [text == whole for text in texts] == [1, 1, 0, 0, 1, 1]
    await serving.check_health()
    for mode in ("abort", "wait"):
        left = asyncio.ensure_future(text_of(serving, "left", 60))
        while not sum(unfinished(engines)):
            await asyncio.sleep(0.001)
        # The other engines have no pages in use.
        assert not await serving.reset_prefix_cache()
        assert await serving.reset_prefix_cache(reset_running_requests=True)
        await serving.sleep(mode=mode)
        assert ((await left) == whole) == (mode == "wait")
        assert all(engine.is_sleeping() for engine in engines)
        assert await serving.is_sleeping()
        await serving.wake_up()
    assert await serving.reset_prefix_cache()
    assert await text_of(serving, "again") == letters(said(9))


class Warming(LLMEngine):
    """An engine that has compiled no program for requests yet."""

    @property
    def is_ready(self) -> bool:
        return False


@served()
async def test_requests_prefer_engines_with_compiled_programs(serving, engines):
    assert serving.is_ready
    for engine in engines[:-1]:
        engine.__class__ = Warming
    assert serving.is_ready
    names = [str(number) for number in range(COUNT)]
    await asyncio.gather(*(text_of(serving, name) for name in names))
    made = [engine.stats.num_generated_tokens for engine in engines]
    assert made == [0, 0, 9 * COUNT]
    engines[-1].__class__ = Warming
    assert not serving.is_ready
    assert await text_of(serving, "waits") == letters(said(9))


@served(delay_s=0.01)
async def test_each_text_counts_as_a_request_for_the_load(serving, engines):
    params: dict[str, Any] = dict(n=3, temperature=1.0)
    asked = [asyncio.ensure_future(text_of(serving, "many", 60, **params))]
    await asyncio.sleep(0.05)
    asked += [
        asyncio.ensure_future(text_of(serving, str(number), 60)) for number in range(4)
    ]
    while sum(unfinished(engines)) < 7:
        await asyncio.sleep(0.001)
    assert unfinished(engines) == [3, 2, 2]
    await asyncio.gather(*asked)


@served(is_idle=False)
async def test_failed_step_is_recoverable_and_dead_engine_is_not(serving, engines):
    _break_next(engines[0].runner)
    names = [str(number) for number in range(COUNT)]
    asked = [text_of(serving, name, 60) for name in names]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(results[0], EngineGenerateError)
    assert results[1:] == [letters(said(60))] * (COUNT - 1)
    assert not serving.errored
    assert await text_of(serving, "next") == letters(said(9))
    _break_next(engines[0].runner, 2 * MAX_FAILURES)
    while not serving.errored:
        with pytest.raises((EngineGenerateError, EngineDeadError)):
            await text_of(serving, "last")
    assert not serving.is_running
    with pytest.raises(EngineDeadError):
        await serving.check_health()
    with pytest.raises(EngineDeadError):
        await text_of(serving, "later")


@served()
async def test_server_runs_several_engines(serving, engines):
    for engine in engines:
        engine.tokenizer = TurnsTokenizer(16)
    app = make_app(serving, ServerSettings())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        body = {"prompt": PROMPT, "max_tokens": 9}
        asked = [http.post(COMPLETIONS, json=body) for _ in range(2 * COUNT)]
        for answer in await asyncio.gather(*asked):
            assert answer.json()["choices"][0]["text"] == letters(said(9))
        lines = (await http.get("/metrics")).text.splitlines()
        for rank in range(COUNT):
            start = f'vllm:generation_tokens_total{{engine="{rank}",'
            (line,) = (one for one in lines if one.startswith(start))
            assert float(line.split()[-1]) == 18
            start = 'vllm:cache_config_info{block_size="4",cache_dtype="float32"'
            infos = [one for one in lines if one.startswith(start)]
            assert f'engine="{rank}"' in infos[rank]
        response = await http.get("/page/server.json")
        assert response.json()["is_ready"]


def corpora_of(engines: list[LLMEngine]) -> Any:
    """Return the corpora, which all engines have."""
    first, *others = [engine.list_external_corpora() for engine in engines]
    assert others == [first] * len(others)
    return first


@served(change=with_suffix)
async def test_corpora_change_in_all_engines_or_none(serving, engines):
    tables = [engine.runner for engine in engines]
    set_table = tables[1].set_corpora

    def fail(table: Any) -> None:
        raise MemoryError("no room for the table")

    tables[1].set_corpora = fail
    with pytest.raises(MemoryError):
        await serving.add_external_corpus("a", [[2, 3]])
    assert corpora_of(engines) == {}
    assert not tables[0].corpora.any(), "restored"
    tables[1].set_corpora = set_table
    await serving.add_external_corpus("a", [[2, 3]])
    tables[1].set_corpora = fail
    with pytest.raises(MemoryError):
        await serving.remove_external_corpus("a")
    assert corpora_of(engines) == {"a": 2}
    assert tables[0].corpora.any(), "restored"


@served(change=with_suffix)
async def test_concurrent_changes_of_corpora_leave_engines_equal(serving, engines):
    add = engines[1].add_external_corpus

    def add_later(*arguments: Any) -> int:
        time.sleep(0.05)  # the first engine has the corpus already
        return add(*arguments)

    async def remove_soon() -> None:
        while True:
            with contextlib.suppress(RequestError):
                return await serving.remove_external_corpus("a")
            await asyncio.sleep(0.001)

    engines[1].add_external_corpus = add_later
    await asyncio.gather(serving.add_external_corpus("a", [[2]]), remove_soon())
    assert corpora_of(engines) == {}


@served(change=with_suffix)
async def test_changes_of_corpora_leave_threads_for_long_work(serving, engines):
    has_begun, may_continue = threading.Event(), threading.Event()
    make_table = engines[0].runner.corpora_table

    def wait(texts: Any) -> Any:
        has_begun.set()
        assert may_continue.wait(20)
        return make_table(texts)

    engines[0].runner.corpora_table = wait
    first, second = (
        asyncio.ensure_future(serving.add_external_corpus(name, [[2]])) for name in "ab"
    )
    try:
        while not has_begun.is_set():
            await asyncio.sleep(0.001)
        work = serving.run_in_thread(lambda: "done", is_long=True)
        assert await asyncio.wait_for(work, 5) == "done"
        first.cancel()
        await asyncio.sleep(0)
    finally:
        may_continue.set()
    assert await second == 1
    assert corpora_of(engines) == {"a": 1, "b": 1}, "a cancelled change is complete"

"""A script that ends while an engine is working exits with its own status."""

import subprocess
from pathlib import Path

import pytest

from tests.long_suites import members
from tests.support.processes import run_python
from tests.support.programs import quick_environment

MANY = 50  # number of times that each script runs in the long suite

ASYNC = """
import asyncio, sys
from jaxspec import SamplingParams
from jaxspec.engine.arg_utils import AsyncEngineArgs
from jaxspec.engine.async_llm_engine import AsyncLLMEngine

engine = AsyncLLMEngine.from_engine_args(
    AsyncEngineArgs(
        model="jaxspec/tiny-gemma2",
        speculative_config={
            "model": "jaxspec/tiny-gemma2-draft", "num_speculative_tokens": 3
        },
        max_model_len=256,
        max_num_seqs=4,
    )
)

async def generate(max_tokens, num_outputs):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async for output in engine.generate("Once upon a time", params, str(max_tokens)):
        num_outputs -= 1
        if not num_outputs:
            break
"""
LOOP_IS_LEFT = "asyncio.run(generate(200, 3))"
ALL_IS_READ = "asyncio.run(generate(32, -1))"
LLM_IN_THREAD = """
import threading
from jaxspec import LLM, SamplingParams

llm = LLM(
    "jaxspec/tiny-gemma2",
    speculative_config={{
        "model": "jaxspec/tiny-gemma2-draft", "num_speculative_tokens": 3
    }},
    max_model_len=256,
    max_num_seqs=4,
)
has_begun = threading.Event()

def generate():
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for _ in range({num_calls}):
        (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
        has_begun.set()
    print(len(output.outputs[0].token_ids))

threading.Thread(target=generate, daemon={is_daemon}).start()
has_begun.wait()
"""
# When the script ends, a thread runs the tokenizer's C++ code, without the GIL.
TOKENIZES = """
tokenize, text = llm.get_tokenizer().encode, "Once upon a time " * 1000
is_tokenizing = threading.Event()

def tokenize_forever():
    while True:
        tokenize(text)
        is_tokenizing.set()

threading.Thread(target=tokenize_forever, daemon=True).start()
is_tokenizing.wait()
"""
ONE_CALL = LLM_IN_THREAD.format(num_calls=1, is_daemon=False)
MANY_CALLS = LLM_IN_THREAD.format(num_calls=10**6, is_daemon=True)
# These scripts run with an empty program cache.
IS_COMPILING = """
asyncio.run(generate(4, -1))
assert engine.num_warming
"""
FAILS = "\nraise ZeroDivisionError"

SCRIPTS = {
    "loop is left": (ASYNC + LOOP_IS_LEFT, 0),
    "all is read": (ASYNC + ALL_IS_READ, 0),
    "shut down": (ASYNC + ALL_IS_READ + "\nengine.shutdown()", 0),
    "a status": (ASYNC + LOOP_IS_LEFT + "\nsys.exit(7)", 7),
    "an exception": (ASYNC + LOOP_IS_LEFT + FAILS, 1),
    "daemon thread": (MANY_CALLS, 0),
    "tokenizing": (ONE_CALL + TOKENIZES, 0),
    "daemon thread, tokenizing": (MANY_CALLS + TOKENIZES, 0),
    "compiling": (ASYNC + IS_COMPILING, 0),
    "compiling, an exception": (ASYNC + IS_COMPILING + FAILS, 1),
    "compiling, shut down": (ASYNC + IS_COMPILING + "\nengine.shutdown()", 0),
    "compiling, loop is left, an exception": (
        ASYNC + IS_COMPILING + LOOP_IS_LEFT + FAILS,
        1,
    ),
}
# It does two things at once; the slow tests also do each thing alone, and exit while
# programs are compiled.
IN_MAKE_TEST = ("daemon thread, tokenizing",)


def run(script: str, cache: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a script; `cache` is a new folder for its compiled programs."""
    environment = quick_environment()
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    return run_python("-c", script, env=environment, timeout=300)


ONCE = [
    pytest.param(name, 1, marks=() if name in IN_MAKE_TEST else pytest.mark.slow)
    for name in SCRIPTS
]
OFTEN = members("exit", [(name, MANY) for name in SCRIPTS], is_example=lambda _: False)


@pytest.mark.parametrize(("name", "count"), [*ONCE, *OFTEN])
def test_script_exits_with_its_own_status(name: str, count: int, tmp_path: Path):
    script, status = SCRIPTS[name]
    for number in range(count):
        cache = tmp_path / str(number) if name.startswith("compiling") else None
        done = run(script, cache)
        assert done.returncode == status, (number, done.stderr)
        is_failing = script.endswith(FAILS)
        assert ("Traceback" in done.stderr) == is_failing, (number, done.stderr)
        assert ("ZeroDivisionError" in done.stderr) == is_failing, done.stderr


def test_thread_that_outlives_the_main_thread_gets_its_programs(tmp_path: Path):
    """Python waits for non-daemon threads, so the engine must keep running for them."""
    script = LLM_IN_THREAD.format(num_calls=3, is_daemon=False)
    done = run(script.replace("has_begun.wait()", ""), tmp_path)
    assert (done.returncode, done.stdout) == (0, "32\n"), done.stderr

"""Several engines run in one process, and still work after it has forked."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import SamplingParams
from tests.support.engines import (
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
)
from tests.support.processes import run_python

pytestmark = pytest.mark.slow
ROUNDS = 4
PROMPTS = [[2, 3, 4, 5], [7, 8], [11, 4, 9, 9, 1], [6]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)


def texts(engine: LLMEngine) -> list[list[int]]:
    return tokens_of(generate(engine, PROMPTS, [GREEDY, SEEDED, GREEDY, SEEDED]))


def test_engines_in_threads_are_independent():
    """Run engines with different models and sizes in threads."""
    small, large = make_micro(seed=0), make_micro(seed=1, hidden_size=32)
    engines = [
        make_engine(small, make_draft_of(small), num_draft_tokens=3),
        make_engine(large),
    ]
    alone = [texts(engine) for engine in engines]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(len(engines)) as pool:
        for _ in range(ROUNDS):
            assert list(pool.map(texts, engines)) == alone


FORKS = """
import multiprocessing
from jaxspec import LLM, SamplingParams

llm = LLM("jaxspec/tiny-gemma2", max_model_len=128, max_num_seqs=1)
params = SamplingParams(temperature=0, max_tokens=12)
say = lambda: llm.generate("A dragon", params, use_tqdm=False)[0].outputs[0].token_ids
before = say()
fork = multiprocessing.get_context("fork")
for _ in range(3):
    child = fork.Process(target=sum, args=([1, 2],))
    child.start()
    assert say() == before, "while a child runs"
    child.join(60)
    assert child.exitcode == 0, child.exitcode
assert say() == before
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others do not fork")
def test_engine_continues_after_forks():
    """Data loaders fork. The child cannot use the engine, as jax cannot be forked."""
    done = run_python("-c", FORKS, env=None, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"

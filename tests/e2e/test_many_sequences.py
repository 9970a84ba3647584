"""Texts of hundreds of concurrent sequences equal those in small batches.

`make test` runs fewer of them (64) and lowers `MAX_GROUP_BYTES`, so that their logits
are still verified in several groups.
"""

from typing import Any

import numpy as np
import pytest

from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.programs import FIRST_CHUNK
from jaxspec.engine.scheduling.scheduler import Scheduler
from jaxspec.program import target_pass, verify
from jaxspec.program.plan import TILE
from jaxspec.sampling_params import SamplingParams
from tests.support.engines import (
    PROGRAMS,
    OneProgramRunner,
    generate,
    make_engine,
    make_micro,
    tokens_of,
)

FEWER, NUM_SEQS = 64, 256
GROUP_BYTES = 2**13


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 16, random.integers(1, 12)) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.8])),
            seed=number,
            max_tokens=6,
            ignore_eos=True,
            extra_args={"num_speculative_tokens": int(random.integers(6))},
        )
        for number in range(count)
    ]
    return [prompt.tolist() for prompt in prompts], params


@pytest.mark.parametrize(
    ("count", "is_grouped"),
    [
        (FEWER, True),
        pytest.param(NUM_SEQS, True, marks=pytest.mark.slow),
        pytest.param(NUM_SEQS, False, marks=pytest.mark.slow),
    ],
)
def test_hundreds_of_sequences_give_the_same_texts(count, is_grouped, monkeypatch):
    """Greedy and seeded sequences have between 0 and 5 drafts per round."""
    target = make_micro()
    few = make_engine(target, max_num_seqs=8, runner=OneProgramRunner)
    expected = tokens_of(generate(few, *requests(count)))
    if is_grouped:
        for module in (target_pass, verify):
            monkeypatch.setattr(module, "MAX_GROUP_BYTES", GROUP_BYTES)
    engine = make_engine(
        target,
        make_micro(seed=1),
        num_draft_tokens=5,
        max_num_seqs=count,
        num_pages=8 * count,
        max_num_batched_tokens=8 * count,
        runner=OneProgramRunner,
    )
    if is_grouped:
        # In a folder of its own, because a program's key lacks the group size.
        engine.runner.cache = ProgramCache(PROGRAMS / f"groups of {GROUP_BYTES} bytes")
    outputs = generate(engine, *requests(count))
    assert tokens_of(outputs) == expected
    assert engine.stats.num_draft_tokens > count
    assert 0 < engine.stats.acceptance_rate < 1


@pytest.mark.slow
def test_launch_prefills_up_to_the_token_budget(monkeypatch):
    """This budget exceeds the largest program that an engine compiles at its start."""
    random, target = np.random.default_rng(0), make_micro()
    prompts = [random.integers(4, 16, 250).tolist() for _ in range(16)]
    params = [
        SamplingParams(temperature=0.8, seed=number, max_tokens=4, ignore_eos=True)
        for number in range(16)
    ]
    settings: dict[str, Any] = dict(
        max_num_seqs=16, max_model_len=256, num_pages=2048, runner=OneProgramRunner
    )
    few = make_engine(target, max_num_batched_tokens=512, **settings)
    expected = tokens_of(generate(few, prompts, params))
    budget = 2 * FIRST_CHUNK
    engine = make_engine(target, max_num_batched_tokens=budget, **settings)
    read = []
    plan = Scheduler.plan

    def note(scheduler: Scheduler) -> Launch | None:
        launch = plan(scheduler)
        read.append(0 if launch is None else len(launch.plan.tiles))
        return launch

    monkeypatch.setattr(Scheduler, "plan", note)
    assert tokens_of(generate(engine, prompts, params)) == expected
    assert max(read) * TILE == budget

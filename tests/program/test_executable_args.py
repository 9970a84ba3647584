"""Programs take all arrays that they read or change, and no draft model at K = 0."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.executable_args import Arrays, flatten, used_arguments
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.step import speculative_step
from jaxspec.program.wire import PlanLayout
from tests.support import pair
from tests.support.engines import make_engine

PLAIN = StepShape(num_seqs=2, num_levels=0, max_prompt_tokens=0)
DRAFTING = dataclasses.replace(PLAIN, num_levels=3)
WITH_PROMPTS = dataclasses.replace(PLAIN, max_prompt_tokens=32)
GREEDY = dataclasses.replace(PLAIN, features=Features(all_greedy=True))
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "one pass": {"mask_token_id": 1},
    "tree": {"tree": "[(0,), (1,), (0, 0)]"},
    "after n-grams": {"lookup": (2, 1)},
}


@functools.cache
def engine_of(way: str = "chain") -> LLMEngine:
    settings: Any = dict(num_draft_tokens=3) | pair.SETTINGS | WAYS[way]
    return make_engine(pair.target(), pair.draft("noisy"), **settings)


def arrays_of(engine: LLMEngine) -> Arrays:
    """Return the engine's arrays, with a copy of its state."""
    runner = engine.runner
    state = jax.tree.map(jnp.copy, runner.state)
    return Arrays(runner.program.proposers, runner.params, state)


def everything(engine: LLMEngine) -> Any:
    runner: Any = engine.runner
    return (*runner.params, runner.state)


@pytest.mark.parametrize("shape", [PLAIN, GREEDY, WITH_PROMPTS])
@pytest.mark.parametrize("way", WAYS)
def test_unused_arguments_are_neither_read_nor_changed(way: str, shape: StepShape):
    engine = engine_of(way)
    program, arguments = engine.runner.program, everything(engine)
    is_unused = [one.is_unused_without_drafts for one in program.proposers]
    assert is_unused[-1]
    plan = np.zeros(PlanLayout(shape, program.pool).size, np.int32)

    def run(*given: Any) -> Any:
        state, _ = speculative_step(*given, config=program, shape=shape)
        return state.proposers

    traced = jax.make_jaxpr(run)(*arguments, plan).jaxpr
    numbers = jax.tree.unflatten(
        jax.tree.structure((*arguments, plan)), range(len(traced.invars))
    )
    used = {id(one) for equation in traced.eqns for one in equation.invars}
    params, states = (
        [
            id(traced.invars[number])
            for part, unused in zip(parts, is_unused, strict=True)
            if unused
            for number in jax.tree.leaves(part)
        ]
        for parts in (numbers[1], numbers[2].proposers)
    )
    assert len(params + states) > 10
    assert not used & {*params, *states}
    assert [id(one) for one in traced.outvars][-len(states) :] == states


def test_plain_program_takes_the_arguments_of_an_engine_without_drafts():
    with_draft, alone = engine_of(), make_engine(pair.target(), **pair.SETTINGS)
    sizes = [
        [
            [(leaf.shape, leaf.dtype) for leaf in part]
            for part in flatten(
                used_arguments(one.runner.program.proposers, PLAIN, everything(one))
            )
        ]
        for one in (with_draft, alone)
    ]
    assert sizes[0] == sizes[1]
    runner: Any = with_draft.runner
    counts = [
        len(jax.tree.leaves(runner.executable(shape).args_info))
        for shape in (PLAIN, DRAFTING, StepShape.draft_prefill(32))
    ]
    everyone = len(jax.tree.leaves(everything(with_draft))) + 1
    assert counts == [sum(map(len, sizes[0])) + 1, everyone, everyone]


def test_call_replaces_its_donated_arrays():
    arrays, params = arrays_of(engine_of()), engine_of().runner.params
    plan = jnp.zeros((1,), jnp.int32)

    def program(weights: list[Any], given: list[Any], plan: Any) -> Any:
        calls.append((len(weights), len(given)))
        return list(map(other, given)), plan

    calls: list[tuple[int, int]] = []
    before = jax.tree.map(np.asarray, arrays.state)
    drafts = before.proposers
    assert arrays.call(program, PLAIN, plan) is plan
    # The plain program does not take the draft model's pages, so they are unchanged.
    # All other arrays are its results.
    once = jax.tree.map(np.asarray, arrays.state)
    expected = jax.tree.map(other, before)
    expect_equal(once, dataclasses.replace(expected, proposers=drafts))
    arrays.call(program, DRAFTING, plan)
    twice = jax.tree.map(np.asarray, arrays.state)
    expect_equal(twice, jax.tree.map(other, once))
    assert calls[0][0] < calls[1][0] and calls[0][1] < calls[1][1]
    assert calls[1] == tuple(map(len, flatten((*params, arrays.state))))


def other(array: Any) -> Any:
    """Return the array with all bits inverted."""
    values = np.asarray(array)
    if values.dtype == bool:
        return ~values
    return (~values.view(np.uint8)).view(values.dtype)


def expect_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for found, expected in zip(
        jax.tree.leaves(one), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [PLAIN, DRAFTING])
def test_interrupted_call_leaves_a_consistent_state(shape: StepShape):
    arrays = arrays_of(engine_of())
    before = jax.tree.leaves(arrays.state)

    def program(weights: list[Any], given: list[Any], plan: Any) -> Any:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        arrays.call(program, shape, None)
    after = jax.tree.leaves(arrays.state)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert not arrays.is_state_consumed
    after[0].delete()
    assert arrays.is_state_consumed

"""Compiled programs copy no pages or weights, and run no parts that are not needed.

Whole programs are traced, `step_context` included. `tests/e2e` tests results.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.plan import Features, StepShape
from jaxspec_kernels import write_kv_pages
from tests.support import pair
from tests.support.engines import make_engine
from tests.support.oracles import make_hf_model
from tests.support.programs import READERS_COMPILER, USERS_COMPILER
from tests.support.step_programs import (
    PAGE_SHAPES,
    SHARDED,
    check_program,
    instructions,
    materialized,
    num_bytes,
    num_parameters,
)

LOOPED = StepShape(
    num_seqs=2,
    num_levels=3,
    max_prompt_tokens=0,
    max_rounds=4,
    features=Features(all_greedy=True),
)
# Sampled, with prompts. Together with the first, it covers all parts of a round.
SAMPLED = StepShape(num_seqs=1, num_levels=3, max_prompt_tokens=32)
# All features but grammars.
FEATURES = Features(has_controls=True, num_logprobs=5, num_prompt_logprobs=3)
QUICK = LOOPED, SAMPLED
SHAPES = [
    *QUICK,
    dataclasses.replace(LOOPED, features=Features()),
    *(
        StepShape(num_seqs=seqs, num_levels=drafts, max_prompt_tokens=chunk)
        for seqs in (1, 2)
        for drafts in (0, 3)
        for chunk in (0, 32)
        if (seqs, drafts, chunk) != (1, 3, 32)
    ),
    *(
        StepShape(num_seqs=1, num_levels=n, max_prompt_tokens=0, max_rounds=4)
        for n in (0, 3)
    ),
    *(
        StepShape(num_seqs=2, num_levels=3, max_prompt_tokens=n, features=FEATURES)
        for n in (0, 32)
    ),
]


@functools.cache
def users_engine(dtype: str) -> LLMEngine:
    """Return an engine with users' compile options."""
    engine = make_engine(
        pair.target(),
        pair.draft("noisy"),
        num_draft_tokens=3,
        dtype=dtype,
        **pair.SETTINGS,
    )
    engine.runner.compiler_options = READERS_COMPILER
    return engine


@pytest.mark.slow
def test_tested_programs_equal_users_programs():
    texts = []
    for options in (READERS_COMPILER, USERS_COMPILER):
        runner: Any = users_engine.__wrapped__("float32").runner
        runner.compiler_options = options
        text = runner.executable(
            dataclasses.replace(SAMPLED, num_seqs=2, max_prompt_tokens=0)
        ).as_text()
        # Ignore source locations, which differ if a program comes from the cache.
        text = re.sub(r"(?m)^(File|Function|Stack)\w+\n(\d+ .*\n)+", "", text)
        texts.append(re.sub(r"metadata=\{[^}]*\}", "", text))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=marks, id=f"{shape.name}-{dtype}")
        for shape in SHAPES
        for dtype in ("float32", "bfloat16")
        for marks in [[pytest.mark.slow] * (shape not in QUICK or dtype == "bfloat16")]
    ],
)
def test_pages_and_weights_are_never_copied(shape, dtype):
    """A CPU stores bfloat16 pages as uint16."""
    engine = users_engine(dtype)
    stored = {"float32": jnp.float32, "bfloat16": jnp.uint16}[dtype]
    assert engine.runner.state.target_pages[0].dtype == stored
    check_program(engine, shape)


TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"


@pytest.mark.slow
@pytest.mark.parametrize("num_seqs", [1, 2])
@pytest.mark.parametrize(
    ("num_drafts", "keys"),
    [
        pytest.param(3, {"num_side_leaves": 1}, id="leaves"),
        pytest.param(6, {"tree": TREE}, id="tree"),
    ],
)
def test_kv_of_accepted_tree_paths_are_moved_in_place(num_drafts, keys, num_seqs):
    """Pages of the target, and of a draft model with its own tree, are not copied."""
    engine = make_engine(
        pair.target(),
        pair.draft("noisy"),
        num_draft_tokens=num_drafts,
        **keys,
        **pair.SETTINGS,
    )
    engine.runner.compiler_options = READERS_COMPILER
    shapes = [
        shape
        for shape in engine.scheduler.shapes.all()
        if (shape.num_seqs, shape.max_prompt_tokens) == (num_seqs, 0)
        if not shape.tree.is_chain
    ]
    assert shapes
    check_program(engine, shapes[0])


def test_answers_are_stored_in_place():
    """The cache of answers and the pages of tokens are updated in place."""
    engine = make_engine(
        pair.target(),
        num_draft_tokens=4,
        rule="coupled",
        suffix={"max_cached_requests": 8},
        **pair.SETTINGS,
    )
    engine.runner.compiler_options = READERS_COMPILER
    runner: Any = engine.runner
    [cache] = jax.tree.leaves(runner.state.proposers)
    kept = {cache.shape, runner.state.token_pages.shape}
    shapes = {shape.name: shape for shape in engine.scheduler.shapes.all()}
    executable = runner.executable(shapes["2x4_greedy"])
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(runner.state)
    program = executable.as_text()
    written = {one.shape for one in instructions(program) if one.opcode == "scatter"}
    assert kept <= written, "the check sees no cache of answers"
    assert materialized(program, kept) == []


def test_common_program_has_no_controls():
    runner: Any = users_engine("float32").runner
    controls = runner.state.rows.controls
    shapes = {leaf.shape for leaf in (controls.bias_ids, controls.bad_words)}
    program = runner.executable(SAMPLED).as_text()
    used = {one.opcode for one in instructions(program) if one.shape in shapes}
    assert used == {"parameter"}


def test_the_check_finds_a_copy():
    pages = jnp.zeros(max(PAGE_SHAPES, key=len), jnp.float32)
    rows, slots = jnp.ones((3, 1, 8), jnp.float32), jnp.arange(3, dtype=jnp.int32)

    def program(**options: Any) -> str:
        written = jax.jit(write_kv_pages, **options).lower(pages, rows, rows, slots)
        return str(written.compile(READERS_COMPILER).as_text())

    assert materialized(program(donate_argnums=0), PAGE_SHAPES) == []
    (copy,) = materialized(program(), PAGE_SHAPES)
    assert copy.opcode == "copy"


@pytest.mark.parametrize("num_seqs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_plain_program_excludes_the_draft_model(num_seqs):
    runner: Any = pair.engine().runner
    shape = StepShape(num_seqs=num_seqs, num_levels=0, max_prompt_tokens=0)
    target, draft, state, pages = (
        len(jax.tree.leaves(tree))
        for tree in (*runner.params, runner.state, runner.state.proposers)
    )
    program = runner.executable(shape).as_text()
    assert num_parameters(program) == target + state - pages + 1
    drafting = StepShape(num_seqs=num_seqs, num_levels=3, max_prompt_tokens=0)
    program = runner.executable(drafting).as_text()
    assert num_parameters(program) == target + draft + state + 1
    plain: Any = pair.plain_engine().runner
    costs = [one.executable(shape).cost_analysis() for one in (plain, runner)]
    assert costs[0]["flops"] == costs[1]["flops"] > 0


@pytest.mark.parametrize(("shards", "draft_shards"), [(2, 1), (8, 2), (8, 8)])
def test_models_and_pages_are_split_over_devices(shards, draft_shards):
    """`tests/conformance` tests that texts are the same."""
    target, draft = make_hf_model(seed=3, **SHARDED), make_hf_model(seed=4, **SHARDED)
    engine = make_engine(
        target,
        draft,
        num_draft_tokens=3,
        tensor_parallel_size=shards,
        draft_tensor_parallel_size=draft_shards,
        **pair.settings(max_num_seqs=3),
    )
    target_params, (draft_params,) = engine.runner.params
    assert draft_params is not None
    assert num_shards(target_params["embedding"].values) == shards
    assert num_shards(draft_params["embedding"].values) == draft_shards
    pages = engine.runner.state.target_pages[0]
    assert isinstance(pages, jax.Array) and num_shards(pages) == shards


def num_shards(array: jax.Array) -> int:
    """Return the number of different parts into which an array is split."""
    return array.size // array.addressable_shards[0].data.size

"""Inspect compiled steps: their arguments, and the arrays that they write to memory."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.executable_args import used_arguments
from jaxspec.program.plan import StepShape
from tests.support import pair

PAGE_SHAPES = {
    (pair.SETTINGS["num_pages"], pair.SETTINGS["page_size"], 2, 8),
    (pair.SETTINGS["num_pages"] * pair.SETTINGS["page_size"], 2, 8),
}


# Operations that only rename values and compute nothing.
FREE = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional"}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program."""

    computation: str
    shape: tuple[int, ...]
    opcode: str
    text: str


def instructions(program: str) -> list[Instruction]:
    """Parse a program's text; return the instructions whose result is one array."""
    found, computation = [], ""
    for line in program.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if header:
            computation = header[1]
        value = re.match(r"\s+(?:ROOT )?%\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if value:
            shape = tuple(int(size) for size in value[1].split(",") if size)
            found.append(Instruction(computation, shape, value[2], line.strip()))
    return found


def materialized(program: str, shapes: set[tuple[int, ...]]) -> list[Instruction]:
    """Return the instructions that write a whole array of one of the shapes to memory.

    Values inside a fusion are not materialized; a scatter, or a fusion around one,
    writes rows into its operand.
    """
    every = instructions(program)
    fused = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", program))
    scatters = {one.computation for one in every if one.opcode == "scatter"}

    def is_scatter(one: Instruction) -> bool:
        called = re.search(r"calls=%([\w.-]+)", one.text)
        is_around = one.opcode == "fusion" and called and called[1] in scatters
        return bool(one.opcode == "scatter" or is_around)

    return [
        one
        for one in every
        if one.shape in shapes
        and one.computation not in fused
        and one.opcode not in FREE
        and not is_scatter(one)
    ]


def num_parameters(program: str) -> int:
    entry = program[program.index("\nENTRY") :]
    return len(re.findall(r" parameter\(\d+\)", entry))


def weight_shapes(params: Any) -> set[tuple[int, ...]]:
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim >= 2}
    return {form for shape in shapes for form in itertools.permutations(shape)}


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def written_in_c(program: str) -> set[tuple[int, ...]]:
    """Return the shapes of C++ operations' results, except the residual stream."""
    calls = re.findall(r"= \((.*?)\) custom-call\(.*jaxspec_attention_block", program)
    sizes = {one for call in calls for one in re.findall(r"\w+\[([\d,]+)\]", call)}
    return {tuple(map(int, one.split(","))) for one in sizes}


def check_program(engine: LLMEngine, shape: StepShape) -> str:
    """Assert that a compiled program copies no weights or pages; return its text."""
    runner: Any = engine.runner
    executable = runner.executable(shape)
    # Every array of the state is updated in place: pages and rows.
    memory = executable.memory_analysis()
    arguments = (*runner.params, runner.state)
    *_, state = used_arguments(runner.program.proposers, shape, arguments)
    assert memory.alias_size_in_bytes == num_bytes(state)
    program = executable.as_text()
    pages = (*runner.state.target_pages, *jax.tree.leaves(runner.state.proposers))
    assert {leaf.shape for leaf in pages} < PAGE_SHAPES
    scatters = [one for one in instructions(program) if one.opcode == "scatter"]
    written = {one.shape for one in scatters} | written_in_c(program)
    assert written & PAGE_SHAPES, "the check finds no pages"
    assert materialized(program, PAGE_SHAPES) == []
    weights = weight_shapes(runner.params)
    assert {3, 4} & set(map(len, weights)), "the check finds no panels"
    assert materialized(program, weights) == []
    return str(program)


SHARDED: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=4,
    query_pre_attn_scalar=8,
    sliding_window=8,
    # Gate and up matrices are split in whole blocks of 128 columns, so eight shards
    # need eight blocks.
    intermediate_size=1024,
)

"""Programs have narrow target passes for rounds with few drafts, and copy nothing."""

import functools
import re
from typing import Any

import pytest

from jaxspec.program.plan import Features, StepShape
from jaxspec.program.target_pass import FEW
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_engine,
    tokens_of,
)
from tests.support.programs import READERS_COMPILER
from tests.support.step_programs import check_program

LOOKUP = (5, 5)
GREEDY = Features(all_greedy=True)

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def make_lookup_engine(**changes):
    drafts = dict(num_draft_tokens=pair.NUM_DRAFT, lookup=LOOKUP) | changes
    engine = make_engine(pair.target(), **pair.settings(**drafts))
    engine.runner.compiler_options = READERS_COMPILER
    return engine


@functools.cache
def engine_of(dtype: str = "float32"):
    return make_lookup_engine(dtype=dtype)


ALL = Features(num_logprobs=5, has_controls=True)


@pytest.mark.parametrize(
    ("num_seqs", "features", "dtype"),
    [
        (1, GREEDY, "float32"),
        slow(1, Features(), "float32"),
        slow(2, Features(), "float32"),
        slow(2, ALL, "float32"),
        slow(2, Features(), "bfloat16"),
    ],
)
def test_both_forms_write_pages_in_place(num_seqs, features, dtype):
    shape = StepShape(
        num_seqs=num_seqs,
        num_levels=pair.NUM_DRAFT,
        max_prompt_tokens=0,
        features=features,
    )
    entry = entry_of(check_program(engine_of(dtype), shape))
    if features != ALL:
        assert " conditional(" not in entry
        assert len(set(re.findall(r" while\(.*body=%([\w.-]+)", entry))) == 2


@pytest.mark.parametrize(
    ("chunk", "features"), [(0, GREEDY), slow(0, Features()), slow(32, Features())]
)
def test_no_products_outside_of_the_two_forms(chunk, features):
    """The wide and the narrow pass contain all matrix products of the program."""
    shape = StepShape(
        num_seqs=1,
        num_levels=pair.NUM_DRAFT,
        max_prompt_tokens=chunk,
        features=features,
    )
    runner: Any = engine_of().runner
    program = runner.executable(shape).as_text()
    assert " dot(" in program and '"jaxspec_multiply"' in program
    assert has_products(program, entry_of(program)) == (chunk > 0)


@pytest.mark.parametrize("features", [GREEDY, slow(Features())])
def test_programs_for_many_drafts_have_a_narrow_pass(features):
    """Suffix proposers may find few drafts, and only the device knows how many."""
    count = 2 * FEW + 1
    engine = make_lookup_engine(num_draft_tokens=count, lookup=None, suffix={})
    shape = StepShape(
        num_seqs=1, num_levels=count, max_prompt_tokens=0, features=features
    )
    program = check_program(engine, shape)
    entry = entry_of(program)
    assert " conditional(" not in entry
    assert len(set(re.findall(r" while\(.*body=%([\w.-]+)", entry))) == 3
    assert not has_products(program, entry)


def test_a_text_without_repeats_runs_plain_rounds_only():
    """Every round adds one token, without drafts."""
    engine = make_engine(
        pair.target(),
        num_draft_tokens=pair.NUM_DRAFT,
        lookup=LOOKUP,
        runner=OneProgramRunner,
        **pair.SETTINGS,
    )
    prompt = pair.prompts(1, longest=9, seed=4)[0]
    # Sample, because the greedy text repeats one token.
    params = SamplingParams(seed=1, temperature=1.0, max_tokens=12, ignore_eos=True)
    (text,) = tokens_of(generate(pair.plain_engine(), [prompt], params))
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, [prompt], params)) == [text]
    assert all(not result.num_valid_drafts.any() for _, _, result in rounds)
    assert any(shape.num_levels for _, shape, _ in rounds)


def entry_of(program: str) -> str:
    """Return the outermost computation of a compiled program."""
    return program[program.index("\nENTRY") :]


def has_products(program: str, computation: str) -> bool:
    """Return whether a computation has matrix products outside of its loops."""
    called = re.findall(r"(?:calls|to_apply)=%([\w.-]+)", computation)
    inner = (re.search(rf"^%{name} .*?^}}", program, re.M | re.S) for name in called)
    is_here = " dot(" in computation or '"jaxspec_multiply"' in computation
    return is_here or any(has_products(program, found[0]) for found in inner if found)

"""For every mutant (a known bug), its check fails."""

import importlib

import pytest

from tests.long_suites import members
from tests.mutants import MUTANTS
from tests.support.mutation import Mutant, applied, is_killed

# Its check takes less time than most.
EXAMPLE = "stop_inside_run_ignored"


@pytest.mark.parametrize(
    "one",
    members("program_mutants", MUTANTS, is_example=lambda one: one.name == EXAMPLE),
    ids=lambda one: one.name,
)
def test_mutant_is_killed(one: Mutant):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


def test_mutants_are_removed_again():
    for one in MUTANTS:
        module = importlib.import_module(one.module)
        real = getattr(module, one.function)
        with applied(one):
            assert getattr(module, one.function) is not real
        assert getattr(module, one.function) is real


@pytest.mark.long_suite(name="program_mutants")
def test_checks_pass_without_a_mutant():
    for check in dict.fromkeys(one.check for one in MUTANTS):
        check()

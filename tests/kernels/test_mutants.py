"""The tests detect every known bug of a kernel, in every implementation."""

import pytest

from tests.kernels import mutants, rejection_mutants
from tests.long_suites import members
from tests.support.mutation import applied, is_killed


@pytest.fixture
def truth():
    """Compute the expected verdicts before a mutant is applied."""
    rejection_mutants.rounds()


@pytest.mark.parametrize(
    "one",
    members(
        "attention_mutants",
        mutants.MUTANTS,
        is_example=lambda one: one.name == "tpu: missing rescale",
    ),
    ids=lambda one: one.name,
)
def test_mutant_of_attention_is_killed(one):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


@pytest.mark.usefixtures("truth")
@pytest.mark.parametrize(
    "one",
    members(
        "rejection_mutants",
        rejection_mutants.MUTANTS,
        is_example=lambda one: one == rejection_mutants.MUTANTS[0],
    ),
    ids=lambda one: one.name,
)
def test_mutant_of_rejection_sampling_is_killed(one):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(mutants, marks=pytest.mark.long_suite(name="attention_mutants")),
        pytest.param(
            rejection_mutants, marks=pytest.mark.long_suite(name="rejection_mutants")
        ),
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_checks_pass_without_a_mutant(module):
    checks = [*module.CHECKS.values(), *(one.check for one in module.MUTANTS)]
    for check in dict.fromkeys(checks):
        check()


def test_every_implementation_of_attention_has_every_bug():
    names = {one.name for one in mutants.MUTANTS}
    for implementation in mutants.CHECKS:
        assert {f"{implementation}: {bug}" for bug in mutants.BUGS} <= names


def test_mutants_can_be_made():
    """Every mutant's module contains the code that the mutant replaces."""
    for one in (*mutants.MUTANTS, *rejection_mutants.MUTANTS):
        with applied(one):
            pass

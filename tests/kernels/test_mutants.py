"""Every known bug of an attention kernel is seen, in every implementation."""

import pytest

from tests.kernels.mutants import BUGS, CHECKS, MUTANTS
from tests.mutation import applied, is_killed

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_mutant_is_killed(one):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


@slow
def test_checks_pass_without_a_mutant():
    for check in dict.fromkeys(one.check for one in MUTANTS):
        check()


def test_every_implementation_has_every_bug():
    names = {one.name for one in MUTANTS}
    for implementation in CHECKS:
        assert {f"{implementation}: {bug}" for bug in BUGS} <= names


def test_mutants_can_be_made():
    """The code they rewrite is still there."""
    for one in MUTANTS:
        with applied(one):
            pass

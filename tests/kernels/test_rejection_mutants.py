"""Every known bug of rejection sampling is seen by a check of its verdicts."""

import pytest

from tests.batteries import members
from tests.kernels.rejection_mutants import CHECKS, MUTANTS, rounds
from tests.support.mutation import applied, is_killed


@pytest.fixture
def truth():
    """Before a mutant is applied."""
    rounds()


@pytest.mark.usefixtures("truth")
@pytest.mark.parametrize(
    "one",
    members("rejection_mutants", MUTANTS, is_example=lambda one: one == MUTANTS[0]),
    ids=lambda one: one.name,
)
def test_mutant_is_killed(one):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


@pytest.mark.battery(name="rejection_mutants")
def test_checks_pass_without_a_mutant():
    for check in dict.fromkeys([*CHECKS.values(), *(one.check for one in MUTANTS)]):
        check()


def test_mutants_can_be_made():
    """The code they rewrite is still there."""
    for one in MUTANTS:
        with applied(one):
            pass

"""Every known bug of an attention kernel is seen, in every implementation."""

import pytest

from tests.batteries import members
from tests.kernels.mutants import BUGS, CHECKS, MUTANTS
from tests.support.mutation import applied, is_killed

EXAMPLE = "tpu: missing rescale"


@pytest.mark.parametrize(
    "one",
    members("attention_mutants", MUTANTS, is_example=lambda one: one.name == EXAMPLE),
    ids=lambda one: one.name,
)
def test_mutant_is_killed(one):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


@pytest.mark.battery(name="attention_mutants")
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

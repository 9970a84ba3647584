"""Every known bug is seen by its check."""

import jax
import pytest

from tests.mutants import MUTANTS, Mutant, applied, is_killed


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_mutant_is_killed(one: Mutant):
    jax.clear_caches()
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


def test_mutants_are_taken_out_again():
    for one in MUTANTS:
        with applied(one):
            pass
    # Each needs its line, once, in the real source: otherwise this raises.
    for one in MUTANTS:
        with applied(one):
            pass


def test_checks_pass_without_a_mutant():
    for check in dict.fromkeys(one.check for one in MUTANTS):
        check()

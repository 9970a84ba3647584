"""Every known bug is seen by its check."""

import importlib

import pytest

from tests.mutants import MUTANTS
from tests.mutation import Mutant, applied, is_killed


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_mutant_is_killed(one: Mutant):
    assert is_killed(one), f"{one.name} survived: {one.old} -> {one.new}"


def test_mutants_are_taken_out_again():
    for one in MUTANTS:
        module = importlib.import_module(one.module)
        real = getattr(module, one.function)
        with applied(one):
            assert getattr(module, one.function) is not real
        assert getattr(module, one.function) is real


def test_checks_pass_without_a_mutant():
    for check in dict.fromkeys(one.check for one in MUTANTS):
        check()

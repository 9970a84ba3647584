"""Texts follow the target: more counts, and drafts that are all wrong or right.

`test_claims.py` counts fewer texts, of every proposer.
"""

import functools

import pytest

from tests.conformance import distribution, proposers
from tests.conformance.distribution import CONTROLS, RULES, acceptance_of
from tests.support.engines import make_draft_of, with_draft

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAME = "draft model"


@pytest.mark.long_suite(name="counts")
@pytest.mark.parametrize("rule", RULES)
def test_positions_follow_the_target_closely(rule):
    engine = proposers.micro_engine(NAME, is_optimized=True)
    counted = distribution.sample(engine, rule, 10_000)
    levels = distribution.next_logits(distribution.LENGTH)
    for controls, tokens in zip(CONTROLS, counted, strict=True):
        distributions = distribution.distributions_of(levels, controls)
        distribution.check_distribution(tokens, distributions, (rule, controls))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_adverse_draft_changes_the_speed_only(rule):
    """The draft model prefers tokens that the target avoids: few are accepted."""
    engine, target = proposers.micro_engine(NAME), proposers.micro_target()
    adverse = with_draft(engine, make_draft_of(target, num_layers=2, sign=-1.0))
    assert acceptance_of(adverse, rule) < 0.5 * acceptance_of(engine, rule)
    length = distribution.LENGTH - 1
    counted = distribution.sample(adverse, rule, 700, length=length)
    levels = distribution.next_logits(length)
    for controls, tokens in zip(CONTROLS, counted, strict=True):
        distributions = distribution.distributions_of(levels, controls)
        distribution.check_distribution(
            tokens, distributions, ("adverse", rule, controls)
        )


@pytest.mark.parametrize(
    "rule",
    # Greedy and seeded cases are slow: `test_claims.py` tests them on another target.
    ["standard", "block", slow("seeded"), slow("greedy")],
)
def test_target_as_its_own_draft_has_every_draft_accepted(rule):
    engine = with_draft(proposers.micro_engine(NAME), proposers.micro_target())
    assert acceptance_of(engine, rule) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8 draft", "int4 draft"])
def test_quantized_draft_differs(name):
    engines = proposers.micro_engine(name), proposers.micro_engine(NAME)
    rate, whole = (acceptance_of(one, "greedy") for one in engines)
    assert 0.1 < rate < 0.9 and rate != whole

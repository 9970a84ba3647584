"""`enumerated.py` with thousands of texts instead of millions."""

import pytest

from tests.e2e.enumerated import RULES, count, distribution_of_texts, make
from tests.support.engines import make_micro


@pytest.mark.long_suite(name="counts")
def test_texts_follow_the_enumerated_distribution():
    target = make_micro(seed=3)
    engine = make(target, batch=16, num_pages=32)
    distribution = distribution_of_texts(target)
    assert distribution.sum() == pytest.approx(1)
    for rule in RULES:
        found = count(engine, distribution, rule, 4000)
        assert found.num_texts >= 4000
        assert found.num_preemptions > 0
        assert found.num_prefix_hits > 0
        assert 0.1 < found.acceptance_rate < 0.95

"""Acceptance statistics equal sums over a list of rounds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduling.stats import EngineStats

# Rounds: (drafts, accepted, generated); a sequence that has ended generates nothing.
SEQUENCE = st.integers(0, 8).flatmap(
    lambda drafts: st.tuples(
        st.just(drafts), st.integers(0, drafts), st.booleans()
    ).map(lambda one: (one[0], one[1] * one[2], (one[1] + 1) * one[2]))
)
ROUND = st.lists(SEQUENCE, max_size=6)


@given(rounds=st.lists(ROUND))
def test_totals_equal_sums_over_the_rounds(rounds):
    stats = EngineStats()
    for sequences in rounds:
        stats.record_round(*np.array(sequences, np.int64).reshape(-1, 3).T)
    everybody = [one for sequences in rounds for one in sequences]
    drafting = [one for one in everybody if one[0] and one[2]]
    proposed = sum(drafts for drafts, _, _ in drafting)
    kept = sum(accepted for _, accepted, _ in drafting)
    assert stats.num_draft_rounds == len(drafting)
    assert stats.num_draft_tokens == proposed
    assert stats.num_accepted_tokens == kept
    assert stats.num_generated_tokens == sum(new for _, _, new in everybody)
    assert stats.acceptance_rate == (kept / proposed if proposed else 0)
    length = 1 + kept / len(drafting) if drafting else 1
    assert stats.mean_acceptance_length == length
    deepest = max((drafts for drafts, _, _ in drafting), default=0)
    assert stats.accepted_per_position == [
        sum(accepted > position for _, accepted, _ in drafting)
        for position in range(deepest)
    ]

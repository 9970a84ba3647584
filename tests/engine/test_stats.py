"""Acceptance figures equal what a list of rounds says."""

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.stats import EngineStats

ROUND = st.integers(0, 8).flatmap(
    lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts))
)


@given(rounds=st.lists(ROUND))
def test_totals_equal_sums_over_the_rounds(rounds):
    stats = EngineStats()
    for drafts, accepted in rounds:
        stats.record(drafts, accepted, accepted + 1)
    drafting = [(drafts, accepted) for drafts, accepted in rounds if drafts]
    proposed = sum(drafts for drafts, _ in drafting)
    kept = sum(accepted for _, accepted in drafting)
    assert stats.num_draft_rounds == len(drafting)
    assert stats.num_draft_tokens == proposed
    assert stats.num_accepted_tokens == kept
    assert stats.num_generated_tokens == kept + len(rounds)
    assert stats.acceptance_rate == (kept / proposed if proposed else 0)
    length = 1 + kept / len(drafting) if drafting else 1
    assert stats.mean_acceptance_length == length
    deepest = max((drafts for drafts, _ in drafting), default=0)
    assert stats.accepted_per_position == [
        sum(accepted > position for _, accepted in drafting)
        for position in range(deepest)
    ]


def test_a_round_without_drafts_leaves_acceptance_alone():
    stats = EngineStats()
    stats.record(4, 3, 4)
    stats.record(0, 0, 1)
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.75, 4.0)
    assert stats.accepted_per_position == [1, 1, 1, 0]
    assert stats.num_generated_tokens == 5

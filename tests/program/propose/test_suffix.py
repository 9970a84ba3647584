"""Suffix drafts equal those counted in Python, on random and chosen texts."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jaxspec.config.lookups import NUM_MATCHES, WHOLE, draft_limits
from jaxspec.program.propose import ngram_match, suffix
from tests.support.lookups import (
    DRAFTS,
    PAGE_SIZE,
    TABLE_LEN,
    TRUSTING,
    Limits,
    drafts_of,
    search_suffix,
)


def found_in(
    texts: list[list[int]],
    limits: Limits = TRUSTING,
    min_prob: Fraction = Fraction(0),
    *,
    shortest: int = 1,
    num_draft_tokens: int = DRAFTS,
    is_active: list[bool] | None = None,
) -> list[list[int]]:
    """Return the valid drafts of each sequence."""
    most = draft_limits(*limits, num_draft_tokens)
    min_share = math.ceil(min_prob * WHOLE)

    # Call through the modules, in which a mutant replaces the functions.
    def propose(active: Any, pages: Any) -> Any:
        found = ngram_match.find_matches(
            active,
            pages,
            longest=len(most) - 1,
            shortest=shortest,
            num_matches=NUM_MATCHES,
            num_levels=num_draft_tokens,
        )
        return suffix.choose(found, limits=most, min_share=min_share)

    given: Any = dict(num_draft_tokens=num_draft_tokens, is_active=is_active)
    return drafts_of(texts, propose, **given)


# 1, 2, 3 three times, with a different continuation each time.
FORKED = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2]


def check_chosen_suffixes() -> None:
    """Check texts that test one rule each."""
    cases = [
        # No match, or no other match than the token itself.
        ([1, 2, 3, 4], []),
        ([5], []),
        # One draft per matching token.
        ([1, 2, 3, 1], [2]),
        ([1, 2, 3, 4, 1, 2], [3, 4]),
        # The most frequent continuation wins over the latest.
        ([1, 2, 8, 1, 2, 9, 1, 3, 7, 1], [2]),
        # Of equally frequent continuations, the latest wins.
        ([1, 2, 8, 1, 3, 7, 1], [3]),
        # Only the longest matches are counted, even if shorter ones are more frequent.
        ([4, 5, 1, 6, 1, 2, 1, 2, 4, 5, 1], [6, 1, 2]),
        # A continuation that reaches the end of the known tokens starts over.
        ([4, 4, 4, 4], [4, 4, 4]),
        (FORKED, [3, 6]),
    ]
    texts = [text for text, _ in cases]
    assert found_in(texts) == [drafts for _, drafts in cases]
    # One of three matches continues with 6, a share of 1/3.
    assert found_in([FORKED], min_prob=Fraction(1, 3)) == [[3, 6]]
    assert found_in([FORKED], min_prob=Fraction(1, 2)) == [[3]]


def test_chosen_texts_have_the_expected_drafts():
    check_chosen_suffixes()
    texts = [[4, 5, 1, 6, 1, 2, 1, 2, 4, 5, 1], FORKED]
    assert [search_suffix(text) for text in texts] == [[6, 1, 2], [3, 6]]


@pytest.mark.parametrize(
    ("limits", "min_prob", "shortest", "num_draft_tokens"),
    [
        ((24, 1.0), Fraction(1, 10), 1, 16),
        ((24, 1.0), Fraction(0), 4, 8),
        ((12, 2.5), Fraction(1, 3), 1, 4),
        ((6, 0.5), Fraction(1, 2), 1, 3),
        ((33, 4.0), Fraction(1), 2, 16),
        ((2, 1.0), Fraction(0), 1, 1),
    ],
)
def test_drafts_of_random_texts_equal_the_counts(
    limits: Limits, min_prob: Fraction, shortest: int, num_draft_tokens
):
    random = np.random.default_rng(num_draft_tokens + shortest)
    lengths = random.integers(1, TABLE_LEN * PAGE_SIZE + 1, 80)
    vocab = random.integers(2, 6, 80)
    texts = [
        random.integers(0, size, length).tolist()
        for size, length in zip(vocab, lengths, strict=True)
    ]
    # Repetitive texts with a few random changes.
    for text in texts[::3]:
        text[:] = (text[:9] * 9)[: len(text)]
        text[int(random.integers(len(text)))] = 1
    one: dict[str, Any] = dict(shortest=shortest, num_draft_tokens=num_draft_tokens)
    expected = [search_suffix(text, limits, min_prob, **one) for text in texts]
    assert found_in(texts, limits, min_prob, **one) == expected
    counts = {len(drafts) for drafts in expected}
    assert 0 in counts
    assert max(counts) == max(draft_limits(*limits, num_draft_tokens))


def test_inactive_sequences_have_no_drafts():
    texts = [[1, 2, 1], [1, 2, 1]]
    assert found_in(texts, is_active=[True, False]) == [[2], []]

"""Expected tokens over measured seconds, against sums that are written out."""

import numpy as np
import pytest
from jaxspec.engine.scheduling.rates import Form, expected_kept

SECONDS = np.array([0.010, 0.012, 0.016])


def test_drafts_stay_where_all_before_them_do_and_where_they_are_wanted():
    acceptance = np.array([[0.5, 0.8, 0.9], [0.25, 1.0, 1.0]])
    kept = expected_kept(np.array([3, 1]), acceptance, 2)
    assert kept.tolist() == pytest.approx([0.5 + 0.25, 0.5 + 0.5 * 0.8 + 0.25])


def test_tokens_over_seconds():
    kept = np.array([0.75, 1.15])
    expected = [2 / 0.010, 2.75 / 0.012, 3.15 / 0.016]
    assert Form(SECONDS).rates(2, kept) == pytest.approx(expected)


def test_drafts_beside_others_bring_a_share_more():
    kept = np.array([0.75, 1.15])
    found = Form(SECONDS, beside=0.2).rates(2, kept)
    assert found == pytest.approx([200, 2.9 / 0.012, (2 + 1.2 * 1.15) / 0.016])


def test_what_comes_before_drafts_is_no_matter_without_them():
    kept = np.array([0.75, 1.15])
    found = Form(SECONDS).rates(2, kept, again_s=0.004)
    assert found == pytest.approx([200, 2.75 / 0.016, 3.15 / 0.020])


def test_of_a_whole_tree_a_part_is_no_choice():
    found = Form(SECONDS, is_whole=True).rates(1, np.array([0.9, 1.7]))
    assert found[1] == 0 and (found[[0, 2]] > 0).all()

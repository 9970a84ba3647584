"""Logits of draft levels; for sampling, see `tests/mutants.py`."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.propose import draft_sampling
from jaxspec.program.propose.draft_sampling import logits_by_level

LEVELS, ROWS, VOCAB = 3, 4, 5


@pytest.mark.parametrize("is_one_product", [True, False])
def test_logits_of_a_level_are_those_of_its_rows(is_one_product, monkeypatch):
    """Levels are computed one by one if their logits exceed `MAX_GROUP_BYTES`."""
    all_bytes = 4 * LEVELS * ROWS * VOCAB
    most = all_bytes if is_one_product else all_bytes - 1
    monkeypatch.setattr(draft_sampling, "MAX_GROUP_BYTES", most)
    products = []

    def make(rows):
        products.append(rows.shape[0])
        return jnp.tile(rows[:, :1], VOCAB)

    rows = jnp.arange(LEVELS * ROWS * 2.0).reshape(LEVELS, ROWS, 2)
    logits_of = logits_by_level(make, rows, VOCAB)
    for level in range(LEVELS):
        expected = np.tile(rows[level, :, :1], VOCAB)
        np.testing.assert_array_equal(logits_of(level), expected)
    assert products == ([LEVELS * ROWS] if is_one_product else [ROWS] * LEVELS)

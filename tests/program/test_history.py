"""Tokens are written and read by page, and padding writes nothing."""

import jax.numpy as jnp
import numpy as np

from jaxspec.program import history

PAGES, SIZE = 6, 4
# The last sequence shares a page with the first.
TABLE = jnp.array([[2, 0, PAGES], [5, PAGES, PAGES], [2, 1, PAGES]], jnp.int32)


def integers(values) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


def test_write_changes_only_its_positions():
    pages = integers(np.arange(PAGES * SIZE).reshape(PAGES, SIZE))
    position = integers([[3, 4, 5], [0, 1, 2], [3, 4, 5]])
    tokens = integers([[91, 92, 93]] * 3)
    kept = jnp.array([[True, True, False], [True, False, True], [False] * 3])
    after = history.write(pages, TABLE, position, tokens, kept)
    expected = np.array(pages)
    expected[2, 3], expected[0, 0], expected[5, 0], expected[5, 2] = 91, 92, 91, 93
    np.testing.assert_array_equal(after, expected)
    found = history.read(after, TABLE, position)
    np.testing.assert_array_equal(found, [[91, 92, 1], [91, 21, 93], [91, 4, 5]])
    whole = history.whole(after, TABLE)
    np.testing.assert_array_equal(whole[0, :8], [8, 9, 10, 91, 92, 1, 2, 3])
    np.testing.assert_array_equal(whole[1, :4], [91, 21, 93, 23])


def test_positions_without_a_page_or_outside_the_table_are_dropped():
    pages = integers(np.zeros((PAGES, SIZE)))
    position = integers([[-1, 8, 11, 12], [4, 7, -4, 100]])
    tokens, kept = jnp.full((2, 4), 9, jnp.int32), jnp.ones((2, 4), bool)
    after = history.write(pages, TABLE[:2], position, tokens, kept)
    assert not np.asarray(after).any()
    slots = history.slots(TABLE[:2], position, kept, num_pages=PAGES, page_size=SIZE)
    assert (slots == PAGES * SIZE).all()

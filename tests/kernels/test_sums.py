"""A row's sum has the same bits, however many rows there are beside it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.sums import row_sums


@pytest.mark.parametrize("size", [16, 384, 8192])
def test_sums_of_rows_do_not_depend_on_their_number(size):
    rows = np.random.default_rng(size).random((2048, size), np.float32)
    sums: Any = jax.jit(lambda rows: row_sums(jnp.exp(rows)))
    first = np.asarray(sums(rows[:1]))
    np.testing.assert_allclose(first, np.exp(rows[:1]).sum(keepdims=True), rtol=1e-5)
    for count in (2, 3, 4, 9, 11, 16, 64, 129, 2048):
        np.testing.assert_array_equal(np.asarray(sums(rows[:count]))[:1], first)


def test_sums_of_rows_have_the_rows_shape():
    rows = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(row_sums(rows), rows.sum(axis=-1, keepdims=True))
    (single,) = row_sums(jnp.arange(5.0)[None])
    assert single.tolist() == [10.0]
    broken = rows.at[1, 2, 0].set(jnp.nan).at[0, 1, 1].set(jnp.inf)
    is_finite = jnp.isfinite(row_sums(broken))[..., 0]
    assert is_finite.tolist() == [[True, False, True], [True, True, False]]

"""The bits of a row's sum do not depend on other rows."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.cpu import compiler_options
from jaxspec_kernels.sums import row_sums
from tests.support.programs import USERS_COMPILER


def weights(rows: jax.Array) -> jax.Array:
    """Return weights of a softmax.

    XLA fuses their computation in one way for a single row, in another for several
    rows.
    """
    return jnp.exp(rows - rows.max(axis=1, keepdims=True))


MAKERS, SIZES = (jnp.exp, jnp.square, weights), (16, 384, 8192)
# The sums of norms, and a sum of more than `LONG` values.
EXAMPLES = [(jnp.square, 384), (weights, 8192)]


def compiled_sums(make: Any) -> Any:
    options = (compiler_options() or {}) | USERS_COMPILER
    return jax.jit(lambda rows: row_sums(make(rows)), compiler_options=options)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(*one, marks=() if one in EXAMPLES else pytest.mark.slow)
        for one in itertools.product(MAKERS, SIZES)
    ],
)
def test_sums_of_rows_do_not_depend_on_their_number(make, size):
    rows = np.random.default_rng(size).normal(size=(2048, size)).astype(np.float32)
    sums = compiled_sums(make)
    alone = np.concatenate([sums(rows[i : i + 1]) for i in range(129)])
    expected = np.asarray(make(jnp.asarray(rows[:129])), np.float64).sum(axis=1)
    np.testing.assert_allclose(alone[:, 0], expected, rtol=1e-5)
    for count in (2, 3, 4, 9, 11, 16, 64, 129, 2048):
        found = np.asarray(sums(rows[:count]))[:129]
        np.testing.assert_array_equal(found, alone[:count])


def test_sums_of_heads_do_not_depend_on_the_number_of_rows():
    """Each head is normalised alone, and has its own axis."""
    heads = np.random.default_rng(4).normal(size=(300, 4, 256)).astype(np.float32)
    sums = compiled_sums(jnp.square)
    alone = np.concatenate([sums(heads[i : i + 1]) for i in range(33)])
    for count in (2, 3, 5, 16, 33, 300):
        found = np.asarray(sums(heads[:count]))[:33]
        np.testing.assert_array_equal(found, alone[:count])
    one_axis = np.asarray(sums(heads[:33].reshape(-1, 256)))
    np.testing.assert_array_equal(one_axis, alone.reshape(-1, 1))


def test_sums_of_rows_have_the_rows_shape():
    rows = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(row_sums(rows), rows.sum(axis=-1, keepdims=True))
    (single,) = row_sums(jnp.arange(5.0)[None])
    assert single.tolist() == [10.0]
    broken = rows.at[1, 2, 0].set(jnp.nan).at[0, 1, 1].set(jnp.inf)
    is_finite = jnp.isfinite(row_sums(broken))[..., 0]
    assert is_finite.tolist() == [[True, False, True], [True, True, False]]

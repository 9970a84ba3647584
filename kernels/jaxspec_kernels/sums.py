"""Sums of rows, to the same bits whatever rows are beside them.

How XLA:CPU adds up a row depends on how many rows there are and on what it fuses the
sum with: from 11 rows of 384 on, other bits come out. A product with a matrix of ones
has one order for a row, with any number of rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Of the product, at least: for a single column or row XLA:CPU takes another form of
# product, which adds up in another order.
COLUMNS, MIN_ROWS = 4, 2


def row_sums(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    """The sum of every row; on a CPU its bits are those of the row alone."""
    return jax.lax.platform_dependent(rows, cpu=_by_product, default=_plainly)


def _by_product(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    # Not reshaped to two axes: where devices split the second of three (the heads),
    # that would gather all rows on every device.
    wide = jnp.atleast_2d(rows)
    missing = max(0, MIN_ROWS - wide.shape[0])
    wide = jnp.pad(wide, [(0, missing)] + [(0, 0)] * (wide.ndim - 1))
    ones = jnp.ones((COLUMNS, rows.shape[-1]), rows.dtype)
    numbers = (((wide.ndim - 1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(wide, ones, numbers, precision=jax.lax.Precision.HIGHEST)
    return sums[: len(wide) - missing, ..., :1].reshape(*rows.shape[:-1], 1)


def _plainly(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    return rows.sum(axis=-1, keepdims=True)

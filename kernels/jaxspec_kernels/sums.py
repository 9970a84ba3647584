"""Sums of rows whose bits do not depend on other rows.

XLA:CPU's order of summation depends on the number of rows and on the operations it
fuses the sum with: from 11 rows of 384 on, the bits change. A product with a matrix of
ones adds up a row in one order, with any number of rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Minimum number of columns and of rows of the product. With a single one, XLA:CPU uses
# another routine, which adds up in another order.
COLUMNS, MIN_ROWS = 4, 2
# From jax 0.11 on, XLA:CPU splits a sum of 8,191 values, but not of 8,000, if there are
# at least 96 rows and fewer than 16 columns.
LONG, LONG_COLUMNS = 4096, 16 if jax.__version_info__ >= (0, 11) else COLUMNS


def row_sums(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    """Return the sum of every row; on CPU its bits depend on that row only."""
    return jax.lax.platform_dependent(rows, cpu=_by_product, default=_plainly)


def _by_product(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    # Keep the axes: if devices split the second of three (the heads), a reshape to two
    # axes would gather all rows on every device.
    wide = jnp.atleast_2d(rows)
    missing = max(0, MIN_ROWS - wide.shape[0])
    wide = jnp.pad(wide, [(0, missing)] + [(0, 0)] * (wide.ndim - 1))
    columns = LONG_COLUMNS if rows.shape[-1] >= LONG else COLUMNS
    ones = jnp.ones((columns, rows.shape[-1]), rows.dtype)
    numbers = (((wide.ndim - 1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(wide, ones, numbers, precision=jax.lax.Precision.HIGHEST)
    return sums[: len(wide) - missing, ..., :1].reshape(*rows.shape[:-1], 1)


def _plainly(rows: Float[Array, "... number"]) -> Float[Array, "... 1"]:
    return rows.sum(axis=-1, keepdims=True)

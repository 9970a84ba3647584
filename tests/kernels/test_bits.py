"""Pools store keys and values as the bits of floats, or as 8-bit numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import paged_attention, write_kv_pages
from jaxspec_kernels.bits import ScaledPages, from_storage, storage_dtype, to_storage

UINT16, UINT8 = jnp.zeros(0, jnp.uint16), jnp.zeros(0, jnp.uint8)
INT8 = ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0))
FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "platform", "expected"),
    [
        (jnp.bfloat16, "cpu", jnp.uint16),
        (jnp.bfloat16, "tpu", jnp.bfloat16),
        (jnp.bfloat16, "gpu", jnp.bfloat16),
        (jnp.float32, "cpu", jnp.float32),
        (jnp.float32, "tpu", jnp.float32),
        (FP8, "cpu", jnp.uint8),
        (FP8, "tpu", FP8),
        (FP8, "gpu", FP8),
    ],
)
def test_bfloat16_and_fp8_are_stored_as_bits_on_cpu_only(dtype, platform, expected):
    assert storage_dtype(jnp.dtype(dtype), platform) == jnp.dtype(expected)


def test_every_bit_pattern_is_read_as_its_value():
    patterns = np.arange(2**16, dtype=np.uint16)
    # A bfloat16 is the upper half of the float32 with the same value.
    expected = (patterns.astype(np.uint32) << 16).view(np.float32)
    result = np.asarray(from_storage(jnp.asarray(patterns)))
    np.testing.assert_array_equal(result, expected)  # NaN equals NaN here
    assert result.dtype == np.float32


def test_values_are_stored_rounded_to_nearest_even():
    exact = np.float32(1) + np.float32(2) ** -np.arange(4, 12, dtype=np.float32)
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf], np.float32)
    values = np.concatenate([exact, halfway])
    rounded = np.asarray(from_storage(to_storage(jnp.asarray(values), UINT16)))
    np.testing.assert_array_equal(rounded, values.astype(jnp.bfloat16).astype("f4"))
    assert rounded[8] == 1 and rounded[9] == 1 + 2**-6
    assert np.signbit(rounded[10])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float_pools_hold_values(dtype):
    rows = jax.random.normal(jax.random.key(0), (4, 3))
    kept = to_storage(rows, jnp.zeros(0, dtype))
    assert kept.dtype == dtype
    np.testing.assert_array_equal(kept, rows.astype(dtype))
    assert from_storage(kept).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.float8_e5m2])
def test_rejects_other_types_of_pages(dtype):
    """Integer pages would silently truncate keys."""
    pages = jnp.zeros((2, 4, 2, 8), dtype)
    rows, slots = jnp.ones((1, 1, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="or int8 `ScaledPages`"):
        write_kv_pages(pages, rows, rows, slots)
    with pytest.raises(NotImplementedError, match="or int8 `ScaledPages`"):
        paged_attention(
            rows[:, None], pages, jnp.zeros((1, 2), jnp.int32), slots + 1, scale=1.0
        )


def test_fp8_rounds_to_nearest_even_and_saturates():
    kinds = np.concatenate([np.geomspace(1e-4, 500, 999), [0, 464, 1e30, np.inf]])
    values = np.concatenate([kinds, -kinds]).astype(np.float32)
    found = np.asarray(from_storage(to_storage(jnp.asarray(values), UINT8)))
    expected = np.clip(values, -448, 448).astype(FP8).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    assert found[-1] == -448
    assert np.isnan(from_storage(to_storage(jnp.array([jnp.nan]), UINT8)))


def test_int8_error_is_at_most_half_a_step():
    rows = np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32)
    rows *= np.geomspace(1e-6, 1e6, 15).reshape(5, 3, 1)
    rows[1, 2] = 0
    kept = to_storage(jnp.asarray(rows), INT8)
    assert kept.values.dtype == jnp.int8 and kept.scales.shape == (5, 3)
    largest = np.abs(rows).max(axis=2)
    np.testing.assert_allclose(kept.scales, largest / 127, rtol=1e-6)
    off = np.abs(np.asarray(from_storage(kept)) - rows).max(axis=2)
    assert (off <= 0.501 * largest / 127).all()
    # The row has the same bits when it is written alone: they do not depend on other
    # tokens.
    alone = to_storage(jnp.asarray(rows[3:4]), INT8)
    np.testing.assert_array_equal(alone.values, kept.values[3:4])
    np.testing.assert_array_equal(alone.scales, kept.scales[3:4])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_row_with_nan_is_nan_in_int8(broken):
    rows = np.ones((2, 4), np.float32)
    rows[0, 1] = broken
    found = np.asarray(from_storage(to_storage(jnp.asarray(rows), INT8)))
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1], 1)


@pytest.mark.parametrize("num_rows", [1, 300])
def test_each_of_many_rows_with_nan_is_nan(num_rows):
    """XLA:CPU's vectorised maximum ignores NaN, so a scale must not rely on it."""
    rows = np.ones((num_rows, 4, 256), np.float32)
    rows[0, 1, 0] = rows[-1, 2, 255] = np.nan
    kept = jax.jit(lambda rows: to_storage(rows, INT8))(jnp.asarray(rows))
    is_broken = np.isnan(np.asarray(kept.scales))
    assert is_broken[0, 1] and is_broken[-1, 2] and is_broken.sum() == 2


def test_float16_pages_are_read():
    key = jax.random.normal(jax.random.key(0), (4, 1, 8))
    table, length = jnp.zeros((1, 1), jnp.int32), jnp.array([4])
    results = []
    for dtype in (jnp.float32, jnp.float16):
        pages = write_kv_pages(jnp.zeros((1, 4, 2, 8), dtype), key, key, jnp.arange(4))
        results.append(paged_attention(key[None, :1], pages, table, length, scale=1.0))
    np.testing.assert_allclose(*results, atol=4e-3)

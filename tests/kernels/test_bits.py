"""Bits of bfloat16 in uint16 go in and come out unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import paged_attention, write_kv_pages
from jaxspec_kernels.bits import from_storage, storage_dtype, to_storage

UINT16 = jnp.dtype(jnp.uint16)


@pytest.mark.parametrize(
    ("dtype", "platform", "expected"),
    [
        (jnp.bfloat16, "cpu", jnp.uint16),
        (jnp.bfloat16, "tpu", jnp.bfloat16),
        (jnp.bfloat16, "gpu", jnp.bfloat16),
        (jnp.float32, "cpu", jnp.float32),
        (jnp.float32, "tpu", jnp.float32),
    ],
)
def test_only_bfloat16_on_cpu_is_kept_as_bits(dtype, platform, expected):
    assert storage_dtype(jnp.dtype(dtype), platform) == jnp.dtype(expected)


def test_every_bit_pattern_comes_out_as_its_value():
    patterns = np.arange(2**16, dtype=np.uint16)
    # A bfloat16 is the upper half of the float32 with the same value.
    expected = (patterns.astype(np.uint32) << 16).view(np.float32)
    result = np.asarray(from_storage(jnp.asarray(patterns)))
    np.testing.assert_array_equal(result, expected)  # NaN equals NaN here
    assert result.dtype == np.float32


def test_values_go_in_rounded_to_nearest_even():
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
    kept = to_storage(rows, jnp.dtype(dtype))
    assert kept.dtype == dtype
    np.testing.assert_array_equal(kept, rows.astype(dtype))
    assert from_storage(kept).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.float8_e4m3fn])
def test_other_types_of_pages_are_refused(dtype):
    """Keys would be cut to whole numbers, in silence."""
    pages = jnp.zeros((2, 4, 2, 8), dtype)
    rows, slots = jnp.ones((1, 1, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="quantised pages are not there yet"):
        write_kv_pages(pages, rows, rows, slots)
    with pytest.raises(NotImplementedError, match="quantised pages are not there yet"):
        paged_attention(
            rows[:, None], pages, jnp.zeros((1, 2), jnp.int32), slots + 1, scale=1.0
        )


def test_float16_pages_are_read():
    key = jax.random.normal(jax.random.key(0), (4, 1, 8))
    table, length = jnp.zeros((1, 1), jnp.int32), jnp.array([4])
    results = []
    for dtype in (jnp.float32, jnp.float16):
        pages = write_kv_pages(jnp.zeros((1, 4, 2, 8), dtype), key, key, jnp.arange(4))
        results.append(paged_attention(key[None, :1], pages, table, length, scale=1.0))
    np.testing.assert_allclose(*results, atol=4e-3)

"""Blocks have the requested rows, cast as by numpy; errors name overflowing tensors."""

import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, tensor
from jaxspec_checkpoints.casting import cast_blocks, find_dtype
from jaxspec_checkpoints.tensor import in_memory

DTYPES = ("float32", "bfloat16", "float16")
VALUES = np.random.default_rng(0).standard_normal((37, 5), np.float32) * 100


@pytest.mark.parametrize("rows", [1, 2, 7, 36, 37, 100])
@pytest.mark.parametrize("block_bytes", [1, 60, 2**25])
def test_blocks_have_the_requested_rows(monkeypatch, rows, block_bytes):
    """The rows are the same for any size of the blocks that are read at a time."""
    monkeypatch.setattr(tensor, "BLOCK_BYTES", block_bytes)
    (source,) = in_memory({"x": VALUES}).values()
    blocks = list(cast_blocks("x", source, dtype=VALUES.dtype, rows=rows))
    assert [start for start, _ in blocks] == list(range(0, 37, rows))
    assert {len(values) for _, values in blocks[:-1]} <= {rows}
    np.testing.assert_array_equal(np.concatenate([each for _, each in blocks]), VALUES)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_values_are_rounded_as_numpy_does(source, target):
    """Infinite and NaN values are kept."""
    edges = np.full((1, 5), [np.inf, -np.inf, np.nan, 1e-30, 1])
    values = np.concatenate([VALUES, edges])
    values = values.astype(find_dtype(source))
    (each,) = in_memory({"x": values}).values()
    blocks = list(cast_blocks("x", each, dtype=find_dtype(target), rows=10))
    found = np.concatenate([rows for _, rows in blocks])
    assert (found.shape, found.dtype.name) == (values.shape, target)
    expected = values.astype(find_dtype(target)).astype(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("float32", "float16", 65520.0),
        ("bfloat16", "float16", -66000.0),
        ("float32", "bfloat16", 3.4e38),
    ],
)
def test_too_large_values_name_the_tensor(source, target, value):
    values = np.ones((4, 3), find_dtype(source))
    values[2, 1] = value
    (each,) = in_memory({"x": values}).values()
    expected = f"'x' holds {values[2, 1]}, too large for {target} .at most"
    with pytest.raises(CheckpointError, match=expected.replace("+", r"\+")):
        list(cast_blocks("x", each, dtype=find_dtype(target), rows=1))


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp16", "", "BFLOAT16"])
def test_rejects_other_types(dtype):
    expected = f"one of float32, bfloat16, float16, got '{dtype}'"
    with pytest.raises(CheckpointError, match=expected):
        find_dtype(dtype)

"""Products with quantized matrices equal those of dequantized ones, in float64."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import grouped_matmul
from jaxspec_kernels.grouped_matmul import gpu, reference

# Groups, features of a group, outputs and rows: several column tiles and rows tiles,
# groups that are no power of two, one that is read in chunks, and a single row.
SHAPES = [(3, 32, 70, 5), (2, 16, 130, 70), (1, 200, 34, 3), (5, 24, 6, 1)]
IMPLEMENTATIONS = {
    "reference": reference.grouped_matmul,
    "gpu": functools.partial(gpu.grouped_matmul, interpret=True),
    # Splits with different numbers of steps, and one without any.
    "gpu, split": functools.partial(
        gpu.grouped_matmul,
        interpret=True,
        tiles=gpu.Tiles(rows=16, outputs=32, chunks=2, splits=4),
    ),
}
LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-127, 127)}
KINDS = [("int4", False), ("uint4", True), ("int8", False), ("int8", True)]


def arguments(kind, shape, *, has_minima):
    groups, size, outputs, rows = shape
    random = np.random.default_rng(size)
    least, largest = LIMITS[kind]
    values = random.integers(least, largest + 1, (groups, size, outputs), np.int8)
    values[0, :2, :2] = [[least, largest], [largest, least]]
    scales = random.normal(size=(*(2,) * has_minima, groups, outputs))
    return (
        jnp.asarray(random.normal(size=(rows, groups * size)), jnp.float32),
        jnp.asarray(values).astype(kind),
        jnp.asarray(scales, jnp.float32),
    )


def _products() -> Iterator[Any]:
    """Yield all combinations; `make test` has each kind, and each shape, once."""
    dtypes = "bfloat16", "float32", "float32", "bfloat16"
    for implementation in IMPLEMENTATIONS:
        quick = (2, 1, 3, 0) if implementation == "gpu, split" else (1, 3, 0, 2)
        for kind, own in zip(KINDS, quick, strict=True):
            for number, shape in enumerate(zip(SHAPES, dtypes, strict=True)):
                marks = [pytest.mark.slow] * (number != own)
                yield pytest.param(implementation, *kind, *shape, marks=marks)


@pytest.mark.parametrize(
    ("implementation", "kind", "has_minima", "shape", "dtype"), [*_products()]
)
def test_products_equal_float64(implementation, kind, has_minima, shape, dtype):
    inputs, values, scales = arguments(kind, shape, has_minima=has_minima)
    inputs = inputs.astype(dtype)
    numbers = np.asarray(values.astype(jnp.float32), np.float64)
    of_scales = np.asarray(scales, np.float64).reshape(-1, *scales.shape[-2:])
    numbers = numbers * of_scales[0][:, None]
    if has_minima:
        numbers = numbers + of_scales[1][:, None]
    rows = np.asarray(inputs.astype(jnp.float32), np.float64)
    expected = rows @ numbers.reshape(rows.shape[1], -1)
    found = IMPLEMENTATIONS[implementation](inputs, values, scales)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max() * 4)


def test_tiles_fill_a_gpu():
    """One row of a small matrix is split; no split is shorter than 256 features."""
    choose = functools.partial(gpu.choose_tiles, itemsize=2, is_packed=True)
    tiles = choose((1, 28, 128), 4096)
    assert (tiles.rows, tiles.splits) == (16, 12)
    assert choose((1, 4, 128), 4096).splits == 2
    assert choose((2048, 28, 128), 4096).splits == 1


@pytest.mark.parametrize(
    ("inputs", "scales"), [((2, 48), (2, 8)), ((2, 32), (2, 6)), ((2, 32), (3, 2, 8))]
)
def test_rejects_shapes_that_do_not_fit(inputs, scales):
    values = jnp.zeros((2, 16, 8), jnp.int8)
    message = f"inputs have shape {inputs} and scales {scales}"
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_matmul(jnp.zeros(inputs), values, jnp.zeros(scales))


@pytest.mark.parametrize(
    ("outputs", "kind", "message"),
    [(7, "int4", "7 outputs"), (8, "float8_e4m3fn", "float8_e4m3fn")],
)
def test_gpu_rejects_what_it_cannot_read(outputs, kind, message):
    values = jnp.zeros((2, 16, outputs), kind)
    with pytest.raises(NotImplementedError, match=message):
        grouped_matmul(
            jnp.zeros((2, 32)), values, jnp.zeros((2, outputs)), implementation="gpu"
        )


def test_other_platforms_run_the_reference(monkeypatch):
    inputs, values, scales = arguments("int8", SHAPES[0], has_minima=False)
    expected = reference.grouped_matmul(inputs, values, scales)
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda name=platform: name)
        found = grouped_matmul(inputs, values, scales)
        np.testing.assert_array_equal(found, expected)

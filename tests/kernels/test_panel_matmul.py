"""Products with panels are exact, and a row's bits do not depend on other rows."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_checkpoints.quantization import Scheme, dequantize, quantize
from jaxspec_kernels import panel_matmul, panel_rows
from jaxspec_kernels.panel_matmul import (
    WIDTH,
    QuantizedPanels,
    from_panels,
    from_quantized_panels,
    quantized_panels,
    to_panels,
)
from jaxspec_kernels.panel_matmul.cases import CASES

pytestmark = pytest.mark.usefixtures("has_native")


def panels_of(case, dtype, seed=0):
    values = np.random.default_rng(seed).normal(size=(case.outputs, case.features))
    matrix = values.astype(jnp.dtype(dtype))
    return matrix.astype(np.float64), jnp.asarray(to_panels(matrix))


def rows_of(case, seed=1):
    values = np.random.default_rng(seed).normal(size=(case.rows, case.features))
    return jnp.asarray(values, jnp.float32)


# Schemes whose groups divide the features: a whole row, or a few features.
QUANTIZED = [
    ("tiny/gate_up_proj", Scheme(kind="int8")),
    ("a pad of each", Scheme(kind="int8")),
    ("a pad of each", Scheme(kind="fp8")),
    ("a pad of each", Scheme(kind="int4", group_size=5)),
    ("two features", Scheme(kind="int4")),
    ("tiny/down_proj", Scheme(kind="int4", group_size=128)),
    ("tiny/down_proj", Scheme(kind="int8", group_size=64)),
    ("tiny/down_proj", Scheme(kind="fp8", group_size=16)),
    ("tiny/down_proj", Scheme(kind="int4", group_size=32, has_minima=True)),
    ("tiny/gate_up_proj", Scheme(kind="int4", group_size=32, has_minima=True)),
    ("a pad of each", Scheme(kind="int4", group_size=5, has_minima=True)),
    ("tiny/prefill", Scheme(kind="int8", group_size=16, has_minima=True)),
    ("a pad of each", Scheme(kind="int8", has_minima=True)),
]


def quantized_panels_of(case, scheme):
    values = np.random.default_rng(2).normal(size=(case.outputs, case.features))
    values[0, 0], values[1] = 0, values[1] / 1e4  # also the smallest of a type
    values, scales = quantize(values, scheme)
    if scheme.has_minima:
        # As in files: few bits, so that the product of value and scale is exact.
        scales = scales.astype(np.float16).astype(np.float32)
    panels = QuantizedPanels(*map(jnp.asarray, quantized_panels(values, scales)))
    return dequantize(values, scales).astype(np.float64), panels


def made(case, kind):
    """Return a matrix in float64, and its panels; `kind` is their dtype or scheme."""
    make = quantized_panels_of if isinstance(kind, Scheme) else panels_of
    return make(case, kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, dtype) for name in CASES for dtype in ("float32", "bfloat16")] + QUANTIZED,
    ids=str,
)
def test_products_equal_float64_and_the_reference(name, kind):
    case, is_quantized = CASES[name], isinstance(kind, Scheme)
    rows, (matrix, panels) = rows_of(case), made(case, kind)
    held = jax.tree.map(np.asarray, panels)
    unpack = from_quantized_panels if is_quantized else from_panels
    np.testing.assert_array_equal(unpack(held, matrix.shape), matrix)
    most = 1e-5 * np.sqrt(case.features)
    index = jnp.array([0, case.outputs - 1, case.outputs + 5, -3, WIDTH - 1])
    clipped = np.clip(np.asarray(index), 0, case.outputs - 1)
    for implementation in ("cpu", "reference"):
        own: Any = dict(implementation=implementation)
        for is_rounded in (False, True):  # float32 panels never round rows
            given = rows
            if is_rounded and kind != "float32":
                given = rows.astype(jnp.bfloat16)
            expected = np.asarray(given, np.float64) @ matrix.T
            found = panel_matmul(
                rows, panels, num_outputs=case.outputs, is_rounded=is_rounded, **own
            )
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, atol=most)
        looked_up = panel_rows(index, panels, shape=matrix.shape, **own)
        np.testing.assert_array_equal(looked_up, matrix[clipped])


# Numbers of rows; each number is a program of its own.
ALL_COUNTS = (*range(1, 27), 39)
QUICK_COUNTS = (1, 2, 3, 5, 6, 7, 13, 14, 15, 25, 26, 39)


@pytest.mark.parametrize(
    "counts", [QUICK_COUNTS, pytest.param(ALL_COUNTS, marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize(
    ("kind", "is_rounded"),
    [
        *(
            (dtype, is_rounded)
            for dtype in ("float32", "bfloat16")
            for is_rounded in (False, True)
        ),
        (Scheme(kind="int8"), False),
        (Scheme(kind="int8"), True),
        (Scheme(kind="int8", group_size=16), True),
        (Scheme(kind="fp8"), True),
        (Scheme(kind="int4", group_size=128), False),
        (Scheme(kind="int4", group_size=128), True),
        (Scheme(kind="int4", group_size=32), True),
        (Scheme(kind="int4", group_size=32, has_minima=True), False),
        (Scheme(kind="int4", group_size=32, has_minima=True), True),
        (Scheme(kind="int8", group_size=16, has_minima=True), True),
    ],
    ids=str,
)
def test_products_of_a_row_do_not_depend_on_other_rows(kind, is_rounded, counts):
    # Several chunks of features, and parts of panels; the last panel is not full.
    case = replace(CASES["tiny/down_proj"], rows=40, outputs=600)
    rows, (_, panels) = rows_of(case), made(case, kind)
    given: Any = dict(num_outputs=600, is_rounded=is_rounded, implementation="cpu")
    whole = np.asarray(panel_matmul(rows, panels, **given))
    for count in counts:
        for start in (0, case.rows - count):
            found = panel_matmul(rows[start : start + count], panels, **given)
            np.testing.assert_array_equal(found, whole[start : start + count])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", Scheme(kind="int4")], ids=str)
def test_panels_are_placed_without_a_copy(kind):
    values = np.zeros((96, 4096), np.float32)
    if isinstance(kind, Scheme):
        panels = quantized_panels(*quantize(values, kind)).values
    else:
        panels = to_panels(values.astype(jnp.dtype(kind)))
    placed = jax.device_put(panels, jax.devices("cpu")[0])
    assert placed.unsafe_buffer_pointer() == panels.ctypes.data


@pytest.mark.parametrize("zeros", [(0,), (39,), (1, 2, 17), range(40)], ids=str)
def test_rows_of_zeros_have_products_of_zero_and_others_keep_their_bits(zeros):
    case = replace(CASES["tiny/prefill"], rows=40, outputs=1000)
    rows, (_, panels) = rows_of(case), made(case, "bfloat16")
    given: Any = dict(num_outputs=1000, implementation="cpu")
    expected = np.array(panel_matmul(rows, panels, **given))
    expected[list(zeros)] = 0
    found = panel_matmul(rows.at[jnp.array(zeros)].set(0), panels, **given)
    np.testing.assert_array_equal(found, expected)


def test_rejects_panels_of_another_matrix():
    rows, panels = jnp.zeros((2, 6)), jnp.zeros((1, 5, WIDTH))
    with pytest.raises(ValueError, match="of 32 outputs and 6 features"):
        panel_matmul(rows, panels, num_outputs=32)
    with pytest.raises(ValueError, match=r"must be \(1, 3, 32, 2\)"):
        half = panels.astype(jnp.bfloat16)
        panel_rows(jnp.zeros(1, jnp.int32), half, shape=(32, 5))
    bytes_ = QuantizedPanels(panels.astype(jnp.int8), jnp.zeros((1, 2, WIDTH)))
    with pytest.raises(ValueError, match="5 features must divide into 2 groups"):
        panel_rows(jnp.zeros(1, jnp.int32), bytes_, shape=(32, 5))

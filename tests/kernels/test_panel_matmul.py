"""Products with panels are exact, and a row's bits do not depend on other rows."""

from dataclasses import replace
from typing import Any

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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_products_equal_float64_and_the_reference(name, dtype):
    case = CASES[name]
    rows, (matrix, panels) = rows_of(case), panels_of(case, dtype)
    np.testing.assert_array_equal(from_panels(np.asarray(panels), matrix.shape), matrix)
    most = 1e-5 * np.sqrt(case.features)
    for is_rounded in (False, True):
        given = rows.astype(dtype) if is_rounded else rows
        expected = np.asarray(given, np.float64) @ matrix.T
        for implementation in ("cpu", "reference"):
            found = panel_matmul(
                rows,
                panels,
                num_outputs=case.outputs,
                is_rounded=is_rounded,
                implementation=implementation,
            )
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, atol=most)
    index = jnp.array([0, case.outputs - 1, case.outputs + 5, -3, WIDTH - 1])
    clipped = np.clip(np.asarray(index), 0, case.outputs - 1)
    for implementation in ("cpu", "reference"):
        found = panel_rows(
            index, panels, shape=matrix.shape, implementation=implementation
        )
        np.testing.assert_array_equal(found, matrix[clipped])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_a_row_do_not_depend_on_other_rows(dtype):
    case = replace(CASES["tiny/prefill"], rows=40, outputs=1024)
    rows, (_, panels) = rows_of(case), panels_of(case, dtype)
    for is_rounded in (False, True):
        given: Any = dict(num_outputs=1024, is_rounded=is_rounded)
        given["implementation"] = "cpu"
        whole = np.asarray(panel_matmul(rows, panels, **given))
        for count in (*range(1, 27), 39):
            for start in (0, case.rows - count):
                part = rows[start : start + count]
                found = panel_matmul(part, panels, **given)
                np.testing.assert_array_equal(found, whole[start : start + count])


# Shapes, and sizes of groups that divide their features: a whole row, or a few
# features.
QUANTIZED = [
    ("tiny/gate_up_proj", Scheme(kind="int8")),
    ("a pad of each", Scheme(kind="int8")),
    ("a pad of each", Scheme(kind="fp8")),
    ("two features", Scheme(kind="int4")),
    ("tiny/down_proj", Scheme(kind="int4", group_size=128)),
    ("tiny/down_proj", Scheme(kind="int8", group_size=64)),
]


def quantized_panels_of(case, scheme):
    values = np.random.default_rng(2).normal(size=(case.outputs, case.features))
    values[0, 0], values[1] = 0, values[1] / 1e4  # also the smallest of a type
    values, scales = quantize(values, scheme)
    panels = QuantizedPanels(*map(jnp.asarray, quantized_panels(values, scales)))
    return dequantize(values, scales), panels


@pytest.mark.parametrize(("name", "scheme"), QUANTIZED)
def test_quantized_products_equal_float64_and_the_reference(name, scheme):
    case = CASES[name]
    rows, (matrix, panels) = rows_of(case), quantized_panels_of(case, scheme)
    held = QuantizedPanels(*map(np.asarray, panels))
    np.testing.assert_array_equal(from_quantized_panels(held, matrix.shape), matrix)
    expected = np.asarray(rows, np.float64) @ matrix.T.astype(np.float64)
    index = jnp.array([0, case.outputs - 1, case.outputs + 5, -3, WIDTH - 1])
    clipped = np.clip(np.asarray(index), 0, case.outputs - 1)
    for implementation in ("cpu", "reference"):
        given: Any = dict(implementation=implementation)
        for is_rounded in (False, True):  # rows never are
            found = panel_matmul(
                rows, panels, num_outputs=case.outputs, is_rounded=is_rounded, **given
            )
            most = 1e-5 * np.sqrt(case.features)
            np.testing.assert_allclose(found, expected, atol=most)
        looked_up = panel_rows(index, panels, shape=matrix.shape, **given)
        np.testing.assert_array_equal(looked_up, matrix[clipped])


@pytest.mark.parametrize(
    "scheme", [Scheme(kind="int8"), Scheme(kind="int4", group_size=128)]
)
def test_quantized_products_of_a_row_do_not_depend_on_other_rows(scheme):
    case = replace(CASES["tiny/prefill"], rows=40, outputs=1024)
    rows, (_, panels) = rows_of(case), quantized_panels_of(case, scheme)
    given: Any = dict(num_outputs=1024, implementation="cpu")
    whole = np.asarray(panel_matmul(rows, panels, **given))
    for count in (*range(1, 27), 39):
        for start in (0, case.rows - count):
            found = panel_matmul(rows[start : start + count], panels, **given)
            np.testing.assert_array_equal(found, whole[start : start + count])


def test_rejects_panels_of_another_matrix():
    rows, panels = jnp.zeros((2, 6)), jnp.zeros((1, 5, WIDTH))
    with pytest.raises(ValueError, match="of 32 outputs and 6 features"):
        panel_matmul(rows, panels, num_outputs=32)
    with pytest.raises(ValueError, match=r"\(1, 3, 32, 2\) are needed"):
        half = panels.astype(jnp.bfloat16)
        panel_rows(jnp.zeros(1, jnp.int32), half, shape=(32, 5))
    bytes_ = QuantizedPanels(panels.astype(jnp.int8), jnp.zeros((1, 2, WIDTH)))
    with pytest.raises(ValueError, match="5 features must divide into 2 groups"):
        panel_rows(jnp.zeros(1, jnp.int32), bytes_, shape=(32, 5))

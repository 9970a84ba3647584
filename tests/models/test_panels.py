"""Matrices in panels give the bits of the (out, in) form, and are read where they lie.

The whole engine runs on them in every float32 test that loads a model's files.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ModelConfig
from jaxspec.models import panels
from jaxspec.models.gemma2 import MIN_ROWS, project
from jaxspec.models.weights import laid_out, random_params, suit_devices
from jaxspec.sharding import make_mesh
from tests.oracles import TINY, PagedModel

MATRIX = jax.random.normal(jax.random.key(1), (192, 40))
CONFIG = ModelConfig.from_hf(
    TINY
    | dict(model_type="gemma2", num_hidden_layers=2, vocab_size=192)
    | dict(hidden_size=64, intermediate_size=128, head_dim=32)
)


def rows_of(count: int, features: int) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (count, features))


def test_a_panel_holds_its_outputs_input_by_input():
    found = panels.cut(MATRIX)
    assert found.shape == (3, 40, panels.PANEL)
    assert panels.is_cut(found)
    assert not panels.is_cut(MATRIX)
    assert panels.num_outputs(found) == panels.num_outputs(MATRIX) == 192
    for output in (0, 63, 64, 191):
        panel, place = divmod(output, panels.PANEL)
        np.testing.assert_array_equal(found[panel, :, place], MATRIX[output])


@pytest.mark.parametrize("shape", [(192, 40), (384, 1536), (3072, 384)])
@pytest.mark.parametrize("rows", [4, 7, 48, panels.MOST_ROWS, panels.MOST_ROWS + 1])
def test_products_are_those_of_the_matrix_bit_for_bit(rows, shape):
    matrix = jax.random.normal(jax.random.key(2), shape)
    inputs = rows_of(rows, shape[1])
    multiply: Any = jax.jit(project)
    found, expected = (multiply(inputs, one) for one in (panels.cut(matrix), matrix))
    np.testing.assert_array_equal(found, expected)
    few = multiply(inputs[-MIN_ROWS:], panels.cut(matrix))
    np.testing.assert_array_equal(found[-MIN_ROWS:], few)


def test_rows_taken_are_those_of_the_matrix():
    index = jnp.array([0, 1, 63, 64, 191, 192, 10**6], jnp.int32)
    expected = MATRIX.at[index].get(mode="clip")
    np.testing.assert_array_equal(panels.take(panels.cut(MATRIX), index), expected)


@pytest.mark.parametrize("rows", [4, panels.MOST_ROWS])
def test_few_rows_read_panels_where_they_lie(rows):
    forms = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((rows, 384), (48, 384, 64))
    ]
    text = str(jax.jit(project).lower(*forms).compile().as_text())
    made = re.findall(r"= f32\[48,384,64\]\S* (\S+?)\(", text)
    assert set(made) == {"parameter"}, "the weight itself is copied or converted"


@pytest.mark.parametrize(
    "devices, dtype, expected",
    [(1, "float32", 3), (2, "float32", 2), (1, "bfloat16", 2)],
)
def test_one_cpu_with_float32_gets_panels(devices, dtype, expected):
    mesh = make_mesh(devices)
    params = random_params(CONFIG, seed=3, dtype=jnp.dtype(dtype), mesh=mesh)
    placements = jax.tree.map(lambda leaf: leaf.sharding, params)
    suit_devices(params, mesh)
    assert params["embedding"].ndim == expected
    assert params["layers"]["0"]["attention"]["kv_proj"].ndim == expected
    assert params["final_norm"].ndim == 1
    assert laid_out(CONFIG, params) == CONFIG
    if devices == 1:
        for found, before in zip(
            *map(jax.tree.leaves, (params, placements)), strict=True
        ):
            assert found.sharding.mesh == before.mesh


def test_what_does_not_divide_stays_as_it_is():
    params: Any = {"a": {"odd": jnp.ones((96, 8)), "even": jnp.ones((128, 8))}}
    panels.cut_params(params, make_mesh(1))
    assert params["a"]["odd"].shape == (96, 8)
    assert params["a"]["even"].shape == (2, 8, 64)


@functools.cache
def logits(pieces: tuple[int, ...], *, is_cut: bool) -> np.ndarray:
    mesh = make_mesh(1)
    params = random_params(CONFIG, seed=4, dtype=jnp.dtype("float32"), mesh=mesh)
    if is_cut:
        suit_devices(params, mesh)
    model = PagedModel(CONFIG, params)
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, sum(pieces))
    return np.concatenate(
        [model.feed(piece) for piece in np.split(tokens, np.cumsum(pieces)[:-1])]
    )


@pytest.mark.parametrize("pieces", [(40, 1, 6), (panels.MOST_ROWS + 8,)])
def test_a_model_computes_the_same_bits(pieces):
    found, expected = logits(pieces, is_cut=True), logits(pieces, is_cut=False)
    np.testing.assert_array_equal(found, expected)

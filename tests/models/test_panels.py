"""Panels give the bits of the (out, in) form, where they pay and nowhere else.

They lie in every float32 engine of the tests (`tests.engines`), where sizes divide.
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
from jaxspec.models.panels import Panelled
from jaxspec.models.weights import laid_out, random_params, suit_devices
from jaxspec.sharding import make_mesh
from tests.oracles import TINY, PagedModel

MATRIX = jax.random.normal(jax.random.key(1), (192, 40))
CONFIG = ModelConfig.from_hf(
    TINY
    | dict(model_type="gemma2", num_hidden_layers=2, vocab_size=192)
    | dict(hidden_size=64, intermediate_size=128, head_dim=32)
)


def both(matrix: jax.Array) -> Panelled:
    return Panelled(matrix, jnp.asarray(panels.cut(matrix)))


def make_params(dtype: str = "float32", devices: int = 1) -> dict[str, Any]:
    mesh = make_mesh(devices)
    return random_params(CONFIG, seed=3, dtype=jnp.dtype(dtype), mesh=mesh)


def test_a_panel_holds_its_outputs_input_by_input():
    found = panels.cut(MATRIX)
    assert found.shape == (3, 40, panels.WIDTH)
    for output in (0, 63, 64, 191):
        panel, place = divmod(output, panels.WIDTH)
        np.testing.assert_array_equal(found[panel, :, place], MATRIX[output])


def test_both_forms_together_look_like_the_matrix():
    one = both(MATRIX)
    assert (one.shape, one.dtype, one.nbytes) == ((192, 40), jnp.float32, 192 * 40 * 4)
    assert one.sharding == MATRIX.sharding
    assert one[...] is one
    np.testing.assert_array_equal(one[5], MATRIX[5])
    np.testing.assert_array_equal(np.asarray(one, np.float64), MATRIX)
    index = jnp.array([3, 191, 500])
    np.testing.assert_array_equal(
        one.at[index].get(mode="clip"), MATRIX[np.array([3, 191, 191])]
    )
    assert len(jax.tree.leaves(one)) == 2


@pytest.mark.parametrize("shape", [(192, 40), (384, 1536), (3072, 384)])
@pytest.mark.parametrize("rows", [4, 7, panels.MAX_ROWS, panels.MAX_ROWS + 1, 70])
def test_products_are_those_of_the_matrix_bit_for_bit(rows, shape):
    matrix = jax.random.normal(jax.random.key(2), shape)
    inputs = jax.random.normal(jax.random.key(rows), (rows, shape[1]))
    multiply: Any = jax.jit(project)
    found = multiply(inputs, both(matrix))
    np.testing.assert_array_equal(found, multiply(inputs, matrix))
    few = multiply(inputs[-MIN_ROWS:], both(matrix))
    np.testing.assert_array_equal(found[-MIN_ROWS:], few)


def read_by(rows: int, outputs: int, features: int = 384) -> set[str]:
    """Which form a compiled product reads, and that it copies neither."""
    shapes = [(outputs, features), (outputs // panels.WIDTH, features, panels.WIDTH)]
    forms = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs = jax.ShapeDtypeStruct((rows, features), jnp.float32)
    compiled = jax.jit(project).lower(inputs, Panelled(*forms)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 1.5 * panels.MAX_COPIED_BYTES
    read = set()
    for shape in shapes:
        kind = ",".join(map(str, shape))
        made = re.findall(rf"= f32\[{kind}\]\S* (\S+?)\(", str(compiled.as_text()))
        assert set(made) <= {"parameter"}, "a weight is copied"
        read |= {len(shape)} if made else set()
    return {{2: "matrix", 3: "panels"}[axes] for axes in read}


@pytest.mark.parametrize(
    "rows, outputs, expected",
    [
        (MIN_ROWS, 3072, "panels"),
        (panels.MAX_ROWS, 3072, "panels"),
        (panels.MAX_ROWS + 1, 3072, "matrix"),
        # As many rows, but too many copies of them.
        (panels.MAX_ROWS, 64 * 256, "matrix"),
        (MIN_ROWS, 64 * 256, "panels"),
    ],
)
def test_the_faster_form_is_read_where_it_lies(rows, outputs, expected):
    assert read_by(rows, outputs) == {expected}


@pytest.mark.parametrize(
    "devices, dtype, expected",
    [(1, "float32", True), (2, "float32", False), (1, "bfloat16", False)],
)
def test_one_cpu_with_float32_gets_panels(devices, dtype, expected):
    params = make_params(dtype, devices)
    forms = jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), params)
    suit_devices(params, make_mesh(devices))
    assert isinstance(params["embedding"], Panelled) == expected
    key_value = params["layers"]["0"]["attention"]["kv_proj"]
    assert isinstance(key_value, Panelled) == expected
    assert isinstance(params["final_norm"], jax.Array)
    assert laid_out(CONFIG, params) == CONFIG
    found = jax.tree.map(
        lambda leaf: (leaf.shape, leaf.sharding),
        params,
        is_leaf=lambda node: isinstance(node, Panelled),
    )
    assert found == forms


def test_a_large_model_has_no_second_form(monkeypatch):
    params = make_params()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    monkeypatch.setattr(panels, "MAX_BYTES", num_bytes - 1)
    suit_devices(params, make_mesh(1))
    assert isinstance(params["embedding"], jax.Array)
    monkeypatch.setattr(panels, "MAX_BYTES", num_bytes)
    suit_devices(params, make_mesh(1))
    assert isinstance(params["embedding"], Panelled)


def test_what_does_not_divide_stays_as_it_is():
    params: Any = {"a": {"odd": jnp.ones((96, 8)), "even": jnp.ones((128, 8))}}
    panels.add_panels(params, make_mesh(1))
    assert isinstance(params["a"]["odd"], jax.Array)
    assert params["a"]["even"].panels.shape == (2, 8, 64)


@functools.cache
def logits(pieces: tuple[int, ...], *, has_panels: bool) -> np.ndarray:
    params = make_params()
    if has_panels:
        suit_devices(params, make_mesh(1))
    model = PagedModel(CONFIG, params)
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, sum(pieces))
    return np.concatenate(
        [model.feed(piece) for piece in np.split(tokens, np.cumsum(pieces)[:-1])]
    )


@pytest.mark.parametrize("pieces", [(40, 1, 6), (72,)])
def test_a_model_computes_the_same_bits(pieces):
    found, expected = (logits(pieces, has_panels=one) for one in (True, False))
    np.testing.assert_array_equal(found, expected)

"""Workarounds for XLA:CPU give the same bits, and apply only where they are faster.

These tests use the storage layouts that XLA reads, which are for platforms without a
C++ compiler. All engines of `tests.support.engines` test the layouts of the C++
operations.
"""

import functools
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import cpu
from jaxspec.models.cpu import (
    MIN_ROWS,
    Bfloat16Matrix,
    HalfMatrix,
    NativeMatrix,
    PanelMatrix,
)
from jaxspec.models.families import config_from_hf
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.network import functions_of
from jaxspec.models.weights import choose_forms, random_params
from jaxspec.sharding import make_mesh, replicated
from jaxspec_kernels import native
from jaxspec_kernels.rejection_sampling.passes import lowest
from tests.support.oracles import TINY, PagedModel
from tests.support.programs import READERS_COMPILER, USERS_COMPILER

MATRIX = jax.random.normal(jax.random.key(1), (192, 40))
CONFIG = config_from_hf(
    TINY
    | dict(model_type="gemma2", num_hidden_layers=2, vocab_size=192)
    | dict(hidden_size=64, intermediate_size=128, head_dim=32)
)


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, native.OFF)


def panelled(matrix: jax.Array) -> PanelMatrix:
    return PanelMatrix.of(jax.device_put(matrix, replicated(make_mesh(1))))


def make_params(dtype: str = "float32", devices: int = 1) -> dict[str, Any]:
    mesh = make_mesh(devices)
    return random_params(CONFIG, seed=3, dtype=jnp.dtype(dtype), mesh=mesh)


@pytest.mark.parametrize("form", [DenseMatrix, PanelMatrix, Bfloat16Matrix])
def test_every_storage_layout_holds_the_matrix(form):
    matrix = jax.device_put(MATRIX, replicated(make_mesh(1)))
    if form is Bfloat16Matrix:
        matrix = matrix.astype(jnp.bfloat16)
    one = form.of(matrix)
    assert (one.shape, one.dtype) == ((192, 40), matrix.dtype)
    assert one.nbytes == matrix.nbytes  # bytes of one layout: a product reads only one
    np.testing.assert_array_equal(one.values, matrix)
    index = jnp.array([3, 191, 500])
    expected = np.asarray(matrix, np.float32)
    np.testing.assert_array_equal(one.rows(index), expected[[3, 191, 191]])
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 40)), matrix.dtype)
    products = np.asarray(inputs, np.float64) @ expected.T.astype(np.float64)
    found = one.multiply(inputs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, products, atol=1e-4)
    if form is PanelMatrix:
        layout: Any = one
        panels = expected.reshape(3, cpu.XLA_WIDTH, 40).swapaxes(1, 2)
        np.testing.assert_array_equal(layout.panels, panels)


# `make test` has all numbers of rows with the smallest matrix.
SHAPES = [(192, 40), (384, 1536), (3072, 384)]
QUICK = [(cpu.MAX_ROWS, SHAPES[1]), (7, SHAPES[2]), (cpu.MAX_ROWS + 1, SHAPES[2])]


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        pytest.param(
            *one,
            marks=[pytest.mark.slow] * (one[1] != SHAPES[0] and one not in QUICK),
        )
        for one in itertools.product([4, 7, cpu.MAX_ROWS, cpu.MAX_ROWS + 1, 70], SHAPES)
    ],
)
def test_products_equal_the_matrixs_bit_for_bit(rows, shape):
    matrix = jax.random.normal(jax.random.key(2), shape)
    inputs = jax.random.normal(jax.random.key(rows), (rows, shape[1]))
    multiply: Any = jax.jit(
        lambda inputs, matrix: matrix.multiply(inputs), compiler_options=USERS_COMPILER
    )
    found = multiply(inputs, panelled(matrix))
    np.testing.assert_array_equal(found, multiply(inputs, DenseMatrix(matrix)))
    few = multiply(inputs[-MIN_ROWS:], panelled(matrix))
    np.testing.assert_array_equal(found[-MIN_ROWS:], few)


def read_by(rows: int, outputs: int, features: int = 384) -> set[str]:
    """Return the layouts that a compiled product reads; assert that it copies none."""
    shapes = [(outputs, features), (outputs // cpu.XLA_WIDTH, features, cpu.XLA_WIDTH)]
    forms = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs = jax.ShapeDtypeStruct((rows, features), jnp.float32)
    multiply: Any = jax.jit(lambda inputs, matrix: matrix.multiply(inputs))
    compiled = multiply.lower(inputs, PanelMatrix(*forms)).compile(READERS_COMPILER)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 1.5 * cpu.MAX_COPIED_BYTES
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
        (cpu.MAX_ROWS, 3072, "panels"),
        (cpu.MAX_ROWS + 1, 3072, "matrix"),
        # The same number of rows, but more copies than are worth making.
        (cpu.MAX_ROWS, 64 * 256, "matrix"),
        (MIN_ROWS, 64 * 256, "panels"),
    ],
)
def test_faster_form_is_read_in_place(rows, outputs, expected):
    assert read_by(rows, outputs) == {expected}


@pytest.mark.usefixtures("without_native")
def test_storage_layout_depends_on_devices_type_and_size(monkeypatch):
    for devices, dtype, expected in (
        (1, "float32", PanelMatrix),
        (2, "float32", DenseMatrix),
        (1, "bfloat16", Bfloat16Matrix),
        (2, "bfloat16", Bfloat16Matrix),
    ):
        params = make_params(dtype, devices)
        assert type(params["embedding"]) is expected
        assert type(params["layers"]["0"]["attention"]["kv_proj"]) is expected
        assert isinstance(params["final_norm"], jax.Array)
    # Matrices that do not divide remain dense.
    config = config_from_hf(TINY | dict(model_type="gemma2", vocab_size=128))
    options: Any = dict(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1))
    params = random_params(config, seed=0, **options)
    assert type(params["embedding"]) is PanelMatrix  # 128 outputs
    layer = params["layers"]["0"]
    assert type(layer["attention"]["q_proj"]) is DenseMatrix  # 32
    assert type(layer["feed_forward"]["down_proj"]) is DenseMatrix  # 48
    # A model above the size limit has no second layout.
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(make_params(devices=2)))
    for limit, expected in ((num_bytes - 1, DenseMatrix), (num_bytes, PanelMatrix)):
        monkeypatch.setattr(cpu, "MAX_BYTES", limit)
        assert type(make_params()["embedding"]) is expected


@pytest.mark.parametrize(
    ("devices", "dtype", "are_bfloat16", "is_trained", "expected"),
    [
        (1, "float32", False, False, NativeMatrix),
        (1, "float32", True, False, HalfMatrix),
        (1, "bfloat16", True, False, NativeMatrix),
        (1, "float32", True, True, PanelMatrix),
        (2, "float32", True, False, DenseMatrix),
    ],
)
def test_operations_in_cpp_have_their_own_storage_layouts(
    devices, dtype, are_bfloat16, is_trained, expected
):
    facts = dict(are_bfloat16=are_bfloat16, is_trained=is_trained)
    form = cpu.choose_form(jnp.dtype(dtype), num_devices=devices, num_bytes=0, **facts)
    assert form is expected


@pytest.mark.usefixtures("without_native")
def test_declarations_are_not_modified():
    specs = functions_of(CONFIG).param_specs(CONFIG)
    before = dict(specs)
    given: dict[str, Any] = dict(dtype=jnp.dtype("float32"), copies=2)
    chosen = choose_forms(specs, mesh=make_mesh(1), **given)
    assert specs == before
    assert chosen.keys() == specs.keys()
    assert chosen["embedding",].form is PanelMatrix
    kv_proj = "layers", "0", "attention", "kv_proj"
    assert chosen[kv_proj].shape[0] == 2 * specs[kv_proj].shape[0]


def test_bfloat16_lookup_does_not_convert_the_table():
    """Compare the temporary bytes of a loop that looks up rows of a 64 kB table."""
    table = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)

    def look_up(matrix: Any, tokens: jax.Array) -> jax.Array:
        def body(total: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
            return total + matrix.rows(tokens + step), None

        zeros = jnp.zeros((4, 64), jnp.float32)
        return jax.lax.scan(body, zeros, jnp.arange(8, dtype=jnp.int32))[0]

    tokens, num_bytes = jax.ShapeDtypeStruct((4,), jnp.int32), []
    for form in (Bfloat16Matrix, DenseMatrix):
        lowered: Any = jax.jit(look_up).lower(form(table), tokens)
        memory = lowered.compile(READERS_COMPILER).memory_analysis()
        num_bytes.append(memory.temp_size_in_bytes)
    assert num_bytes[0] < 2**14
    # A float32 copy has 128 kB. XLA:CPU makes one of the dense form on most processors.
    if num_bytes[1] < 2**17:
        pytest.skip("on this processor XLA converts no table, so nothing is proven")


@functools.cache
def logits(pieces: tuple[int, ...], *, has_panels: bool) -> np.ndarray:
    def is_panel(leaf: Any) -> bool:
        return not has_panels and isinstance(leaf, PanelMatrix)

    params = jax.tree.map(
        lambda leaf: DenseMatrix(leaf.values) if is_panel(leaf) else leaf,
        make_params(),
        is_leaf=is_panel,
    )
    model = PagedModel(CONFIG, params, compiler_options=USERS_COMPILER)
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, sum(pieces))
    return np.concatenate(
        [model.run(piece) for piece in np.split(tokens, np.cumsum(pieces)[:-1])]
    )


# In `make test`, products have the same bits, above, and `tests/e2e/test_lossless.py`
# runs a whole model without C++.
@pytest.mark.slow
@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("pieces", [(40, 6), (40, 1, 6), (72,)])
def test_panels_give_the_same_bits(pieces):
    found, expected = (logits(pieces, has_panels=one) for one in (True, False))
    np.testing.assert_array_equal(found, expected)


def test_unknown_compiler_options_are_left_out(monkeypatch, caplog):
    assert cpu.compiler_options() == cpu.COMPILER_OPTIONS
    monkeypatch.setattr(cpu, "COMPILER_OPTIONS", {"xla_cpu_unheard_of": True})
    assert cpu.compiler_options.__wrapped__() is None
    assert "xla_cpu_unheard_of" in caplog.text
    monkeypatch.setattr(
        cpu, "COMPILER_OPTIONS", {"xla_cpu_parallel_codegen_split_count": "so"}
    )
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="xla_cpu_parallel_codegen_split_count"
    ):
        cpu.compiler_options.__wrapped__()


def test_bfloat16_support_is_read_from_the_processor(monkeypatch):
    if Path("/proc/cpuinfo").exists():
        assert cpu.instructions().startswith(("flags", "Features"))
        assert "\n" not in cpu.instructions()
    for machine, flags, expected in (
        ("x86_64", "flags: avx512f avx512_bf16", True),
        ("AMD64", "flags: amx_bf16", True),
        ("x86_64", "flags: avx512f", False),
        ("aarch64", "Features: avx512_bf16", False),
        ("x86_64", "", False),
    ):
        monkeypatch.setattr(cpu.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(cpu, "instructions", lambda flags=flags: flags)
        assert cpu.has_bfloat16() == expected


def test_two_maxima_are_faster_than_argmax():
    """If this fails, argmax is fast enough to replace `passes.lowest`."""
    rows = jax.random.normal(jax.random.key(0), (8, 8192))
    ids = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    ways = {
        "argmax": lambda rows: jnp.argmax(rows, axis=1),
        "two maxima": lambda rows: lowest(rows, ids)[1],
    }
    runs: dict[str, Any] = {
        name: jax.jit(way, compiler_options=USERS_COMPILER)
        for name, way in ways.items()
    }
    found = {name: run(rows) for name, run in runs.items()}
    least_s = dict.fromkeys(ways, math.inf)
    for _ in range(300):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(rows))
            least_s[name] = min(least_s[name], time.perf_counter() - start)
    np.testing.assert_array_equal(found["argmax"], found["two maxima"])
    assert least_s["two maxima"] < least_s["argmax"], least_s

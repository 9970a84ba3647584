"""Attention with head norms is bit-exact in chunks, and split by head."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config.model import KvLayer
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch, layer_slots
from jaxspec.models.cpu import (
    Bfloat16Matrix,
    NativeMatrix,
    compiler_options,
    pad_batch,
    pad_rows,
)
from jaxspec.models.layers import attend, attention_block, rope_tables
from jaxspec.models.matrices import DenseMatrix
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh, replicated
from jaxspec_kernels import native
from jaxspec_kernels.bits import storage_dtype, to_storage
from jaxspec_kernels.decoder_blocks import Norm
from tests.support.oracles import sequence_batch
from tests.support.programs import READERS_COMPILER, USERS_COMPILER

MODEL, HEADS, HEAD_DIM = 48, 4, 16
NUM_TOKENS, PAGE_SIZE, WINDOW = 27, 4, 6
NUM_PAGES = 8
SETTINGS: dict[str, Any] = dict(num_q_heads=HEADS, scale=20**-0.5, window=WINDOW)
STREAM = np.random.default_rng(3).normal(size=(NUM_TOKENS, MODEL)).astype(np.float32)
NORMS = dict(before=MODEL, after=MODEL, q_norm=HEAD_DIM, k_norm=HEAD_DIM)


def make_weights(kv_heads: int = 2, heads: int = HEADS) -> dict[str, np.ndarray]:
    """Return random matrices (out, in), and weights of the norms."""
    rng = np.random.default_rng(7)
    keys, queries = kv_heads * HEAD_DIM, heads * HEAD_DIM
    shapes = dict(
        q=(queries, MODEL), k=(keys, MODEL), v=(keys, MODEL), o=(MODEL, queries)
    )
    found = {name: rng.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    found |= {name: rng.normal(size=size) * 0.5 for name, size in NORMS.items()}
    return {name: value.astype(np.float32) for name, value in found.items()}


def norms_of(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: Norm(jnp.asarray(weights[name]), 1e-6, 1.0) for name in NORMS}


def matrices_of(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the matrices as the layer stores them.

    In the fused one, each head's keys come before its values.
    """
    both = [weights[name].reshape(-1, 1, HEAD_DIM, MODEL) for name in "kv"]
    kv_proj = np.concatenate(both, axis=1).reshape(-1, MODEL)
    return dict(q_proj=weights["q"], kv_proj=kv_proj, o_proj=weights["o"])


def params_of(weights: dict[str, np.ndarray], form: Any, dtype: str) -> dict[str, Any]:
    if form is NativeMatrix and not native.is_available():
        pytest.skip("no native operations here: the log says why")
    whole = replicated(make_mesh(1))
    return {
        name: form.of(jax.device_put(jnp.asarray(matrix, dtype), whole))
        for name, matrix in matrices_of(weights).items()
    }


def batch_of(start: int, count: int) -> TokenBatch:
    """Return consecutive tokens of one sequence, in shuffled pages."""
    order = np.random.default_rng(0).permutation(NUM_PAGES)
    return sequence_batch(np.zeros(count), order, page_size=PAGE_SIZE, start=start)


@pytest.mark.parametrize("layer", [KvLayer(0, True, 1), KvLayer(1, True, 0, 2)])
def test_pads_have_no_slot_in_a_local_layer(layer):
    """The second layer has an array of its own, of one page per unit of two."""
    local = jnp.array([3])
    batch = replace(batch_of(0, 1), local_slot_mapping=local, unit_pages=2)
    num_slots = NUM_PAGES * PAGE_SIZE
    padded = pad_batch(batch, num_slots)
    assert padded.local_slot_mapping is not None
    slots = layer_slots(padded.local_slot_mapping, layer, PAGE_SIZE)
    assert slots.shape == padded.slot_mapping.shape == padded.tokens.shape
    assert (slots[1:] >= num_slots).all()
    assert (padded.slot_mapping[1:] >= num_slots).all()


def run_chunks(params: dict[str, Any], chunk: int, **settings: Any) -> np.ndarray:
    """Run the attention block, `chunk` tokens per call; return its rows.

    Unused slots hold NaN.
    """
    kv_heads = params["kv_proj"].shape[0] // (2 * HEAD_DIM)
    pages: Any = jnp.full((NUM_PAGES, PAGE_SIZE, 2 * kv_heads, HEAD_DIM), jnp.nan)
    stored = storage_dtype(params["q_proj"].dtype, "cpu")
    pages = to_storage(pages, jnp.zeros(0, stored))

    def run(params: Any, rows: Any, pages: Any, batch: TokenBatch) -> Any:
        tables = rope_tables(batch.positions, HEAD_DIM, 10_000.0)
        given: dict[str, Any] = SETTINGS | settings | {"tables": tables}
        return attention_block(
            params, rows, pages, batch=batch, backend=Backend(), **given
        )

    options = (compiler_options() or {}) | USERS_COMPILER
    step: Any = jax.jit(run, compiler_options=options)
    made = []
    for start in range(0, NUM_TOKENS, chunk):
        here = jnp.asarray(STREAM[start : start + chunk])
        batch = pad_batch(batch_of(start, len(here)), NUM_PAGES * PAGE_SIZE)
        rows, pages = step(params, pad_rows(here), pages, batch)
        made.append(rows[: len(here)])
    return np.concatenate(made)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(DenseMatrix, "float32", marks=pytest.mark.slow),
        pytest.param(Bfloat16Matrix, "bfloat16", marks=pytest.mark.slow),
        (NativeMatrix, "float32"),
        (NativeMatrix, "bfloat16"),
    ],
)
def test_normalised_heads_have_the_same_bits_in_chunks_of_any_size(form, dtype):
    weights = make_weights()
    params, norms = params_of(weights, form, dtype), norms_of(weights)
    alone = run_chunks(params, 1, **norms)
    assert np.isfinite(alone).all()
    for chunk in (2, 5, 9, 27):
        np.testing.assert_array_equal(run_chunks(params, chunk, **norms), alone)


def test_devices_normalise_only_their_own_heads():
    """Each of eight devices has one head, and gathers no other for the norms."""
    heads, mesh = 8, make_mesh(8)
    weights = make_weights(heads, heads)
    norms = norms_of(weights)
    backend = Backend(implementation="reference", mesh=mesh, mesh_axes=TARGET_MESH_AXES)
    split = PartitionSpec(TARGET_MESH_AXES)
    placements = dict(
        q_proj=split, kv_proj=split, o_proj=PartitionSpec(None, TARGET_MESH_AXES)
    )
    batch = batch_of(0, NUM_TOKENS)
    pages = jnp.zeros((NUM_PAGES, PAGE_SIZE, 2 * heads, HEAD_DIM))
    given: Any = dict(batch=batch, num_q_heads=heads, scale=0.3)
    given |= {name: norms[name] for name in ("q_norm", "k_norm")}

    def run(backend: Backend, params: Any, rows: Any) -> Any:
        tables = rope_tables(batch.positions, HEAD_DIM, 10_000.0)
        return attend(params, rows, pages, tables=tables, backend=backend, **given)[0]

    params = {
        name: DenseMatrix(jax.device_put(matrix, NamedSharding(mesh, placements[name])))
        for name, matrix in matrices_of(weights).items()
    }
    step: Any = jax.jit(functools.partial(run, backend), out_shardings=replicated(mesh))
    compiled = step.lower(params, STREAM).compile(READERS_COMPILER)
    # The only collective is the output projection's sum over heads.
    collectives = re.findall(r" (all-\S+?|reduce-scatter)\(", compiled.as_text())
    assert collectives == ["all-reduce"]
    whole = params_of(weights, DenseMatrix, "float32")
    expected = run(Backend(implementation="reference"), whole, jnp.asarray(STREAM))
    np.testing.assert_allclose(compiled(params, STREAM), expected, atol=1e-4)

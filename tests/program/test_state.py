"""Rows of a new state are empty, and no arrays share memory."""

import dataclasses
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import named_devices
from jaxspec.engine.memory.probe import plan_for
from jaxspec.errors import UnsupportedError
from jaxspec.models.families import config_from_hf
from jaxspec.program.plan import NO_TOKEN, PoolShape
from jaxspec.program.rows import init_rows
from jaxspec.program.state import (
    EngineState,
    check_kv_cache_dtype,
    init_token_pages,
    init_zeros,
    page_forms,
)
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh, replicated
from jaxspec_checkpoints.gemma.published import published_config

DTYPE: Any = jnp.dtype(jnp.bfloat16)
POOL = PoolShape(num_rows=3, num_pages=10, page_size=4, max_model_len=14, vocab_size=70)


def test_new_rows_are_empty():
    rows = init_rows(POOL)
    assert rows.page_table.shape == (3, 4)
    assert np.asarray(rows.is_done).all()
    assert not np.asarray(rows.num_tokens).any()
    # Unused entries name the pad page, and writes to it are dropped.
    assert (np.asarray(rows.page_table) == POOL.num_pages).all()
    assert (np.asarray(rows.stop_ids) == NO_TOKEN).all()


def forms_of(
    parts: int, devices: Any = None, *, scan_layers: bool = False, **pool: Any
):
    """Return the forms of 9B's pages on `parts` devices."""
    config = config_from_hf(published_config("9b"))
    config = dataclasses.replace(config, scan_layers=scan_layers)
    mesh = make_mesh(parts, devices=devices)
    changed = dataclasses.replace(POOL, **pool)
    forms: Any = page_forms(config, DTYPE, changed, mesh, TARGET_MESH_AXES)
    return forms


@pytest.mark.parametrize("scan_layers", [False, True])
def test_scanned_layers_of_a_kind_have_their_pages_in_one_array(scan_layers):
    forms = forms_of(8, scan_layers=scan_layers)
    shapes = [(21 * 10, 4, 16, 256)] * 2 if scan_layers else [(10, 4, 16, 256)] * 42
    assert [form.shape for form in forms] == shapes
    assert all(form.sharding.shard_shape(form.shape)[2] == 2 for form in forms)


@pytest.mark.parametrize(
    ("kept", "dtypes"), [("int8", ["int8", "float32"]), ("fp8", ["uint8"])]
)
def test_pages_of_eight_bits_split_by_heads_with_their_scales(kept, dtypes):
    leaves = jax.tree.leaves(forms_of(4, kv_cache_dtype=kept)[0])
    assert [str(leaf.dtype) for leaf in leaves] == dtypes
    shapes = [(10, 4, 16, 256), (10, 4, 16)]
    assert [leaf.shape for leaf in leaves] == shapes[: len(leaves)]
    assert all(leaf.sharding.shard_shape(leaf.shape)[2] == 4 for leaf in leaves)


@pytest.mark.parametrize(
    ("parts", "scan_layers", "lanes", "own"),
    [(1, False, 256, 256), (4, False, 512, 128), (2, True, 256, 128)],
)
def test_a_tpu_has_the_lanes_of_each_devices_heads(parts, scan_layers, lanes, own):
    """Pages of 16 tokens with 16 rows of heads have 256 scales, one per lane.

    On one of four devices they have 64, in 128 lanes.
    """
    pool: Any = dict(kv_cache_dtype="int8", page_size=16)
    devices = named_devices("v5e-8")
    first = forms_of(parts, devices, scan_layers=scan_layers, **pool)[0]
    pages = 21 * 10 if scan_layers else 10
    assert first.is_in_lanes and first.values.dtype == jnp.int8
    assert first.scales.shape == (pages, 1, lanes)
    assert first.scales.sharding.shard_shape(first.scales.shape) == (pages, 1, own)


@pytest.mark.parametrize(
    ("device", "options", "says"),
    [
        ("v5e-8", dict(kv_cache_dtype="int8", tensor_parallel_size=8), "one KV head"),
        ("v5e-8", dict(kv_cache_dtype="fp8", tensor_parallel_size=8), "one KV head"),
        ("v5e-8", dict(kv_cache_dtype="fp8", tensor_parallel_size=4), None),
        ("v5e-8", dict(kv_cache_dtype="int8", tensor_parallel_size=4), None),
        ("v5e-8", dict(kv_cache_dtype="int8", tensor_parallel_size=2), None),
        ("h100", dict(kv_cache_dtype="fp8"), None),
        ("h100", dict(kv_cache_dtype="int8"), None),
    ],
)
def test_memory_plan_rejects_page_types_the_device_cannot_read(device, options, says):
    args = EngineArgs(model="google/gemma-2-9b-it", dtype="bfloat16", **options)
    if says is None:
        page_bytes = plan_for(args, device).facts.target.page_bytes
        heads = 8 // options.get("tensor_parallel_size", 1)
        scale_bytes = 16 * 2 * heads * 4 if options["kv_cache_dtype"] == "int8" else 0
        if device == "v5e-8" and scale_bytes:
            scale_bytes = max(scale_bytes, 128 * 4)  # scales fill whole rows of lanes
        # Half of the 42 layers: a page is of the local or of the global ones.
        assert page_bytes == 21 * (16 * 2 * heads * 256 + scale_bytes)
        return
    with pytest.raises(UnsupportedError, match=says):
        plan_for(args, device)


def test_old_gpus_reject_fp8():
    old = SimpleNamespace(platform="gpu", device_kind="A100", compute_capability="8.0")
    form = forms_of(1)[0]
    with pytest.raises(UnsupportedError, match="capability 8.0, and fp8 needs 8.9"):
        check_kv_cache_dtype("fp8", old, form)
    check_kv_cache_dtype("int8", old, form)


def test_the_state_can_be_donated_and_used_again():
    state = EngineState(
        # Copy the rows: jax does not donate an array that shares numpy's memory.
        rows=jax.tree.map(jnp.copy, init_rows(POOL)),
        token_pages=jnp.copy(init_token_pages(POOL)),
        target_pages=(),
        proposers=(),
    )
    assert state.token_pages.shape == (10, 4)
    buffers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    assert len(buffers) == len(jax.tree.leaves(state))
    donating = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf, state), donate_argnums=0
    )
    kept = donating(state)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kept)} == buffers
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_zeroed_arrays_take_memory_when_written():
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    mesh = make_mesh(1, None, jax.devices("cpu"))
    form = jax.ShapeDtypeStruct((2**16, 2**8), jnp.float32, sharding=replicated(mesh))
    before = resident_pages()
    array = init_zeros(form).block_until_ready()
    assert (resident_pages() - before) * resource.getpagesize() < array.nbytes / 2
    assert not np.asarray(array).any()
    # A program can still update the array in place.
    start = array.unsafe_buffer_pointer()
    array = jax.jit(lambda one: one.at[5, 3].set(1), donate_argnums=0)(array)
    assert array.unsafe_buffer_pointer() == start
    assert np.argwhere(np.asarray(array)).tolist() == [[5, 3]]

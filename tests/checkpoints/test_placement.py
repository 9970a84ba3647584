"""Every device gets its rows and columns, cast, with little host memory."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxspec_checkpoints import (
    CheckpointError,
    Sizes,
    Tensor,
    in_memory,
    open_checkpoint,
    tensor,
    tensor_shapes,
)
from jaxspec_checkpoints.placement import place
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints import loading_memory
from tests.checkpoints.models import tiny_config

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("outer", "inner"))
SPECS = {
    "rows": PartitionSpec(("outer", "inner"), None),
    "columns": PartitionSpec(None, ("outer", "inner")),
    "both": PartitionSpec("outer", "inner"),
    "copies": PartitionSpec("inner", None),
    "everywhere": PartitionSpec(None, None),
}


def make_parts(count: int, rows: int = 48, columns: int = 16) -> list[Tensor]:
    values = np.arange(count * rows * columns, dtype=np.float32)
    arrays = values.reshape(count, rows, columns)
    return list(in_memory({str(n): a for n, a in enumerate(arrays)}).values())


def put(parts: list[Tensor], spec: str = "rows", **options: Any) -> jax.Array:
    settings: dict[str, Any] = dict(dtype=np.dtype(np.float32)) | options
    return place(parts, sharding=NamedSharding(MESH, SPECS[spec]), **settings)


def fuse(parts: list[Tensor], block: int) -> np.ndarray:
    """Concatenate the parts in turn, `block` rows of each at a time."""
    rows = []
    for start in range(0, parts[0].shape[0], block):
        for part in parts:
            rows += list(part.whole()[start : start + block])
    return np.stack(rows)


# Bytes that are read at a time: one row, blocks that end within a shard, and everything
# at once.
@pytest.mark.parametrize("block_bytes", [1, 5 * 64, 2**20])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("count", "block"), [(1, 1), (2, 1), (2, 4), (2, 48), (3, 8)])
def test_every_device_holds_its_shard(monkeypatch, block_bytes, spec, count, block):
    monkeypatch.setattr(tensor, "BLOCK_BYTES", block_bytes)
    parts = make_parts(count)
    placed = put(parts, spec, block=block)
    expected = fuse(parts, block)
    assert placed.shape == expected.shape
    assert placed.sharding == NamedSharding(MESH, SPECS[spec])
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_rows_are_read_once_checked_and_copied():
    """Each row is read once, for any number of shards and of copies.

    Changing the caller's array afterwards changes no placed tensor.
    """
    values, reads, counted = np.ones((48, 16), np.float32), [], []

    def read(start: int, stop: int) -> np.ndarray:
        reads.append((start, stop))
        return values[start:stop]

    dtype = np.dtype("f4")
    source = Tensor(shape=(48, 16), dtype=dtype, source="weights:part", read=read)
    assert source.sha256 is None
    placed = put([source], "copies", on_bytes=counted.append)
    assert reads == [(0, 48)]
    assert sum(counted) == source.num_bytes
    everywhere = put([source], "everywhere")
    values[:] = 2
    for one in (placed, everywhere):
        np.testing.assert_array_equal(one, np.ones((48, 16)))
    wrong = dataclasses.replace(source, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="weights:part: the bytes have sha256"):
        put([wrong])
    with pytest.raises(CheckpointError, match="but 000"):
        wrong.whole()


@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_cast_on_the_way(source, dtype):
    values = np.linspace(-3, 3, 64).astype(source).reshape(16, 4)
    given = in_memory({"part": values, "norm": values[:, 0]})
    placed = put([given["part"]], dtype=np.dtype(dtype))
    assert placed.dtype == dtype
    np.testing.assert_array_equal(placed, values.astype(dtype))
    # A vector is split over the inner axis.
    sharding = NamedSharding(MESH, PartitionSpec("inner"))
    placed = place([given["norm"]], sharding=sharding, dtype=np.dtype(dtype))
    np.testing.assert_array_equal(placed, values[:, 0].astype(dtype))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4,)}


# The model has 2 GB in bfloat16, and its embedding is the largest tensor, as in the
# real models. Its two KV heads cannot be split over eight devices.
LARGE = dict(
    vocab_size=64000,
    hidden_size=2048,
    intermediate_size=16384,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large") / "hf"
    folder.mkdir()
    config = tiny_config("2b", torch_dtype="bfloat16", **LARGE)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {
        name: random.integers(0, 2**16, shape, np.uint16).view(jnp.bfloat16)
        for name, shape in tensor_shapes(Sizes.from_config(config)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    yield folder
    shutil.rmtree(folder.parent)  # pytest would keep the last three


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "kaggle", "orbax"])
def test_host_holds_at_most_two_of_the_largest_tensor(large, to):
    """Measure a separate process that loads 2 GB onto 8 simulated devices."""
    folder = large
    if to != "hf":
        folder = large.parent / to
        write_checkpoint(open_checkpoint(large), folder, to=to, progress=False)
    result = subprocess.run(
        [sys.executable, loading_memory.__file__, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["num_devices"] == 8
    assert found["checkpoint_bytes"] > 1.9e9
    # Keys, values and norms are copied to all devices; every other row is on one
    # device.
    replicated = found["device_bytes"] - found["checkpoint_bytes"]
    assert 0 < replicated < 0.1 * found["checkpoint_bytes"]
    assert found["largest_device_bytes"] == found["device_bytes"] / 8
    assert found["host_bytes"] <= 2 * found["largest_tensor_bytes"], found

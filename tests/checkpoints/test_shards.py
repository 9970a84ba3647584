"""Files equal those of the safetensors library, in shards of limited size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxspec_checkpoints import Sizes, shards
from jaxspec_checkpoints.shards import write_huggingface
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints.models import tiny_config, tiny_tensors

CONFIG = tiny_config("2b")
TENSORS = tiny_tensors(CONFIG, dtype="bfloat16")
INDEX = "model.safetensors.index.json"


def write(folder: Path, tensors: dict[str, np.ndarray], **options: Any) -> int:
    """Write a model; return the number of bytes that the writer counted."""
    num_bytes: list[int] = []
    settings: Any = dict(dtype=None, max_shard_bytes=shards.MAX_SHARD_BYTES) | options
    sizes, given = Sizes.from_config(CONFIG), in_memory(tensors)
    write_huggingface(folder, sizes, given, on_bytes=num_bytes.append, **settings)
    return sum(num_bytes)


@pytest.mark.parametrize("block_bytes", [1, 2**25])
def test_small_model_is_one_file(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_bytes)
    num_bytes = write(tmp_path, TENSORS)
    assert num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        one = found[name]
        assert (one.dtype, one.shape) == (expected.dtype, expected.shape)
        assert one.tobytes() == expected.tobytes()
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # transformers requires this


def test_widest_types_come_first(tmp_path):
    """Shards have the widest types first, so that each tensor is aligned."""
    tensors = {
        "narrow": np.arange(3, dtype=np.float16),
        "wide": np.arange(4, dtype=np.float32),
    }
    write(tmp_path, tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["wide"]["data_offsets"] == [0, 16]
    assert header["narrow"]["data_offsets"] == [16, 22]
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(expected, tensors[name])


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("max_shard_bytes", [50_000, 150_000, 200_000])
def test_shards_are_no_larger_than_the_limit(tmp_path, max_shard_bytes, dtype):
    kind = None if dtype is None else np.dtype(dtype)
    num_bytes = write(tmp_path, TENSORS, dtype=kind, max_shard_bytes=max_shard_bytes)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == num_bytes
    files = sorted(set(index["weight_map"].values()))
    total = len(files)
    names = [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
    assert files == names and total > 1
    found, sizes = {}, []
    for file in files:
        held = load_file(tmp_path / file)
        assert {name: file for name in held}.items() <= index["weight_map"].items()
        sizes.append(sum(tensor.nbytes for tensor in held.values()))
        # A shard exceeds the limit only if it holds a single tensor.
        assert sizes[-1] <= max_shard_bytes or len(held) == 1
        found |= held
    # Any two neighbouring shards together exceed half of the limit.
    smallest = [a + b for a, b in zip(sizes, sizes[1:], strict=False)]
    assert all(size > min(max_shard_bytes, num_bytes) / 2 for size in smallest)
    assert sorted(found) == sorted(TENSORS) == sorted(index["weight_map"])
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(found[name], expected.astype(found[name].dtype))

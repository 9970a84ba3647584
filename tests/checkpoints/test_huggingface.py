"""Folders of safetensors, whole and in shards; one that cannot be read says why."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec_checkpoints import CheckpointError, read_tensors

TENSORS = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "second": np.arange(4, dtype=np.float32).astype(jnp.bfloat16),
    "third": np.array([[1.5]], np.float16),
}
SHARDS = {
    "first": "model-00001-of-00002.safetensors",
    "second": "model-00002-of-00002.safetensors",
    "third": "model-00001-of-00002.safetensors",
}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for shard in set(SHARDS.values()):
        held = {name: TENSORS[name] for name in TENSORS if SHARDS[name] == shard}
        save_file(held, tmp_path / shard)
    write_index(tmp_path, SHARDS)
    return tmp_path


def check(folder: Path) -> None:
    found = list(read_tensors(folder))
    assert sorted(name for name, _ in found) == sorted(TENSORS)
    for name, tensor in found:
        assert tensor.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(tensor, TENSORS[name])


def test_single_file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    check(tmp_path)


def test_shards(sharded):
    check(sharded)


def test_folder_may_be_a_string(sharded):
    assert len(list(read_tensors(str(sharded)))) == 3


def test_single_file_goes_before_an_index(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_index(tmp_path, {"first": "gone.safetensors"})
    check(tmp_path)


def test_tensors_come_one_at_a_time(sharded):
    """A generator: a model larger than the memory of the host can be placed."""
    reading = read_tensors(sharded)
    next(reading)
    for shard in set(SHARDS.values()):
        (sharded / shard).unlink()
    with pytest.raises((CheckpointError, FileNotFoundError)):
        list(reading)


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
@pytest.mark.parametrize("name", ["model.safetensors", *sorted(set(SHARDS.values()))])
def test_truncated_file_is_named(sharded, name, kept):
    if name == "model.safetensors":
        save_file(TENSORS, sharded / name)
    content = (sharded / name).read_bytes()
    (sharded / name).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=f"{name} is no readable safetensors"):
        list(read_tensors(sharded))


def test_missing_shard_is_named(sharded):
    (sharded / SHARDS["second"]).unlink()
    expected = f"names {SHARDS['second']}, which is not in the folder"
    with pytest.raises(CheckpointError, match=expected):
        list(read_tensors(sharded))


@pytest.mark.parametrize("shard", ["../outside.safetensors", "sub/x.safetensors"])
def test_index_may_not_leave_the_folder(sharded, shard):
    (sharded / "sub").mkdir()
    for place in (sharded / "sub" / "x.safetensors", sharded.parent / "outside"):
        save_file(TENSORS, place.with_suffix(".safetensors"))
    write_index(sharded, SHARDS | {"first": shard})
    with pytest.raises(CheckpointError, match=f"points outside its folder: '{shard}'"):
        list(read_tensors(sharded))


def test_absolute_path_in_an_index_is_refused(sharded, tmp_path):
    target = tmp_path / "elsewhere.safetensors"
    save_file(TENSORS, target)
    write_index(sharded, {"first": str(target)})
    with pytest.raises(CheckpointError, match="points outside"):
        list(read_tensors(sharded))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}'])
def test_index_that_is_no_index_is_named(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(CheckpointError, match=f"{index.name} is no index"):
        list(read_tensors(tmp_path))


def test_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").touch()
    expected = "neither model.safetensors nor .*found: config.json, pytorch_model.bin"
    with pytest.raises(CheckpointError, match=expected):
        list(read_tensors(tmp_path))


def test_missing_folder_has_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="found: nothing"):
        list(read_tensors(tmp_path / "nowhere"))

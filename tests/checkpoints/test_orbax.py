"""Our own folders: hashes, versions and shapes are checked, and Orbax reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, Sizes, orbax, storage
from jaxspec_checkpoints.orbax import is_own, open_own, write_own
from jaxspec_checkpoints.reading import LAYOUTS
from jaxspec_checkpoints.storage import ArrayWriter, open_arrays
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints.flax_trees import restore
from tests.checkpoints.models import tiny_config, tiny_tensors

CONFIG = tiny_config("27b", num_hidden_layers=1)
TENSORS = tiny_tensors(CONFIG, dtype="bfloat16")
NAME = "model.layers.0.self_attn.k_proj.weight"


def write(folder: Path, dtype: np.dtype | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    write_own(
        folder,
        Sizes.from_config(CONFIG),
        in_memory(TENSORS),
        dtype=dtype,
        on_bytes=abs,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the written folder, for a test to damage."""
    return shutil.copytree(written, tmp_path / "own")


def change_manifest(folder: Path, change: Any) -> None:
    path = folder / "jaxspec_checkpoint.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_folder_is_read_bit_for_bit(written):
    assert is_own(written)
    checkpoint = open_own(written, LAYOUTS)
    assert checkpoint.format == "orbax"
    assert checkpoint.config == CONFIG
    assert checkpoint.tokenizer_folder == written
    assert list(checkpoint.tensors) == list(TENSORS)
    for name, expected in TENSORS.items():
        found = checkpoint.tensors[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.whole().tobytes() == expected.tobytes()
    assert is_own(written) and not is_own(written / "weights")


def test_orbax_restores_the_weights(written):
    tree = restore(written / "weights")
    assert sorted(tree) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        assert tree[name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("block_bytes", [20_000, 2**25])
def test_chunks_are_rows_of_a_block(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(orbax, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(storage, "_COMMIT_BYTES", block_bytes)
    write(tmp_path)
    for name, array in open_arrays(tmp_path / "weights").items():
        row_bytes = TENSORS[name][:1].nbytes
        rows = min(len(TENSORS[name]), max(1, block_bytes // row_bytes))
        assert array.chunks == (rows, *array.shape[1:])
    for name, tensor in open_own(tmp_path, LAYOUTS).tensors.items():
        assert tensor.whole().tobytes() == TENSORS[name].tobytes()


def test_values_are_cast(tmp_path):
    write(tmp_path, dtype=np.dtype("float32"))
    for name, tensor in open_own(tmp_path, LAYOUTS).tensors.items():
        np.testing.assert_array_equal(
            tensor.whole(), TENSORS[name].astype(np.float32), strict=True
        )


def test_flipped_bit_names_the_tensor(folder):
    """The bytes are in a file of the database, and only the hash shows the change."""
    values = TENSORS[NAME].tobytes()
    (file,) = [
        path
        for path in (folder / "weights" / "d").iterdir()
        if values in path.read_bytes()
    ]
    content = bytearray(file.read_bytes())
    content[content.index(values) + len(values) // 2] ^= 1
    file.write_bytes(content)
    tensors = open_own(folder, LAYOUTS).tensors
    with pytest.raises(CheckpointError, match=rf"{NAME}: the bytes have sha256"):
        tensors[NAME].whole()
    other = "model.layers.0.self_attn.v_proj.weight"
    assert tensors[other].whole().tobytes() == TENSORS[other].tobytes()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(version=2), "was written by a newer jaxspec: its version is 2, this one"),
        (dict(version=0), "must have version 1, got 0"),
        (dict(version="1"), "must have version 1, got '1'"),
        (dict(version=True), "must have version 1, got True"),
        (dict(version=None), "must have version 1, got None"),
        (dict(format="other"), "must have format 'jaxspec', got 'other'"),
        (dict(tensors=[1]), r"must list `tensors`, got \[1\]"),
    ],
)
def test_manifest_of_another_kind_is_refused(folder, change, expected):
    change_manifest(folder, lambda manifest: manifest.update(change))
    with pytest.raises(CheckpointError, match=expected):
        open_own(folder, LAYOUTS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(shape=[1, 2]), r"has shape \[64, 144\] in .*but .* records \[1, 2\]"),
        (dict(shape=None), r"but .* records None"),
        (dict(dtype="float32"), "has dtype bfloat16 in .*but .* records float32"),
        (dict(sha256="12"), "must record a sha256 of 64 digits for tensor .* got '12'"),
        (dict(sha256=None), "must record a sha256 of 64 digits for tensor .* got None"),
    ],
)
def test_manifest_that_disagrees_names_the_tensor(folder, change, expected):
    change_manifest(folder, lambda manifest: manifest["tensors"][NAME].update(change))
    with pytest.raises(CheckpointError, match=f"'?{NAME}.*{expected}|{expected}"):
        open_own(folder, LAYOUTS)


def test_record_that_is_no_record(folder):
    change_manifest(folder, lambda manifest: manifest["tensors"].update({NAME: 3}))
    with pytest.raises(CheckpointError, match=f"{NAME}.* records None"):
        open_own(folder, LAYOUTS)


def test_tensor_that_is_not_listed(folder):
    change_manifest(folder, lambda manifest: manifest["tensors"].pop(NAME))
    with pytest.raises(CheckpointError, match=f"holds tensor '{NAME}', which .* not"):
        open_own(folder, LAYOUTS)


def test_tensor_that_is_not_there(folder):
    def add(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["other"] = manifest["tensors"][NAME]

    change_manifest(folder, add)
    with pytest.raises(
        CheckpointError, match="lists tensor 'other', which .* not hold"
    ):
        open_own(folder, LAYOUTS)


def test_config_is_checked_against_the_tensors(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 8}))
    with pytest.raises(CheckpointError, match="q_proj.weight' has shape"):
        open_own(folder, LAYOUTS)


def test_missing_parts_are_named(folder):
    (folder / "weights" / "_METADATA").unlink()
    (folder / "weights" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match="weights holds no arrays; found: d"):
        open_own(folder, LAYOUTS)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json; found: jaxspec_"):
        open_own(folder, LAYOUTS)


@pytest.mark.parametrize("name", ["weights", "jaxspec_checkpoint.json"])
def test_parts_may_not_be_elsewhere(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} is a symlink .* outside"):
        open_own(folder, LAYOUTS)


def test_float16_and_bfloat16_are_not_mixed_up(tmp_path):
    """Both take two bytes per value: the stored type distinguishes them, not sizes."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ArrayWriter(tmp_path / "tree") as writer:
        for kind in (np.float16, ml_dtypes.bfloat16):
            name = np.dtype(kind).name
            writer.create((name,), (2, 3), dtype=np.dtype(kind), chunks=(2, 3))
            writer.write(name, (slice(None),), values.astype(kind))
    found = {
        name: each.dtype.name for name, each in open_arrays(tmp_path / "tree").items()
    }
    assert found == {"float16": "float16", "bfloat16": "bfloat16"}

"""Our own folders: hashes, versions and shapes are checked, and Orbax reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxspec_checkpoints import CheckpointError, Sizes, orbax, storage
from jaxspec_checkpoints.orbax import is_own, open_own, write_own
from jaxspec_checkpoints.reading import LAYOUTS
from jaxspec_checkpoints.storage import open_arrays
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints.flax_trees import restore
from tests.checkpoints.models import tiny_config, tiny_tensors

CONFIG = tiny_config("27b", num_hidden_layers=1)
TENSORS = tiny_tensors(CONFIG, dtype="bfloat16")
NAME = "model.layers.0.self_attn.k_proj.weight"


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    sizes, tensors = Sizes.from_config(CONFIG), in_memory(TENSORS)
    write_own(folder, sizes, tensors, dtype=None, on_bytes=abs)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the written folder, for a test to damage."""
    return shutil.copytree(written, tmp_path / "own")


def test_folder_is_read_by_us_and_by_orbax(written):
    assert is_own(written) and not is_own(written / "weights")
    checkpoint = open_own(written, LAYOUTS)
    assert checkpoint.format == "orbax"
    assert checkpoint.config == CONFIG
    assert checkpoint.tokenizer_folder == written
    assert list(checkpoint.tensors) == list(TENSORS)
    tree = restore(written / "weights")
    assert sorted(tree) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        found = checkpoint.tensors[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.whole().tobytes() == tree[name].tobytes() == expected.tobytes()


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


def of_tensors(change: Any) -> Any:
    return lambda manifest: change(manifest["tensors"])


def of_record(**changes: Any) -> Any:
    return of_tensors(lambda tensors: tensors[NAME].update(changes))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            (lambda manifest, given=given: manifest.update(given), expected)
            for given, expected in [
                (dict(version=2), "a newer jaxspec: its version is 2, this one"),
                (dict(version=0), "must have version 1, got 0"),
                (dict(version="1"), "must have version 1, got '1'"),
                (dict(version=True), "must have version 1, got True"),
                (dict(version=None), "must have version 1, got None"),
                (dict(format="other"), "must have format 'jaxspec', got 'other'"),
                (dict(tensors=[1]), r"must list `tensors`, got \[1\]"),
            ]
        ),
        (
            of_record(shape=[1, 2]),
            rf"{NAME}.*has shape \[64, 144\] in .*but .* records \[1, 2\]",
        ),
        (of_record(shape=None), rf"{NAME}.*but .* records None"),
        (
            of_record(dtype="float32"),
            f"{NAME}.*has dtype bfloat16 in .*but .* records float32",
        ),
        (of_record(sha256="12"), f"a sha256 of 64 digits for .*{NAME}.* got '12'"),
        (of_record(sha256=None), f"a sha256 of 64 digits for .*{NAME}.* got None"),
        (
            of_tensors(lambda tensors: tensors.update({NAME: 3})),
            f"{NAME}.* records None",
        ),
        (
            of_tensors(lambda tensors: tensors.pop(NAME)),
            f"holds tensor '{NAME}', which .* not",
        ),
        (
            of_tensors(lambda tensors: tensors.update(other=tensors[NAME])),
            "lists tensor 'other', which .* not hold",
        ),
    ],
)
def test_manifest_that_disagrees_with_the_folder_is_refused(folder, change, expected):
    path = folder / "jaxspec_checkpoint.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=expected):
        open_own(folder, LAYOUTS)


def test_missing_or_linked_parts_are_named(folder, tmp_path):
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG | {"head_dim": 8}))
    with pytest.raises(CheckpointError, match="q_proj.weight' has shape"):
        open_own(folder, LAYOUTS)
    config.write_text(json.dumps(CONFIG))
    for name in ("weights", "jaxspec_checkpoint.json"):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=f"{name} is a symlink .* outside"):
            open_own(folder, LAYOUTS)
        (folder / name).unlink()
        (tmp_path / "elsewhere").rename(folder / name)
    (folder / "weights" / "_METADATA").unlink()
    (folder / "weights" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match="weights holds no arrays; found: d"):
        open_own(folder, LAYOUTS)
    config.unlink()
    with pytest.raises(CheckpointError, match="no config.json; found: jaxspec_"):
        open_own(folder, LAYOUTS)

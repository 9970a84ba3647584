"""Folders of Orbax, our own and others', are read and written in parts."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from jaxspec_checkpoints import CheckpointError, Sizes, orbax, storage
from jaxspec_checkpoints.orbax import is_own, open_own, write_own
from jaxspec_checkpoints.reading import LAYOUTS
from jaxspec_checkpoints.storage import ArrayWriter, Slabs, is_orbax, open_arrays
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints.flax_trees import restore, save
from tests.checkpoints.models import check_tensors, tiny_config, tiny_tensors

CONFIG = tiny_config("27b", num_hidden_layers=1)
TENSORS = tiny_tensors(CONFIG, dtype="bfloat16")
NAME = "model.layers.0.self_attn.k_proj.weight"
RANDOM = np.random.default_rng(0)
# Larger than what Orbax puts into its index instead of a file.
TREE = {
    "a/b": {"w": RANDOM.standard_normal((2, 40, 30), np.float32)},
    "c": {"w": RANDOM.standard_normal((70, 50)).astype(ml_dtypes.bfloat16)},
    "d": {"w": RANDOM.standard_normal(3000).astype(np.float16)},
}
ARRAYS = {f"{key}.w": inner["w"] for key, inner in TREE.items()}
STORES = {
    "database": dict(use_ocdbt=True),
    "files": dict(use_ocdbt=False),
    "database of zarr 3": dict(use_ocdbt=True, use_zarr3=True),
    "files of zarr 3": dict(use_ocdbt=False, use_zarr3=True),
    "not compressed": dict(use_ocdbt=True, use_compression=False),
}
ZARRAY = "c.w/.zarray"


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
    check_tensors(checkpoint.tensors, TENSORS)
    check_tensors(checkpoint.tensors, restore(written / "weights"))


@pytest.mark.parametrize("block_bytes", [20_000, 2**25])
def test_chunks_are_rows_of_a_block(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(orbax, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(storage, "_COMMIT_BYTES", block_bytes)
    write(tmp_path)
    for name, array in open_arrays(tmp_path / "weights").items():
        row_bytes = TENSORS[name][:1].nbytes
        rows = min(len(TENSORS[name]), max(1, block_bytes // row_bytes))
        assert array.chunks == (rows, *array.shape[1:])
    check_tensors(open_own(tmp_path, LAYOUTS).tensors, TENSORS)


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
        (dict(version=2), "a newer jaxspec: its version is 2, this one"),
        (dict(version=0), "must have version 1, got 0"),
        (dict(version="1"), "must have version 1, got '1'"),
        (dict(version=True), "must have version 1, got True"),
        (dict(version=None), "must have version 1, got None"),
        (dict(format="other"), "must have format 'jaxspec', got 'other'"),
        (dict(tensors=[1]), r"must list `tensors`, got \[1\]"),
        ({NAME: 3}, f"{NAME}.* records None"),
        ({NAME: None}, f"holds tensor '{NAME}', which .* not"),
        (dict(other={}), "lists tensor 'other', which .* not hold"),
        (
            {NAME: dict(shape=[1, 2])},
            rf"{NAME}.*has shape \[64, 144\] in .*but .* records \[1, 2\]",
        ),
        ({NAME: dict(shape=None)}, rf"{NAME}.*but .* records None"),
        ({NAME: dict(dtype="float32")}, f"{NAME}.*bfloat16 in .* records float32"),
        ({NAME: dict(sha256="12")}, f"a sha256 of 64 digits for .*{NAME}.* got '12'"),
        ({NAME: dict(sha256=None)}, f"a sha256 of 64 digits for .*{NAME}.* got None"),
    ],
)
def test_manifest_that_disagrees_with_the_folder_is_refused(folder, change, expected):
    """A change of a tensor's record is merged into it; None removes the record."""
    path = folder / "jaxspec_checkpoint.json"
    manifest = json.loads(path.read_text())
    for name, value in change.items():
        if name in manifest:
            manifest[name] = value
        elif value is None:
            del manifest["tensors"][name]
        else:
            record = manifest["tensors"].get(name, manifest["tensors"][NAME])
            is_part = isinstance(value, dict)
            manifest["tensors"][name] = record | value if is_part else value
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


@pytest.fixture(params=STORES)
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save(tmp_path / "tree", TREE, **STORES[request.param])
    return tmp_path / "tree"


def read(folder: Path, name: str, axis: int = 0) -> np.ndarray:
    array = open_arrays(folder)[name]
    return Slabs(array, axis).read(0, array.shape[axis])


def change(name: str, folder: Path, **changes: Any) -> None:
    """Change the content of a JSON file."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_arrays_are_described_and_read(tree):
    assert is_orbax(tree)
    arrays = open_arrays(tree)
    assert sorted(arrays) == sorted(ARRAYS)
    for name, expected in ARRAYS.items():
        assert arrays[name].shape == expected.shape
        assert arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(read(tree, name), expected)
    slabs = Slabs(arrays["a/b.w"], axis=2, fixed=(1,))
    for start, stop in [(3, 9), (0, 30), (29, 30), (5, 6)]:
        expected = ARRAYS["a/b.w"][1, :, start:stop]
        np.testing.assert_array_equal(slabs.read(start, stop), expected)


def test_folders_of_older_versions_are_read(tmp_path):
    """Older versions have a msgpack file, not `_METADATA`, which is not needed."""
    folder, older = tmp_path / "tree", tmp_path / "older"
    tree = {"a": {"b": {"c": ARRAYS["c.w"]}, "d": ARRAYS["d.w"]}}
    (tmp_path / "checkpoint").write_text("")
    for path in (tmp_path, tmp_path / "nowhere"):
        assert not is_orbax(path)
    save(folder, tree)
    save(older, tree, use_ocdbt=False)
    # Without `_METADATA`, the list of arrays is read from the database.
    (folder / "_METADATA").unlink()
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (older / name).unlink(missing_ok=True)
    assert not is_orbax(older)
    (older / "checkpoint").write_bytes(b"\x81")
    for path in (folder, older):
        assert is_orbax(path)
        assert sorted(open_arrays(path)) == ["a.b.c", "a.d"]
        np.testing.assert_array_equal(read(path, "a.b.c"), ARRAYS["c.w"])


@pytest.mark.parametrize("length", [None, 25])
def test_a_chunk_is_decoded_once(tmp_path, length):
    """Reading a large chunk in small slabs opens its file once per pass."""
    save(tmp_path / "tree", TREE, use_ocdbt=False)
    array = open_arrays(tmp_path / "tree")["a/b.w"]
    assert array.chunks == array.shape
    slabs = Slabs(array, axis=2, fixed=(1,), length=length)
    slabs.read(0, 1)
    shutil.rmtree(tmp_path / "tree" / "a")
    for start in range(1, length or 30):
        expected = ARRAYS["a/b.w"][1, :, start : start + 1]
        np.testing.assert_array_equal(slabs.read(start, start + 1), expected)
    # Reading the last slab ends the pass and frees the cached chunks, so the next read
    # needs the files.
    with pytest.raises(CheckpointError, match="'a/b.w'"):
        slabs.read(0, 1)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage", [truncate, lambda path: path.write_text(""), os.unlink]
)
def test_damaged_values_name_the_tensor(tree, damage):
    # Without a database, damage the tensors' own files; else the database's data files.
    descriptions = [".zarray", "zarr.json", "_METADATA", "_CHECKPOINT_METADATA"]
    for path in sorted(tree.rglob("*")):
        is_file = path.is_file() and path.name not in descriptions
        if is_file and path.stat().st_size > 2000:
            damage(path)
    arrays = open_arrays(tree)
    assert sorted(arrays) == sorted(ARRAYS)
    failures = 0
    for name, expected in ARRAYS.items():
        try:
            np.testing.assert_array_equal(read(tree, name), expected)
        except CheckpointError as error:
            assert f"tensor {name!r} of {tree} cannot be read" in str(error)
            failures += 1
    # A data file of the database holds several tensors, and its first half may hold a
    # whole one.
    assert failures >= (1 if damage is truncate else 3)


def move_outside(folder: Path) -> None:
    (folder / "c.w" / "0.0").rename(folder.parent / "elsewhere")
    (folder / "c.w" / "0.0").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("use_ocdbt", "damage", "message"),
    [
        (True, lambda tree: truncate(tree / "manifest.ocdbt"), "is not a readable Orb"),
        *(
            (
                True,
                partial(change, "_METADATA", tree_metadata=tree),
                "not a description of",
            )
            for tree in ([1], {"x": 1}, {"x": {"key_metadata": [{}]}})
        ),
        *(
            (
                False,
                lambda tree, text=text: (tree / ZARRAY).write_text(text),
                "tensor 'c.w' of .* cannot be opened",
            )
            for text in ("{", '{"zarr_format": 2}', "[]")
        ),
        # A reader must not allocate chunks larger than the array.
        (False, partial(change, ZARRAY, chunks=[70, 5000]), r"'c.w' .* \(70, 5000\)"),
        (
            False,
            lambda tree: shutil.rmtree(tree / "c.w"),
            "_METADATA lists tensor 'c.w'",
        ),
        (False, move_outside, r"c.w/0.0 is a symlink .* outside"),
    ],
)
def test_damaged_descriptions_are_refused(tmp_path, use_ocdbt, damage, message):
    save(tmp_path / "tree", TREE, use_ocdbt=use_ocdbt)
    damage(tmp_path / "tree")
    with pytest.raises(CheckpointError, match=message):
        open_arrays(tmp_path / "tree")


def with_zeros(folder: Path, store: dict[str, Any]) -> None:
    """Write as older versions did, which leave out chunks of zeros."""
    spec = {
        "driver": "zarr",
        "kvstore": store,
        "metadata": {"shape": [4, 2000], "chunks": [2, 2000], "dtype": "<f4"},
    }
    array = ts.open(spec, create=True).result()
    array[2:].write(np.ones((2, 2000), np.float32)).result()
    (folder / "_METADATA").write_text('{"tree_metadata": {}}')


def test_omitted_chunks_are_read_as_zeros_in_databases(tmp_path):
    """The database's index lists its chunks, so the omitted ones are zeros."""
    base = {"driver": "file", "path": f"{tmp_path}/"}
    with_zeros(tmp_path, {"driver": "ocdbt", "base": base, "path": "a/"})
    expected = np.repeat([[0.0], [1.0]], 2, axis=0) * np.ones(2000)
    np.testing.assert_array_equal(read(tmp_path, "a"), expected)
    change("_METADATA", tmp_path, store_array_data_equal_to_fill_value=True)
    with pytest.raises(CheckpointError, match="tensor 'a' of"):
        read(tmp_path, "a")
    # Without an index, an omitted chunk cannot be distinguished from a lost one.
    files = tmp_path / "files"
    files.mkdir()
    with_zeros(files, {"driver": "file", "path": f"{files}/a/"})
    with pytest.raises(CheckpointError, match="tensor 'a' of"):
        read(files, "a")


@pytest.mark.parametrize("commit_bytes", [1, 10_000, 2**27])
def test_orbax_restores_what_the_writer_wrote(tmp_path, monkeypatch, commit_bytes):
    monkeypatch.setattr(storage, "_COMMIT_BYTES", commit_bytes)
    folder = tmp_path / "tree"
    # Chunks of zeros are stored: a reader could not distinguish them from lost ones.
    given = {
        ("a", "b"): ARRAYS["a/b.w"],
        ("x.y",): ARRAYS["c.w"],
        ("z",): np.zeros((4, 3), np.float32),
    }
    with ArrayWriter(folder) as writer:
        for keys, values in given.items():
            form: Any = dict(dtype=values.dtype, chunks=(1, *values.shape[1:]))
            name = writer.create(keys, values.shape, **form)
            for start in range(len(values)):
                part = slice(start, start + 1)
                writer.write(name, (part,), values[part])
    tree = restore(folder)
    assert list(tree) == ["a", "x.y", "z"]
    np.testing.assert_array_equal(tree["a"]["b"], ARRAYS["a/b.w"])
    np.testing.assert_array_equal(tree["x.y"], ARRAYS["c.w"])
    assert tree["x.y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read(folder, "x.y"), ARRAYS["c.w"])
    np.testing.assert_array_equal(read(folder, "z"), np.zeros((4, 3)))
    metadata = json.loads((folder / "_METADATA").read_text())
    assert metadata["store_array_data_equal_to_fill_value"] is True
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), ArrayWriter(tmp_path / "broken") as writer:
        name = writer.create(("a",), (4, 3), dtype=np.dtype("f4"), chunks=(2, 3))
        writer.write(name, (slice(None),), np.ones((4, 3), np.float32))
        raise KeyboardInterrupt
    assert not is_orbax(tmp_path / "broken")

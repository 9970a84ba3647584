"""A model is written whole, bit for bit, or not at all.

Values are cast as by numpy, and safetensors equal those of their library.
"""

import collections
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxspec_checkpoints import (
    CheckpointError,
    Sizes,
    open_checkpoint,
    shards,
    tensor,
    writing,
)
from jaxspec_checkpoints.casting import cast_blocks, find_dtype
from jaxspec_checkpoints.shards import write_huggingface
from jaxspec_checkpoints.tensor import in_memory
from jaxspec_checkpoints.writing import FORMATS, write_checkpoint
from tests.checkpoints.models import (
    FAMILIES,
    check_tensors,
    tiny_config,
    tiny_tensors,
    write_tiny,
)

SIDE_FILES = ["config.json", "generation_config.json"]
SIDE_FILES += ["tokenizer.model", "tokenizer_config.json"]
AFTER_THE_WEIGHTS = ("_write_side_files", "_sync")
ERRORS = {
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "full disk": (OSError(28, "No space left"), CheckpointError, "not written.*No sp"),
    "value error": (ValueError("RESOURCE"), CheckpointError, "not written: RESOURCE"),
    "our bug": (AssertionError("bug"), AssertionError, "bug"),
}
DTYPES = ("float32", "bfloat16", "float16")
VALUES = np.random.default_rng(0).standard_normal((37, 5), np.float32) * 100
CONFIG = tiny_config("2b")
TENSORS = tiny_tensors(CONFIG, dtype="bfloat16")
INDEX = "model.safetensors.index.json"


def convert(source: Path, destination: Path, to: str, **options: Any) -> None:
    checkpoint = open_checkpoint(source)
    write_checkpoint(checkpoint, destination, to=to, progress=False, **options)


def check(folder: Path, to: str, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == to
    check_tensors(checkpoint.tensors, tensors)


def check_nothing_opens(folder: Path) -> None:
    """Check that no folder at or below this one is taken for a checkpoint."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            with pytest.raises(CheckpointError):
                open_checkpoint(path)


# Every pair of one family, and every format of the others.
@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        pytest.param(
            *one,
            marks=() if one[0] == "2b" or one[1] == one[2] else pytest.mark.slow,
        )
        for one in itertools.product(FAMILIES, FORMATS, FORMATS)
    ],
)
def test_every_pair_of_formats_is_bit_exact(tmp_path, family, first, second):
    dtype = {"2b": "bfloat16", "9b": "float16", "27b": "float32"}[family]
    tensors = write_tiny(tmp_path / "source", family=family, dtype=dtype, shards=3)
    before, options = tmp_path / "source", dict(max_shard_bytes=300_000)
    for name, to in (("first", first), ("second", second), ("last", "hf")):
        convert(before, tmp_path / name, to, **options)
        before, options = tmp_path / name, {}
        check(before, to, tensors)
    if (family, first) == ("9b", "hf"):
        assert len(list((tmp_path / "first").glob("*.safetensors"))) > 3
    # All files other than the weights are copied byte for byte.
    for name in SIDE_FILES:
        expected = (tmp_path / "source" / name).read_bytes()
        assert (tmp_path / "last" / name).read_bytes() == expected, name
    names = {"source", "first", "second", "last"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("to", FORMATS)
def test_values_are_cast_and_the_config_says_so(tmp_path, to, dtype):
    """Both names of the type in a config are changed."""
    source, made = tmp_path / "source", tmp_path / "model"
    tensors = write_tiny(source, family="2b", seed=3)
    given = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (source / "config.json").write_text(json.dumps(given))
    convert(source, made, to, dtype=dtype)
    kind = open_checkpoint(made).tensors["model.norm.weight"].dtype
    assert kind.name == dtype
    check(made, to, {name: tensor.astype(kind) for name, tensor in tensors.items()})
    config = json.loads((made / "config.json").read_text())
    assert config == given | {"torch_dtype": dtype, "dtype": dtype}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "there" / "source"
    write_tiny(folder, family="2b", dtype="bfloat16")
    return folder


@pytest.mark.parametrize("to", FORMATS)
def test_existing_destination_is_rejected(tmp_path, source, to):
    destination = tmp_path / "model"
    for make, is_kept in (
        (lambda: destination.symlink_to(tmp_path / "nowhere"), destination.is_symlink),
        (
            lambda: destination.write_text("mine"),
            lambda: destination.read_text() == "mine",
        ),
        (destination.mkdir, lambda: not list(destination.iterdir())),
    ):
        destination.unlink(missing_ok=True)
        make()
        with pytest.raises(CheckpointError, match="model exists already: name a fold"):
            convert(source, destination, to)
        assert {path.name for path in tmp_path.iterdir()} == {"there", "model"}
        assert is_kept()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("model", dict(to="gguf"), "to must be one of hf, kaggle, orbax, got 'gguf'"),
        ("model", dict(to="hf", dtype="int8"), "one of float32, .* got 'int8'"),
        ("no/model", dict(to="hf"), "no is not a folder: create it first"),
        ("there/source/model", dict(to="orbax"), "is inside the source checkpoint"),
        ("there/source/./model", dict(to="hf"), "is inside the source checkpoint"),
    ],
)
def test_wrong_arguments_are_rejected(tmp_path, source, name, options, expected):
    with pytest.raises(CheckpointError, match=expected):
        convert(source, tmp_path / name, **options)
    assert not (tmp_path / name).exists()
    convert(source, source.parent / "model", "orbax")


@pytest.mark.parametrize(("dtype", "factor"), [(None, 1), ("float32", 2)])
def test_full_disk_is_reported_before_writing(
    tmp_path, source, monkeypatch, dtype, factor
):
    side = sum((source / name).stat().st_size for name in SIDE_FILES)
    needed = open_checkpoint(source).num_bytes * factor + side
    usage = collections.namedtuple("usage", "total used free")
    free = [needed]
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage(0, 0, free[0]))
    with monkeypatch.context() as patch:
        patch.setattr(writing.tempfile, "TemporaryDirectory", None)
        with pytest.raises(
            CheckpointError, match=r"needs 0.00\d GB, and .* free: free"
        ):
            convert(source, tmp_path / "model", "hf", dtype=dtype)
    free[0] = int(needed * 1.02)
    convert(source, tmp_path / "model", "hf", dtype=dtype)


def bar(count: int = 0, act: Callable[[], None] = lambda: None) -> MagicMock:
    """Return a progress bar that calls a function at one of its updates."""
    made, numbers = MagicMock(), itertools.count(1)
    made.return_value = made.__enter__.return_value = made
    made.__exit__.return_value = None
    made.update.side_effect = lambda _: act() if next(numbers) == count else None
    return made


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("to", FORMATS)
def test_bar_counts_bytes_to_its_end(tmp_path, source, monkeypatch, to, dtype):
    monkeypatch.setattr(writing, "tqdm", shown := bar())
    write_checkpoint(open_checkpoint(source), tmp_path / "model", to=to, dtype=dtype)
    options = shown.call_args.kwargs
    assert (options["unit"], options["unit_scale"]) == ("B", True)
    assert options["disable"] is False
    written = open_checkpoint(tmp_path / "model").num_bytes
    counted = sum(call.args[0] for call in shown.update.call_args_list)
    assert counted == options["total"] == written


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("count", [1, 7, 24])
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("to", FORMATS)
def test_error_while_writing_leaves_nothing(
    tmp_path, source, monkeypatch, to, name, count
):
    error, expected, message = ERRORS[name]
    monkeypatch.setattr(writing, "tqdm", bar(count, raising(error)))
    with pytest.raises(expected, match=message):
        write_checkpoint(open_checkpoint(source), tmp_path / "model", to=to)
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


def test_error_after_the_weights_leaves_nothing(tmp_path, source, monkeypatch):
    """A destination that another process makes meanwhile is left alone."""
    for step in AFTER_THE_WEIGHTS:
        with monkeypatch.context() as patch:
            patch.setattr(writing, step, raising(OSError("gone")))
            with pytest.raises(CheckpointError, match="model was not written: gone"):
                convert(source, tmp_path / "model", "kaggle")
        assert {path.name for path in tmp_path.iterdir()} == {"there"}
    destination = tmp_path / "model"

    def make() -> None:
        destination.mkdir()
        (destination / "mine").touch()

    monkeypatch.setattr(writing, "tqdm", bar(5, make))
    with pytest.raises(CheckpointError, match="model was not written"):
        write_checkpoint(open_checkpoint(source), destination, to="hf")
    assert [path.name for path in destination.iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"there", "model"}


@pytest.mark.parametrize("to", FORMATS)
def test_damaged_or_too_large_weights_leave_nothing(tmp_path, source, to):
    """A wrong hash is found only after the tensor's last byte."""
    own, large = (tmp_path / "there" / name for name in ("own", "large"))
    name = "model.layers.1.mlp.up_proj.weight"
    convert(source, own, "orbax")
    manifest = json.loads((own / "jaxspec_checkpoint.json").read_text())
    manifest["tensors"][name]["sha256"] = "0" * 64
    (own / "jaxspec_checkpoint.json").write_text(json.dumps(manifest))
    tensors = write_tiny(large, family="2b")
    tensors[name][3, 4] = 1e6
    save_file(tensors, large / "model.safetensors")
    for folder, dtype, message in (
        (own, None, f"{name}: the bytes have sha256"),
        (large, "float16", f"'{name}' holds 1000000.0, too large"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "model", to, dtype=dtype)
        assert {path.name for path in tmp_path.iterdir()} == {"there"}


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_opens_before_the_last_step(tmp_path, source, monkeypatch, to):
    """Just before the final rename, all files are complete in a hidden folder.

    The folder has the mark of unfinished folders until then.
    """
    seen = []

    def look(folder: Path, destination: Path) -> None:
        check_nothing_opens(tmp_path / folder.relative_to(tmp_path).parts[0])
        seen.append(sorted(path.name for path in folder.iterdir()))
        os.rename(folder, destination)

    monkeypatch.setattr(Path, "rename", look)
    convert(source, tmp_path / "model", to)
    assert open_checkpoint(tmp_path / "model").format == to
    assert seen == [sorted(path.name for path in (tmp_path / "model").iterdir())]


KILLED = """
import itertools, os, signal, sys
from unittest.mock import MagicMock
from jaxspec_checkpoints import open_checkpoint, storage, writing

storage._COMMIT_BYTES = 1
source, destination, to, step = sys.argv[1:]
updates = itertools.count(1)

def kill(*arguments):
    if step != "write" or next(updates) == 9:
        os.kill(os.getpid(), signal.SIGKILL)

if step == "write":
    writing.tqdm = bar = MagicMock(update=kill)
    bar.return_value = bar.__enter__.return_value = bar
else:
    setattr(writing, step, kill)
writing.write_checkpoint(open_checkpoint(source), destination, to=to)
"""


@pytest.mark.parametrize(
    "step",
    [
        "write",
        *(pytest.param(one, marks=pytest.mark.slow) for one in AFTER_THE_WEIGHTS),
    ],
)
def test_killed_process_leaves_nothing_that_opens(tmp_path, source, step):
    """What a killed process leaves is hidden and marked as unfinished.

    A second attempt succeeds.
    """
    processes = {
        to: subprocess.Popen(
            [sys.executable, "-c", KILLED, source, tmp_path / to, to, step],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for to in FORMATS
    }
    for to, process in processes.items():
        assert process.wait() == -signal.SIGKILL, to
    left = sorted(path for path in tmp_path.iterdir() if path.name != "there")
    assert [path.name.split(".")[1] for path in left] == sorted(FORMATS)
    for path in left:
        assert path.name.startswith(".")
        assert any(each.stat().st_size > 10_000 for each in path.rglob("*"))
        check_nothing_opens(path)
    for to in FORMATS:
        convert(source, tmp_path / to, to)
        assert open_checkpoint(tmp_path / to).format == to


@pytest.mark.parametrize("rows", [1, 2, 7, 36, 37, 100])
@pytest.mark.parametrize("block_bytes", [1, 60, 2**25])
def test_blocks_have_the_requested_rows(monkeypatch, rows, block_bytes):
    """The rows are the same for any size of the blocks that are read at a time."""
    monkeypatch.setattr(tensor, "BLOCK_BYTES", block_bytes)
    (source,) = in_memory({"x": VALUES}).values()
    blocks = list(cast_blocks("x", source, dtype=VALUES.dtype, rows=rows))
    assert [start for start, _ in blocks] == list(range(0, 37, rows))
    assert {len(values) for _, values in blocks[:-1]} <= {rows}
    np.testing.assert_array_equal(np.concatenate([each for _, each in blocks]), VALUES)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_values_are_rounded_as_numpy_does(source, target):
    """Infinite and NaN values are kept."""
    edges = np.full((1, 5), [np.inf, -np.inf, np.nan, 1e-30, 1])
    values = np.concatenate([VALUES, edges])
    values = values.astype(find_dtype(source))
    (each,) = in_memory({"x": values}).values()
    blocks = list(cast_blocks("x", each, dtype=find_dtype(target), rows=10))
    found = np.concatenate([rows for _, rows in blocks])
    assert (found.shape, found.dtype.name) == (values.shape, target)
    expected = values.astype(find_dtype(target)).astype(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("float32", "float16", 65520.0),
        ("bfloat16", "float16", -66000.0),
        ("float32", "bfloat16", 3.4e38),
    ],
)
def test_too_large_values_name_the_tensor(source, target, value):
    values = np.ones((4, 3), find_dtype(source))
    values[2, 1] = value
    (each,) = in_memory({"x": values}).values()
    expected = f"'x' holds {values[2, 1]}, too large for {target} .at most"
    with pytest.raises(CheckpointError, match=expected.replace("+", r"\+")):
        list(cast_blocks("x", each, dtype=find_dtype(target), rows=1))


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
    check_tensors(load_file(tmp_path / "model.safetensors"), TENSORS)
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
    check_tensors(load_file(tmp_path / "model.safetensors"), tensors)


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
    assert sorted(found) == sorted(index["weight_map"])
    check_tensors(
        found, {name: one.astype(dtype or one.dtype) for name, one in TENSORS.items()}
    )

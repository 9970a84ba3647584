"""A model is written whole, bit for bit, or not at all."""

import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec_checkpoints import CheckpointError, open_checkpoint, writing
from jaxspec_checkpoints.writing import FORMATS, write_checkpoint
from tests.checkpoints.models import FAMILIES, write_tiny

SIDE_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer_config.json",
]


def convert(source: Path, destination: Path, to: str, **options: Any) -> None:
    checkpoint = open_checkpoint(source)
    write_checkpoint(checkpoint, destination, to=to, progress=False, **options)


def check(folder: Path, to: str, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == to
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.tensors[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.whole().tobytes() == expected.tobytes(), name


def check_nothing_opens(folder: Path) -> None:
    """Check that no folder at or below this one is taken for a checkpoint."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            with pytest.raises(CheckpointError):
                open_checkpoint(path)


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_formats_is_bit_exact(tmp_path, family, first, second):
    dtype = {"2b": "bfloat16", "9b": "float16", "27b": "float32"}[family]
    tensors = write_tiny(tmp_path / "source", family=family, dtype=dtype, shards=3)
    before, options = tmp_path / "source", dict(max_shard_bytes=300_000)
    for name, to in (("first", first), ("second", second), ("last", "hf")):
        convert(before, tmp_path / name, to, **options)
        before, options = tmp_path / name, {}
        check(before, to, tensors)
    shards = (tmp_path / "first").glob("*.safetensors")
    if (family, first) == ("9b", "hf"):
        assert len(list(shards)) > 3
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
        (
            "model",
            dict(to="hf", dtype="int8"),
            "dtype must be one of float32, .* got 'int8'",
        ),
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


class Bar:
    """A progress bar that calls a function after a number of writes."""

    def __init__(self, count: int, act: Callable[[], None]):
        self.left, self.act, self.bytes = count, act, 0

    def __call__(self, **options: Any) -> "Bar":
        self.options = options
        return self

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, count: int) -> None:
        self.bytes += count
        self.left -= 1
        if self.left == 0:
            self.act()


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("to", FORMATS)
def test_bar_counts_bytes_to_its_end(tmp_path, source, monkeypatch, to, dtype):
    bar = Bar(0, lambda: None)
    monkeypatch.setattr(writing, "tqdm", bar)
    write_checkpoint(open_checkpoint(source), tmp_path / "model", to=to, dtype=dtype)
    assert (bar.options["unit"], bar.options["unit_scale"]) == ("B", True)
    assert bar.options["disable"] is False
    written = open_checkpoint(tmp_path / "model").num_bytes
    assert bar.bytes == bar.options["total"] == written


ERRORS = {
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "full disk": (OSError(28, "No space left"), CheckpointError, "not written.*No sp"),
    "value error": (ValueError("RESOURCE"), CheckpointError, "not written: RESOURCE"),
    "our bug": (AssertionError("bug"), AssertionError, "bug"),
}


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
    monkeypatch.setattr(writing, "tqdm", Bar(count, raising(error)))
    with pytest.raises(expected, match=message):
        write_checkpoint(open_checkpoint(source), tmp_path / "model", to=to)
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


def test_error_after_the_weights_leaves_nothing(tmp_path, source, monkeypatch):
    """A destination that another process makes meanwhile is left alone."""
    for step in ("_write_side_files", "_sync"):
        with monkeypatch.context() as patch:
            patch.setattr(writing, step, raising(OSError("gone")))
            with pytest.raises(CheckpointError, match="model was not written: gone"):
                convert(source, tmp_path / "model", "kaggle")
        assert {path.name for path in tmp_path.iterdir()} == {"there"}
    destination = tmp_path / "model"

    def make() -> None:
        destination.mkdir()
        (destination / "mine").touch()

    monkeypatch.setattr(writing, "tqdm", Bar(5, make))
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
import os, signal, sys
from jaxspec_checkpoints import open_checkpoint, storage, writing

storage._COMMIT_BYTES = 1
source, destination, to, step = sys.argv[1:]


def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


class Bar:
    left = 9

    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def update(self, count):
        self.left -= 1
        if self.left == 0 and step == "write":
            kill()

    def __exit__(self, *error):
        pass


writing.tqdm = Bar
if step != "write":
    setattr(writing, step, kill)
writing.write_checkpoint(open_checkpoint(source), destination, to=to)
"""


@pytest.mark.parametrize(
    "step",
    [
        "write",
        pytest.param("_write_side_files", marks=pytest.mark.slow),
        pytest.param("_sync", marks=pytest.mark.slow),
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

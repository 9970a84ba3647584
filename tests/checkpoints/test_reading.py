"""The format of a folder is detected; an unfinished folder is rejected."""

import shutil
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError, model_files, open_checkpoint
from jaxspec_checkpoints.reading import INCOMPLETE
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import write_tiny


def test_format_is_detected(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tensors = write_tiny(folder, family="2b", num_hidden_layers=1)
    assert open_checkpoint(str(folder)).format == "hf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/model").format == "hf"
    # Other files in the folder do not matter.
    (folder / "README.md").write_text("hello")
    (folder / "logs").mkdir()
    assert open_checkpoint(folder).format == "hf"
    # HuggingFace's format takes precedence.
    made = tmp_path / "made"
    write_checkpoint(open_checkpoint(folder), made, to="orbax", progress=False)
    shutil.copy(folder / "model.safetensors", made)
    checkpoint = open_checkpoint(made)
    assert checkpoint.format == "hf"
    assert set(checkpoint.tensors) == set(tensors)
    for text in ("[" * 100_000, '{"a":' * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json must be readable JS"):
            open_checkpoint(folder)


def test_an_adapter_without_its_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter, which is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # Loading pickled Python objects can run code.
        (".", "holds no checkpoint.*found: config.json, pytorch_model.bin"),
        ("nowhere", "no such folder"),
        ("pytorch_model.bin", "holds no checkpoint.*found: a file"),
        ("a" * 300, "cannot be read: .* too long"),
        ("~nobody-here/model", "^~nobody-here/model holds no check"),
    ],
)
def test_other_paths_are_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("pytorch_model.bin").write_bytes(b"\x80\x04}.")
    Path("config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(name)
    if "too long" in message:
        with pytest.raises(CheckpointError, match=message):
            model_files(name)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_unfinished_folders_are_refused(tmp_path, depth):
    """The mark of an unfinished folder lies next to it, or next to its root."""
    folder = tmp_path / "a" / "b"
    write_tiny(folder, family="2b", num_hidden_layers=1)
    assert open_checkpoint(folder).format == "hf"
    (folder, *above) = (folder, *folder.parents)
    ([folder, *above][depth] / INCOMPLETE).touch()
    with pytest.raises(CheckpointError, match="is left from an unfinished conversion"):
        open_checkpoint(folder)

"""The format of a folder is detected; an unfinished folder is rejected."""

import shutil
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError, model_files, open_checkpoint
from jaxspec_checkpoints.reading import INCOMPLETE
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import write_tiny


def test_format_is_detected(tmp_path, monkeypatch):
    write_tiny(tmp_path / "model", family="2b", num_hidden_layers=1)
    assert open_checkpoint(str(tmp_path / "model")).format == "hf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/model").format == "hf"
    # Other files in the folder do not matter.
    (tmp_path / "model" / "README.md").write_text("hello")
    (tmp_path / "model" / "logs").mkdir()
    assert open_checkpoint(tmp_path / "model").format == "hf"


def test_huggingface_goes_before_others(tmp_path):
    tensors = write_tiny(tmp_path / "source", family="2b", num_hidden_layers=1)
    source = open_checkpoint(tmp_path / "source")
    write_checkpoint(source, tmp_path / "model", to="orbax", progress=False)
    file = tmp_path / "source" / "model.safetensors"
    shutil.copy(file, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.format == "hf"
    assert set(checkpoint.tensors) == set(tensors)


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
def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("pytorch_model.bin").write_bytes(b"\x80\x04}.")
    Path("config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(name)
    if "too long" in message:
        with pytest.raises(CheckpointError, match=message):
            model_files(name)


def test_an_adapter_without_its_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter without its model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_nested_too_deep(tmp_path, text):
    write_tiny(tmp_path, family="2b", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json must be readable JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_unfinished_folders_are_refused(tmp_path, depth):
    """The mark of an unfinished folder lies next to it, or next to its root."""
    folder = tmp_path / "a" / "b"
    write_tiny(folder, family="2b", num_hidden_layers=1)
    assert open_checkpoint(folder).format == "hf"
    (folder, *above) = (folder, *folder.parents)
    ([folder, *above][depth] / INCOMPLETE).touch()
    with pytest.raises(CheckpointError, match="is what an unfinished conversion left"):
        open_checkpoint(folder)

"""The format of a folder is detected; an unfinished folder is rejected."""

import json
import shutil

import pytest

from jaxspec_checkpoints import CheckpointError, model_files, open_checkpoint
from jaxspec_checkpoints.reading import INCOMPLETE
from jaxspec_checkpoints.writing import FORMATS, write_checkpoint
from tests.checkpoints.models import write_tiny


@pytest.mark.parametrize("to", FORMATS)
def test_format_is_detected(tmp_path, to, monkeypatch):
    write_tiny(tmp_path / "source", family="2b", num_hidden_layers=1)
    source = open_checkpoint(tmp_path / "source")
    write_checkpoint(source, tmp_path / "model", to=to, progress=False)
    assert open_checkpoint(tmp_path / "model").format == to
    assert open_checkpoint(str(tmp_path / "model")).format == to
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/model").format == to
    # Other files in the folder do not matter.
    (tmp_path / "model" / "README.md").write_text("hello")
    (tmp_path / "model" / "logs").mkdir()
    assert open_checkpoint(tmp_path / "model").format == to


def test_huggingface_goes_before_others(tmp_path):
    tensors = write_tiny(tmp_path / "source", family="2b", num_hidden_layers=1)
    source = open_checkpoint(tmp_path / "source")
    write_checkpoint(source, tmp_path / "model", to="orbax", progress=False)
    file = tmp_path / "source" / "model.safetensors"
    shutil.copy(file, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.format == "hf"
    assert set(checkpoint.tensors) == set(tensors)


def test_folder_of_nothing_known(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="holds no checkpoint.*found: model.bin"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="found: a file"):
        open_checkpoint(tmp_path / "model.bin")


def test_an_adapter_without_its_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter, which is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("read", [open_checkpoint, model_files])
def test_names_that_the_system_refuses(read):
    with pytest.raises(CheckpointError, match="cannot be read: .* too long"):
        read("a" * 300)


def test_a_user_who_does_not_exist():
    with pytest.raises(CheckpointError, match="^~nobody-here/model holds no check"):
        open_checkpoint("~nobody-here/model")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_nested_too_deep(tmp_path, text):
    write_tiny(tmp_path, family="2b", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json must be readable JSON"):
        open_checkpoint(tmp_path)


def test_python_objects_are_never_opened(tmp_path):
    """Files of pickled Python objects are refused, because loading can run code."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04}.")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="found: config.json, pytorch_model.bin"):
        open_checkpoint(tmp_path)


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

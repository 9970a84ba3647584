"""Folders are detected, whole and in shards; one that cannot be read says why."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec_checkpoints import CheckpointError, model_files, open_checkpoint
from jaxspec_checkpoints.huggingface import open_huggingface, read_tensors
from jaxspec_checkpoints.reading import INCOMPLETE, LAYOUTS
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import (
    check_tensors,
    tiny_gemma3,
    tiny_tensors,
    write_tiny,
)

INDEX = "model.safetensors.index.json"
TENSORS = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "second": np.arange(4, dtype=np.float32).astype(jnp.bfloat16),
    "third": np.array([[1.5]], np.float16),
}
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
SHARDS = {"first": FIRST, "second": SECOND, "third": FIRST}
NESTED = "text_config"


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


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for shard in set(SHARDS.values()):
        held = {name: TENSORS[name] for name in TENSORS if SHARDS[name] == shard}
        save_file(held, tmp_path / shard)
    write_index(tmp_path, SHARDS)
    return tmp_path


def test_single_file_takes_precedence_over_an_index(sharded):
    check_tensors(read_tensors(str(sharded)), TENSORS)
    first = read_tensors(sharded)["first"]
    np.testing.assert_array_equal(first.read(1, 2), TENSORS["first"][1:2])
    assert first.source.endswith(f"{SHARDS['first']}:first")
    # The index decides which of two copies is read.
    held = {"first": TENSORS["first"] + 1, "second": TENSORS["second"]}
    save_file(held, sharded / SHARDS["second"])
    check_tensors(read_tensors(sharded), TENSORS)
    save_file(TENSORS, sharded / "model.safetensors")
    write_index(sharded, {"first": "gone.safetensors"})
    check_tensors(read_tensors(sharded), TENSORS)


def cut_off(name: str, kept: int, folder: Path) -> None:
    if name == "model.safetensors":
        save_file(TENSORS, folder / name)
    (folder / name).write_bytes((folder / name).read_bytes()[:kept])


def indexed(folder: Path, **changes: str | None) -> None:
    """Make the index name other files with weights; None removes a tensor."""
    (folder / "sub").mkdir()
    for place in (folder / "sub" / "x", folder.parent / "outside"):
        save_file(TENSORS, place.with_suffix(".safetensors"))
    merged = SHARDS | changes
    write_index(folder, {name: file for name, file in merged.items() if file})


def index_text(text: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)


def only(names: str, tensors: dict[str, Any], folder: Path) -> None:
    """Leave only files of these names, or a file of `tensors`."""
    for path in folder.iterdir():
        path.unlink()
    for name in names.split():
        (folder / name).touch()
    if tensors:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            (partial(cut_off, name, kept), f"{name} is not a readable safetensors")
            for name in ("model.safetensors", FIRST, SECOND)
            for kept in (0, 4, 60, -1)
        ),
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND}, which is not"),
        *(
            (partial(indexed, first=file), f"points outside its folder: '{file}'")
            for file in ("../outside.safetensors", "sub/x.safetensors")
        ),
        (lambda folder: indexed(folder, first=str(folder / FIRST)), "points outside"),
        *(
            (partial(index_text, text), f"{INDEX} is not an index")
            for text in ("{}", '{"weight_map": []}', '{"weight_map": 1}')
        ),
        *(
            (partial(index_text, text), f"{INDEX} must (be|hold)")
            for text in ("", "{", "[]")
        ),
        (partial(indexed, third=None), "holds tensor 'third', which .* not list"),
        (partial(indexed, third=SECOND), "00002.* holds tensor 'third', but it does"),
        (partial(only, "", {"first": np.zeros(2, np.int8)}), "'first' has type I8"),
        (
            partial(only, "pytorch_model.bin config.json", {}),
            "neither model.safetensors nor .*found: config.json, pytorch_model.bin",
        ),
        (shutil.rmtree, "found: no such folder"),
    ],
)
def test_folder_that_cannot_be_read_says_why(sharded, change, expected):
    change(sharded)
    with pytest.raises(CheckpointError, match=expected):
        read_tensors(sharded)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_symlink_to_elsewhere_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    write_tiny(folder, family="2b")
    (folder / name).rename(folder / "here")
    (folder / name).symlink_to("here")
    assert open_huggingface(folder, LAYOUTS).num_parameters > 0
    (folder / "here").rename(tmp_path / name)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a symlink that points outs"):
        open_huggingface(folder, LAYOUTS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"intermediate_size": 289}, r"down_proj.* \(72, 288\), .* \(72, 289\)"),
        *(
            ({"hidden_size": size}, "hidden_size must be an integer of at")
            for size in (None, 0, "72", True, 7.5)
        ),
        # So many layers that a list of their tensors' names would fill the memory.
        ({"num_hidden_layers": 10**30}, "num_hidden_layers=1000.* only 13 tens"),
        ({"model_type": "gemma4"}, "must be 'gemma2' or .*, got 'gemma4'"),
    ],
)
def test_config_that_does_not_fit_is_refused(tmp_path, changes, expected):
    write_tiny(tmp_path, family="2b", num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=expected):
        open_huggingface(tmp_path, LAYOUTS)


def write_gemma3(
    folder: Path, prefix: str, tensors: dict[str, np.ndarray], **outer: object
) -> Path:
    """Write a multimodal folder whose text tensors have a prefix of that form."""
    text = tiny_gemma3(vocab_size=len(tensors["model.embed_tokens.weight"]))
    config = {"model_type": "gemma3", NESTED: text, "dtype": "bfloat16", **outer}
    (folder / "config.json").write_text(json.dumps(config))
    held = {f"{prefix}{name[6:]}": value for name, value in tensors.items()}
    vision = "model." if prefix == "model.language_model." else ""
    for name in (
        "vision_tower.vision_model.post_layernorm.bias",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    ):
        held[vision + name] = np.ones(4, np.float32)
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "prefix", ["", "model.", "language_model.model.", "model.language_model."]
)
def test_text_model_of_a_multimodal_folder_is_read(tmp_path, prefix):
    tensors = tiny_tensors(tiny_gemma3())
    checkpoint = open_checkpoint(write_gemma3(tmp_path, prefix, tensors))
    assert checkpoint.layout.title == "Gemma 3"
    check_tensors(checkpoint.tensors, tensors)


def test_rows_of_images_are_cut_off(tmp_path):
    """The multimodal embedding has rows for images, which text models lack.

    The checkpoint keeps the 262,144 rows that all sizes of Gemma 3 share, and its
    config has this `vocab_size`.
    """
    config = tiny_gemma3(
        vocab_size=262144, hidden_size=8, intermediate_size=8, num_hidden_layers=1
    )
    tensors = tiny_tensors(config)
    rows = tensors["model.embed_tokens.weight"]
    longer = {**tensors, "model.embed_tokens.weight": np.pad(rows, ((0, 64), (0, 0)))}
    text = {**config, "vocab_size": 262208}
    folder = write_gemma3(tmp_path, "language_model.model.", longer, text_config=text)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["vocab_size"] == checkpoint.sizes.vocab_size == 262144
    found = checkpoint.tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found.whole(), rows)


@pytest.mark.parametrize("name", ["vision_towers.a", "model.layers.0.vision_tower.b"])
def test_other_tensors_are_not_skipped(tmp_path, name):
    tensors = tiny_tensors(tiny_gemma3()) | {f"model.{name}": np.ones(4, np.float32)}
    folder = write_gemma3(tmp_path, "language_model.model.", tensors)
    with pytest.raises(CheckpointError, match="is not part of Gemma 3"):
        open_checkpoint(folder)


def test_tensor_under_two_names_is_refused(tmp_path):
    tensors = tiny_tensors(tiny_gemma3())
    folder = write_gemma3(tmp_path, "language_model.model.", tensors)
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"] = held["language_model.model.norm.weight"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="'model.norm.weight' twice"):
        open_checkpoint(folder)

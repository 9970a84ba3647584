"""Kaggle folders of every tree layout are read, with their tokenizer.

They need no config.json: the shapes identify the model.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, Sizes, kaggle, storage
from jaxspec_checkpoints.gemma import flax_layout
from jaxspec_checkpoints.gemma.published import GEMMA2, GEMMA3
from jaxspec_checkpoints.kaggle import is_kaggle, open_kaggle, write_kaggle
from jaxspec_checkpoints.layout import Layout
from jaxspec_checkpoints.reading import LAYOUTS
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints.flax_trees import FORMS, flax_leaves, restore, save, stored
from tests.checkpoints.models import (
    FACTS,
    FAMILIES,
    check_tensors,
    published_shapes,
    tiny_config,
    tiny_gemma3,
    tiny_tensors,
)

VISION = {
    "SigLiPFromPatches_0/siglip_encoder/pos_embedding": np.ones((1, 2, 3), np.float32),
    "embedder/mm_input_projection/w": np.ones((3, 40), np.float32),
    "embedder/mm_soft_embedding_norm/scale": np.ones(3, np.float32),
}


def write(
    folder: Path, config: Any, tensors: dict[str, np.ndarray], layout: Layout = GEMMA2
) -> int:
    """Write a tree; return the number of bytes that the writer counted."""
    sizes, counted = Sizes.from_config(config), []
    given: Any = dict(dtype=None, layout=layout, on_bytes=counted.append)
    write_kaggle(folder, sizes, in_memory(tensors), **given)
    return sum(counted)


def check_tree(folder: Path, expected: Any) -> None:
    tree = restore(folder)
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    check_tensors(*(dict(enumerate(jax.tree.leaves(one))) for one in (tree, expected)))


def write_mount(
    root: Path,
    *,
    family: str = "2b",
    form: str = "flat",
    is_model_first: bool = True,
    num_stacks: int = 0,
    num_layers: int = 2,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Make the folders that a notebook mounts; return the canonical weights.

    The tree is in `root / "variant"`. `root` also gets a `config.json`, which published
    trees lack. The tree of "gemma3" has arrays for images and no pad rows.
    """
    shape: dict[str, Any] = dict(num_stacks=num_stacks, is_model_first=is_model_first)
    if family == "gemma3":
        config, shape = tiny_gemma3(), shape | dict(is_model_first=False, pad_rows=0)
    else:
        config = tiny_config(family, num_hidden_layers=num_layers)
    tensors = tiny_tensors(config, dtype="bfloat16")
    leaves = flax_leaves(tensors, config, **shape)
    leaves |= VISION if family == "gemma3" else {}
    root.mkdir(exist_ok=True)
    save(root / "variant", FORMS[form](leaves), **options)
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.model").write_bytes(b"pieces")
    return tensors


def check(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = open_kaggle(folder, LAYOUTS)
    assert checkpoint.format == "kaggle"
    assert list(checkpoint.tensors) == list(tensors)
    check_tensors(checkpoint.tensors, tensors)


TREES: list[tuple[str, dict[str, Any]]] = [
    *(
        (family, dict(is_model_first=is_model_first))
        for family in FAMILIES
        for is_model_first in (True, False)
    ),
    *(("2b", dict(num_stacks=2, num_layers=count)) for count in (2, 5)),
    # Eight layers in six stacks: two of the stacks have one layer more.
    *(("gemma3", dict(num_stacks=num_stacks)) for num_stacks in (0, 6)),
]


# All forms of the first and of the last tree, and one form of the others.
@pytest.mark.parametrize(
    ("family", "options", "form"),
    [
        pytest.param(
            *tree, form, marks=() if tree in ends or form == "nested" else slow
        )
        for slow, ends in [(pytest.mark.slow, (TREES[0], TREES[-1]))]
        for tree in TREES
        for form in FORMS
    ],
)
def test_trees_of_every_layout_are_read(tmp_path, family, form, options):
    check(tmp_path, write_mount(tmp_path, family=family, form=form, **options))
    layout = GEMMA3 if family == "gemma3" else GEMMA2
    assert open_kaggle(tmp_path, LAYOUTS).layout is layout


def test_gemma_3_is_written_and_read_again(tmp_path):
    config = tiny_gemma3()
    tensors = tiny_tensors(config, dtype="bfloat16")
    write(tmp_path, config, tensors, layout=GEMMA3)
    leaves = flax_leaves(tensors, config, is_model_first=False, pad_rows=0)
    check_tree(tmp_path / "gemma3", FORMS["flat"](leaves))
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, tensors)


def open_without_values(folder: Path, patch: Any, shapes: dict[str, Any]) -> Any:
    """Open a tree with true names and shapes, but no values, which are not read."""
    names = {path.replace("/", "."): shape for path, shape in shapes.items()}
    arrays = {name: stored(shape, name) for name, shape in names.items()}
    patch.setattr(kaggle, "open_arrays", lambda folder: arrays)
    (folder / "_METADATA").touch()
    return open_kaggle(folder, LAYOUTS)


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        *(("270m", 0.268098176), ("1b", 0.999885952), ("4b", 3.880)),
        *(("12b", 11.766), ("27b", 27.009)),
    ],
)
def test_published_gemma_3_is_found_by_its_shapes(
    tmp_path, monkeypatch, size, billions
):
    assert len(GEMMA3.published) == 5
    sizes = GEMMA3.published[size]
    form: Any = dict(is_model_first=False, has_qk_norm=True)
    shapes = flax_layout.leaf_shapes(sizes, num_rows=262144, **form)
    shapes = {f"transformer/{path}": shape for path, shape in shapes.items()}
    checkpoint = open_without_values(tmp_path, monkeypatch, shapes)
    assert (checkpoint.layout, checkpoint.sizes) == (GEMMA3, sizes)
    digits = 9 if billions < 1 else 3
    assert round(checkpoint.num_parameters / 1e9, digits) == billions


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("2b", 2_614_341_888), ("9b", 9_241_705_984), ("27b", 27_227_128_320)],
)
def test_published_shapes_have_their_config(
    tmp_path, monkeypatch, name, num_parameters
):
    shapes = published_shapes(name, "flax")
    checkpoint = open_without_values(tmp_path, monkeypatch, shapes)
    changes = {"eos_token_id": [1, 107], "torch_dtype": "float16"}
    assert checkpoint.config == FACTS[name]["config"] | changes
    assert checkpoint.generation_config == {}
    assert checkpoint.num_parameters == num_parameters


def test_root_folder_and_tree_folder_are_the_same_checkpoint(tmp_path, monkeypatch):
    tensors, tree = write_mount(tmp_path), tmp_path / "variant"
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    for folder in (tmp_path, tree):
        assert is_kaggle(folder)
        check(folder, tensors)
        checkpoint = open_kaggle(folder, LAYOUTS)
        assert checkpoint.folder == tree
        assert checkpoint.tokenizer_folder == tmp_path
        assert checkpoint.generation_config == {"temperature": 0.5}
    monkeypatch.chdir(tree)
    assert "tokenizer.model" in open_kaggle(Path("."), LAYOUTS).side_files
    (tree / "tokenizer.model").write_bytes(b"other")
    assert open_kaggle(tmp_path, LAYOUTS).tokenizer_folder == tree
    # A folder that may not be entered is no second checkpoint, like the `lost+found`
    # of a mounted disk.
    shutil.copytree(tree, tmp_path / "another")
    monkeypatch.setattr(kaggle.os, "access", lambda path, _: path.name != "another")
    check(tmp_path, tensors)
    monkeypatch.undo()
    expected = r"holds 2 checkpoints: name one of them \(another, variant\)"
    with pytest.raises(CheckpointError, match=expected):
        open_kaggle(tmp_path, LAYOUTS)
    assert open_kaggle(tmp_path / "another", LAYOUTS).folder == tmp_path / "another"


def test_other_folders_are_not_kaggle_checkpoints(tmp_path):
    assert not is_kaggle(tmp_path)
    assert not is_kaggle(tmp_path / "nowhere")
    (tmp_path / "variant").mkdir()
    assert not is_kaggle(tmp_path)
    # A tree that lies elsewhere, and a link to itself.
    root = tmp_path / "root"
    write_mount(root)
    (root / "variant").rename(tmp_path / "elsewhere")
    (root / "variant").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="variant is a symlink .* outside"):
        open_kaggle(root, LAYOUTS)
    (tmp_path / "elsewhere" / "loop").symlink_to("loop")
    if sys.version_info < (3, 13):
        with pytest.raises(CheckpointError, match="loop is a symlink that leads back"):
            open_kaggle(tmp_path / "elsewhere", LAYOUTS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(num_hidden_layers=3), "has no tensor 'transformer/layer_2/"),
        (dict(num_hidden_layers=10**30), "has .*=1000.*, but the checkpoint has 2"),
        (dict(num_hidden_layers=1), "'transformer/layer_1/.*' is not part of the"),
        (dict(head_dim=16), r"attn/.*' has shape .* but config.json requires"),
        (dict(vocab_size=700), "has 640 rows, expected vocab_size=700"),
        (dict(hidden_size=None), "config.json: hidden_size must be an integer"),
        (
            None,
            "no config.json, and its shapes fit no published .*"
            "hidden_size=72.*Put the model's config.json into ",
        ),
    ],
)
def test_config_is_checked_against_the_shapes(tmp_path, change, expected):
    write_mount(tmp_path)
    path = tmp_path / "config.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=expected):
        open_kaggle(tmp_path, LAYOUTS)


@pytest.mark.parametrize("block_bytes", [20_000, 2**25])
@pytest.mark.parametrize("is_model_first", [True, False])
def test_writer_makes_the_tree_of_the_formulas(
    tmp_path, monkeypatch, is_model_first, block_bytes
):
    """Orbax reads the written tree: flat keys, zero padding, the size's orientation."""
    monkeypatch.setattr(Layout, "is_model_first", lambda *_: is_model_first)
    monkeypatch.setattr(flax_layout, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(storage, "_COMMIT_BYTES", 4 * block_bytes)
    config = tiny_config("27b", num_hidden_layers=1)
    tensors = tiny_tensors(config, dtype="bfloat16")
    assert write(tmp_path, config, tensors) == sum(
        tensor.nbytes for tensor in tensors.values()
    )
    leaves = flax_leaves(tensors, config, is_model_first=is_model_first)
    leaves["embedder/input_embedding"][512:] = 0
    check_tree(tmp_path / "gemma2", FORMS["flat"](leaves))


def test_tensors_that_the_tree_cannot_hold_are_not_written(tmp_path):
    config = tiny_config("2b", intermediate_size=72)
    expected = "could not determine the orientation of gating_einsum"
    with pytest.raises(CheckpointError, match=expected):
        write(tmp_path, config, tiny_tensors(config))
    assert not list(tmp_path.iterdir())
    config = tiny_config("2b")
    tensors = tiny_tensors(config)
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    expected = f"'{name}' is float16, but .* in 'layer_1/attn/kv_einsum/w'.* float32"
    with pytest.raises(CheckpointError, match=expected):
        write(tmp_path, config, tensors)


def test_memory_of_a_read_tensor_is_freed(tmp_path):
    """Reading a whole tensor frees its cached chunk: later reads open the files.

    An array may be a single chunk. The embedding is read up to its padding rows, which
    would otherwise keep its chunk in the cache.
    """
    write_mount(tmp_path, use_ocdbt=False)
    tensors = open_kaggle(tmp_path, LAYOUTS).tensors
    for tensor in tensors.values():
        tensor.whole()
    for path in (tmp_path / "variant").rglob("*"):
        if path.is_file():
            path.unlink()
    for tensor in tensors.values():
        with pytest.raises(CheckpointError, match="cannot be read"):
            tensor.read(0, 1)

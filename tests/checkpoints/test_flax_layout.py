"""Every canonical tensor is a view of the right part of the right Flax array.

Trees of every layout are recognized, and the sizes are those that were published.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, Sizes, tensor_shapes
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes, views
from jaxspec_checkpoints.gemma.flax_tree import FlaxTree, read_tree
from jaxspec_checkpoints.gemma.published import GEMMA2, published_config
from jaxspec_checkpoints.tensor import BLOCK_BYTES
from tests.checkpoints.flax_trees import flax_leaves, stored
from tests.checkpoints.models import (
    FACTS,
    FAMILIES,
    published_shapes,
    tiny_config,
    tiny_tensors,
)

EMBEDDING = "embedder/input_embedding"
CONFIG = tiny_config("2b")
SIZES = Sizes.from_config(CONFIG)
PAIRED = ("mlp/gating_einsum", "mlp/linear")
LINEAR = "layer_1/mlp/linear"
ROWS = r"'transformer/embedder/input_embedding' has {} rows, expected vocab_size=512"
SHAPE = r"has shape \(72, 288\).* requires \(288, 72\)"
UNKNOWN = "is not part of the model"


@pytest.mark.parametrize("name", FAMILIES)
def test_published_trees_have_views_of_all_tensors_and_small_chunks(name):
    facts = FACTS[name]["config"]
    # Tuned models have the same config, except that 107 also ends their texts.
    assert published_config(name) == facts | {"eos_token_id": [1, 107]}
    sizes = Sizes.from_config(facts)
    assert GEMMA2.published_name(sizes) == name
    assert GEMMA2.is_model_first(sizes) == (name == "2b")
    shapes, is_model_first = published_shapes(name, "flax"), name == "2b"
    form: Any = dict(num_rows=256128, is_model_first=is_model_first)
    assert leaf_shapes(sizes, **form) == shapes
    assert tensor_shapes(sizes) == published_shapes(name, "hf")
    found = views(sizes, is_model_first=is_model_first)
    assert {view.leaf for view in found.values()} == set(shapes)
    num_rows = {"model.embed_tokens.weight": 256000}
    assert published_shapes(name, "hf") == {
        each: view.tensor(stored(shapes[view.leaf]), num_rows.get(each)).shape
        for each, view in found.items()
    }
    for each, view in found.items():
        shape = shapes[view.leaf]
        chunks = view.chunks(shape, 4)
        num_bytes = math.prod(chunks) * 4
        assert num_bytes <= BLOCK_BYTES, each
        is_whole = chunks[view.axis] == shape[view.axis]
        assert num_bytes > BLOCK_BYTES / 2 or is_whole, each
        # Chunks are whole columns, so blocks of rows never share a chunk.
        for axis, (chunk, size) in enumerate(zip(chunks, shape, strict=True)):
            if axis >= len(view.fixed) and axis != view.axis:
                assert chunk == size, each


@pytest.mark.parametrize("family", FAMILIES)
def test_any_rows_can_be_read(family, monkeypatch):
    config = tiny_config(family, num_hidden_layers=1, vocab_size=24)
    tensors, sizes = tiny_tensors(config), Sizes.from_config(config)
    leaves = flax_leaves(tensors, config, is_model_first=True)
    for name, view in views(sizes, is_model_first=True).items():
        leaf, expected = leaves[view.leaf], tensors[name]
        tensor = view.tensor(stored(leaf.shape), len(expected))

        def read(slabs, start, stop, view=view, leaf=leaf):
            assert 0 <= start < stop <= leaf.shape[view.axis]
            return leaf[view.index(start, stop)]

        monkeypatch.setattr("jaxspec_checkpoints.storage.Slabs.read", read)
        num_rows = len(expected)
        for start in (0, 1, num_rows // 2 - 1, num_rows - 1):
            for stop in {start + 1, start + 9, num_rows}:
                if start < stop <= num_rows:
                    np.testing.assert_array_equal(
                        tensor.read(start, stop), expected[start:stop], err_msg=name
                    )


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Sizes)])
def test_any_other_number_is_no_published_size(field):
    sizes = Sizes.from_config(FACTS["2b"]["config"])
    other = dataclasses.replace(sizes, **{field: getattr(sizes, field) * 2})
    assert GEMMA2.published_name(other) is None
    assert not GEMMA2.is_model_first(other)


def shapes_of(config: dict[str, Any], **form: Any) -> dict[str, tuple[int, ...]]:
    leaves = flax_leaves(tiny_tensors(config), config, **form)
    return {path: array.shape for path, array in leaves.items()}


LEAVES = shapes_of(CONFIG, is_model_first=True)
STACKS = shapes_of(
    tiny_config("2b", num_hidden_layers=5), is_model_first=False, num_stacks=2
)


def flat_name(path: str) -> str:
    outer, _, inner = path.rpartition("/")
    name = f"{path}.w" if path.endswith(PAIRED) else f"{outer}.{inner}"
    return f"transformer/{name}"


SPELLINGS = {
    "flat": flat_name,
    "nested": lambda path: path.replace("/", "."),
    "below a root": lambda path: "transformer." + path.replace("/", "."),
    "below two roots": lambda path: "params/transformer/" + path,
}


def tree_of(
    shapes: dict[str, Any], spelling: str = "flat", dtype: Any = np.float32
) -> FlaxTree:
    names = {SPELLINGS[spelling](path): shape for path, shape in shapes.items()}
    arrays = {name: stored(shape, name, dtype) for name, shape in names.items()}
    return read_tree(Path("folder"), arrays)


def changed(
    leaves: dict[str, Any], changes: dict[str, Any], spelling: str = "flat"
) -> FlaxTree:
    """Return a tree with other shapes; a shape of None removes its array."""
    merged = leaves | changes
    present = {path: shape for path, shape in merged.items() if shape is not None}
    return tree_of(present, spelling)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sizes_follow_from_the_shapes(spelling):
    tree = tree_of(LEAVES, spelling)
    # The tiny model has no published vocabulary size, so no rows count as padding.
    assert tree.sizes(GEMMA2) == Sizes.from_config(CONFIG | {"vocab_size": 512 + 128})
    assert tree.is_model_first(SIZES)
    published = changed(LEAVES, {EMBEDDING: (256000, 72)}, spelling)
    assert published.sizes(GEMMA2).vocab_size == 256000
    for count in (512, 513, 640):  # rows of padding are left out
        found = changed(LEAVES, {EMBEDDING: (count, 72)}, spelling).tensors(SIZES, 128)
        assert found["model.embed_tokens.weight"].shape == (512, 72)


@pytest.mark.parametrize(
    ("spelling", "changes", "message"),
    [
        *(
            ("flat", {EMBEDDING: (n, 72)}, f"{ROWS.format(n)} and at most 128")
            for n in (511, 641)
        ),
        ("flat", {LINEAR: None}, f"has no tensor 'transformer/{LINEAR}/w': it is"),
        ("nested", {LINEAR: None}, f"has no tensor '{LINEAR}': it is"),
        ("below a root", {LINEAR: None}, f"no tensor 'transformer/{LINEAR}': it is"),
        ("nested", {LINEAR: None, "layer_1/mlp/gating_einsum": None}, "and 1 more"),
        ("flat", {LINEAR: (72, 288)}, f"'transformer/{LINEAR}/w' {SHAPE}"),
        ("nested", {LINEAR: (72, 288)}, f"'{LINEAR}' {SHAPE}"),
        ("below a root", {LINEAR: (72, 288)}, f"'transformer/{LINEAR}' {SHAPE}"),
        ("nested", {"layer_1/mlp/bias": (288, 72)}, f"'layer_1/mlp/bias' {UNKNOWN}"),
        ("nested", {"layer_2/mlp/linear": (9, 9)}, f"'layer_2/mlp/linear' {UNKNOWN}"),
        ("nested", {"extra": (288, 72)}, f"'extra' {UNKNOWN}"),
    ],
)
def test_error_uses_the_spelling_of_the_file(spelling, changes, message):
    with pytest.raises(CheckpointError, match=message):
        changed(LEAVES, changes, spelling).tensors(SIZES, 128)


@pytest.mark.parametrize(
    "part", ["mlp/linear", "attn/q_einsum/w", "attn/kv_einsum/w", "mlp/gating_einsum"]
)
@pytest.mark.parametrize("wrong", [None, (), (3,), (2, 3, 4, 5, 6)])
def test_first_layer_must_have_the_arrays_that_determine_sizes(part, wrong):
    expected = f"'layer_0/{part}' has shape .*expected . axes"
    if wrong is None:
        expected = f"has no tensor 'layer_0/{part}'"
    tree = changed(LEAVES, {f"layer_0/{part}": wrong}, "nested")
    with pytest.raises(CheckpointError, match=expected):
        tree.is_model_first(tree.sizes(GEMMA2))


def test_stacks_are_recognized_by_names():
    tree = tree_of(STACKS)
    assert tree.num_stacks == 2
    assert tree.sizes(GEMMA2).num_layers == 5
    assert not tree.is_model_first(tree.sizes(GEMMA2))
    path = "stacked_layers/attention_type_1/mlp/linear"
    expected = r"attention_type_1/mlp/linear' has shape \(288, 72\), expected 3 axes"
    with pytest.raises(CheckpointError, match=expected):
        changed(STACKS, {path: (288, 72)}, "nested").sizes(GEMMA2)
    for old in ("type_0", "type_1"):
        leaves = {path.replace(old, "type_2"): shape for path, shape in STACKS.items()}
        expected = f"no tensor 'stacked_layers/attention_{old}/"
        with pytest.raises(CheckpointError, match=expected):
            tree_of(leaves, "nested").sizes(GEMMA2)


def test_other_trees_are_an_error():
    with pytest.raises(CheckpointError, match="has type int8, expected one of float32"):
        tree_of(LEAVES, dtype=np.int8).tensors(SIZES, 128)
    square = Sizes.from_config(CONFIG | {"intermediate_size": 72})
    with pytest.raises(CheckpointError, match="are both 72, so the orientation of"):
        tree_of(LEAVES).tensors(square, 128)
    nested = tree_of(LEAVES, "nested").arrays
    array = nested["layer_0/mlp/linear"]
    arrays = {**nested, "layer_0/mlp/linear.w": array}
    with pytest.raises(CheckpointError, match="holds tensor .*/linear.* twice"):
        read_tree(Path("folder"), arrays)
    arrays = {f"transformer.{path}": each for path, each in nested.items()}
    tree = read_tree(Path("folder"), arrays | {"other.scale": array})
    with pytest.raises(CheckpointError, match="'transformer/other/scale' is not part"):
        tree.tensors(SIZES, 128)


def test_tree_without_embedding_or_layers_is_an_error():
    expected = "no tensor 'transformer/embedder/input_embedding'.*found: final_norm"
    with pytest.raises(CheckpointError, match=expected):
        changed(LEAVES, {EMBEDDING: None}, "nested")
    with pytest.raises(CheckpointError, match="found: no tensor"):
        read_tree(Path("folder"), {})
    layers = {path: None for path in LEAVES if "layer_" in path}
    with pytest.raises(
        CheckpointError, match="no tensor of a layer, such as transformer/"
    ):
        changed(LEAVES, layers)

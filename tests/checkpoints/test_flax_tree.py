"""Trees of every layout are recognized; errors use the file's spelling."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, Sizes
from jaxspec_checkpoints.gemma.flax_tree import FlaxTree, read_tree
from jaxspec_checkpoints.gemma.published import GEMMA2
from jaxspec_checkpoints.storage import StoredArray
from tests.checkpoints.flax_trees import flax_leaves
from tests.checkpoints.models import tiny_config, tiny_tensors

CONFIG = tiny_config("2b")
SIZES = Sizes.from_config(CONFIG)
LEAVES = {
    path: array.shape
    for path, array in flax_leaves(
        tiny_tensors(CONFIG), CONFIG, is_model_first=True
    ).items()
}
STACKS = {
    path: array.shape
    for path, array in flax_leaves(
        tiny_tensors(tiny_config("2b", num_hidden_layers=5)),
        tiny_config("2b", num_hidden_layers=5),
        is_model_first=False,
        num_stacks=2,
    ).items()
}
PAIRED = ("mlp/gating_einsum", "mlp/linear")


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


def tree_of(shapes: dict[str, Any], spelling: str = "flat", **types: Any) -> FlaxTree:
    names = {SPELLINGS[spelling](path): shape for path, shape in shapes.items()}
    arrays = {
        name: StoredArray(
            name=name,
            folder=Path("folder"),
            shape=shape,
            dtype=np.dtype(types.get("dtype", np.float32)),
            chunks=shape,
            spec={},
        )
        for name, shape in names.items()
    }
    return read_tree(Path("folder"), arrays)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sizes_follow_from_the_shapes(spelling):
    tree = tree_of(LEAVES, spelling)
    # The tiny model has no published vocabulary size, so no rows count as padding.
    assert tree.sizes(GEMMA2) == Sizes.from_config(CONFIG | {"vocab_size": 512 + 128})
    assert tree.is_model_first(SIZES)
    assert list(tree.tensors(SIZES, 128)["model.embed_tokens.weight"].shape) == [
        512,
        72,
    ]


def test_stacks_are_recognized_by_names():
    tree = tree_of(STACKS)
    assert tree.num_stacks == 2
    assert tree.sizes(GEMMA2).num_layers == 5
    assert not tree.is_model_first(tree.sizes(GEMMA2))


def test_published_trees_have_pad_rows():
    leaves = LEAVES | {"embedder/input_embedding": (256128, 72)}
    assert tree_of(leaves).sizes(GEMMA2).vocab_size == 256000
    leaves = LEAVES | {"embedder/input_embedding": (256000, 72)}
    assert tree_of(leaves).sizes(GEMMA2).vocab_size == 256000


@pytest.mark.parametrize("num_rows", [512, 513, 640])
def test_pad_rows_are_cut_off(num_rows):
    leaves = LEAVES | {"embedder/input_embedding": (num_rows, 72)}
    found = tree_of(leaves).tensors(SIZES, 128)["model.embed_tokens.weight"]
    assert found.shape == (512, 72)


@pytest.mark.parametrize("num_rows", [511, 641])
def test_other_numbers_of_embedding_rows_are_an_error(num_rows):
    leaves = LEAVES | {"embedder/input_embedding": (num_rows, 72)}
    expected = (
        f"'transformer/embedder/input_embedding' has {num_rows} rows, expected "
        "vocab_size=512 and at most 128"
    )
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves).tensors(SIZES, 128)


# For each naming of the file's arrays: how an error names one of them.
SPELT = {
    "flat": "transformer/layer_1/mlp/linear/w",
    "nested": "layer_1/mlp/linear",
    "below a root": "transformer/layer_1/mlp/linear",
}


@pytest.mark.parametrize("spelling", SPELT)
def test_error_names_a_missing_tensor(spelling):
    leaves = dict(LEAVES)
    del leaves["layer_1/mlp/linear"]
    expected = f"has no tensor '{SPELT[spelling]}' "
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves, spelling).tensors(SIZES, 128)
    del leaves["layer_1/mlp/gating_einsum"]
    with pytest.raises(CheckpointError, match="and 1 more"):
        tree_of(leaves, spelling).tensors(SIZES, 128)


@pytest.mark.parametrize("spelling", SPELT)
def test_error_names_a_tensor_of_wrong_shape(spelling):
    leaves = LEAVES | {"layer_1/mlp/linear": (72, 288)}
    expected = rf"'{SPELT[spelling]}' has shape \(72, 288\).* requires \(288, 72\)"
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves, spelling).tensors(SIZES, 128)


@pytest.mark.parametrize("path", ["layer_1/mlp/bias", "layer_2/mlp/linear", "extra"])
def test_error_names_an_unknown_tensor(path):
    leaves = LEAVES | {path: (288, 72)}
    with pytest.raises(CheckpointError, match=rf"'{path}' is not part of the model"):
        tree_of(leaves, "nested").tensors(SIZES, 128)


def test_tensor_outside_of_the_root_is_an_error():
    tree = tree_of(LEAVES, "below a root")
    array = next(iter(tree.arrays.values()))
    arrays = {f"transformer.{path}": each for path, each in tree.arrays.items()}
    tree = read_tree(Path("folder"), arrays | {"other.scale": array})
    with pytest.raises(CheckpointError, match="'transformer/other/scale' is not part"):
        tree.tensors(SIZES, 128)


def test_wrong_type_is_an_error():
    with pytest.raises(CheckpointError, match="has type int8, expected one of float32"):
        tree_of(LEAVES, dtype=np.int8).tensors(SIZES, 128)


def test_tensor_in_two_spellings_is_an_error():
    tree = tree_of(LEAVES, "nested")
    array = tree.arrays["layer_0/mlp/linear"]
    arrays = {**tree.arrays, "layer_0/mlp/linear.w": array}
    with pytest.raises(CheckpointError, match="holds tensor .*/linear.* twice"):
        read_tree(Path("folder"), arrays)


@pytest.mark.parametrize(
    "part", ["mlp/linear", "attn/q_einsum/w", "attn/kv_einsum/w", "mlp/gating_einsum"]
)
@pytest.mark.parametrize("wrong", [None, (), (3,), (2, 3, 4, 5, 6)])
def test_first_layer_must_have_the_arrays_that_determine_sizes(part, wrong):
    leaves = dict(LEAVES)
    if wrong is None:
        del leaves[f"layer_0/{part}"]
        expected = f"has no tensor 'layer_0/{part}'"
    else:
        leaves[f"layer_0/{part}"] = wrong
        expected = f"'layer_0/{part}' has shape .*expected . axes"
    tree = tree_of(leaves, "nested")
    with pytest.raises(CheckpointError, match=expected):
        tree.is_model_first(tree.sizes(GEMMA2))


@pytest.mark.parametrize(("old", "new"), [("type_0", "type_2"), ("type_1", "type_2")])
def test_missing_stack_is_an_error(old, new):
    leaves = {path.replace(old, new): shape for path, shape in STACKS.items()}
    expected = f"no tensor 'stacked_layers/attention_{old}/"
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves, "nested").sizes(GEMMA2)


def test_stack_without_a_layer_axis_is_an_error():
    leaves = STACKS | {"stacked_layers/attention_type_1/mlp/linear": (288, 72)}
    expected = r"attention_type_1/mlp/linear' has shape \(288, 72\), expected 3 axes"
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves, "nested").sizes(GEMMA2)


def test_tree_without_embedding_is_an_error():
    leaves = dict(LEAVES)
    del leaves["embedder/input_embedding"]
    expected = "no tensor 'transformer/embedder/input_embedding'.*found: final_norm"
    with pytest.raises(CheckpointError, match=expected):
        tree_of(leaves, "nested")
    with pytest.raises(CheckpointError, match="found: no tensor"):
        read_tree(Path("folder"), {})


def test_tree_without_layers_is_an_error():
    leaves = {path: shape for path, shape in LEAVES.items() if "layer_" not in path}
    with pytest.raises(
        CheckpointError, match="no tensor of a layer, such as transformer/"
    ):
        tree_of(leaves)


def test_rejects_square_gating():
    sizes = Sizes.from_config(CONFIG | {"intermediate_size": 72})
    with pytest.raises(CheckpointError, match="are both 72, so the orientation of"):
        tree_of(LEAVES).tensors(sizes, 128)

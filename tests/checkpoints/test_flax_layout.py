"""Every canonical tensor is a view of the right part of the right Flax array."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes, views
from jaxspec_checkpoints.gemma.published import GEMMA2
from jaxspec_checkpoints.storage import StoredArray
from jaxspec_checkpoints.tensor import BLOCK_BYTES
from tests.checkpoints.flax_trees import flax_leaves
from tests.checkpoints.models import FAMILIES, tiny_config, tiny_tensors

FACTS = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
NAMES = ("2b", "9b", "27b")


def real_leaves(name: str) -> dict[str, tuple[int, ...]]:
    facts, expected = FACTS[name], {}
    for path, shape in facts["flax"].items():
        for layer in range(facts["num_layers"] if "{}" in path else 1):
            expected[path.format(layer)] = tuple(shape)
    return expected


def stored(shape: tuple[int, ...]) -> StoredArray:
    """Return an array with a real shape, but without memory for its values."""
    return StoredArray(
        name="array",
        folder=Path("nowhere"),
        shape=shape,
        dtype=np.dtype(np.float16),
        chunks=shape,
        spec={},
    )


@pytest.mark.parametrize("name", NAMES)
def test_published_trees_have_the_expected_names_and_shapes(name):
    sizes = Sizes.from_config(FACTS[name]["config"])
    shapes = leaf_shapes(
        sizes, num_rows=256128, is_model_first=GEMMA2.is_model_first(sizes)
    )
    assert shapes == real_leaves(name)


@pytest.mark.parametrize("name", NAMES)
def test_published_trees_become_the_tensors_of_huggingface(name):
    sizes, leaves = Sizes.from_config(FACTS[name]["config"]), real_leaves(name)
    found = views(sizes, is_model_first=name == "2b")
    num_rows = {"model.embed_tokens.weight": 256000}
    shapes = {
        each: view.tensor(stored(leaves[view.leaf]), num_rows.get(each)).shape
        for each, view in found.items()
    }
    assert shapes == tensor_shapes(sizes)
    assert {view.leaf for view in found.values()} == set(leaves)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_real_trees_are_small_and_fill_the_array(name):
    sizes, leaves = Sizes.from_config(FACTS[name]["config"]), real_leaves(name)
    for each, view in views(sizes, is_model_first=name == "2b").items():
        shape = leaves[view.leaf]
        chunks = view.chunks(shape, 4)
        assert math.prod(chunks) * 4 <= BLOCK_BYTES, each
        assert math.prod(chunks) * 8 > BLOCK_BYTES or (
            chunks[view.axis] == shape[view.axis]
        ), each
        # Chunks are whole columns, so blocks of rows never share a chunk.
        for axis, (chunk, size) in enumerate(zip(chunks, shape, strict=True)):
            if axis >= len(view.fixed) and axis != view.axis:
                assert chunk == size, each


@pytest.mark.parametrize("num_stacks", [0, 2])
@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_agree_with_the_formulas(family, is_model_first, num_stacks):
    config = tiny_config(family, num_hidden_layers=3)
    tensors, sizes = tiny_tensors(config), Sizes.from_config(config)
    form = dict(is_model_first=is_model_first, num_stacks=num_stacks)
    leaves = flax_leaves(tensors, config, **form)
    shapes = leaf_shapes(sizes, num_rows=512 + 128, **form)
    assert shapes == {path: array.shape for path, array in leaves.items()}
    for name, view in views(sizes, **form).items():
        leaf, expected = leaves[view.leaf], tensors[name]
        slab = leaf[view.index(0, leaf.shape[view.axis])]
        rows = view.rows(slab)[: len(expected)]
        np.testing.assert_array_equal(rows, expected, err_msg=name)
        # The inverse views agree too, for some of the rows.
        step = view.step(leaf.shape)
        back = view.slab(expected[step : 3 * step], leaf.shape)
        np.testing.assert_array_equal(back, leaf[view.index(1, 3)], err_msg=name)


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

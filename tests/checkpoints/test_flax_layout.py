"""Every canonical tensor is a view of the right part of the right Flax array."""

import math
from typing import Any

import numpy as np
import pytest

from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes, views
from jaxspec_checkpoints.gemma.published import GEMMA2
from jaxspec_checkpoints.tensor import BLOCK_BYTES
from tests.checkpoints.flax_trees import flax_leaves, stored
from tests.checkpoints.models import (
    FACTS,
    FAMILIES,
    published_shapes,
    tiny_config,
    tiny_tensors,
)

NAMES = ("2b", "9b", "27b")


@pytest.mark.parametrize("name", NAMES)
def test_published_trees_have_views_of_all_tensors_and_small_chunks(name):
    sizes = Sizes.from_config(FACTS[name]["config"])
    shapes, is_model_first = published_shapes(name, "flax"), name == "2b"
    form: Any = dict(num_rows=256128, is_model_first=GEMMA2.is_model_first(sizes))
    assert leaf_shapes(sizes, **form) == shapes
    found = views(sizes, is_model_first=is_model_first)
    assert {view.leaf for view in found.values()} == set(shapes)
    num_rows = {"model.embed_tokens.weight": 256000}
    assert tensor_shapes(sizes) == {
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

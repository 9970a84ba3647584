"""Kaggle folders: an Orbax tree of Flax names, its tokenizer beside or above it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec_checkpoints.casting import cast_blocks
from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, read_json, side_files
from jaxspec_checkpoints.gemma.flax_layout import EMBEDDER, leaf_shapes, views
from jaxspec_checkpoints.gemma.flax_tree import read_tree
from jaxspec_checkpoints.gemma.published import (
    GEMMA2,
    PAD_ROWS,
    is_gating_model_first,
    published_config,
)
from jaxspec_checkpoints.layout import (
    Layout,
    Sizes,
    check_tensors,
    common_dtype,
    layout_of,
)
from jaxspec_checkpoints.storage import ArrayWriter, is_orbax, open_arrays
from jaxspec_checkpoints.tensor import Tensor


def is_kaggle(folder: Path) -> bool:
    """Whether the folder is an Orbax tree, or has one as a direct child."""
    return is_orbax(folder) or bool(_variants(folder))


def open_kaggle(folder: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    """Check a folder and describe it; no weight is read.

    Args:
        folder: The tree itself, or the folder with the tokenizer and one tree.

    Raises:
        CheckpointError: There are several trees, a file is damaged or outside the
            folder, or the tensors are not those of a Gemma 2 whose sizes are known.
    """
    weights = _weights(folder)
    found = _side_files(weights)
    tree = read_tree(weights, open_arrays(weights))
    if "config.json" in found:
        config = read_json(found["config.json"])
        layout, sizes = layout_of(config, layouts), Sizes.from_config(config)
        tensors = tree.tensors(sizes)
    else:
        layout = GEMMA2
        sizes = tree.sizes()
        config = _published(weights, sizes)
        tensors = tree.tensors(sizes)
        config["torch_dtype"] = common_dtype(tensors).name
    check_tensors(layout, sizes, tensors)
    generation = found.get("generation_config.json")
    return Checkpoint(
        format="kaggle",
        layout=layout,
        folder=weights,
        config=config,
        generation_config=read_json(generation) if generation else {},
        tensors=tensors,
        side_files=found,
    )


def kaggle_files(folder: Path) -> dict[str, Path]:
    """Return the files of the model beside the tree, by name.

    Raises:
        CheckpointError: There are several trees, or a file is outside the folder.
    """
    return _side_files(_weights(folder))


def _side_files(weights: Path) -> dict[str, Path]:
    return side_files(weights, weights.absolute().parent)


def _weights(folder: Path) -> Path:
    """Find the tree: the folder itself, or the one child that is one."""
    if is_orbax(folder):
        return folder
    variants = _variants(folder)
    if len(variants) != 1:
        names = ", ".join(path.name for path in variants)
        raise CheckpointError(
            f"{folder} holds {len(variants)} checkpoints: name one of them "
            f"({names or 'none found'})"
        )
    return check_inside(folder, variants[0])


def _variants(folder: Path) -> list[Path]:
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    # A mounted disk has a `lost+found` that only root may enter.
    open_to_us = [path for path in children if os.access(path, os.R_OK | os.X_OK)]
    return [path for path in open_to_us if path.is_dir() and is_orbax(path)]


def _published(folder: Path, sizes: Sizes) -> dict[str, Any]:
    size = GEMMA2.published_name(sizes)
    if size is None:
        raise CheckpointError(
            f"{folder} has no config.json, and the shapes are those of no published "
            f"Gemma 2: found {sizes}. Put the model's config.json beside it"
        )
    return published_config(size)


def write_kaggle(
    folder: Path,
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    *,
    dtype: np.dtype | None,
    on_bytes: Callable[[int], object],
) -> None:
    """Write the flat form, padded and oriented as published, into a folder of its own.

    Args:
        dtype: What the values are cast to; None keeps each tensor's own.
        on_bytes: Called with the number of bytes after each write.

    Raises:
        CheckpointError: A tensor is damaged, cannot be cast, or the sizes leave it open
            which way `gating_einsum` is.
    """
    size = GEMMA2.published_name(sizes)
    is_model_first = is_gating_model_first(sizes)
    if sizes.hidden_size == sizes.intermediate_size:
        raise CheckpointError(
            f"hidden_size and intermediate_size are both {sizes.hidden_size}: a reader "
            "could not tell which way gating_einsum is, so Kaggle's format cannot hold "
            "this model"
        )
    shapes = leaf_shapes(
        sizes,
        num_rows=sizes.vocab_size + PAD_ROWS,
        is_model_first=is_model_first,
    )
    written: dict[str, tuple[str, np.dtype]] = {}
    with ArrayWriter(folder / (f"gemma2-{size}" if size else "gemma2")) as writer:
        for name, view in views(sizes, is_model_first=is_model_first).items():
            tensor, shape = tensors[name], shapes[view.leaf]
            kind = dtype or tensor.dtype
            chunks = view.chunks(shape, kind.itemsize)
            if view.leaf not in written:
                array = writer.create(
                    _keys(view.leaf), shape, dtype=kind, chunks=chunks
                )
                written[view.leaf] = array, kind
            array, others = written[view.leaf]
            if kind != others:
                raise CheckpointError(
                    f"tensor {name!r} is {kind.name}, but shares {view.leaf!r} with "
                    f"one of {others.name}: choose one dtype for the whole checkpoint"
                )
            step = view.step(shape)
            rows = step * chunks[view.axis]
            for start, values in cast_blocks(name, tensor, dtype=kind, rows=rows):
                slab = view.slab(values, shape)
                first = start // step
                index = view.index(first, first + slab.shape[view.order[0]])
                writer.write(array, index, slab)
                on_bytes(values.nbytes)
            if view.leaf == EMBEDDER:
                pads = np.zeros((PAD_ROWS, sizes.hidden_size), kind)
                index = view.index(sizes.vocab_size, sizes.vocab_size + PAD_ROWS)
                writer.write(array, index, pads)


def _keys(leaf: str) -> tuple[str, str]:
    """The flat form: a path for the outer key, and always a dict within."""
    outer, _, inner = leaf.rpartition("/")
    if inner in ("scale", "w", "input_embedding"):
        return f"transformer/{outer}", inner
    return f"transformer/{leaf}", "w"

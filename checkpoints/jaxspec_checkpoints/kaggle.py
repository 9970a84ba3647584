"""Kaggle folders: an Orbax tree with Flax names, its tokenizer next to or above it."""

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
from jaxspec_checkpoints.gemma.flax_tree import FlaxTree, read_tree
from jaxspec_checkpoints.layout import (
    HEAD,
    Layout,
    Sizes,
    check_tensors,
    common_dtype,
    layout_of,
    must_be_tied,
)
from jaxspec_checkpoints.storage import ArrayWriter, is_orbax, open_arrays
from jaxspec_checkpoints.tensor import Tensor


def is_kaggle(folder: Path) -> bool:
    """Return whether the folder is an Orbax tree, or has one as a direct child."""
    return is_orbax(folder) or bool(_variants(folder))


def open_kaggle(folder: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    """Check a folder and describe it; no weight is read.

    Args:
        folder: The tree itself, or the folder with the tokenizer and one tree.

    Raises:
        CheckpointError: There are several trees, a file is damaged or outside the
            folder, or the tensors do not match a Gemma of a known size.
    """
    weights = _weights(folder)
    found = _side_files(weights)
    forms = [one.flax for one in layouts.values() if one.flax is not None]
    tree = read_tree(weights, open_arrays(weights), forms)
    if "config.json" in found:
        config = read_json(found["config.json"])
        layout = layout_of(config, layouts)
        config = layout.text_config(config)
        sizes = Sizes.from_config(config)
        tensors = tree.tensors(sizes, layout.pad_rows)
    else:
        layout = _layout_of_tree(tree, layouts)
        sizes = tree.sizes(layout)
        config = _published(weights, layout, sizes)
        tensors = tree.tensors(sizes, layout.pad_rows)
        config["torch_dtype"] = common_dtype(tensors).name
    check_tensors(layout, sizes, tensors, is_tied=must_be_tied(config))
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
    """Return the files of the model next to the tree, by name.

    Raises:
        CheckpointError: There are several trees, or a file is outside the folder.
    """
    return _side_files(_weights(folder))


def _side_files(weights: Path) -> dict[str, Path]:
    return side_files(weights, weights.absolute().parent)


def _weights(folder: Path) -> Path:
    """Return the tree: the folder itself, or its only child that is one."""
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
    # A mounted disk has a `lost+found` that only root can read.
    open_to_us = [path for path in children if os.access(path, os.R_OK | os.X_OK)]
    return [path for path in open_to_us if path.is_dir() and is_orbax(path)]


def _layout_of_tree(tree: FlaxTree, layouts: Mapping[str, Layout]) -> Layout:
    """Return the layout of the family that a tree without `config.json` belongs to."""
    for layout in layouts.values():
        if layout.flax is not None and layout.flax.has_qk_norm == tree.has_qk_norm:
            return layout
    raise CheckpointError(
        f"{tree.folder} has no config.json, and the names of its tensors fit no "
        "known family. Put the model's config.json into "
        f"{tree.folder.absolute().parent}"
    )


def _published(folder: Path, layout: Layout, sizes: Sizes) -> dict[str, Any]:
    size = layout.published_name(sizes)
    if size is None or layout.flax is None:
        raise CheckpointError(
            f"{folder} has no config.json, and its shapes fit no published "
            f"{layout.title} model: found {sizes}. Put the model's config.json into "
            f"{folder.absolute().parent}"
        )
    return layout.flax.config(size)


def write_kaggle(
    folder: Path,
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    *,
    layout: Layout,
    dtype: np.dtype | None,
    on_bytes: Callable[[int], object],
) -> None:
    """Write the flat Flax layout, padded and oriented as published, into a subfolder.

    Args:
        layout: Layout of the model's family.
        dtype: Type to cast values to; None keeps each tensor's own.
        on_bytes: Called with the number of bytes after each write.

    Raises:
        CheckpointError: A tensor is damaged or cannot be cast, the LM head is untied,
            or the sizes do not determine the orientation of `gating_einsum`.
    """
    if layout.flax is None:
        raise CheckpointError(
            f"{layout.title} has no Kaggle format: choose hf or orbax"
        )
    if HEAD in tensors:
        raise CheckpointError(
            f"to must be hf or orbax for a model with an {HEAD} of its own: Kaggle's "
            "format has no place for it"
        )
    size, name, pads = (
        layout.published_name(sizes),
        layout.flax.name,
        layout.flax.pad_rows,
    )
    form: Any = dict(
        is_model_first=layout.is_model_first(sizes), has_qk_norm=layout.flax.has_qk_norm
    )
    if sizes.hidden_size == sizes.intermediate_size:
        raise CheckpointError(
            f"hidden_size and intermediate_size are both {sizes.hidden_size}: a reader "
            "could not determine the orientation of gating_einsum, so Kaggle's format "
            "cannot hold this model"
        )
    shapes = leaf_shapes(sizes, num_rows=sizes.vocab_size + pads, **form)
    written: dict[str, tuple[str, np.dtype]] = {}
    with ArrayWriter(folder / (f"{name}-{size}" if size else name)) as writer:
        for name, view in views(sizes, **form).items():
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
                    f"tensor {name!r} is {kind.name}, but Kaggle's format stores it "
                    f"in {view.leaf!r} together with a tensor of type {others.name}: "
                    "choose one dtype for the whole checkpoint"
                )
            step = view.step(shape)
            rows = step * chunks[view.axis]
            for start, values in cast_blocks(name, tensor, dtype=kind, rows=rows):
                slab = view.slab(values, shape)
                first = start // step
                index = view.index(first, first + slab.shape[view.order[0]])
                writer.write(array, index, slab)
                on_bytes(values.nbytes)
            if view.leaf == EMBEDDER and pads:
                rows = np.zeros((pads, sizes.hidden_size), kind)
                index = view.index(sizes.vocab_size, sizes.vocab_size + pads)
                writer.write(array, index, rows)


def _keys(leaf: str) -> tuple[str, str]:
    """Return the keys of the flat layout: the path, then the key of the inner dict."""
    outer, _, inner = leaf.rpartition("/")
    if inner in ("scale", "w", "input_embedding"):
        return f"transformer/{outer}", inner
    return f"transformer/{leaf}", "w"

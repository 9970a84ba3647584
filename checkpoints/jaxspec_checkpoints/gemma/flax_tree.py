"""Recognizes and checks the Flax tree in a file: spelling of paths, stacking, sizes.

The same arrays are published in several ways: as one flat dict keyed by path, or as
nested dicts; with or without a root; with one array per layer, or with stacked layers.
This module reads shapes, no values.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.gemma.flax_layout import (
    EMBEDDER,
    GATING,
    QUERY_NORM,
    STACK,
    leaf_shapes,
    views,
)
from jaxspec_checkpoints.layout import DTYPES, FlaxForm, Layout, Sizes
from jaxspec_checkpoints.storage import StoredArray
from jaxspec_checkpoints.tensor import Tensor

_LAYER = re.compile(rf"(layer_|{STACK})(\d+)/")


@dataclass(frozen=True, kw_only=True)
class FlaxTree:
    """The arrays of one file by their normal path, below the root.

    Attributes:
        root: Prefix of paths before `embedder`, with the slash.
        has_w: Whether arrays of `mlp` are in a dict of their own, under `w`.
        num_stacks: Number of stacks of layers; 0 for arrays per layer.
    """

    folder: Path
    arrays: Mapping[str, StoredArray]
    root: str
    has_w: bool
    num_stacks: int

    def spell(self, leaf: str) -> str:
        """Return the path of `leaf` as this file writes it, or would write it."""
        is_w = self.has_w and leaf.rpartition("/")[0].endswith("mlp")
        return f"{self.root}{leaf}{'/w' if is_w else ''}"

    def layer(self, part: str) -> str:
        """Return the path of `part` in the first layer."""
        return f"{STACK}0/{part}" if self.num_stacks else f"layer_0/{part}"

    def shape(self, leaf: str, num_axes: int) -> tuple[int, ...]:
        """Return the last `num_axes` sizes of an array, which must exist."""
        if leaf not in self.arrays:
            raise CheckpointError(
                f"the checkpoint has no tensor {self.spell(leaf)!r} ({self.folder})"
            )
        shape = self.arrays[leaf].shape
        is_stacked = self.num_stacks > 0 and leaf.startswith(STACK)
        if len(shape) != num_axes + is_stacked:
            raise CheckpointError(
                f"tensor {self.spell(leaf)!r} has shape {shape}, expected "
                f"{num_axes + is_stacked} axes ({self.folder})"
            )
        return shape[is_stacked:]

    @property
    def has_qk_norm(self) -> bool:
        """Whether heads of queries and keys are normalized."""
        return self.layer(QUERY_NORM) in self.arrays

    def sizes(self, layout: Layout) -> Sizes:
        """Derive the sizes from the shapes, and the vocabulary from published sizes.

        If the number of rows is not a published one, all rows are the vocabulary.
        """
        pads = 0 if layout.flax is None else layout.flax.pad_rows
        published = {one.vocab_size for one in layout.published.values()}
        num_rows, _ = self.shape(EMBEDDER, 2)
        heads, model, head_dim = self.shape(self.layer("attn/q_einsum/w"), 3)
        hidden, _ = self.shape(self.layer("mlp/linear"), 2)
        _, num_kv_heads, *_ = self.shape(self.layer("attn/kv_einsum/w"), 4)
        return Sizes(
            vocab_size=num_rows - pads if num_rows - pads in published else num_rows,
            hidden_size=model,
            intermediate_size=hidden,
            num_layers=self._num_layers(),
            num_q_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def _num_layers(self) -> int:
        if not self.num_stacks:
            return 1 + max(
                int(match[2]) for match in map(_LAYER.match, self.arrays) if match
            )
        num_layers = 0
        for stack in range(self.num_stacks):
            leaf = f"{STACK}{stack}/mlp/linear"
            self.shape(leaf, 2)  # raises if it is missing or not a stack
            num_layers += self.arrays[leaf].shape[0]
        return num_layers

    def is_model_first(self, sizes: Sizes) -> bool:
        """Distinguish the two orientations of `gating_einsum` by shape."""
        if sizes.hidden_size == sizes.intermediate_size:
            raise CheckpointError(
                f"hidden_size and intermediate_size are both {sizes.hidden_size}, so "
                f"the orientation of {self.spell(self.layer(GATING))!r} is "
                "ambiguous: fetch this model in another format, such as "
                f"HuggingFace's ({self.folder})"
            )
        return self.shape(self.layer(GATING), 3)[1] == sizes.hidden_size

    def tensors(self, sizes: Sizes, pad_rows: int) -> dict[str, Tensor]:
        """Return the canonical tensors of a model of these sizes, without padding rows.

        Args:
            pad_rows: Greatest number of padding rows after the vocabulary.

        Raises:
            CheckpointError: A tensor is unknown, missing, or has another shape or a
                type that weights cannot have; the message names it as the file spells
                it.
        """
        is_model_first = self.is_model_first(sizes)
        num_layers = self._num_layers()
        if sizes.num_layers > num_layers:
            raise CheckpointError(
                "the checkpoint has no tensor "
                f"{self.spell(f'layer_{num_layers}/mlp/linear')!r}: config.json has "
                f"num_hidden_layers={sizes.num_layers}, but the checkpoint has "
                f"{num_layers} layers ({self.folder})"
            )
        num_rows, _ = self.shape(EMBEDDER, 2)
        if not sizes.vocab_size <= num_rows <= sizes.vocab_size + pad_rows:
            raise CheckpointError(
                f"tensor {self.spell(EMBEDDER)!r} has {num_rows} rows, expected "
                f"vocab_size={sizes.vocab_size} and at most {pad_rows} rows of padding "
                f"({self.folder})"
            )
        form: Any = dict(num_stacks=self.num_stacks, has_qk_norm=self.has_qk_norm)
        self._check(
            leaf_shapes(
                sizes,
                num_rows=num_rows,
                is_model_first=is_model_first,
                **form,
            )
        )
        found = views(sizes, is_model_first=is_model_first, **form)
        return {
            name: view.tensor(
                self.arrays[view.leaf],
                sizes.vocab_size if view.leaf == EMBEDDER else None,
            )
            for name, view in found.items()
        }

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        for leaf, array in self.arrays.items():
            path, where = self.spell(leaf), f"({self.folder})"
            if leaf not in expected:
                raise CheckpointError(
                    f"tensor {path!r} is not part of the model {where}"
                )
            if array.shape != expected[leaf]:
                raise CheckpointError(
                    f"tensor {path!r} has shape {array.shape}, but config.json "
                    f"requires {expected[leaf]} {where}"
                )
            if array.dtype.name not in DTYPES:
                raise CheckpointError(
                    f"tensor {path!r} has type {array.dtype.name}, expected one of "
                    f"{', '.join(DTYPES)} {where}"
                )
        missing = [self.spell(leaf) for leaf in expected if leaf not in self.arrays]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"the checkpoint has no tensor {missing[0]!r}{more}: it is incomplete, "
                f"fetch it again ({self.folder})"
            )


def read_tree(
    folder: Path, arrays: Mapping[str, StoredArray], forms: Iterable[FlaxForm] = ()
) -> FlaxTree:
    """Recognize the tree of a file's arrays.

    Args:
        forms: Flax layouts of the families that it may belong to.

    Raises:
        CheckpointError: There is no embedding or no layer, or a path occurs twice.
    """
    # Flat keys contain slashes, and nested keys are joined by dots; both are converted
    # to the same path.
    paths = {name: name.replace(".", "/") for name in arrays}
    embedder = next((path for path in paths.values() if path.endswith(EMBEDDER)), None)
    if embedder is None:
        found = ", ".join(sorted(paths.values())[:4]) or "no tensor"
        raise CheckpointError(
            f"the checkpoint has no tensor 'transformer/{EMBEDDER}', so it is not a "
            f"Gemma model in Kaggle's format; found: {found} ({folder})"
        )
    root = embedder.removesuffix(EMBEDDER)
    skipped = tuple(part for form in forms for part in form.skipped)
    leaves: dict[str, StoredArray] = {}
    has_w = False
    for name, path in paths.items():
        leaf = path.removeprefix(root)
        if leaf.startswith(skipped):
            continue
        if leaf.rpartition("/")[0].endswith(("/mlp/gating_einsum", "/mlp/linear")):
            leaf, has_w = leaf.removesuffix("/w"), True
        if leaf in leaves:
            raise CheckpointError(
                f"the checkpoint holds tensor {path!r} twice, as {name!r} and as "
                f"{leaves[leaf].name!r} ({folder})"
            )
        leaves[leaf] = arrays[name]
    found = [match for match in map(_LAYER.match, leaves) if match]
    if not found:
        raise CheckpointError(
            "the checkpoint has no tensor of a layer, such as "
            f"{root}layer_0/mlp/linear: it is incomplete, fetch it again ({folder})"
        )
    stacks = {int(match[2]) for match in found if match[1] == STACK}
    return FlaxTree(
        folder=folder,
        arrays=leaves,
        root=root,
        has_w=has_w,
        num_stacks=len(stacks),
    )

"""The canonical layout: a description of any family's tensors.

Names and the (out, in) order are HuggingFace's; every format is read into this layout
and written from it. Knows nothing about files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.tensor import Tensor

EMBEDDING = "model.embed_tokens.weight"
# LM head of a model whose LM head is not the embedding; tied models omit this tensor.
HEAD = "lm_head.weight"
TIE = "tie_word_embeddings"
DTYPES = ("float32", "bfloat16", "float16")
# First parts of canonical names after `model.`.
_PARTS = ("embed_tokens.", "layers.", "norm.")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that determine the shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sizes":
        """Read the sizes from the content of a HuggingFace `config.json`.

        Raises:
            CheckpointError: A size is not a positive integer.
        """
        names = {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_q_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
        }
        values = {}
        for ours, theirs in names.items():
            value = config.get(theirs)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"config.json: {theirs} must be an integer of at least 1, got "
                    f"{value!r}"
                )
            values[ours] = value
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class FlaxForm:
    """Differences between the Flax trees of families.

    Attributes:
        name: Prefix of the name of a folder that holds a tree.
        has_qk_norm: Whether heads of queries and keys are normalized.
        pad_rows: Padding rows to write after the vocabulary.
        model_first: Published sizes whose `gating_einsum` is (2, model, hidden); all
            others have (2, hidden, model).
        skipped: First parts of paths that do not belong to the text model.
        config: Returns the `config.json` of a published size.
    """

    name: str
    has_qk_norm: bool
    pad_rows: int
    model_first: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    config: Callable[[str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describes the tensors of one family.

    Attributes:
        title: Name of the family, for messages.
        model_types: Each `model_type` in `config.json` that means this family.
        tensor_shapes: Shape of every tensor of a model, by its canonical name.
        published: Sizes of the published models, by name.
        turn_markers: Pieces that begin and end a turn of a chat, if any.
        pad_rows: Rows that some formats have after the vocabulary; no token has them.
        config_of: Returns the `config.json` of a published model, given its name on a
            hub; None for other names.
        text_config: Returns the flat `config.json` of the text model, with the format's
            defaults filled in; idempotent.
        prefixes: Prefixes that files have before `layers`, `embed_tokens` and `norm`.
        skipped: First parts of names of tensors that do not belong to the text model.
        flax: Layout of its Flax trees, if any.
    """

    title: str
    model_types: tuple[str, ...] = ()
    tensor_shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    published: Mapping[str, Sizes] = field(default_factory=dict)
    turn_markers: tuple[str, ...] = ()
    pad_rows: int = 0
    config_of: Callable[[str], dict[str, Any] | None] = lambda name: None
    text_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    prefixes: tuple[str, ...] = ("model.",)
    skipped: tuple[str, ...] = ()
    flax: FlaxForm | None = None

    def canonical_tensors(
        self, tensors: Mapping[str, Tensor], vocab_size: int
    ) -> dict[str, Tensor]:
        """Rename a file's tensors; drop other modalities and padding rows.

        Raises:
            CheckpointError: Two tensors of the file have the same canonical name.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(self.skipped):
                continue
            ours = self._canonical_name(name)
            if ours in found:
                raise CheckpointError(
                    f"the checkpoint holds tensor {ours!r} twice: {found[ours].source} "
                    f"and {tensor.source}"
                )
            rows = tensor.shape[0] if tensor.shape else 0
            if ours in (EMBEDDING, HEAD) and rows == vocab_size + self.pad_rows:
                tensor = tensor.head(vocab_size)
            found[ours] = tensor
        return found

    def _canonical_name(self, name: str) -> str:
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            part = name.removeprefix(prefix)
            if name.startswith(prefix) and part.startswith(_PARTS):
                return f"model.{part}"
        is_head = name.endswith(f".{HEAD}") and name.removesuffix(HEAD) in {
            prefix.removesuffix("model.") for prefix in self.prefixes
        }
        return HEAD if is_head else name

    def published_name(self, sizes: Sizes) -> str | None:
        """Return the name of the model with these sizes; None if there is none."""
        found = (name for name, each in self.published.items() if each == sizes)
        return next(found, None)

    def is_model_first(self, sizes: Sizes) -> bool:
        """Return whether Flax checkpoints store `gating_einsum` as (2, model, hidden).

        This depends on the size of the model.
        """
        return self.flax is not None and (
            self.published_name(sizes) in self.flax.model_first
        )


def layout_of(config: Mapping[str, Any], layouts: Mapping[str, Layout]) -> Layout:
    """Return the layout of the family that a `config.json` describes.

    Args:
        layouts: By `model_type`; a config without one means the first.

    Raises:
        CheckpointError: The architecture is not supported.
    """
    kind = config.get("model_type", next(iter(layouts)))
    if not isinstance(kind, str) or kind not in layouts:
        allowed = " or ".join(map(repr, layouts))
        raise CheckpointError(
            f"config.json: model_type must be {allowed}, got {kind!r:.80}"
        )
    return layouts[kind]


def must_be_tied(config: Mapping[str, Any]) -> bool | None:
    """Return False if a `config.json` requires a separate LM head, else None.

    "Tied" is the format's default, which exporters write for any model, so the entry is
    not trusted: the presence and content of `lm_head.weight` decide
    (`Checkpoint.resolved`).

    Raises:
        CheckpointError: `tie_word_embeddings` is not a boolean.
    """
    value = config.get(TIE)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {TIE} must be true or false, got {value!r:.80}"
        )
    return False if value is False else None


def check_tensors(
    layout: Layout,
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    *,
    is_tied: bool | None = None,
) -> None:
    """Check that `tensors` are exactly the model that the config describes.

    Args:
        is_tied: True: the embedding is the LM head, and `lm_head.weight` must be
            absent; False: it must be present; None: it may be present.

    Raises:
        CheckpointError: Names the first tensor that is unknown, missing, or has another
            shape or a type that weights cannot have, with what was found and expected.
    """
    # Reject an absurd number of layers: the names of their tensors, made below, would
    # fill the memory.
    if sizes.num_layers > max(1000, len(tensors)):
        raise CheckpointError(
            f"config.json has num_hidden_layers={sizes.num_layers}, but the "
            f"checkpoint has only {len(tensors)} tensors: it is incomplete, or the "
            "config is another model's"
        )
    expected = layout.tensor_shapes(sizes)
    if is_tied is False or (is_tied is None and HEAD in tensors):
        expected[HEAD] = sizes.vocab_size, sizes.hidden_size
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(_unknown(name, tensor, layout, sizes))
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {tensor.shape}, but config.json requires "
                f"{expected[name]} ({tensor.source})"
            )
        if tensor.dtype.name not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} has type {tensor.dtype.name}, expected one of "
                f"{', '.join(DTYPES)} ({tensor.source})"
            )
    missing = [name for name in expected if name not in tensors]
    if missing == [HEAD]:
        raise CheckpointError(
            f"the checkpoint has no tensor {HEAD!r}, and config.json has {TIE}=false: "
            f"fetch or export it again, or set {TIE} to true if the embedding is the "
            "LM head"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0]!r}{more}: it is incomplete, "
            "fetch or export it again"
        )


def _unknown(name: str, tensor: Tensor, layout: Layout, sizes: Sizes) -> str:
    start, _, rest = name.partition("model.layers.")
    number, _, part = rest.partition(".")
    in_first = f"model.layers.0.{part}" in layout.tensor_shapes(sizes)
    if not start and number.isdigit() and in_first:
        return (
            f"tensor {name!r} belongs to a layer that config.json "
            f"(num_hidden_layers={sizes.num_layers}) does not have ({tensor.source})"
        )
    return f"tensor {name!r} is not part of {layout.title} ({tensor.source})"


def common_dtype(tensors: Mapping[str, Tensor]) -> np.dtype:
    """Return the dtype that has the most bytes, reported as the checkpoint's dtype.

    Packed values are skipped, because their dtype is not that of weights.
    """
    sizes: dict[np.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.dtype.name not in DTYPES:
            continue
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])

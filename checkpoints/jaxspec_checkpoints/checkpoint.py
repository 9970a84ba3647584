"""Defines `Checkpoint`, the result of reading any format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.layout import EMBEDDING, HEAD, TIE, Layout, Sizes
from jaxspec_checkpoints.quantization import held_bytes
from jaxspec_checkpoints.tensor import Tensor, have_same_bytes

# File with the token ids that a draft may propose, most frequent first. See
# `jaxspec_checkpoints.trimming`.
TOKEN_MAP = "draft_token_map.json"
# Files other than weights that belong to a model, in every format.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    TOKEN_MAP,
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One model on disk. Its structure has been checked; its weights are not read.

    Attributes:
        format: "hf", "kaggle", "orbax" or "gguf".
        layout: Layout of the tensors of its family.
        folder: Where the weights are; for a GGUF file that was named, the file.
        config: Content of HuggingFace's `config.json`; derived from the shapes if the
            format has none.
        generation_config: Content of `generation_config.json`, or empty.
        tensors: By canonical name; complete, with the shapes of the config. Until the
            checkpoint is `resolved`, `lm_head.weight` may be a copy of the embedding.
        side_files: Paths of those of `SIDE_FILES` that exist, by name.
        made_files: Side files derived from the format's metadata: functions that return
            their contents.
    """

    format: str
    layout: Layout
    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    side_files: Mapping[str, Path] = field(default_factory=dict)
    made_files: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """Sizes in the config, which determine the shapes of all tensors."""
        return Sizes.from_config(self.config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with the embedding counted once."""
        return sum(t.num_bytes // t.dtype.itemsize for t in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(map(held_bytes, self.tensors.values()))

    def resolved(self) -> "Checkpoint":
        """Return the model with one LM head: `lm_head.weight`, or the embedding.

        An `lm_head.weight` with the embedding's bytes is a copy and is left out. With
        other bytes it is the LM head, whatever `tie_word_embeddings` says. The result's
        config has the correct `tie_word_embeddings`. Reads both matrices up to their
        first difference.

        Raises:
            CheckpointError: A file is damaged.
        """
        if HEAD not in self.tensors or HEAD in self.layout.tensor_shapes(self.sizes):
            return self
        tensors = dict(self.tensors)
        is_tied = have_same_bytes(tensors[EMBEDDING], tensors[HEAD])
        if is_tied:
            del tensors[HEAD]
        config = self.config
        # A config without the entry means that the LM head is tied to the embedding.
        if config.get(TIE) is not is_tied and (TIE in config or not is_tied):
            config = {**config, TIE: is_tied}
        return replace(self, config=config, tensors=tensors)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of `tokenizer.model` or `tokenizer.json`; `folder` if neither exists.

        A GGUF file contains its own tokenizer.
        """
        for name in ("tokenizer.model", "tokenizer.json"):
            if name in self.side_files:
                return self.side_files[name].parent
        return self.folder

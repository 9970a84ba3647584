"""Scaled-down Gemma 2 models in HuggingFace, and the same weights in every format."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch

from jaxspec_checkpoints import bundled_target, open_checkpoint
from jaxspec_checkpoints.writing import write_checkpoint
from tests.accuracy import gemma_library
from tests.checkpoints.models import FAMILIES
from tests.support.oracles import make_hf_model

SIZES = tuple(FAMILIES)
# Three layers (local, global, local), with caps and a window so small that they affect
# every test.
CHANGES: dict[str, Any] = dict(
    vocab_size=160,
    num_hidden_layers=3,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=8,
)
# hidden_size / num_attention_heads must be an integer, as in the published 27B: the
# gemma library rounds it down.
SIZE_CHANGES: dict[str, dict[str, int]] = {
    "2b": {},
    "9b": {},
    "27b": dict(hidden_size=160, intermediate_size=1280),
}
PAD_ROWS = 128
SHARD_BYTES = 200_000


@functools.cache
def reference(size: str, *, is_draft: bool = False) -> Any:
    """Return a random model whose text does not repeat itself.

    With tied embeddings a random model repeats its last token, even with keys at wrong
    positions. Layers with large outputs and random signs in the final norm prevent
    that. The draft is the same model with noise: it agrees often.
    """
    shape = FAMILIES[size] | CHANGES | SIZE_CHANGES[size]
    model = make_hf_model(seed=6, **shape)
    # HuggingFace's texts have a fixed length; our engine uses `ignore_eos`.
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.add_(2)
            layer.post_feedforward_layernorm.weight.add_(2)
        weight = model.model.norm.weight
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        # Gemma's norms scale by 1 + weight.
        weight.copy_(2 * signs * (1 + weight) - 1)
        if is_draft:
            for value in model.parameters():
                noise = torch.randn(value.shape, generator=generator)
                value.add_(0.03 * noise * value.std())
    return model


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """Return the weights by canonical name, as host arrays."""
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def _write_hf(model: Any, size: str, folder: Path) -> None:
    model.save_pretrained(folder)


def _write_shards(model: Any, size: str, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def _convert(to: str, model: Any, size: str, folder: Path) -> None:
    source = folder.with_name(f"{folder.name}-source")
    model.save_pretrained(source)
    write_checkpoint(open_checkpoint(source), folder, to=to, progress=False)


def _write_nested(model: Any, size: str, folder: Path) -> None:
    """Save the gemma library's own parameters with Orbax, without our writer."""
    config = model.config.to_dict()
    tree = gemma_library.to_tree(tensors_of(model), config, size)
    table = tree["embedder"]["input_embedding"]
    # Rows past the vocabulary must not matter, so they are nonzero.
    pads = np.full((PAD_ROWS, table.shape[1]), 7, table.dtype)
    tree["embedder"]["input_embedding"] = np.concatenate([table, pads])
    model.config.save_pretrained(folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / f"gemma2-{size}", tree)


WRITERS: dict[str, Callable[[Any, str, Path], None]] = {
    "hf": _write_hf,
    "hf_shards": _write_shards,
    "kaggle_flat": functools.partial(_convert, "kaggle"),
    "kaggle_nested": _write_nested,
    "orbax": functools.partial(_convert, "orbax"),
}
OPENED_AS = {
    "hf": "hf",
    "hf_shards": "hf",
    "kaggle_flat": "kaggle",
    "kaggle_nested": "kaggle",
    "orbax": "orbax",
}


def write(model: Any, size: str, folder: Path, *, kind: str) -> Path:
    """Write a model and a tokenizer with one of `WRITERS`; return `folder`."""
    WRITERS[kind](model, size, folder)
    shutil.copyfile(bundled_target() / "tokenizer.model", folder / "tokenizer.model")
    return folder

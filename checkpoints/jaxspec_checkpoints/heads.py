"""Reads heads as SafeAILab, SpecForge, SGLang, vLLM and speculators write them.

A head is a small network on the hidden states of a target. This module recognizes the
kind of head in a folder and renames each writer's tensors to vLLM's names. Sizes are
checked in `jaxspec.models.heads`.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand, listing, read_json, readable
from jaxspec_checkpoints.huggingface import INTEGERS, SINGLE, read_tensors
from jaxspec_checkpoints.tensor import Tensor

EAGLE, EAGLE3, MEDUSA, DFLASH = "eagle", "eagle3", "medusa", "dflash"
KINDS = (EAGLE, EAGLE3, MEDUSA, DFLASH)
# Kinds of heads that are not supported. They are recognized only so that errors can
# name them.
_UNSUPPORTED = ("dflash2", "dspark")
MLP_SPECULATOR = "mlp_speculator"
MLP_SPECULATOR_REMOVED = (
    "MLP speculators were removed: none has been published for Gemma. Use an "
    f"{EAGLE3!r}, {EAGLE!r} or {MEDUSA!r} head."
)

# File that some writers of Medusa heads use in place of model.safetensors.
_MEDUSA_FILE = "medusa_lm_head.safetensors"
# By kind of head: patterns of tensor names as other libraries write them, and vLLM's
# name. The first pattern that matches is applied.
_SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    EAGLE: (
        (r"fusion_fc\.(.*)", r"fc.\1"),
        (r"transformer\.(.*)", r"layers.0.\1"),
        (r"model\.(.*)", r"\1"),
    ),
    EAGLE3: (
        (r"(?:model\.)?midlayer\.(.*)", r"layers.0.\1"),
        (r"model\.(.*)", r"\1"),
    ),
    MEDUSA: (
        # Names in the code of the Medusa paper: number of the head, then of its block;
        # the last one is the head's LM head.
        (r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(.*)", r"blocks.\1.layers.\2.\3"),
        (r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
        (r"medusa_heads?\.(.*)", r"\1"),
    ),
    DFLASH: ((r"model\.(.*)", r"\1"),),
}
# The only tensors that are skipped, by vLLM's names. Any other unknown name is an
# error. No head computes with these: each follows from other tensors or the config, or
# is a matrix that the method takes from the target.
_NOT_READ = {
    "t2d": KINDS,  # the inverse of d2t
    "rotary_emb.inv_freq": KINDS,  # follows from rope_theta
    "layers.0.self_attn.rotary_emb.inv_freq": KINDS,
    "verifier_norm.weight": KINDS,  # the target's, used in training
    "verifier_lm_head.weight": KINDS,
    "lm_head.weight": (EAGLE,),  # EAGLE's output goes through the target's LM head
}


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """One head on disk, not yet read.

    Attributes:
        kind: One of `KINDS`.
        config: Content of its `config.json`.
        tensors: Tensors by vLLM's names.
    """

    kind: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def kind_of_head(config: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a `config.json` describes; None for other models.

    Kinds of speculators outside of `KINDS` are returned by their own name.
    """
    named = config.get("speculators_model_type")
    if named is not None:
        return str(named)
    names = {str(name).lower() for name in config.get("architectures") or ()}
    for kind in (EAGLE3, *_UNSUPPORTED, DFLASH):
        if any(kind in name for name in names):
            return kind
    is_eagle = any("eagle" in name for name in names)
    # The code of the EAGLE paper, and code that follows it, writes model_type "llama"
    # for the head.
    is_layer = config.get("model_type") == "llama" and (
        config.get("num_hidden_layers") == 1
    )
    if is_eagle or is_layer or config.get("model_type") == EAGLE:
        return EAGLE
    if config.get("model_type") in (MEDUSA, MLP_SPECULATOR):
        return str(config["model_type"])
    return MEDUSA if "medusa_num_heads" in config else None


def read_head_config(folder: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return the kind of the head in a folder, and the content of its `config.json`.

    Raises:
        CheckpointError: The folder holds no head, or one not in `KINDS`.
    """
    folder = expand(folder)
    with readable(folder):
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json; found: {listing(folder)}. Copy the "
                "whole folder again"
            )
        config = read_json(folder / "config.json")
    kind = kind_of_head(config)
    if kind == EAGLE and not _may_join(folder):
        kind = None
    if kind == MLP_SPECULATOR:
        raise CheckpointError(
            f"{folder} holds a head of kind {kind!r}. {MLP_SPECULATOR_REMOVED}"
        )
    if kind not in KINDS:
        what = "no head" if kind is None else f"a head of kind {kind!r}"
        raise CheckpointError(
            f"{folder} holds {what} (config.json: model_type="
            f"{config.get('model_type')!r}). A head is a small network on a target's "
            f"hidden states, trained for that target: {', '.join(KINDS)}."
        )
    return kind, config


def _may_join(folder: Path) -> bool:
    """Return whether a folder may hold EAGLE's `fc`, which joins a token and a state.

    Without it, the folder is a model of one layer with the same config.json.
    """
    try:
        names = read_tensors(folder, more_types=INTEGERS)
    except CheckpointError:  # `open_head` reports errors in its files
        return True
    return any(_our_spelling(EAGLE, name) == "fc.weight" for name in names)


def open_head(folder: str | Path) -> HeadFiles:
    """Recognize the head in a folder; no weight is read.

    Raises:
        CheckpointError: The folder holds no known head, its weights are not
            safetensors, or two tensors have the same vLLM name.
    """
    folder = expand(folder)
    kind, config = read_head_config(folder)
    with readable(folder):
        file = _weights_file(folder)
        found = read_tensors(folder, file=file, more_types=INTEGERS)
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        ours = _our_spelling(kind, name)
        if kind in _NOT_READ.get(ours, ()):
            continue
        if ours in tensors:
            raise CheckpointError(
                f"{folder} has the tensor {ours!r} twice: as {name!r}"
            )
        tensors[ours] = tensor
    return HeadFiles(kind=kind, folder=folder, config=config, tensors=tensors)


def _weights_file(folder: Path) -> str:
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0].name}, a pickle, which could "
            "run any code when loaded: convert it to model.safetensors"
        )
    has_other = (folder / _MEDUSA_FILE).is_file() and not (folder / SINGLE).is_file()
    return _MEDUSA_FILE if has_other else SINGLE


def _our_spelling(kind: str, name: str) -> str:
    for pattern, ours in _SPELLINGS[kind]:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    return name


def write_head(
    folder: str | Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a head as vLLM reads it, into a new folder, atomically.

    Raises:
        CheckpointError: The folder exists already.
    """
    folder = expand(folder).absolute()
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists already: name a folder that does not, or delete it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as temporary:
        inside = Path(temporary) / folder.name
        inside.mkdir()
        contiguous = {
            name: np.ascontiguousarray(array) for name, array in arrays.items()
        }
        save_file(contiguous, inside / SINGLE, metadata={"format": "pt"})
        # Safetensors makes the file readable by its owner only.
        (inside / SINGLE).chmod(0o644)
        text = json.dumps(dict(config), indent=2) + "\n"
        (inside / "config.json").write_text(text, encoding="utf-8")
        inside.rename(folder)

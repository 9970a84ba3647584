"""Detects the format of a folder and opens it (`open_checkpoint`).

A GGUF model is given by its file, or by the folder that holds the file. This module
also finds the files other than weights (`model_files`, `read_config`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import (
    expand,
    listing,
    read_json,
    readable,
    side_files,
)
from jaxspec_checkpoints.gemma.published import LAYOUTS
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.reading import find_gguf, is_gguf, open_gguf
from jaxspec_checkpoints.huggingface import (
    huggingface_names,
    is_huggingface,
    open_huggingface,
)
from jaxspec_checkpoints.kaggle import is_kaggle, kaggle_files, open_kaggle
from jaxspec_checkpoints.layout import Layout
from jaxspec_checkpoints.orbax import is_own, open_own, own_names

# Marker file next to a folder that `write_checkpoint` has not finished.
INCOMPLETE = "INCOMPLETE"

# Key of a GGUF file in `model_files`.
GGUF = "model.gguf"

# Formats in the order of detection; see README.md for how to add one. Our own format
# precedes Kaggle's, because both contain a folder that Orbax wrote.
_FORMATS = {
    "hf": (is_huggingface, open_huggingface),
    "orbax": (is_own, open_own),
    "kaggle": (is_kaggle, open_kaggle),
    "gguf": (is_gguf, open_gguf),
}


def open_checkpoint(
    folder: str | Path, layouts: Mapping[str, Layout] = LAYOUTS
) -> Checkpoint:
    """Detect the format of a folder and check that it is a whole model.

    Args:
        layouts: Layouts of the families that it may belong to, by `model_type`.

    Raises:
        CheckpointError: `folder` is not a folder, has no known format, or its parts do
            not fit together; no weight has been loaded.
    """
    folder = expand(folder)
    with readable(folder):
        return _open(folder, layouts)


def _open(folder: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    for place in (folder, *folder.absolute().parents[:2]):
        if (place / INCOMPLETE).is_file():
            raise CheckpointError(
                f"{folder} is left from an unfinished conversion "
                f"({place / INCOMPLETE} says so): delete it and convert again"
            )
    for name, (is_format, open_format) in _FORMATS.items():
        if (folder.is_dir() or name == "gguf") and is_format(folder):
            return open_format(folder, layouts)
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds a LoRA adapter, which is not supported: merge it into "
            "its model (peft's merge_and_unload) and give the folder of the result"
        )
    raise CheckpointError(
        f"{folder} holds no checkpoint: expected model.safetensors or its index "
        "(HuggingFace), an Orbax folder (Kaggle/Flax), a converted one, or a .gguf "
        f"file; found: {listing(folder)}"
    )


def lists_head(folder: str | Path) -> bool:
    """Return whether a folder's weights include a tensor for the LM head.

    Reads names only. False for a folder that cannot be opened: `open_checkpoint`
    reports the reason.
    """
    folder = expand(folder)
    try:
        with readable(folder):
            if is_huggingface(folder):
                names = huggingface_names(folder)
            elif is_own(folder):
                names = own_names(folder)
            else:
                gguf = find_gguf(folder)
                names = [] if gguf is None else list(read_gguf(gguf).tensors)
    except CheckpointError:
        return False
    parts = (name.split(".") for name in names)
    return any("lm_head" in one or one[0] == "output" for one in parts)


def model_files(folder: str | Path) -> dict[str, Path]:
    """Return config, tokenizer and other files that describe a model, by name.

    Also for a folder without weights, such as a tokenizer's. A GGUF file, whose
    metadata describe the model, has the key `GGUF`.

    Raises:
        CheckpointError: A file is a symlink to outside the folder, or the folder cannot
            be read.
    """
    folder = expand(folder)
    with readable(folder):
        has_weights = is_huggingface(folder) or is_own(folder)
        if not has_weights and folder.is_dir() and is_kaggle(folder):
            return kaggle_files(folder)
        found = side_files(folder)
        gguf = None if has_weights else find_gguf(folder)
        return found if gguf is None else {**found, GGUF: gguf}


def read_config(
    folder: str | Path, layouts: Mapping[str, Layout] = LAYOUTS
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the contents of `config.json` and `generation_config.json`.

    In a format without `config.json`, the first is derived from the weights' shapes,
    and the second is empty.

    Args:
        layouts: As in `open_checkpoint`.

    Raises:
        CheckpointError: The folder has neither config nor weights, or a file is broken.
    """
    files = model_files(folder)
    if GGUF in files or "config.json" not in files:
        # Read the config from the GGUF file itself: a config.json next to it is often a
        # stub.
        checkpoint = open_checkpoint(folder, layouts)
        return checkpoint.config, checkpoint.generation_config
    generation = files.get("generation_config.json")
    return read_json(files["config.json"]), read_json(generation) if generation else {}

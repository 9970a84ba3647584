"""Owns `open_checkpoint`: tells the formats apart by what is in a folder."""

from pathlib import Path

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import listing
from jaxspec_checkpoints.huggingface import is_huggingface, open_huggingface

# In the order they are asked; see README.md for how to add one.
_FORMATS = {"hf": (is_huggingface, open_huggingface)}
FORMATS = tuple(_FORMATS)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find out the format of a folder and check that it is a whole Gemma 2.

    Raises:
        CheckpointError: It is no folder, of no known format, or what is in it does not
            fit together; nothing has been loaded.
    """
    folder = Path(folder).expanduser()
    for is_format, open_format in _FORMATS.values():
        if folder.is_dir() and is_format(folder):
            return open_format(folder)
    raise CheckpointError(
        f"{folder} holds no checkpoint: expected model.safetensors or its index "
        "(HuggingFace), an Orbax folder (Kaggle/Flax), or a converted one; found: "
        f"{listing(folder)}"
    )

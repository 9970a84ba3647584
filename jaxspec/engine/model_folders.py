"""Resolves model names to folders, and reads the sampling defaults of a folder.

A name is a folder, a GGUF file, a bundled model, or a model to download.
"""

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.engine import read_generation_config
from jaxspec.errors import ConfigError, one_of, wrong_argument
from jaxspec.sampling_params import SAMPLING_FIELDS
from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.bundled import (
    BUNDLED_DRAFT,
    BUNDLED_HEADS,
    BUNDLED_TARGET,
    NAMED_MODELS,
    PACKAGED_GEMMA3,
)
from jaxspec_checkpoints.files import expand
from jaxspec_checkpoints.gguf.file import SUFFIX
from jaxspec_checkpoints.sources import fetch, is_remote

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_HEADS",
    "BUNDLED_NAMES",
    "BUNDLED_TARGET",
    "PACKAGED_GEMMA3",
    "model_folder",
    "recommended_sampling",
]

_BUNDLED = dict(NAMED_MODELS)
# Prefix of bundled models, which are never downloaded.
_OWN_PREFIX = "jaxspec/"
BUNDLED_NAMES = frozenset(_BUNDLED)
_ALLOWED = (
    "an existing folder, a .gguf file, owner/name on the Hugging Face Hub (with GGUF "
    "files owner/name:Q4_K_M), a Kaggle handle owner/model/framework/variation, or "
    f"{one_of(_BUNDLED)}"
)
# Maps names in generation_config.json to names of SamplingParams.
_OUR_NAMES = {name: name for name in (*SAMPLING_FIELDS, "repetition_penalty")}
_OUR_NAMES["max_new_tokens"] = "max_tokens"


def model_folder(name: object, argument: str, **options: Any) -> Path:
    """Return the folder or GGUF file of a model; download it if it is not local.

    Args:
        argument: Name of the argument, for errors.
        options: Options of `jaxspec_checkpoints.sources.fetch`.

    Raises:
        ConfigError: There is no such model, or it cannot be downloaded.
    """
    if isinstance(name, str) and name in _BUNDLED:
        with _as_config_error(argument, name):
            return _BUNDLED[name]()
    if not isinstance(name, str) or not name:
        raise wrong_argument(ConfigError, argument, _ALLOWED, name)
    folder = expand(name)
    # Not `folder.is_dir()`, which raises for a name that is too long for a path.
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder):
        if folder.suffix == SUFFIX:
            return folder
        hint = "This is a file: give the folder it is in, or a .gguf file."
        raise wrong_argument(ConfigError, argument, _ALLOWED, name, hint)
    if not is_remote(name) or name.startswith(_OWN_PREFIX):
        hint = f"No such folder exists{_similar(name, folder) or '.'}"
        raise wrong_argument(ConfigError, argument, _ALLOWED, name, hint)
    with _as_config_error(argument, name):
        return fetch(name, **options)


def _similar(name: str, folder: Path) -> str:
    """Return the question "did you mean ...?" for a similar name, or ""."""
    matches = difflib.get_close_matches(name, _BUNDLED, n=1)
    if not matches:
        with contextlib.suppress(OSError):
            names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
            near = difflib.get_close_matches(folder.name, names, n=1)
            matches = [str(folder.parent / one) for one in near]
    return f"; did you mean {matches[0]!r}?" if matches else ""


@contextlib.contextmanager
def _as_config_error(argument: str, name: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        message = f"{argument}: {error}"
        raise ConfigError(message, parameter=argument, value=name) from error


def recommended_sampling(
    folder: Path | None, override: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Translate a folder's recommended sampling to the names of SamplingParams.

    Args:
        folder: With a `generation_config.json`; None recommends nothing.
        override: Entries of such a file that replace the folder's.
    """
    stored = {} if folder is None else dict(read_generation_config(folder))
    stored |= override or {}
    return {
        ours: stored[theirs]
        for theirs, ours in _OUR_NAMES.items()
        if stored.get(theirs) is not None
    }

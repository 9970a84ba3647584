"""Models by name: an id of the Hugging Face Hub or a Kaggle handle becomes a folder.

Decides which service a name belongs to. The services' own libraries do the work:
network, logins, cache, progress bars. Knows nothing about the content of a folder.
"""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand

# `google/gemma-2-9b-it`; with a type of GGUF files, `google/gemma-2-2b-it-GGUF:Q4_K_M`
_HUB_ID = re.compile(
    r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?::(?P<kind>\w[\w.-]*))?", re.ASCII
)
# `google/gemma-2/flax/gemma2-2b-it`, with or without `/2` for a version
_KAGGLE_HANDLE = re.compile(r"(?:\w[\w-]*/){3}\w[\w.-]*(?:/[1-9]\d*)?", re.ASCII)


def is_remote(name: str) -> bool:
    """Return whether `name` is spelled like something that `fetch` can get."""
    return any(form.fullmatch(name) for form in (_HUB_ID, _KAGGLE_HANDLE))


def fetch(
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = True,
) -> Path:
    """Return the folder or GGUF file of a model, from this machine or from a service.

    Models in the service's cache are not fetched again. An existing folder takes
    precedence over a service's model of the same name; other arguments are then
    ignored.

    Args:
        name: A folder, `owner/name` on the Hugging Face Hub, `owner/name:Q4_K_M` for a
            GGUF file there, or Kaggle's `owner/model/framework/variation`, with or
            without `/version`.
        revision: Branch, tag or commit on the Hugging Face Hub.
        token: For the Hugging Face Hub; True is the one saved by its login, which is
            also the default. Kaggle's library finds its own.
        cache_dir: Folder for downloads, instead of the service's own cache.
        weights: False leaves out the weights if the service allows it: the rest is
            enough for a tokenizer. GGUF files are always fetched whole.

    Raises:
        CheckpointError: Says why the model cannot be fetched, and what to do.
    """
    folder = expand(name)
    # Not `folder.is_dir()`, which raises for names that are too long for a path.
    if os.path.isdir(folder):
        return folder
    if found := _HUB_ID.fullmatch(name):
        if not isinstance(revision, str | None):
            raise CheckpointError(
                "revision must be a branch, tag or commit as a string, got "
                f"{revision!r} for {name!r}"
            )
        hub = _service("hub", name)
        if found["kind"] is not None:
            return hub.download_gguf(
                *found.group("name", "kind"),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
            )
        return hub.download(
            name, revision=revision, token=token, cache_dir=cache_dir, weights=weights
        )
    if _KAGGLE_HANDLE.fullmatch(name):
        if revision is not None:
            raise CheckpointError(
                f"{name!r} is a Kaggle handle, which has no revisions, got "
                f"revision={revision!r}: a fifth part names the version, like "
                "'google/gemma-2/flax/gemma2-2b-it/2'"
            )
        kaggle = _service("kaggle", name)
        return kaggle.download(name, cache_dir=cache_dir)
    raise CheckpointError(
        f"{name!r} is not a folder, not an id of the Hugging Face Hub (owner/name, or "
        "owner/name:Q4_K_M) and not a Kaggle handle (owner/model/framework/variation): "
        "check the spelling"
    )


def _service(extra: str, name: str) -> Any:
    """Import a service's module, which needs the extra of the same name."""
    try:
        return importlib.import_module(f"{__name__}.{extra}")
    except ImportError as error:
        raise CheckpointError(
            f"{name!r} is not a folder here, and fetching it needs the extra "
            f"{extra!r}, which is not installed: run pip install "
            f'"jaxspec-decoding[{extra}]", or download the model by other means and '
            "pass its folder"
        ) from error

"""The Hugging Face Hub, through huggingface_hub.

Chooses the files of a repository to fetch, and explains the library's errors to users.
Importing this module needs the extra `hub`.
"""

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, errors, snapshot_download

from jaxspec_checkpoints.checkpoint import SIDE_FILES
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand

# Patterns of the files to fetch. The hub matches them with whole paths, and `*` also
# matches slashes.
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    # Orbax, at the root or below: its metadata, then OCDBT and Zarr storage.
    "jaxspec_checkpoint.json",
    "*_METADATA",
    "*_sharding",
    "*commit_success.txt",
    "checkpoint",
    "*/checkpoint",
    "*array_metadatas/*",
    "*manifest.ocdbt",
    "d/*",
    "*/d/*",
    "*.zarray",
    "*zarr.json",
    "*/[0-9]*",
)
# Never fetched, in any folder: pickles, formats that cannot be read, and GGUF files
# whose type the user did not name. Weights in a subfolder are second copies in a
# publisher's original format.
_NEVER = (
    *("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth"),
    *("*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx"),
    *("*/*.safetensors", "*/*.safetensors.index.json"),
)
# Image projectors, next to GGUF files.
_PROJECTORS = ("mmproj*", "*/mmproj*")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
)


def download(
    name: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    weights: bool,
) -> Path:
    """Fetch a repository's model, or its missing files, and return the folder.

    Raises:
        CheckpointError: Says why the model cannot be fetched, and what to do.
    """
    with _explained(name, revision):
        fetched = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else expand(cache_dir),
            allow_patterns=[*SIDE_FILES, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_NEVER),
        )
    folder = Path(fetched)
    if weights and not _has_weights(folder):
        raise CheckpointError(
            f"{_page(name)} has no weights as *.safetensors or in Orbax's format. To "
            f"fetch a GGUF file, add its type, as in {name}:Q4_K_M. Pickles (*.bin, "
            "*.pt) are not fetched, as they can run code. Choose a repository with "
            "safetensors or GGUF files."
        )
    return folder


def download_gguf(
    name: str,
    kind: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
) -> Path:
    """Fetch the one GGUF file, or its shards, whose name ends in a type.

    Args:
        kind: As in the file's name, "Q4_K_M"; case does not matter.

    Returns:
        The file; for shards, the first.

    Raises:
        CheckpointError: Says why the model cannot be fetched, and what to do.
    """
    either = "".join(
        f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter
        for letter in kind
    )
    patterns = [
        f"*{mark}{either}{end}"
        for mark in "-."
        for end in (".gguf", "-[0-9][0-9][0-9][0-9][0-9]-of-*.gguf")
    ]
    with _explained(name, revision):
        try:
            # Check before fetching: several models of this type are an error.
            found = HfApi().model_info(
                name, revision=revision or constants.DEFAULT_REVISION, token=token
            )
            _check_one(name, kind, [one.rfilename for one in found.siblings or ()])
        except (httpx2.TransportError, errors.OfflineModeIsEnabled):
            found = None  # the cache may have it
        fetched = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else expand(cache_dir),
            allow_patterns=patterns,
            ignore_patterns=list(_PROJECTORS),
        )
    folder = Path(fetched)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return folder / _check_one(name, kind, names)


def _check_one(name: str, kind: str, names: Sequence[str]) -> str:
    """Return the first file of the one model of a type."""
    models: dict[str, list[str]] = {}
    for file in sorted(names):
        if file.endswith(".gguf") and not Path(file).name.startswith("mmproj"):
            models.setdefault(_SHARD.sub("", file), []).append(file)
    ends = tuple(f"{mark}{kind}.gguf".lower() for mark in "-.")
    found = [model for model in models if model.lower().endswith(ends)]
    if len(found) == 1:
        return models[found[0]][0]
    shown = ", ".join((found or list(models))[:8]) or "none"
    what = "several GGUF files" if found else "no GGUF file"
    raise CheckpointError(
        f"{_page(name)} has {what} of type {kind!r}, but exactly one is needed; "
        f"found: {shown}. Name another type, or download a file and pass its path."
    )


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turn the library's errors into explanations for users."""
    try:
        yield
    except (
        httpx2.HTTPError,
        errors.HFValidationError,
        json.JSONDecodeError,
        OSError,
        RuntimeError,
    ) as error:
        reason = _reason(error, name, revision)
        if reason is None:
            raise
        raise CheckpointError(
            f"{name!r} is not a folder here, and cannot be fetched from the Hugging "
            f"Face Hub: {reason}"
        ) from error


def _has_weights(folder: Path) -> bool:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return any(fnmatch(path, pattern) for path in paths for pattern in _WEIGHTS)


def _page(name: str) -> str:
    return f"{constants.ENDPOINT}/{name}"


def _reason(error: BaseException, name: str, revision: str | None) -> str | None:
    """Explain an error to a user; None if it is unknown."""
    if isinstance(error, errors.IncompleteSnapshotError):
        cause = _reason(error.__cause__, name, revision) if error.__cause__ else None
        return f"an earlier download of it is unfinished, and {cause or error}"
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        # Without network the library searches its cache and raises an error about that;
        # its cause is the original error.
        return _reason(error.__cause__, name, revision)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE is set and the cache has no whole copy of it. Unset the "
            "variable, or fetch the model once with network access."
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, name, revision)
    if isinstance(error, errors.HFValidationError):
        return f"this cannot be the id of a repository. {error}"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "token=True uses a saved token, but none is saved: run `hf auth login`."
    if isinstance(error, (httpx2.TransportError, ConnectionError, TimeoutError)):
        return (
            f"{constants.ENDPOINT} cannot be reached, or the connection broke "
            f"({type(error).__name__}: {error}). Check network and proxy and try "
            "again; files that have arrived whole are kept. Without network, pass a "
            "model's folder."
        )
    if isinstance(error, (errors.FileMetadataError, json.JSONDecodeError)):
        return (
            f"{constants.ENDPOINT} does not respond like the Hugging Face Hub: check "
            f"HF_ENDPOINT, proxy and firewall ({error})."
        )
    return _local_reason(error)


def _refusal(
    error: errors.HfHubHTTPError, name: str, revision: str | None
) -> str | None:
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return (
            f"it is open only to those who accepted its licence ({status}). Accept it "
            f"on {_page(name)}, then give a token of that account that may read gated "
            "repositories: hf_token=..., the variable HF_TOKEN, or `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"it has no revision {revision or constants.DEFAULT_REVISION!r}. "
            f"{_page(name)}/tree/main lists branches and tags."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no such repository, or it is private ({status}). Check the "
            f"spelling on {_page(name)}; for a private repository give a token: "
            "hf_token=..., the variable HF_TOKEN, or `hf auth login`."
        )
    if isinstance(error, errors.DisabledRepoError):
        return "its owner or the hub has disabled it. Choose another model."
    if status == 401:
        return (
            "the token is not valid. Create a new one in the settings of your "
            "account and pass it as hf_token=... or in the variable HF_TOKEN."
        )
    if status == 403:
        return (
            f"the token does not allow it ({error.server_message or status}). Give a "
            "token that may read this repository."
        )
    if status == 429 or status >= 500:
        return f"the hub is busy or fails ({status}). Try again later."
    return None


def _local_reason(error: BaseException) -> str | None:
    """Explain errors that come neither from the hub nor from the network."""
    number = error.errno if isinstance(error, OSError) else None
    # hf_xet, which transfers large files, raises RuntimeErrors with a text only.
    text = str(error) if isinstance(error, RuntimeError) else ""
    if number in _DISK_FULL or "os error 28" in text:
        return (
            "the disk is full. Free space, or choose another disk with download_dir "
            "or the variable HF_HOME."
        )
    if number in _NOT_WRITABLE:
        return (
            f"the cache cannot be written ({error}). Choose another folder with "
            "download_dir or the variable HF_HOME."
        )
    if "Task error" in text or (isinstance(error, OSError) and number is None):
        return (
            f"the download broke off ({error}). Try again; files that have arrived "
            "whole are kept."
        )
    return None

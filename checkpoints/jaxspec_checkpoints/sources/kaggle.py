"""Kaggle Models, through kagglehub.

Chooses the folder of downloads if the caller names one, and explains the library's
errors to users. Importing this module needs the extra `kaggle`.
"""

import errno
import shutil
import tarfile
import zipfile
from pathlib import Path

import kagglehub
import requests
from kagglehub.exceptions import (
    BackendError,
    CredentialError,
    DataCorruptionError,
    KaggleEnvironmentError,
)

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand

# Kaggle's frameworks whose files may be Orbax or safetensors. Others are rejected
# before gigabytes that cannot be read are fetched.
_FRAMEWORKS = ("flax", "jax", "transformers", "other")


def download(name: str, *, cache_dir: str | Path | None) -> Path:
    """Fetch a model's variation unless it is cached, and return the folder.

    Raises:
        CheckpointError: Says why the model cannot be fetched, and what to do.
    """
    framework = name.split("/")[2]
    if framework.lower() not in _FRAMEWORKS:
        raise CheckpointError(
            f"{name!r} is not a folder here, and as a Kaggle handle its third part "
            f"must be one of {', '.join(_FRAMEWORKS)}, got {framework!r}: weights "
            "for other frameworks cannot be read"
        )
    try:
        if cache_dir is None:
            return Path(kagglehub.model_download(name))
        return _download_to(expand(cache_dir), name)
    except (
        BackendError,
        CredentialError,
        DataCorruptionError,
        KaggleEnvironmentError,
        EOFError,
        OSError,
        tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:
        reason = _reason(error, name)
        if reason is None:
            raise
        raise CheckpointError(
            f"{name!r} is not a folder here, and cannot be fetched from Kaggle: "
            f"{reason}"
        ) from error


def _download_to(cache_dir: Path, name: str) -> Path:
    place = cache_dir / f"kaggle--{name.replace('/', '--')}"
    is_new = not place.exists()
    try:
        return Path(kagglehub.model_download(name, output_dir=str(place)))
    except BaseException:
        if is_new:
            # Remove what a failed download left: the library would take it for a user's
            # own files, and reject the folder from then on.
            shutil.rmtree(place, ignore_errors=True)
        raise


def _page(name: str) -> str:
    return "https://www.kaggle.com/models/" + "/".join(name.split("/")[:2])


def _reason(error: BaseException, name: str) -> str | None:
    """Explain an error to a user; None if it is unknown."""
    if isinstance(error, requests.HTTPError):
        return _refusal(error, name)
    if isinstance(error, (BackendError, CredentialError, KaggleEnvironmentError)):
        return (
            f"the notebook cannot attach it ({error}). Add the model under Input in "
            "the notebook's side bar, and pass its folder below /kaggle/input."
        )
    if isinstance(
        error, (DataCorruptionError, EOFError, tarfile.TarError, zipfile.BadZipFile)
    ):
        return f"the download is damaged ({error}). Try again."
    if isinstance(error, requests.RequestException):
        return (
            f"Kaggle cannot be reached, or the connection broke "
            f"({type(error).__name__}: {error}). Check network and proxy and try "
            "again. Without network, a copy in the cache is found only by a handle "
            f"with its version, like {'/'.join(name.split('/')[:4])}/2, or pass a "
            "model's folder."
        )
    if isinstance(error, FileExistsError) and error.errno is None:
        return (
            f"{error.args[0]} It is the rest of an unfinished download, or another "
            "version: delete the folder and try again."
        )
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk is full. Free space, or choose another disk with download_dir "
            "or the variable KAGGLEHUB_CACHE."
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return (
            f"the cache cannot be written ({error}). Choose another folder with "
            "download_dir or the variable KAGGLEHUB_CACHE."
        )
    return None


def _refusal(error: requests.HTTPError, name: str) -> str | None:
    status = 0 if error.response is None else error.response.status_code
    if status in (401, 403):
        return (
            f"you are not logged in, or have not accepted its licence ({status}). "
            f"Accept it on {_page(name)}, then log in as that account: the variable "
            "KAGGLE_API_TOKEN, the file ~/.kaggle/access_token, or "
            "kagglehub.login() in a notebook."
        )
    if status == 404:
        return (
            "there is no such model, framework, variation or version (404). Check the "
            f"spelling on {_page(name)}."
        )
    if status == 429 or status >= 500:
        return f"Kaggle is busy or fails ({status}). Try again later."
    return None

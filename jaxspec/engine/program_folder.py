"""Folders of compiled programs, on a disk or in a bucket of Google Cloud Storage.

Owns reading and writing of their files. Buckets are accessed with `etils.epath`, as in
jax's own cache, whose paths have the methods of `pathlib` that are used here.
"""

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.extras import require_packages

# A `pathlib.Path`, or a path of `etils.epath` in a bucket, with the same methods.
AnyPath = Any

BUCKET = "gs://"
_NAME = "compilation_cache_dir"
# `etils.epath` uses TensorFlow instead of gcsfs if it is installed.
_PACKAGES = ("etils", "fsspec", "gcsfs")


def folder_at(place: str) -> AnyPath:
    """Return a folder by its path or its address; nothing is read.

    Raises:
        ConfigError: It is an address of another kind, or packages are missing.
    """
    if "://" not in place:
        return Path(place)
    if not place.startswith(BUCKET):
        allowed = f"a folder, or {BUCKET}BUCKET/FOLDER"
        hint = "Mount other storage as a folder."
        raise wrong_argument(ConfigError, _NAME, allowed, place, hint)
    if find_spec("tensorflow") is None:
        require_packages("gcs", f"{_NAME}={place!r}", _PACKAGES)
    return importlib.import_module("etils.epath").Path(place)


def is_bucket(path: AnyPath) -> bool:
    """Return whether a path is in a bucket."""
    return str(path).startswith(BUCKET)


def check_readable(folder: AnyPath) -> None:
    """Check that a bucket can be listed; folders on disks are not checked.

    Raises:
        ConfigError: It cannot, for example because the credentials are missing.
    """
    if not is_bucket(folder):
        return
    try:
        with _os_errors():
            # A folder without files does not exist in a bucket.
            with contextlib.suppress(FileNotFoundError):
                next(iter(folder.iterdir()), None)
    except OSError as error:
        hint = "Check the bucket's name and this machine's credentials."
        raise ConfigError(
            f"{_NAME}={str(folder)!r} cannot be read: {error}. {hint}",
            parameter=_NAME,
            value=str(folder),
        ) from error


def files(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """Return the files of a folder whose names match a pattern.

    Raises:
        OSError: The folder cannot be read.
    """
    with _os_errors():
        return list(folder.glob(pattern))


def read(path: AnyPath) -> bytes:
    """Return a file's content.

    Raises:
        OSError: It cannot be read.
    """
    with _os_errors():
        return path.read_bytes()


def exists(path: AnyPath) -> bool:
    """Return whether a file exists and can be reached."""
    with contextlib.suppress(OSError), _os_errors():
        return path.exists()
    return False


def first_line(path: AnyPath) -> bytes:
    """Return the first line of a file.

    Raises:
        OSError: It cannot be read.
    """
    with _os_errors(), path.open("rb") as file:
        return file.readline()


def write(path: AnyPath, content: bytes) -> None:
    """Write a file, so that other processes see all of it or nothing.

    Raises:
        OSError: It cannot be written.
    """
    if is_bucket(path):
        with _os_errors():
            path.write_bytes(content)  # an object appears when all of it is written
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same file: rename complete files only.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        # Readable as the user's umask allows: others may share the folder.
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def mark_used(path: AnyPath) -> None:
    """Record that a file is used now, so that `make_room` keeps it."""
    if not is_bucket(path):
        with contextlib.suppress(OSError):  # another user's, or a read-only image
            os.utime(path)


def make_room(folder: AnyPath, pattern: str, max_bytes: int) -> None:
    """Remove the least recently used files beyond a limit; a bucket has none.

    Buckets do not record when a file was read, and their rules delete old files.
    """
    if is_bucket(folder):
        return
    # Another process may remove files at the same time.
    with contextlib.suppress(OSError):
        entries = [(path.stat(), path) for path in folder.glob(pattern)]
        entries.sort(key=lambda pair: pair[0].st_mtime)
        surplus = sum(status.st_size for status, _ in entries) - max_bytes
        for status, path in entries:
            if surplus <= 0:
                break
            path.unlink()
            surplus -= status.st_size


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of a bucket's client, which have many types, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(repr(error)) from error

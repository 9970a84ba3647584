"""Rules for a checkpoint's files: inside its folder, and readable.

A folder may come from anywhere, so a symlink or an index in it must not reach other
files of this machine.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.checkpoint import SIDE_FILES
from jaxspec_checkpoints.errors import CheckpointError


def expand(path: str | Path) -> Path:
    """Replace `~` by the home directory; leave the path of an unknown user as it is."""
    return Path(os.path.expanduser(path))


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Convert operating system errors about files in `folder` to `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error}. Check the name and your permissions"
        ) from error


def check_inside(folder: Path, path: Path) -> Path:
    """Return `path` if its target lies in `folder`.

    A snapshot in the HuggingFace cache consists of symlinks to `blobs` next to
    `snapshots`, and those may be symlinks to `blobs` of the whole cache; both are
    allowed.

    Raises:
        CheckpointError: `path` is a symlink to a place outside `folder`.
    """
    try:
        root, real = folder.resolve(), path.resolve()
    except RuntimeError as error:  # Python before 3.13
        raise CheckpointError(
            f"{path} is a symlink that leads back to itself: put the file itself into "
            "the folder"
        ) from error
    roots = [root, *_cache_blobs(root)]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{path} is a symlink that points outside its folder, to {real}: put the "
            "file itself into the folder"
        )
    return path


def _cache_blobs(root: Path) -> list[Path]:
    """Return the folders that symlinks in a HuggingFace cache snapshot may lead to."""
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            return [repository / "blobs", repository.parent / "blobs"]
    return []


def check_tree(folder: Path) -> None:
    """Apply `check_inside` to everything below `folder`."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            check_inside(folder, path)


def side_files(*folders: Path) -> dict[str, Path]:
    """Return the `SIDE_FILES` that exist, by name; earlier folders take precedence."""
    found: dict[str, Path] = {}
    for folder in folders:
        for name in SIDE_FILES:
            path = folder / name
            if name not in found and path.is_file():
                found[name] = check_inside(folder, path)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file cannot be read, or does not hold an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} must be readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {content!r:.80}")
    return content


def listing(folder: Path) -> str:
    """Describe the content of a folder, for messages."""
    if not folder.is_dir():
        return "a file, not a folder" if folder.exists() else "no such folder"
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:8]) or "an empty folder"
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")

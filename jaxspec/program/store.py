"""Compiled steps on disk: a second start neither traces nor compiles them.

jax's own cache is asked only after a step has been traced and lowered, which takes as
long as loading what it has. Here the name of a step is made of what it is traced from:
the packages' sources, the configuration, shapes and placement of the arguments, the
devices, the versions, and jax's settings.
"""

import hashlib
import logging
import os
import pickle
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

_log = logging.getLogger(__name__)

_PACKAGES = ("jaxspec", "jaxspec_kernels")
# Of jax's settings those that say where things are kept, or what is told of them.
_ASIDE = ("cache", "log", "profiler", "traceback", "dump")
# Not every device's programs can be taken out of the process.
_UNSUPPORTED = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
_UNREADABLE = (OSError, EOFError, zlib.error, pickle.PickleError, *_UNSUPPORTED)


def unseen_name() -> str:
    """A name that gives a program no place in jax's cache.

    XLA:CPU writes an executable that came out of a cache without its functions: read
    back, it fails when it runs. So what is to be kept must have been compiled.
    """
    return f"step_{uuid.uuid4().hex}"


class ProgramStore:
    """A folder of executables.

    Like jax's own cache it holds code: who can write to it can run what they like.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def name(self, mesh: Mesh, *parts: object) -> str:
        """What an executable is called that depends on these; equal `repr`, equal name.

        Args:
            mesh: The devices that it runs on.
        """
        devices = [(device.id, device.device_kind) for device in mesh.devices.flat]
        platform = mesh.devices.flat[0].client.platform_version
        digest = hashlib.sha256(_sources())
        for part in (*_surroundings(), platform, devices, mesh, *parts):
            digest.update(repr(part).encode() + b"\0")
        return digest.hexdigest()

    def load(
        self, name: str, mesh: Mesh, arguments: tuple[Any, ...], result: Any
    ) -> Callable[..., Any] | None:
        """Bring an executable back; None if there is none that can be read.

        Args:
            arguments: Trees like those that it takes, whatever their leaves.
            result: A tree like the one it returns.
        """
        path = self._folder / name
        if not path.exists():
            return None
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
        devices = list(mesh.devices.flat)
        try:
            return serialize_executable.deserialize_and_load(
                zlib.decompress(path.read_bytes()), *trees, execution_devices=devices
            )
        except _UNREADABLE as error:
            _log.warning("%s cannot be used, and is compiled again: %r", path, error)
            return None

    def save(self, name: str, executable: jax.stages.Compiled) -> None:
        """Keep an executable for the next start."""
        try:
            payload, _, _ = serialize_executable.serialize(executable)
            self._folder.mkdir(parents=True, exist_ok=True)
            # Another process may be at the same one: whole files only.
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(zlib.compress(payload, level=1))
            os.replace(file.name, self._folder / name)
        except (OSError, *_UNSUPPORTED) as error:
            _log.warning("a program cannot be kept in %s: %r", self._folder, error)


def _surroundings() -> tuple[object, ...]:
    """What all programs of a process depend on."""
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in _ASIDE)
    }
    flags = os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")
    versions = jax.__version__, metadata.version("jaxlib")
    return versions, flags, settings, _cpu_flags()


@cache
def _cpu_flags() -> str | None:
    """The instructions that code for this CPU may have."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return next(found, None)


@cache
def _sources() -> bytes:
    """A digest of everything that a step is traced from."""
    digest = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in _files(package)):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _files(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for suffix in ("*.py", "*.json"):
            yield from Path(folder).rglob(suffix)

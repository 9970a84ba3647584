"""Compiled programs on disk: a second start neither traces nor compiles them.

Owns how one executable comes about: read from a folder, or lowered, compiled and kept
there. jax's own cache is asked only after a program has been traced and lowered, which
takes as long as reading it back does; here the name of a file is made of what the
program is traced from, so that nothing is traced to find it: the packages' sources, the
configuration, shapes and placement of the arguments, the devices, the versions, and
jax's settings. None of these settings is changed.

Programs may be built by several threads and by several processes at once. A folder
holds code: who can write to it can run what they like where it is read.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import pickle
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

# Private, and the only way to settings of one thread: those of `jax.config` are all's.
from jax._src import config as thread_settings
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxspec.jax_settings import OWN_SETTINGS, own_settings
from jaxspec.models import cpu
from jaxspec.program import grammar
from jaxspec.program.executable_args import Arguments, flatten, used_arguments
from jaxspec.program.plan import StepShape
from jaxspec.program.step import lower_step
from jaxspec.program.step_context import ProgramConfig
from jaxspec_kernels import native

_log = logging.getLogger(__name__)

# Of all programs in a folder; those that were not used for longest make way.
MAX_BYTES = 4 * 2**30
SUFFIX = ".program"

Options = dict[str, str | bool]

_PACKAGES = ("jaxspec", "jaxspec_kernels")
# Of jax's settings those that say where things are kept, what is told of them, or which
# devices there are: the ones of a program are in its name themselves.
_ASIDE = re.compile(
    "cache|log|profiler|traceback|dump|platform|backend|_devices|distributed|cross_host"
    "|timeout|transfer|client"
)
# The platform's name of a GPU ends with its memory where it is only described.
_MEMORY = re.compile(r" \d+GB.*")
# Not every device's programs can be taken out of the process.
_UNSUPPORTED = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, pickle.PickleError),
    *(AttributeError, ImportError, LookupError, TypeError),
    *_UNSUPPORTED,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """An executable, and what it took.

    Attributes:
        lower_s: Seconds to trace and lower it; 0 where it was read.
        compile_s: Seconds that XLA took; where it was read, seconds to read it.
        num_bytes: What its file takes; 0 where there is none.
    """

    executable: Callable[..., Any]
    was_loaded: bool
    lower_s: float
    compile_s: float
    num_bytes: int = 0


class ProgramCache:
    """A folder of executables, or none: then everything is compiled."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._has_warned = False

    def build(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None = None,
    ) -> Built:
        """Read an executable; where there is none, compile and keep it.

        Args:
            arguments: The parameters and the state, or their abstract forms.
            options: Of XLA, by the names of its flags.
        """
        path = self.path(program, shape, arguments, options)
        if path is None:
            # Not by the name of those that are kept: jax's cache may take this one.
            name = f"{program_name(shape)}_unkept"
            return _compile(program, shape, arguments, options, name)
        start = time.monotonic()
        given = flatten(used_arguments(program.proposers, shape, arguments))
        loaded = _load(path, program.mesh, given)
        if loaded is not None:
            return Built(
                executable=loaded,
                was_loaded=True,
                lower_s=0.0,
                compile_s=time.monotonic() - start,
            )
        with _past_jax_cache():
            built = _compile(program, shape, arguments, options, program_name(shape))
        try:
            num_bytes = _save(path, built.executable)
        except (OSError, *_UNSUPPORTED) as error:
            if not self._has_warned:
                _log.warning("Programs cannot be kept in %s: %r", self._folder, error)
            self._has_warned = True
            return built
        return dataclasses.replace(built, num_bytes=num_bytes)

    def fill(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None = None,
    ) -> Built | None:
        """Compile and keep an executable for devices that may not be here.

        Returns:
            None where a whole one is there already; whether these devices can read it
            is not known before they do.

        Raises:
            OSError: The folder cannot be written.
        """
        path = self.path(program, shape, arguments, options)
        assert path is not None, "a program that is not kept"
        if _is_whole(path):
            return None
        with _past_jax_cache():
            built = _compile(program, shape, arguments, options, program_name(shape))
        return dataclasses.replace(built, num_bytes=_save(path, built.executable))

    def path(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None = None,
    ) -> Path | None:
        """The file of an executable, there or not; None where none is kept.

        A program that asks an object of its process for masks is not kept.
        """
        if self._folder is None:
            return None
        is_by_name = program.mask_source is grammar.native_masks
        if shape.features.has_grammar and not is_by_name:
            return None
        digest = _digest(program, shape, arguments, options)
        return self._folder / f"{program_name(shape)}-{digest}{SUFFIX}"


def program_name(shape: StepShape) -> str:
    """What profiles and files call a program."""
    return "step_" + re.sub(r"\W", "_", shape.name)


def _compile(
    program: ProgramConfig,
    shape: StepShape,
    arguments: Arguments,
    options: Options | None,
    name: str,
) -> Built:
    start = time.monotonic()
    lowered = lower_step(program, shape, arguments, name=name)
    lowered_ts = time.monotonic()
    with own_settings():
        executable = lowered.compile(options)
    return Built(
        executable=executable,
        was_loaded=False,
        lower_s=lowered_ts - start,
        compile_s=time.monotonic() - lowered_ts,
    )


@contextlib.contextmanager
def _past_jax_cache() -> Iterator[None]:
    """In this thread, have jax's cache keep nothing, if the user has set one up.

    XLA:CPU writes an executable that came out of a cache without its functions: read
    back, it fails when it runs. What jax's cache never gets it cannot give.
    """
    with thread_settings.persistent_cache_min_compile_time_secs(math.inf):
        yield


def _load(
    path: Path, mesh: Mesh, given: tuple[list[Any], list[Any]]
) -> Callable[..., Any] | None:
    """Bring an executable back; None if there is none that can be read.

    Args:
        given: Its parameters and its state, as in a call.
    """
    trees = (
        jax.tree.structure(((*given, "plan"), {})),
        jax.tree.structure((given[1], "result")),
    )
    try:
        payload = zlib.decompress(path.read_bytes())
        loaded = serialize_executable.deserialize_and_load(
            payload, *trees, execution_devices=list(mesh.devices.flat)
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _UNREADABLE as error:
        _log.warning("%s cannot be used, and is compiled again: %r", path, error)
        return None
    with contextlib.suppress(OSError):  # of others, or of an image
        os.utime(path)
    return loaded


def _save(path: Path, executable: Any) -> int:
    """Keep an executable for the next start; returns the bytes that it takes.

    Raises:
        OSError: The folder cannot be written.
        ValueError, NotImplementedError, jax.errors.JaxRuntimeError: These devices'
            executables cannot be taken out of the process.
    """
    payload, _, _ = serialize_executable.serialize(executable)
    # Reading is not faster without: this takes a twentieth of it, for a fifth of the
    # bytes, and damage is noticed.
    content = zlib.compress(payload, level=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be at the same one: whole files only.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        # For all whom the user's umask lets read it: it may have been made for others.
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _make_room(path.parent)
    return len(content)


def _is_whole(path: Path) -> bool:
    try:
        zlib.decompress(path.read_bytes())
    except (OSError, zlib.error):
        return False
    return True


def _make_room(folder: Path) -> None:
    """Remove the programs that were not used for longest, beyond `MAX_BYTES`."""
    # Another process may remove some meanwhile.
    with contextlib.suppress(OSError):
        found = [(path.stat(), path) for path in folder.glob(f"step_*{SUFFIX}*")]
        found.sort(key=lambda pair: pair[0].st_mtime)
        excess = sum(status.st_size for status, _ in found) - MAX_BYTES
        for status, path in found:
            if excess <= 0:
                break
            path.unlink()
            excess -= status.st_size


def _digest(
    program: ProgramConfig,
    shape: StepShape,
    arguments: Arguments,
    options: Options | None,
) -> str:
    """One name for all that an executable depends on."""
    mesh = program.mesh
    leaves, structure = jax.tree.flatten(arguments)
    forms = [
        (leaf.shape, str(leaf.dtype), _parts(leaf.sharding, leaf.shape, mesh))
        for leaf in leaves
    ]
    # A grammar's program calls back into an object of this process.
    program = dataclasses.replace(program, mask_source=None)
    digest = hashlib.sha256(_sources())
    for part in (
        _part_of(mesh),
        *_settings(),
        *_about(list(mesh.devices.flat)),
        *(list(mesh.shape.items()), mesh.axis_types),
        *(program, shape, forms, structure, sorted((options or {}).items())),
    ):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


def _part_of(mesh: Mesh) -> tuple[int, int]:
    """Which of the processes that a program runs in this one is, and of how many.

    They may have one folder, and each has an executable for its own devices.
    """
    count = len({device.process_index for device in mesh.devices.flat})
    return (jax.process_index() if count > 1 else 0), count


def _parts(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> Any:
    """What of an array each device has, however that was said."""
    if sharding.is_fully_replicated:
        return None
    indices = sharding.devices_indices_map(shape)
    return [indices[device] for device in mesh.devices.flat]


def facts() -> dict[str, object]:
    """What programs depend on beside their configuration, by name: of all processes.

    Devices are left out, for which jax would look.
    """
    versions, settings, flags = _settings()
    assert isinstance(versions, tuple) and isinstance(settings, list)
    found: dict[str, object] = dict(zip(("jax", "jaxlib"), versions, strict=True))
    found |= {f"jax.config.{name}": value for name, value in settings}
    found |= {"XLA_FLAGS": flags, "sources": _sources().hex()}
    return found


def _settings() -> list[object]:
    """What all programs of a process depend on."""
    settings = [
        (name, value)
        for name, value in sorted(jax.config.values.items())
        if not _ASIDE.search(name) and name.removeprefix("jax_") not in OWN_SETTINGS
    ]
    versions = jax.__version__, metadata.version("jaxlib")
    return [versions, settings, os.environ.get("XLA_FLAGS", "").split()]


def _about(devices: Sequence[Any]) -> Iterator[object]:
    """What makes devices others; described ones are like those that are here."""
    platform = devices[0].platform
    for device in devices:
        place = list(device.coords) if platform == "tpu" else None
        yield device.id, _MEMORY.sub("", device.device_kind), place
    if platform == "cpu":
        yield cpu.instructions()
        yield native.digest()
    elif platform == "tpu":
        yield devices[0].client.platform_version
        yield os.environ.get("LIBTPU_INIT_ARGS", "").split()
    else:
        yield _plugin_versions()


@cache
def _plugin_versions() -> list[str]:
    """Of the compilers for GPUs; a described one's client does not tell its own."""
    return sorted(
        f"{found.name} {found.version}"
        for found in metadata.distributions()
        if re.fullmatch(r"jax[-_](cuda|rocm)\d+[-_](pjrt|plugin)", found.name)
    )


@cache
def _sources() -> bytes:
    """A digest of everything that a step is traced from, wherever it is installed."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for name, path in sorted(_files(package)):
            digest.update(f"{package}/{name}".encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for suffix in ("*.py", "*.json", "*.cc", "*.h"):
            for path in Path(folder).rglob(suffix):
                yield path.relative_to(folder).as_posix(), path

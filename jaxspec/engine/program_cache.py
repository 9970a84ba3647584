"""Compiled programs on disk: a second start neither traces nor compiles them.

Builds executables: reads them from a folder, or lowers, compiles and saves them there.
jax's own cache is keyed by the lowered program, so it saves neither tracing nor
lowering, which take as long as reading an executable. Here the file name is a digest of
the inputs of tracing: the packages' sources, the configuration, shapes and placement of
the arguments, the devices, the versions, and jax's settings. None of these settings is
changed. The file starts with a line that has these parts, so that a miss can be
explained.

Several threads and processes may build programs at once. A folder contains code: anyone
who can write to it can run arbitrary code in the processes that read it.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pickle
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

# Private, but the only access to settings of one thread: `jax.config` is global.
from jax._src import config as thread_settings
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxspec.engine import program_folder
from jaxspec.engine.program_folder import AnyPath
from jaxspec.jax_settings import OWN_SETTINGS, own_settings
from jaxspec.models import cpu
from jaxspec.program import grammar
from jaxspec.program.executable_args import Arguments, flatten, used_arguments
from jaxspec.program.plan import StepShape
from jaxspec.program.step import lower_step
from jaxspec.program.step_context import ProgramConfig
from jaxspec_kernels import native

_log = logging.getLogger(__name__)

# Limit for all programs in a folder; the least recently used ones are removed.
MAX_BYTES = 4 * 2**30
SUFFIX = ".program"

Options = dict[str, str | bool]
# Parts of everything that an executable depends on, by name: text, or a digest.
Key = dict[str, str]
# Parts that are readable.
_READABLE = ("versions", "flags", "devices")

_PACKAGES = ("jaxspec", "jaxspec_kernels")
# jax settings that do not change programs: storage, logging and the choice of devices
# (the devices of a program are part of its digest).
_ASIDE = re.compile(
    "cache|log|profiler|traceback|dump|platform|backend|_devices|distributed|cross_host"
    "|timeout|transfer|client"
)
# The device kind of a described GPU (AOT) ends with its memory.
_MEMORY = re.compile(r" \d+GB.*")
# Raised if a device's executables cannot be serialized.
_UNSUPPORTED = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, pickle.PickleError),
    *(AttributeError, ImportError, LookupError, TypeError),
    *_UNSUPPORTED,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """An executable, and the cost of building it.

    Attributes:
        lower_s: Seconds to trace and lower it; 0 if it was read.
        compile_s: Seconds to compile it, or to read it.
        num_bytes: Size of the file written; 0 if none was.
    """

    executable: Callable[..., Any]
    was_loaded: bool
    lower_s: float
    compile_s: float
    num_bytes: int = 0


class ProgramCache:
    """A folder of executables; without a folder, every program is compiled."""

    def __init__(self, folder: AnyPath | None):
        self._folder = folder
        self._has_warned = False

    def build(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None = None,
    ) -> Built:
        """Read an executable; if there is none, compile and save it.

        Args:
            arguments: The parameters and the state, or their shapes.
            options: XLA options, by the names of its flags.
        """
        key = self._key(program, shape, arguments, options)
        if key is None:
            # Named differently from saved programs, because jax's cache may store this
            # one.
            name = f"{program_name(shape)}_unkept"
            return _compile(program, shape, arguments, options, name)
        path = self._path(shape, key)
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
        if not program_folder.exists(path):
            self._explain_miss(shape, key)
        with _past_jax_cache():
            built = _compile(program, shape, arguments, options, program_name(shape))
        try:
            num_bytes = _save(path, key, built.executable)
        except (OSError, *_UNSUPPORTED) as error:
            if not self._has_warned:
                _log.warning(
                    "Compiled programs cannot be saved in %s: %r", self._folder, error
                )
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
        """Compile and save an executable for devices that may not be present.

        Returns:
            None if an undamaged file exists already. Whether the devices can load it
            is only known when they do.

        Raises:
            OSError: The folder cannot be written.
        """
        key = self._key(program, shape, arguments, options)
        assert key is not None, "a program that is not saved"
        path = self._path(shape, key)
        if _is_whole(path):
            return None
        with _past_jax_cache():
            built = _compile(program, shape, arguments, options, program_name(shape))
        return dataclasses.replace(built, num_bytes=_save(path, key, built.executable))

    def path(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None = None,
    ) -> AnyPath | None:
        """Return the file of an executable, which need not exist.

        None without a folder, and for a program that calls back into an object of this
        process for grammar masks.
        """
        key = self._key(program, shape, arguments, options)
        return None if key is None else self._path(shape, key)

    def _key(
        self,
        program: ProgramConfig,
        shape: StepShape,
        arguments: Arguments,
        options: Options | None,
    ) -> Key | None:
        is_by_name = program.mask_source is grammar.native_masks
        is_kept = is_by_name or not shape.features.has_grammar
        if self._folder is None or not is_kept:
            return None
        return _key_of(program, shape, arguments, options)

    def _path(self, shape: StepShape, key: Key) -> AnyPath:
        assert self._folder is not None
        name = f"{program_name(shape)}-{digest_of(key)}{SUFFIX}"
        return self._folder / name

    def _explain_miss(self, shape: StepShape, key: Key) -> None:
        """Log in which parts the most similar file of this name differs, if any.

        A program for another model or pool is normal in a shared folder. One for the
        same model in another environment was probably made for this start.
        """
        assert self._folder is not None
        found = []
        with contextlib.suppress(OSError):
            pattern = f"{program_name(shape)}-*{SUFFIX}"
            for path in program_folder.files(self._folder, pattern):
                with contextlib.suppress(OSError, ValueError):
                    found.append(_read_key(path))
        nearest = min(found, key=lambda one: len(differences(one, key)), default=None)
        if nearest is None:
            return
        changed = differences(nearest, key)
        is_same_engine = not {"configuration", "arguments"} & changed.keys()
        level = logging.WARNING if is_same_engine else logging.INFO
        _log.log(
            level,
            "%s is not in %s, so it is compiled. A saved program of this name differs "
            "in %s",
            program_name(shape),
            self._folder,
            "; ".join(changed.values()),
        )


def program_name(shape: StepShape) -> str:
    """Return the name of a program in profiles and files."""
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
    """Keep jax's persistent cache from storing programs of this thread.

    If XLA:CPU serializes an executable that it has loaded from a cache, the functions
    are missing, and running it fails. Programs that are never stored are never loaded.
    """
    with thread_settings.persistent_cache_min_compile_time_secs(math.inf):
        yield


def _load(
    path: AnyPath, mesh: Mesh, arguments: tuple[list[Any], list[Any]]
) -> Callable[..., Any] | None:
    """Load an executable; None if there is no file or it cannot be loaded.

    Args:
        arguments: Its parameters and state, as in a call.
    """
    trees = (
        jax.tree.structure(((*arguments, "plan"), {})),
        jax.tree.structure((arguments[1], "result")),
    )
    try:
        payload = _payload(program_folder.read(path))
        loaded = serialize_executable.deserialize_and_load(
            payload, *trees, execution_devices=list(mesh.devices.flat)
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _UNREADABLE as error:
        _log.warning(
            "%s cannot be loaded, so the program is compiled again: %r", path, error
        )
        return None
    program_folder.mark_used(path)
    return loaded


def _save(path: AnyPath, key: Key, executable: Any) -> int:
    """Save an executable for the next start; return its size in bytes.

    Raises:
        OSError: The folder cannot be written.
        ValueError, NotImplementedError, jax.errors.JaxRuntimeError: Executables of
            these devices cannot be serialized.
    """
    payload, _, _ = serialize_executable.serialize(executable)
    # A compressed file has a fifth of the bytes. Decompressing it takes a twentieth of
    # the time to load the executable, and detects damage.
    line = json.dumps(key).encode() + b"\n"
    content = line + zlib.compress(line + payload, level=1)
    program_folder.write(path, content)
    program_folder.make_room(path.parent, f"step_*{SUFFIX}*", MAX_BYTES)
    return len(content)


def _is_whole(path: AnyPath) -> bool:
    try:
        _payload(program_folder.read(path))
    except (OSError, ValueError, zlib.error):
        return False
    return True


def _payload(content: bytes) -> bytes:
    """Return the serialized executable of a file.

    Raises:
        ValueError, zlib.error: The file is damaged.
    """
    line, _, compressed = content.partition(b"\n")
    unpacked = zlib.decompress(compressed)
    if not unpacked.startswith(line + b"\n"):
        raise ValueError("its first line is damaged")
    return unpacked[len(line) + 1 :]


def _read_key(path: AnyPath) -> Key:
    """Return the key of a file.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    found = json.loads(program_folder.first_line(path))
    if not isinstance(found, dict):
        raise ValueError("its first line is damaged")
    return found


def _key_of(
    program: ProgramConfig,
    shape: StepShape,
    arguments: Arguments,
    options: Options | None,
) -> Key:
    """Return everything that an executable depends on, besides its shape."""
    mesh = program.mesh
    leaves, structure = jax.tree.flatten(arguments)
    forms = [
        (leaf.shape, str(leaf.dtype), _parts(leaf.sharding, leaf.shape, mesh))
        for leaf in leaves
    ]
    # A grammar's program calls back into an object of this process.
    program = dataclasses.replace(program, mask_source=None)
    versions, settings, flags = _settings()
    about, compilers, compiler_flags = _about(list(mesh.devices.flat))
    devices = [about, _part_of(mesh), list(mesh.shape.items()), mesh.axis_types]
    return {
        "versions": repr([versions, compilers]),
        "flags": repr([flags, compiler_flags, sorted((options or {}).items())]),
        "devices": repr(devices),
        "settings": _hashed(settings),
        "sources": _sources().hex(),
        "configuration": _hashed([program, shape]),
        "arguments": _hashed([forms, structure]),
    }


def _hashed(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def digest_of(key: Key) -> str:
    """Return the digest of all parts of a key."""
    return _hashed(sorted(key.items()))


def differences(saved: Key, key: Key) -> Key:
    """Return the parts in which two keys differ, described in words."""
    found = {}
    for name in key:
        before = saved.get(name)
        if before == key[name]:
            continue
        found[name] = name
        if name in _READABLE:
            found[name] += f": {before}, and here {key[name]}"
    return found


def _part_of(mesh: Mesh) -> tuple[int, int]:
    """Return this process's index among those of a mesh, and their number.

    The processes may share a folder; each has an executable for its own devices.
    """
    count = len({device.process_index for device in mesh.devices.flat})
    return (jax.process_index() if count > 1 else 0), count


def _parts(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> Any:
    """Return the part of an array on each device, however the sharding is written."""
    if sharding.is_fully_replicated:
        return None
    indices = sharding.devices_indices_map(shape)
    return [indices[device] for device in mesh.devices.flat]


def facts() -> dict[str, object]:
    """Return the facts besides configuration that must be equal in all processes.

    Devices are left out: listing them would initialize jax.
    """
    versions, settings, flags = _settings()
    assert isinstance(versions, tuple) and isinstance(settings, list)
    all_facts: dict[str, object] = dict(zip(("jax", "jaxlib"), versions, strict=True))
    all_facts |= {f"jax.config.{name}": value for name, value in settings}
    all_facts |= {"XLA_FLAGS": flags, "sources": _sources().hex()}
    return all_facts


def _settings() -> list[object]:
    """Return versions, jax settings and XLA flags, which all programs depend on."""
    settings = [
        (name, value)
        for name, value in sorted(jax.config.values.items())
        if not _ASIDE.search(name) and name.removeprefix("jax_") not in OWN_SETTINGS
    ]
    versions = jax.__version__, metadata.version("jaxlib")
    return [versions, settings, os.environ.get("XLA_FLAGS", "").split()]


def _about(devices: Sequence[Any]) -> tuple[object, object, object]:
    """Return devices, versions of compilers and flags that programs depend on.

    They are equal for described (AOT) devices and present ones.
    """
    platform = devices[0].platform
    about: list[object] = []
    for device in devices:
        place = list(device.coords) if platform == "tpu" else None
        about.append((device.id, _MEMORY.sub("", device.device_kind), place))
    if platform == "cpu":
        return [*about, cpu.instructions()], native.digest(), None
    if platform == "tpu":
        flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
        return about, devices[0].client.platform_version, flags
    return about, _plugin_versions(), None


@cache
def _plugin_versions() -> list[str]:
    """Return the versions of jax's GPU plugins, which contain compilers.

    The client of a described (AOT) GPU does not report them.
    """
    return sorted(
        f"{distribution.name} {distribution.version}"
        for distribution in metadata.distributions()
        if re.fullmatch(r"jax[-_](cuda|rocm)\d+[-_](pjrt|plugin)", distribution.name)
    )


@cache
def _sources() -> bytes:
    """Return a digest of the packages' sources, independent of where they are."""
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

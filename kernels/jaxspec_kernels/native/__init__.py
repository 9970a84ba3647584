"""Operations in C++ for CPUs, called from XLA programs: built where they run.

XLA:CPU copies a matrix into another order on every call, cannot multiply float32 rows
with weights that are kept as bfloat16, and runs attention as hundreds of small loops.
The sources in this folder do what is left to do, for the processor at hand: a compiler
of the machine makes a library of them at the first use (some seconds), kept for later
ones. A kept library is named after its content, and a damaged one is built again. Where
the folder cannot be written, each process builds its own. Where there is no compiler,
XLA's own operations serve, and the log says so.

Which instructions they are made of is decided when they are built, not when they run:
those of the processor at hand (AVX-512, AVX2 or SSE on x86-64; NEON on ARM). A folder
of libraries may be shared: each kind of processor has one of its own. All forms make
the same sums in the same order but for the number of lanes, and where a processor
rounds a product before it adds it up: the last bits of results differ between machines,
not between programs of one.

The forms of x86-64 are tested where they run. That of ARM has been run by an emulator
alone, with jaxlib for Linux on aarch64: no such processor has run it, and its speed is
not known. Of macOS the command line is tested, a build is not; for musl there is no
jaxlib.

What callers hand over as data leads nowhere outside of arrays: page ids and rows that
are not there are the nearest that are, slots past the last are not written, lengths end
where page tables do. Shapes that do not fit each other are refused, by the functions in
Python while they are traced, and by each operation, whose error XLA raises. What users
ask for the host of the engine has checked before.

They are described where they are used: `multiply` and `look_up` in
`jaxspec_kernels.panel_matmul`, `attend` in `jaxspec_kernels.paged_attention`, the
halves of a layer in `jaxspec_kernels.decoder_blocks`, and passes over logits in
`jaxspec_kernels.rejection_sampling`. `masks` asks Python for the masks of grammars.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from importlib import metadata
from multiprocessing.pool import ThreadPool
from pathlib import Path

import jax

from jaxspec_kernels.native import masks

__all__ = ["digest", "is_available", "require"]

_log = logging.getLogger(__name__)

VARIABLE = "JAXSPEC_NATIVE"
ON, OFF = "on", "off"
TARGETS = (
    "jaxspec_multiply",
    "jaxspec_look_up",
    "jaxspec_attend",
    "jaxspec_attention_block",
    "jaxspec_feed_forward_block",
    "jaxspec_statistics",
    "jaxspec_amounts",
    "jaxspec_race",
    "jaxspec_excess",
    "jaxspec_search",
    "jaxspec_draw",
    "jaxspec_probabilities",
    masks.TARGET,
)

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    # A product and a sum are one rounding, wherever the processor can.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
)
# Compilers for ARM know the processor at hand by this name; Apple's refused the other.
_FOR_THIS_PROCESSOR = {"arm64": "-mcpu=native", "aarch64": "-mcpu=native"}
_COMPILE_LIMIT_S = 600


def is_available() -> bool:
    """Whether they can be called; builds them if need be. `JAXSPEC_NATIVE` says off."""
    given = os.environ.get(VARIABLE, "") or ON
    return given.lower() != OFF and _is_registered(given)


@functools.cache
def _is_registered(given: str) -> bool:
    """Have XLA know the operations; False, and a line in the log, where that fails."""
    try:
        library = _load(given)
        for name in TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        masks.install(library)
    except (OSError, RuntimeError, AttributeError) as cause:
        _log.warning(
            "No native operations, which are several times faster: %s. XLA's own serve "
            "(%s=%s silences this)",
            cause,
            VARIABLE,
            OFF,
        )
        return False
    return True


def require(operation: str) -> None:
    """Raises `NotImplementedError` where the operations cannot be called."""
    if not is_available():
        raise NotImplementedError(
            f"{operation} has no 'cpu' implementation here: the native operations are "
            "not built (the log says why); implementation='reference' runs anywhere"
        )


def digest() -> str:
    """What distinguishes programs that call these operations; empty without any."""
    return _digest(_compiler()) if is_available() else ""


def _load(given: str) -> ctypes.CDLL:
    """Load the library for this machine; build it where there is no whole one.

    Args:
        given: As `cache_folder` takes it.

    Raises:
        OSError: The library can neither be built nor loaded.
        RuntimeError: There is no compiler, or it fails.
    """
    compiler = _compiler()
    name = f"native-{_digest(compiler)}"
    for path in _kept_libraries(given, name):
        try:
            # A damaged library can end the process when it is loaded.
            if path.name == _whole_name(name, path.read_bytes()):
                return ctypes.CDLL(str(path))
            _log.warning("%s is damaged, and is built again", path)
            path.unlink()
        except OSError as cause:
            _log.info("Building native operations anew: %s", cause)
    with tempfile.TemporaryDirectory(prefix="jaxspec-native-") as folder:
        made = _build(compiler, Path(folder))
        try:
            path = _keep(made, cache_folder(given), name)
        # A RuntimeError: the user has no home directory.
        except (OSError, RuntimeError) as cause:
            _log.warning(
                "Native operations cannot be kept, and are built again at every start: "
                "%s. Set %s to a folder that can be written",
                cause,
                VARIABLE,
            )
            path = made
        return ctypes.CDLL(str(path))  # the file may be removed once it is loaded


def _kept_libraries(given: str, name: str) -> list[Path]:
    try:
        return sorted(cache_folder(given).glob(f"{name}-*.so"))
    except (OSError, RuntimeError):  # `_keep` meets the same, and it is logged
        return []


def _whole_name(name: str, content: bytes) -> str:
    """Name a library after its content, so that damage is seen."""
    return f"{name}-{hashlib.sha256(content).hexdigest()}.so"


def _build(compiler: str, folder: Path) -> Path:
    """Compile the sources in a private folder; returns the library's path."""
    _log.info("Building native operations with %s (once)", compiler)
    made, sources = folder / "native.so", _sources()
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    with ThreadPool(len(sources)) as pool:  # each in a process of its own
        commands = [
            ["-c", f"-I{jax.ffi.include_dir()}", "-o", to, str(source)]
            for to, source in zip(objects, sources, strict=True)
        ]
        pool.map(functools.partial(_run, compiler), commands)
    _run(compiler, ["-shared", "-o", str(made), *objects])
    return made


def _keep(made: Path, folder: Path, name: str) -> Path:
    """Copy a library to where later processes find it, whole; returns its new path.

    Raises:
        OSError: The folder cannot be written, or its disk is full.
    """
    content = made.read_bytes()
    path = folder / _whole_name(name, content)
    folder.mkdir(parents=True, exist_ok=True)
    # Other processes may write the same library at once.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def _run(compiler: str, arguments: list[str]) -> None:
    """Raises `RuntimeError` with the first line of what the compiler says."""
    try:
        subprocess.run(
            [compiler, *_flags(), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip().splitlines()[:1]
        raise RuntimeError(f"{compiler} fails: {' '.join(told)}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{compiler} takes over {_COMPILE_LIMIT_S} s") from error


def _flags() -> tuple[str, ...]:
    """Of every command.

    None is for undefined symbols, which Apple's linker refuses: there are none, as
    XLA's headers reach it through pointers. Loaders do not mind that it is called .so.
    """
    return *_FLAGS, _FOR_THIS_PROCESSOR.get(platform.machine(), "-march=native")


def _compiler() -> str:
    """Raises `RuntimeError` where there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    found = next(filter(None, map(shutil.which, filter(None, names))), None)
    if found is None:
        raise RuntimeError("there is no C++ compiler (c++, g++, clang++ or $CXX)")
    return found


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.cc"))


@functools.cache
def _digest(compiler: str) -> str:
    """Of all that the library is made of, and for: sources, flags, the processor."""
    found = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.h")) + _sources():
        found.update(path.read_bytes())
    versions = jax.__version__, metadata.version("jaxlib")
    parts = *_flags(), *versions, compiler, platform.machine(), _processor()
    found.update("\0".join(parts).encode())
    return found.hexdigest()[:16]


def _processor() -> str:
    """What the processor can do: a library for one need not run on another."""
    if sys.platform == "darwin":  # platform.processor() says "arm" of all of Apple's
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        told = subprocess.run(asked, check=True, capture_output=True, text=True)
        return told.stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # The last two are ARM's, which has no names of models there.
    names = "flags", "Features", "model name", "CPU implementer", "CPU part"
    return "\n".join(
        next((line for line in lines if line.startswith(name)), "") for name in names
    )


def cache_folder(given: str = ON) -> Path:
    """Where libraries are kept, as `JAXSPEC_NATIVE` says or by default."""
    if given.lower() != ON:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspec" / "native"

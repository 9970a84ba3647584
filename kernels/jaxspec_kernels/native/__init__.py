"""C++ operations for CPUs, called from XLA programs.

XLA:CPU copies a matrix into another order on every call, cannot multiply float32 rows
with bfloat16 weights, and runs attention as hundreds of small loops. The sources in
this folder replace these. A wheel for a platform has libraries of them for each kind of
processor (`compiling`), of which the best is loaded (`shipped_library`). Otherwise the
machine's C++ compiler builds a library on first use (some seconds), which is cached.
Its file name contains the hash of its content; a damaged library is built again. If the
folder cannot be written, each process builds its own. If there is no compiler, XLA's
operations are used, and the log says so.

The instruction set is chosen at build time: that of this processor (AVX-512, AVX2 or
SSE on x86-64; NEON on ARM). Machines may share a cache folder, because each kind of
processor has its own library. All variants compute the same sums in the same order,
except that the number of lanes differs, that some processors round a product before
adding it, and that tiles (AMX) add up bfloat16 products in another order: the last bits
of results differ between machines, not between programs on one machine. If the system
does not allow a process to use tiles, it multiplies in float32.

The x86-64 variants are tested on real processors. The ARM variant has run in an
emulator only, with jaxlib for Linux on aarch64; its speed is not known. For macOS the
compiler's command line is tested, a build is not; for musl there is no jaxlib.

Operations never access memory outside of their arrays, whatever the data: page ids and
row numbers are clamped, slots out of range are not written, and lengths are limited by
the page table. Shapes that do not match are rejected at trace time by the Python
functions, and by each operation, whose error XLA raises. The engine validates requests
before they reach an operation.

Contracts: `multiply` and `look_up` in `jaxspec_kernels.panel_matmul`, `attend` in
`jaxspec_kernels.paged_attention`, both halves of a layer in
`jaxspec_kernels.decoder_blocks`, and passes over logits in
`jaxspec_kernels.rejection_sampling`. `masks` calls back into Python for grammar masks.
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
from pathlib import Path

import jax

from jaxspec_kernels.native import compiling, masks

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
    "jaxspec_mass_above",
    "jaxspec_gumbel_argmax",
    "jaxspec_residual_mass",
    "jaxspec_search",
    "jaxspec_draw",
    "jaxspec_probabilities",
    masks.TARGET,
)

_FOLDER = Path(__file__).parent
# Libraries that a wheel has; a checkout has none.
_SHIPPED = _FOLDER / "shipped"


def is_available() -> bool:
    """Return whether the operations can be called; builds them on first use."""
    return read_setting().lower() != OFF and _is_registered(read_setting())


def read_setting() -> str:
    """Return `JAXSPEC_NATIVE`: on, off or a folder of built libraries."""
    return os.environ.get(VARIABLE, "") or ON


@functools.cache
def _is_registered(setting: str) -> bool:
    """Register the operations with XLA; on failure log a warning and return False."""
    try:
        library = load(setting)
        for name in TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        masks.install(library)
        _log.info("Native CPU operations use %s", instructions(library))
    except (OSError, RuntimeError, AttributeError) as cause:
        _log.warning(
            "Native CPU operations are not available: %s. XLA's operations are "
            "used, which are several times slower (%s=%s silences this warning)",
            cause,
            VARIABLE,
            OFF,
        )
        return False
    return True


def instructions(library: ctypes.CDLL) -> str:
    """Return the best instructions that the library's products use on this machine."""
    name = library.jaxspec_instructions
    name.restype = ctypes.c_char_p
    return name().decode()


def require(operation: str) -> None:
    """Raise `NotImplementedError` unless the operations can be called."""
    if not is_available():
        raise NotImplementedError(
            f"{operation} has no 'cpu' implementation here: the native operations are "
            "not built (the log says why); implementation='reference' runs anywhere"
        )


def digest() -> str:
    """Return the key of programs that call these operations; empty if unavailable."""
    if not is_available():
        return ""
    shipped = shipped_library(read_setting())
    return _digest(_compiler()) if shipped is None else shipped.name


def load(setting: str) -> ctypes.CDLL:
    """Load the library for this machine; build it if none is shipped or cached.

    Args:
        setting: `JAXSPEC_NATIVE`, as for `cache_folder`.

    Raises:
        OSError: The library can neither be built nor loaded.
        RuntimeError: There is no compiler, or it failed.
    """
    shipped = shipped_library(setting)
    if shipped is not None:
        return ctypes.CDLL(str(shipped))
    compiler = _compiler()
    name = f"native-{_digest(compiler)}"
    for path in _kept_libraries(setting, name):
        try:
            # Loading a damaged library can crash the process.
            if path.name == _whole_name(name, path.read_bytes()):
                return ctypes.CDLL(str(path))
            _log.warning("%s is damaged, so it is built again", path)
            path.unlink()
        except OSError as cause:
            _log.info("Building native operations again: %s", cause)
    with tempfile.TemporaryDirectory(prefix="jaxspec-native-") as folder:
        library = _build(compiler, Path(folder))
        try:
            path = _keep(library, cache_folder(setting), name)
        # RuntimeError is raised if the user has no home directory.
        except (OSError, RuntimeError) as cause:
            _log.warning(
                "Native operations cannot be saved, so they are built at every "
                "start: %s. Set %s to a writable folder",
                cause,
                VARIABLE,
            )
            path = library
        return ctypes.CDLL(str(path))  # the file may be removed once it is loaded


def shipped_library(setting: str) -> Path | None:
    """Return the wheel's best library for this processor; None if it has none.

    Args:
        setting: `JAXSPEC_NATIVE`: a folder asks for a library that is built there.
    """
    if setting.lower() != ON or not _SHIPPED.is_dir():
        return None
    has, include = _processor_flags(), jax.ffi.include_dir()
    for variant in compiling.VARIANTS.get(platform.machine(), ()):
        path = compiling.find_shipped(variant, _FOLDER, _SHIPPED, include)
        if variant.needs <= has and path.is_file():
            return path
    _log.info("No library in %s is for this processor, sources and jaxlib", _SHIPPED)
    return None


def _processor_flags() -> frozenset[str]:
    """Return the flags of an x86-64 processor on Linux; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _kept_libraries(setting: str, name: str) -> list[Path]:
    try:
        return sorted(cache_folder(setting).glob(f"{name}-*.so"))
    except (OSError, RuntimeError):  # `_keep` fails with the same error and logs it
        return []


def _whole_name(name: str, content: bytes) -> str:
    """Return a file name with the hash of the content, which reveals damage."""
    return f"{name}-{hashlib.sha256(content).hexdigest()}.so"


def _build(compiler: str, folder: Path) -> Path:
    """Compile the sources in a private folder; return the library's path."""
    _log.info("Building native operations with %s (once)", compiler)
    flags, include = compiling.flags_for_this_processor(), jax.ffi.include_dir()
    sources = compiling.sources_in(_FOLDER)
    return compiling.compile_library(compiler, flags, include, sources, folder)


def _keep(library: Path, folder: Path, name: str) -> Path:
    """Copy a library atomically to where later processes find it; return its path.

    Raises:
        OSError: The folder cannot be written, or its disk is full.
    """
    content = library.read_bytes()
    path = folder / _whole_name(name, content)
    folder.mkdir(parents=True, exist_ok=True)
    # Other processes may write the same library at the same time.
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


def _compiler() -> str:
    """Return the C++ compiler; raise `RuntimeError` if there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, filter(None, names))), None)
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (c++, g++, clang++ or $CXX)")
    return compiler


@functools.cache
def _digest(compiler: str) -> str:
    """Hash everything the library depends on: sources, flags, versions, processor."""
    versions = jax.__version__, metadata.version("jaxlib")
    parts = *compiling.flags_for_this_processor(), *versions, compiler
    return compiling.digest_of(_FOLDER, (*parts, platform.machine(), _processor()))


def _processor() -> str:
    """Describe the processor; a library built for one may not run on another."""
    if sys.platform == "darwin":  # platform.processor() is "arm" for all of Apple's
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # The last two identify ARM processors, which have no model name.
    names = "flags", "Features", "model name", "CPU implementer", "CPU part"
    return "\n".join(
        next((line for line in lines if line.startswith(name)), "") for name in names
    )


def cache_folder(setting: str = ON) -> Path:
    """Return the folder of built libraries: `JAXSPEC_NATIVE`, or the default."""
    if setting.lower() != ON:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxspec" / "native"

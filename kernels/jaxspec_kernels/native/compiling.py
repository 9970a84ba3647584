"""Compiles the C++ sources to a library, for this processor or for a wheel.

Imports nothing outside of the standard library: the build of a wheel loads this file
without the package.
"""

import functools
import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-O3",
    # Fuse a product and a sum into one rounding, where the processor can.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
)
# The flag for this processor on ARM; Apple's compiler rejects -march=native.
FOR_THIS_PROCESSOR = {"arm64": "-mcpu=native", "aarch64": "-mcpu=native"}
COMPILE_LIMIT_S = 600
SUFFIX = ".so"  # macOS loads it, too
_HEADER = "xla/ffi/api/c_api.h"


@dataclass(frozen=True)
class Variant:
    """A kind of processor for which wheels have a library.

    Attributes:
        name: The first part of the library's file name.
        flags: What its compiler command has in place of the flag for this processor.
        needs: Flags of Linux's /proc/cpuinfo that a processor must have.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_V3_FLAGS = "avx avx2 bmi1 bmi2 f16c fma abm movbe sse4_2 ssse3 popcnt cx16"
_V3 = frozenset(_V3_FLAGS.split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_BF16 = _V4 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")
# Best first. The sources have code for each of them and for no other processor.
VARIANTS = {
    "x86_64": (
        Variant("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), _AMX),
        Variant("avx512bf16", _BF16_FLAGS, _BF16),
        Variant("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
        Variant("x86-64", ("-march=x86-64",)),
    ),
    "aarch64": (Variant("armv8", ("-march=armv8-a",)),),
    "arm64": (Variant("apple-m1", ("-mcpu=apple-m1",)),),
}


def flags_for_this_processor() -> tuple[str, ...]:
    """Return the flags of every compiler command.

    No flag allows undefined symbols, which Apple's linker rejects: there are none, as
    XLA's headers call XLA through pointers.
    """
    return *FLAGS, FOR_THIS_PROCESSOR.get(platform.machine(), "-march=native")


def compile_library(
    compiler: str,
    flags: Sequence[str],
    include: str,
    sources: Sequence[Path],
    folder: Path,
) -> Path:
    """Compile the sources in a private folder; return the library's path.

    Args:
        include: The folder of XLA's headers.

    Raises:
        RuntimeError: The compiler fails, or takes too long.
    """
    library = folder / f"native{SUFFIX}"
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    with ThreadPool(len(sources)) as pool:  # one compiler process each
        commands = [
            ["-c", f"-I{include}", "-o", to, str(source)]
            for to, source in zip(objects, sources, strict=True)
        ]
        pool.map(functools.partial(_run, compiler, flags), commands)
    _run(compiler, flags, ["-shared", "-o", str(library), *objects])
    return library


def _run(compiler: str, flags: Sequence[str], arguments: Sequence[str]) -> None:
    """Run the compiler; raise `RuntimeError` with the first line of its message."""
    try:
        subprocess.run(
            [compiler, *flags, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        message = " ".join(error.stderr.strip().splitlines()[:1])
        raise RuntimeError(f"{compiler} fails: {message}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"{compiler} took longer than {COMPILE_LIMIT_S} s"
        ) from error


def sources_in(folder: Path) -> list[Path]:
    """Return the sources to compile."""
    return sorted(folder.glob("*.cc"))


def digest_of(folder: Path, parts: Iterable[str]) -> str:
    """Hash the sources and headers of a folder, and all else a library depends on."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.h")) + sources_in(folder):
        digest.update(path.read_bytes())
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:16]


def shipped_name(variant: Variant, folder: Path, include: str) -> str:
    """Return the file name of a wheel's library, compiled with the headers `include`.

    Its last part depends on the sources and the flags, so that a library of other
    sources is never loaded.
    """
    major, minor = interface_version(include)
    digest = digest_of(folder, (*FLAGS, *variant.flags))
    return f"{variant.name}-xla{major}.{minor}-{digest}{SUFFIX}"


def find_shipped(variant: Variant, folder: Path, shipped: Path, include: str) -> Path:
    """Return the path of a wheel's library; it exists if jaxlib can call it.

    XLA calls libraries of its own version, and of older ones with the same major
    version: it promises to do so for at least a year.

    Args:
        include: The folder of the installed jaxlib's headers.
    """
    major, minor = interface_version(include)
    name = shipped_name(variant, folder, include)
    names = [
        name.replace(f"-xla{major}.{minor}-", f"-xla{major}.{older}-")
        for older in range(minor, -1, -1)
    ]
    paths = [shipped / one for one in names]
    return next((path for path in paths if path.is_file()), paths[0])


def interface_version(include: str) -> tuple[int, int]:
    """Return the major and minor version of XLA's interface for foreign functions.

    Raises:
        RuntimeError: The headers do not define it.
    """
    text = (Path(include) / _HEADER).read_text(encoding="utf-8")
    pattern = r"^#define XLA_FFI_API_(MAJOR|MINOR)\s+(\d+)"
    found = dict(re.findall(pattern, text, re.MULTILINE))
    if len(found) != 2:
        raise RuntimeError(f"{_HEADER} of jaxlib does not define XLA's version")
    return int(found["MAJOR"]), int(found["MINOR"])

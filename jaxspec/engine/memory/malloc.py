"""Keep glibc's allocator from retaining memory of engines that are gone.

glibc divides allocations into arenas, 8 per core at most. A new thread takes an arena
that has no thread, or else the next one in turn. `malloc_trim` returns the free pages
of an arena, except those at its end in all arenas but the first.

The memory of a process that made twelve engines with different K, one after another,
grew by 10 to 15 %, in jumps of 20 MB, for two reasons:

- On machines with few cores jax's threads hold every arena. The compiler thread of each
  engine took another one, and left memory at its end. With spare arenas, the thread
  takes the arena that the previous compiler thread has left.
- Weights were copied by threads of jax, into the arenas of these threads: glibc maps
  allocations one by one only above a threshold, which rises to 32 MB as arrays are
  freed. The threshold is kept low while weights are loaded and programs compiled, but
  not while programs run: XLA's temporaries would be mapped anew in each launch (600
  page faults per launch of 8 sequences).
"""

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

# On two cores, where glibc's limit is 16 arenas, the threads of one engine use 22.
MIN_ARENAS = 64
# Bytes from which an allocation is mapped: while an engine is made, and glibc's
# maximum.
LOW_THRESHOLD_BYTES, HIGH_THRESHOLD_BYTES = 2**20, 32 * 2**20
# Numbers of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@functools.cache
def permit_spare_arenas() -> None:
    """Raise glibc's limit of arenas, before jax starts its threads."""
    if _is_ours():
        limit = max(MIN_ARENAS, 8 * (os.cpu_count() or 1))
        _set(_ARENA_MAX, limit)


@contextmanager
def large_arrays_mapped() -> Iterator[None]:
    """Map large allocations of the process one by one; they are returned when freed.

    Afterwards the thresholds are those that glibc reaches by itself. If several threads
    are here, the first one to leave ends it for all, which costs only memory.
    """
    if not _is_ours():
        yield
        return
    # The first call ends glibc's own changes of both thresholds.
    _set(_TRIM_THRESHOLD, 2 * HIGH_THRESHOLD_BYTES)
    _set(_MMAP_THRESHOLD, LOW_THRESHOLD_BYTES)
    try:
        yield
    finally:
        _set(_MMAP_THRESHOLD, HIGH_THRESHOLD_BYTES)


def trim_malloc() -> None:
    """Return freed memory to the system, if the C library supports it.

    Otherwise glibc retains it: 208 of 987 MB in a server of the bundled pair.
    """
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _set(parameter: int, value: int) -> None:
    if not ctypes.CDLL(None).mallopt(parameter, value):
        _log.warning(
            "glibc refused mallopt(%d, %d): freed memory may not be returned to the "
            "system",
            parameter,
            value,
        )


def _is_ours() -> bool:
    """Return whether the C library is glibc, and has no limits set by the user."""
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    return _is_glibc() and not is_set and "GLIBC_TUNABLES" not in os.environ


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"

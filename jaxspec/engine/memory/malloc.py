"""Keep glibc's allocator from retaining memory of engines that are gone.

glibc divides small allocations into arenas, up to 8 per core. `malloc_trim` returns
their free pages, except those at the end of every arena but the first. Two cases kept
more with each engine of a process, and jumped by 20 MB at random:

- Each new compiler thread got another arena, because jax's threads hold all of them on
  machines with few cores. With spare arenas it gets the one that the previous compiler
  thread has left.
- After the first large arrays are freed, glibc takes arrays of up to 32 MB from arenas
  as well, and numpy requests huge pages for them.
"""

import ctypes
import functools
import os
import platform

# On two cores, where glibc's limit is 16, the threads of one engine use 22.
MIN_ARENAS = 64
# Larger allocations are mapped one by one, and unmapped when they are freed.
MMAP_THRESHOLD_BYTES = 2**20
# Free memory that the end of an arena may keep: glibc's own maximum.
TRIM_THRESHOLD_BYTES = 64 * 2**20
# Numbers of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@functools.cache
def set_malloc_limits() -> None:
    """Set glibc's limits for the process, before jax starts its threads.

    Does nothing with another C library, or if the user has set any of glibc's limits.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or "GLIBC_TUNABLES" in os.environ or not _is_glibc():
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    mallopt(_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    mallopt(_ARENA_MAX, max(MIN_ARENAS, 8 * (os.cpu_count() or 1)))


def trim_malloc() -> None:
    """Return freed memory to the system, if the C library supports it.

    Otherwise glibc retains it: 208 of 987 MB in a server of the bundled pair.
    """
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"

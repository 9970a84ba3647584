"""Owns the process-wide settings of a test run; knows nothing about jaxspec.

It must not import jaxspec: tests import it, after the settings are made.
"""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from tests.support.programs import quick_flags

# Bytecode is kept for the processes that tests start, and for the next run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Read once, when jax starts, so they are set before its import. Eight devices let
# sharded programs run on a CPU; a run on an accelerator names its own platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICE_FLAG = "--xla_force_host_platform_device_count"
if DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_FLAG}=8"
# Not for accelerators: their compilers know some of these flags as well.
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("JAXSPEC_AOT"):
    os.environ["XLA_FLAGS"] = quick_flags()

# torch's threads wait for one another busily: with as many test processes as cores,
# HuggingFace's tiny models took ten times as long on two threads as on one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent

# Programs that engines keep where nobody says where: with those of this checkout.
KEPT = TESTS.parent / ".pytest_cache"
USERS_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ["XDG_CACHE_HOME"] = str(KEPT / "user")

# Operations in C++, as they were built when jaxspec was installed.
os.environ.setdefault("JAXSPEC_NATIVE", str(USERS_CACHE / "jaxspec" / "native"))

# Compilers for accelerators that are not here. They live in a folder of their own, and
# the tests that compile with them, marked `aot`, run in processes of their own (see
# test_aot.py): jax looks for devices of theirs when it starts, and a process that had
# loaded them crashed when it stored a program for the CPU.
if os.environ.get("JAXSPEC_AOT"):
    sys.path.append(str(Path(sys.prefix) / "aot"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the CUDA plugin's lines, in every process, that there is no GPU."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


with _quiet():
    import jax  # the environment above must be set first
    from jax._src.interpreters.pxla import _cached_lowering_to_hlo
    from jax._src.lru_cache import LRUCache
    from jax._src.pjit import _pjit_lower
    from jaxlib.mlir import ir

    jax.devices()

gc.disable()  # until all is imported: see pytest_collection_finish

MARKED_PLATFORMS = ("tpu", "gpu")
LONGEST = ("test_aot.py",)

# Every compiled program takes about nine mappings of memory. Linux allows a process
# 65,530 of them, and LLVM ends it when there are no more.
MAPPINGS = Path("/proc/self/maps")
# Tens of thousands of lines, and 6,000 take 5 ms to read.
LOOK_EVERY_S = 1.0
LOOKED_TS = pytest.StashKey[float]()
MOST_MAPPINGS = 30_000
MOST_MAPPINGS_OF_A_FILE = 45_000

# JAX keeps the MLIR module of every jitted function after it is compiled. Each module
# has a context of 1.4 MB, and MLIR searches all contexts when it makes another one.
MAX_MLIR_CONTEXTS = 200

# Tests of the host's code, which hardly trace programs, and how long it is checked in
# each that every call fits its annotations: that took four fifths of the longest ones.
HOST_FOLDERS = ("bench", "checkpoints", "cli", "engine", "serve", "tests", "text")
CHECKED_S = 0.5

# A reused key passes every chi-square test, a silent broadcast or promotion most
# comparisons: here each is an error.
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between processes, and with the next run here.

    Also small ones: loading one takes a third of the time that compiling it takes, and
    tests compile tens of thousands.
    """
    cache: Path = config.rootpath / ".pytest_cache" / "jax"
    LRUCache.put = _put_whole
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _put_whole(cache: LRUCache, key: str, value: bytes) -> None:
    """Write an entry of jax's cache so that no process can read part of it.

    jax writes in place. Reading part of an entry is a warning, which is an error here.
    """
    part = cache.path / f"{key}.{os.getpid()}.{threading.get_ident()}"
    part.write_bytes(value)
    part.replace(cache.path / f"{key}-cache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for a device that is not here; begin with the longest tests.

    Processes take tests from one another, but not the one that is running: a long one
    that comes last would run alone.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for platform in MARKED_PLATFORMS:
        marked = [item for item in items if item.get_closest_marker(platform)]
        if marked and jax.default_backend() != platform:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"no {platform} here"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of every collection of garbage, now and later.

    A million objects of torch, transformers and jax: one collection takes a second, and
    together they were a quarter of the time that the imports take.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """Let go of compiled programs where a process has very many, best between files."""
    yield
    if ir.Context._get_live_count() > MAX_MLIR_CONTEXTS:
        _pjit_lower.cache_clear()
        _cached_lowering_to_hlo.cache_clear()
    is_within = nextitem is not None and nextitem.path == item.path
    limit = MOST_MAPPINGS_OF_A_FILE if is_within else MOST_MAPPINGS
    stash, now_ts = item.config.stash, time.monotonic()
    if now_ts < stash.get(LOOKED_TS, 0.0) + LOOK_EVERY_S:
        return
    stash[LOOKED_TS] = now_ts
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > limit:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Without type checks of calls, for tests that make millions of the same.

    They take most of such a test's time, and every other test makes those calls too.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _folder(path: Path) -> str:
    """Return the folder of tests/ that holds a file, at any depth, or "tests"."""
    inside = path.relative_to(TESTS).parts
    return inside[0] if len(inside) > 1 else TESTS.name


@pytest.fixture(autouse=True)
def _slow_tests_do_not_check_types(request: pytest.FixtureRequest) -> Iterator[None]:
    """What takes long makes the same calls very many times.

    On the host, calls are checked for a while in every test: all kinds of them are made
    by then. Programs are traced once, and checked in the tests of their parts; what is
    compiled for devices that are not here is traced from the same.
    """
    if any(map(request.node.get_closest_marker, ("slow", "long_suite", "aot"))):
        request.getfixturevalue("unchecked_types")
    elif _folder(request.path) in HOST_FOLDERS:
        end = threading.Timer(
            CHECKED_S, jaxtyping.config.update, ("jaxtyping_disable", True)
        )
        end.start()
        yield
        end.cancel()
        end.join()
        jaxtyping.config.update("jaxtyping_disable", False)
        return
    yield

"""Process-wide settings of a test run.

This file must not import jaxspec before it has made the settings.
"""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests.support.programs import quick_flags

# Write bytecode files, for processes that tests start and for the next run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# jax reads these variables once, at import. Eight simulated devices let sharded
# programs run on a CPU; a run on an accelerator sets its own platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICE_FLAG = "--xla_force_host_platform_device_count"
if DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_FLAG}=8"
# Only for CPUs, because the compilers of accelerators also read some of these flags.
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("JAXSPEC_AOT"):
    os.environ["XLA_FLAGS"] = quick_flags()

# torch's threads busy-wait for each other. With one test process per core, tiny
# HuggingFace models take ten times as long on two threads as on one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent

# Default program cache of engines in tests: a folder of this checkout.
KEPT = TESTS.parent / ".pytest_cache"
USERS_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ["XDG_CACHE_HOME"] = str(KEPT / "user")

# The operations in C++, which were built when jaxspec was installed.
os.environ.setdefault("JAXSPEC_NATIVE", str(USERS_CACHE / "jaxspec" / "native"))

# Compilers for accelerators that this machine lacks. They are in a separate folder, and
# tests that use them, marked `aot`, run in separate processes (see test_aot.py): jax
# looks for the devices when it starts, and a process that had loaded the compilers
# crashed when it stored a program for the CPU.
if os.environ.get("JAXSPEC_AOT"):
    sys.path.append(str(Path(sys.prefix) / "aot"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the CUDA plugin's log lines about missing GPUs."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


with _quiet():
    import jax  # the environment above must be set before these imports
    from jax._src.interpreters.pxla import _cached_lowering_to_hlo
    from jax._src.lru_cache import LRUCache
    from jax._src.pjit import _pjit_lower
    from jaxlib.mlir import ir

    jax.devices()

gc.disable()  # until `pytest_collection_finish`, when the imports are done

MARKED_PLATFORMS = ("tpu", "gpu")
LONGEST = ("test_aot.py",)

# Every compiled program takes about nine memory mappings. Linux allows a process 65,530
# mappings, and LLVM aborts when there are no more.
MAPPINGS = Path("/proc/self/maps")
# This file lists the mappings of the process. Reading 6,000 lines takes 5 ms, and there
# may be tens of thousands. In 5 s, tests compile hundreds of programs at most.
LOOK_EVERY_S = 5.0
LOOKED_TS = pytest.StashKey[float]()
MOST_MAPPINGS = 30_000
MOST_MAPPINGS_OF_A_FILE = 45_000

# jax stores the MLIR module of every compiled function. Each has a context of 1.4 MB,
# and MLIR searches all contexts when it creates another.
MAX_MLIR_CONTEXTS = 200

# Folders with tests of host code, which rarely trace programs. After `CHECKED_S`
# seconds, a test there stops checking the types of calls, which take four times as long
# with the checks. Shorter tests check the same calls, and pyright checks all code.
HOST_FOLDERS = ("bench", "checkpoints", "cli", "engine", "serve", "tests", "text")
CHECKED_S = 0.1

# Reused random keys and silent broadcasts or promotions are errors in tests. Reused
# keys would pass every chi-square test, and silent broadcasts most comparisons.
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# On a busy machine, a time limit per example would fail.
hypothesis.settings.register_profile("jaxspec", deadline=None)
hypothesis.settings.load_profile("jaxspec")


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between processes, and with later runs in this checkout.

    Small programs are shared too: loading one takes a third of its compile time, and
    tests compile tens of thousands.
    """
    cache: Path = config.rootpath / ".pytest_cache" / "jax"
    LRUCache.put = _put_whole
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _put_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Write an entry of jax's cache atomically, so that no process reads part of it.

    jax itself writes in place. It warns if it reads part of an entry, and warnings are
    errors in tests.
    """
    part = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}"
    part.write_bytes(value)
    part.replace(self.path / f"{key}-cache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for missing devices; run the longest tests first.

    A test process takes over waiting tests of other processes, but not a running test.
    If a long test ran last, the other processes would be idle meanwhile.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for platform in MARKED_PLATFORMS:
        marked = [item for item in items if item.get_closest_marker(platform)]
        if marked and jax.default_backend() != platform:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"no {platform} here"))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection.

    torch, transformers and jax have a million objects, so a collection takes a second.
    Collections take a quarter of the import time, and with Python's thresholds 5 % of
    the time of the tests.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """Drop compiled programs if a process has too many, preferably between files."""
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
    """Disable type checks of calls, for tests that make millions of equal calls.

    The checks would take most of the time, and other tests check the same calls.
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
    """Disable type checks in long tests, which repeat the same calls.

    Tests of host code check calls only for the first seconds, which cover all kinds of
    calls. Programs, also those compiled for other devices, are not checked in whole:
    the tests of their parts check them.
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

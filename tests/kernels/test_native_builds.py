"""The C++ operations with sanitizers, and built for other processors.

All tests that call operations run once more in a process of their own, with a library
that is built with other flags.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxspec_kernels import native
from jaxspec_kernels.native import compiling
from tests.kernels import (
    test_decoder_blocks,
    test_native,
    test_native_fuzz,
    test_paged_attention,
    test_panel_matmul,
    test_rejection_sampling_backends,
)
from tests.kernels.conftest import THOROUGH

HERE = Path(__file__).parent
MODULES = [
    one.__name__.rpartition(".")[2]
    for one in (
        test_decoder_blocks,
        test_native,
        test_native_fuzz,
        test_paged_attention,
        test_panel_matmul,
        test_rejection_sampling_backends,
    )
]
SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
# The compiler runs through this wrapper, which caches objects, because libraries with a
# mistake differ in only one. Compilers must not be sanitized, so it unsets LD_PRELOAD.
WRAPPER = """#!/bin/sh
unset LD_PRELOAD
for word; do [ "$before" = -o ] && to=$word; before=$word; done
case "$before" in *.cc) ;; *) exec {compiler} "$@" {flags} ;; esac
kept={objects}/$(cksum < "$before" | tr ' ' -).o
[ -f "$kept" ] && exec cp "$kept" "$to"
{compiler} "$@" {flags} && cp "$to" "$kept.$$" && mv "$kept.$$" "$kept"
"""
# Runs pytest on the sources in another folder.
CHILD = """
import sys
from pathlib import Path

import pytest


class Sources:
    def pytest_collection_finish(self):
        sys.modules["jaxspec_kernels.native"]._FOLDER = Path(sys.argv[1])


sys.exit(pytest.main(sys.argv[2:], plugins=[Sources()]))
"""

builds = pytest.mark.long_suite(name="native_builds")
pytestmark = [
    pytest.mark.usefixtures("has_native"),
    pytest.mark.skipif(sys.platform != "linux", reason="wraps Linux's compiler"),
]


def test_all_tests_of_operations_run_sanitized():
    named = {
        path.stem
        for path in HERE.glob("test_*.py")
        if '"has_native"' in path.read_text() and path != Path(__file__)
    }
    assert named == set(MODULES)


def found(compiler: str, name: str) -> str:
    """Return the path of a compiler's library; only its name if there is none."""
    asked = [compiler, f"-print-file-name={name}"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_cases(
    folder: Path,
    flags: str,
    *arguments: str,
    sources: Path = native._FOLDER,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run tests of operations with a library that is built with additional flags."""
    wrapper = folder / "c++-wrapped"
    (folder / "objects").mkdir(exist_ok=True)
    compiler = native._compiler()
    wrapper.write_text(
        WRAPPER.format(compiler=compiler, flags=flags, objects=folder / "objects")
    )
    wrapper.chmod(0o755)
    own = {"CXX": str(wrapper), native.VARIABLE: str(folder), **environment}
    command = [sys.executable, "-c", CHILD, str(sources), "-q", "-p"]
    # Capture no output: a sanitizer prints its report and ends the process at once.
    command += ["no:cacheprovider", "-s", f"--hypothesis-profile={THOROUGH}"]
    command += ["-m", "not slow and not long_suite", *arguments]
    # Without this, the child would use the folders that pytest made in this process.
    own["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False
    )


def assert_all_pass(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


# Only tests of backends that run C++.
ALL = (
    *(str(HERE / f"{name}.py") for name in MODULES),
    *("-k", "not gpu and not tpu"),
)


@pytest.fixture(scope="module")
def sanitizers() -> dict[str, str]:
    """Return the environment of a process that loads a sanitized library."""
    # Preload C++'s library as well: Python does not load it, and without it XLA's
    # exceptions are lost.
    names = "libasan.so", "libstdc++.so"
    libraries = [found(native._compiler(), name) for name in names]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no sanitizers")
    # Python and XLA do not free all of their memory at exit.
    return {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of cached sanitized objects."""
    return tmp_path_factory.mktemp("sanitized")


@builds
def test_sanitizers_find_no_error(sanitized, sanitizers):
    """The address and undefined-behaviour sanitizers find no error."""
    assert_all_pass(run_cases(sanitized, SANITIZED, *ALL, **sanitizers))


# Mistakes: file, line, replacement of the line, a test that runs it, and a part of the
# sanitizer's report.
READ, WRITTEN = "READ of size", "WRITE of size"
MUTANTS = {
    "the page table is read one further": (
        "attention.cc",
        "page_table[slot / given.page_size]",
        "page_table[slot / given.page_size + given.table * given.seqs]",
        "test_native_fuzz.py::test_sequence_out_of_range",
        READ,
    ),
    "page ids are not clamped": (
        "attention.cc",
        "given.pages - 1);",
        "given.pages + 1000000);",
        "test_native_fuzz.py::test_sequence_out_of_range",
        "AddressSanitizer",
    ),
    "the slot after the last is written": (
        "blocks.cc",
        "slot >= num_slots",
        "slot > num_slots",
        "test_native_fuzz.py::test_only_existing_slots_are_written",
        WRITTEN,
    ),
    "row numbers are not clamped": (
        "sampling.cc",
        "std::clamp<int64_t>(row.typed_data()[seq], 0, num_rows - 1)",
        "std::clamp<int64_t>(row.typed_data()[seq], 0, num_rows)",
        "test_native_fuzz.py::test_tokens_are_in_the_vocabulary",
        READ,
    ),
}


@builds
@pytest.mark.parametrize("name", MUTANTS)
def test_sanitizers_detect_mistakes(tmp_path, sanitized, sanitizers, name):
    file, before, after, test, report = MUTANTS[name]
    sources = tmp_path / "native"
    shutil.copytree(native._FOLDER, sources)
    text = (sources / file).read_text()
    assert text.count(before) == 1
    (sources / file).write_text(text.replace(before, after))
    path, _, start = test.partition("::")
    arguments = str(HERE / path), "-x", "-k", start
    done = run_cases(sanitized, SANITIZED, *arguments, sources=sources, **sanitizers)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and report in output, output[-3000:]


INSTRUCTIONS = {
    "x86-64": "the processor's base instructions",
    "x86-64-v3": "AVX2",
    "x86-64-v4": "AVX-512",
    "native -mno-amx-bf16": "AVX-512 BF16",
}


def levels() -> list[str]:
    """Return the x86-64 levels whose instructions this processor has.

    The last is this processor without tiles, if it has any: it multiplies bfloat16 with
    AVX-512.
    """
    path = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not path.is_file():
        return []
    words = path.read_text().split()
    found = ["x86-64", "x86-64-v3", *(["x86-64-v4"] if "avx512vl" in words else [])]
    return found + ["native -mno-amx-bf16"] * ("amx_bf16" in words)


@builds
@pytest.mark.parametrize("level", levels())
def test_other_processors_compute_the_same(tmp_path, level):
    """Builds without AVX2 and FMA, with both, and with AVX-512 give equal results.

    They compute 4, 8 and 16 floats at once. One more has AVX-512 BF16 without tiles.
    """
    assert_all_pass(run_cases(tmp_path, f"-march={level}", *ALL))
    (path,) = tmp_path.glob("native-*.so")
    assert native.instructions(ctypes.CDLL(str(path))) == INSTRUCTIONS[level]


def cross_compiler() -> list[str] | None:
    """Return a command that compiles for Linux on ARM, or None.

    It is Debian's compiler, or the clang of PyPI's `ziglang`.
    """
    path = shutil.which("aarch64-linux-gnu-g++")
    if path is not None:
        return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    return None


# This test may be skipped, so it is not in the long suite, which is recorded only if it
# skips nothing.
@pytest.mark.slow
@pytest.mark.skipif(cross_compiler() is None, reason="no cross compiler for ARM")
@pytest.mark.parametrize("source", sorted(native._FOLDER.glob("*.cc")), ids=str)
def test_it_compiles_for_arm(tmp_path, source):
    """Code for ARM uses NEON's vectors and its fused multiply-add."""
    compiler, made = cross_compiler(), tmp_path / "made.s"
    assert compiler is not None
    command = [*compiler, *compiling.FLAGS, "-S", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    assert re.search(rb"\bfmla\s+v\d+\.4s", made.read_bytes())


THREADS = """
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "parallel.h"

// Adds up, in parts: a part writes what the caller reads afterwards.
int main() {
  for (int threads = 1; threads <= 4; ++threads) {
    xla::ffi::ThreadPool pool(threads);
    for (int64_t parts = 0; parts < 12; ++parts)
      for (int repeat = 0; repeat < 5; ++repeat) {
        std::vector<int64_t> numbers(parts, 0);
        jaxspec::for_each_part(pool, parts, [&](int64_t part) {
          // So that the caller does not make all of them before others begin.
          std::this_thread::sleep_for(std::chrono::microseconds(50));
          numbers[part] += part;
        });
        for (int64_t part = 0; part < parts; ++part)
          if (numbers[part] != part) return 1;
      }
  }
  std::puts("done");
}
"""
# Replaces XLA's thread pool, which is not sanitized: the sanitizer would not see how it
# synchronizes its threads.
POOL = """
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {
class ThreadPool {
 public:
  explicit ThreadPool(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    ready_.notify_all();
    for (std::thread& one : threads_) one.join();
  }
  int64_t num_threads() const { return threads_.size(); }
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return is_over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool is_over_ = false;
};
}  // namespace xla::ffi
"""


@builds
@pytest.mark.parametrize("is_broken", [False, True])
def test_threads_do_not_race(tmp_path, is_broken):
    """The sanitizer reports a part that still runs when the caller continues."""
    compiler = native._compiler()
    if not os.path.isabs(found(compiler, "libtsan.so")):
        pytest.skip("the compiler has no sanitizer of threads")
    header = tmp_path / "xla" / "ffi" / "api" / "ffi.h"
    header.parent.mkdir(parents=True)
    header.write_text(POOL)
    text = (native._FOLDER / "parallel.h").read_text()
    if is_broken:
        before = "load(std::memory_order_acquire) < num_parts"
        assert text.count(before) == 1
        text = text.replace(before, f"{before} - 1")
    (tmp_path / "parallel.h").write_text(text)
    (tmp_path / "threads.cc").write_text(THREADS)
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    command += [f"-I{tmp_path}", "-o", str(tmp_path / "threads")]
    subprocess.run([*command, str(tmp_path / "threads.cc")], check=True)
    # Random addresses may overlap with those that the sanitizer reserves.
    run = [shutil.which("setarch") or "setarch", "-R", str(tmp_path / "threads")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ("ThreadSanitizer: " in done.stderr) == is_broken, done.stderr[-3000:]
    assert (done.returncode != 0) == is_broken

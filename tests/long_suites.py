"""Long suites: tests that run in full only when their sources have changed.

A long suite is a set of tests marked `@pytest.mark.long_suite(name=...)`, such as
mutants, programs for other devices, or long counts. `make test` excludes them and runs
one example of most; `make long-suites`, and `make test-all` after all other tests, run
those whose digest differs from the one recorded when they last passed, and record it.
`--all` runs all.

The digest covers the modules that the tests import, without comments and docstrings,
recorded results that they compare with, and the versions of jax and of the compilers.
"""

import argparse
import ast
import datetime
import functools
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.programs import users_flags

ROOT = Path(__file__).parents[1]
THIS = Path(__file__)
RECORD = ROOT / "benchmarks" / "results" / "long_suites.json"
# The Makefile installs compilers for TPU and GPU into this folder.
COMPILERS = Path(sys.prefix) / "aot"
# Long suites run one at a time, each with one process per core.
ARGUMENTS = ("-q", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
# Folders with our own packages.
BASES = ("", "kernels", "checkpoints")
# Modules that every program for a CPU calls, so that their changes make suites due.
NATIVE = tuple(f"kernels/jaxspec_kernels/native/*.{kind}" for kind in ("cc", "h"))
# Modules that are imported by names that are computed: networks, and kernels.
BY_NAME = ("jaxspec/models/*/*.py", "kernels/jaxspec_kernels/*/reference.py")
CPU_KERNELS = "kernels/jaxspec_kernels/*/cpu.py"
DEVICE_KERNELS = "kernels/jaxspec_kernels/*/[gt]pu*.py"
KERNELS = ("kernels/jaxspec_kernels/", "tests/")
PROGRAM = (*KERNELS, "jaxspec/program/", "jaxspec/models/", "jaxspec/sharding.py")
ENGINE = (*PROGRAM, "jaxspec/engine/")
# The same as globs, for tests that start processes and import few modules.
ENGINE_FILES = (
    *("jaxspec/engine/**/*.py", "jaxspec/models/**/*.py", "jaxspec/program/**/*.py"),
    *("jaxspec/sharding.py", "kernels/jaxspec_kernels/**/*.py"),
)


@dataclass(frozen=True, kw_only=True)
class LongSuite:
    """A set of tests that is due when one of its sources has changed.

    Attributes:
        files: Test files with the marked tests.
        reads: Folders and files whose changes make the suite due. Imports from
            elsewhere do not affect its result.
        data: Further files that the tests, or processes that they start, read or
            import, as globs.
        needs_compilers: Whether it needs the compilers for TPU and GPU; see `aot` in
            tests/conftest.py.
    """

    name: str
    files: tuple[str, ...]
    reads: tuple[str, ...]
    data: tuple[str, ...] = ()
    needs_compilers: bool = False

    def sources(self) -> list[Path]:
        """Return the files whose change makes the long suite due."""
        kernels = DEVICE_KERNELS if self.needs_compilers else CPU_KERNELS
        named = [path for glob in (*BY_NAME, kernels) for path in ROOT.glob(glob)]
        tests = [ROOT / file for file in self.files]
        # This file is left out: a new suite would make most others due.
        own = set(filter(self._reads, _imported(tests + named))) - {THIS}
        globs = self.data if self.needs_compilers else (*self.data, *NATIVE)
        own.update(path for glob in globs for path in ROOT.glob(glob))
        return sorted(own)

    def _reads(self, path: Path) -> bool:
        return path.relative_to(ROOT).as_posix().startswith(self.reads)

    def digest(self) -> str:
        """Return the digest of the sources. It is recorded when the suite passes."""
        digest = hashlib.sha256()
        for path in self.sources():
            text = path.read_text(encoding="utf-8")
            text = code_of(text) if path.suffix == ".py" else text
            digest.update(f"{path.relative_to(ROOT)}\0{text}\0".encode())
        versions = [metadata.version(name) for name in ("jax", "jaxlib")]
        if self.needs_compilers:
            versions += compiler_versions()
        digest.update(repr(versions).encode())
        return digest.hexdigest()[:16]


def _aot(name: str, file: str, reads: tuple[str, ...], *data: str) -> LongSuite:
    tuned = "kernels/jaxspec_kernels/tuned/*.json"
    return LongSuite(
        name=name,
        files=(file,),
        reads=reads,
        data=(tuned, *data),
        needs_compilers=True,
    )


SUITES = (
    LongSuite(
        name="attention_mutants",
        files=("tests/kernels/test_mutants.py",),
        reads=KERNELS,
    ),
    LongSuite(
        name="rejection_mutants",
        files=("tests/kernels/test_mutants.py",),
        reads=(*KERNELS, "jaxspec/program/randomness.py"),
    ),
    LongSuite(
        name="attention_calls",
        files=("tests/kernels/test_paged_attention.py",),
        reads=KERNELS,
    ),
    LongSuite(
        name="native_builds",
        files=("tests/kernels/test_native_builds.py",),
        reads=KERNELS,
    ),
    LongSuite(
        name="traffic",
        files=("tests/engine/test_traffic.py",),
        reads=("jaxspec/engine/", "tests/"),
    ),
    LongSuite(
        name="lossless",
        files=(
            "tests/e2e/test_greedy_equality.py",
            "tests/e2e/test_heads.py",
            "tests/e2e/test_lossless.py",
            "tests/e2e/test_pard.py",
            "tests/e2e/test_logprob_bits.py",
        ),
        reads=ENGINE,
    ),
    LongSuite(
        name="counts",
        files=(
            "tests/conformance/test_distribution.py",
            "tests/e2e/test_enumerated.py",
            "tests/program/tree/test_verify_distribution.py",
        ),
        reads=ENGINE,
    ),
    LongSuite(
        name="claims",
        files=("tests/conformance/test_claims.py",),
        reads=ENGINE,
    ),
    LongSuite(
        name="grammars",
        files=("tests/e2e/test_grammars.py", "tests/e2e/test_structured_texts.py"),
        reads=(*ENGINE, "jaxspec/text/"),
    ),
    LongSuite(
        name="real_model",
        files=("tests/accuracy/test_real.py",),
        reads=("tests/accuracy/", "tests/support/", "checkpoints/"),
        data=(*ENGINE_FILES, "jaxspec/config/*.py", "jaxspec/text/*.py"),
    ),
    LongSuite(
        name="several_hosts",
        files=("tests/e2e/test_several_hosts.py",),
        reads=("tests/e2e/", "tests/support/", "jaxspec/engine/"),
        data=(
            *(*ENGINE_FILES, "tests/e2e/several_hosts.py", "jaxspec/serve/*.py"),
            *("jaxspec/exit.py", "jaxspec/llm.py"),
        ),
    ),
    LongSuite(
        name="exit",
        files=("tests/e2e/test_exit.py",),
        reads=("tests/e2e/", "tests/support/"),
        # With all modules that call native code or have threads.
        data=(
            *("jaxspec/__init__.py", "jaxspec/errors.py", "jaxspec/exit.py"),
            *("jaxspec/llm.py", "jaxspec/engine/**/*.py", "jaxspec/text/*.py"),
            *("jaxspec/program/state.py", "kernels/jaxspec_kernels/native/*.py"),
        ),
    ),
    LongSuite(
        name="memory",
        files=("tests/engine/test_resident_memory.py",),
        reads=("tests/engine/", "tests/support/"),
        data=(
            *(*ENGINE_FILES, "jaxspec/exit.py", "jaxspec/llm.py"),
            *("jaxspec/serve/**/*.py", "jaxspec/text/*.py"),
            "checkpoints/jaxspec_checkpoints/*.py",
        ),
    ),
    LongSuite(
        name="streams",
        files=("tests/e2e/test_stream_during_compile.py",),
        reads=(*ENGINE, "jaxspec/serve/"),
    ),
    LongSuite(
        name="device_run",
        files=("tests/test_device.py",),
        reads=(*ENGINE, "benchmarks/", "jaxspec/bench/"),
    ),
    LongSuite(
        name="head_training",
        files=("tests/test_notebooks.py",),
        reads=("tests/test_notebooks.py", "tests/support/"),
        data=(*ENGINE_FILES, "jaxspec/train/*.py", "notebooks/train_a_head.ipynb"),
    ),
    LongSuite(
        name="same_bits",
        files=("tests/models/test_same_bits.py",),
        reads=PROGRAM,
    ),
    LongSuite(
        name="program_mutants",
        files=("tests/test_mutants.py",),
        reads=PROGRAM,
    ),
    LongSuite(
        name="jax_versions",
        files=("tests/release/test_jax_versions.py",),
        reads=("tests/release/",),
        data=(
            *(*ENGINE_FILES, "pyproject.toml", "tests/test_sharding.py"),
            *(f"tests/{name}/*.py" for name in ("engine", "kernels", "program")),
        ),
    ),
    _aot(
        "attention_tpu",
        "tests/kernels/test_kernels_aot.py",
        KERNELS,
        "benchmarks/results/aot_tpu.json",
    ),
    _aot(
        "attention_gpu",
        "tests/kernels/test_kernels_aot.py",
        KERNELS,
        "benchmarks/results/aot_gpu.json",
    ),
    _aot("page_writes", "tests/kernels/test_kernels_aot.py", KERNELS),
    _aot("rejection", "tests/kernels/test_kernels_aot.py", KERNELS),
    _aot("kernel_benchmark", "tests/kernels/test_kernels_aot.py", KERNELS),
    _aot("step", "tests/program/test_aot.py", PROGRAM),
    _aot(
        "scanned",
        "tests/program/test_aot.py",
        ENGINE,
    ),
    _aot(
        "invariant",
        "tests/program/test_aot.py",
        ENGINE,
    ),
    _aot(
        "trees",
        "tests/program/test_aot.py",
        ENGINE,
        "benchmarks/results/aot_trees.json",
    ),
    _aot(
        "quantized",
        "tests/models/test_quantized_aot.py",
        ENGINE,
    ),
    _aot(
        "hosts",
        "tests/program/test_aot.py",
        ENGINE,
        "benchmarks/results/aot_hosts.json",
    ),
    _aot(
        "train",
        "tests/train/test_train_aot.py",
        ("jaxspec/train/", "jaxspec/models/", "tests/train/", "tests/program/hlo.py"),
        "benchmarks/results/aot_train.json",
    ),
    _aot("h200", "tests/program/test_aot.py", (*PROGRAM, "benchmarks/device_steps.py")),
)


def members(
    suite: str, values: Iterable[Any], *, is_example: Callable[[Any], bool]
) -> list[Any]:
    """Return parameters for a test; all but the examples run only in the long suite.

    A tuple stands for several parameters.
    """
    mark = pytest.mark.long_suite(name=suite)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if is_example(value) else mark,
        )
        for value in values
    ]


def code_of(text: str) -> str:
    """Return a module's source without comments, docstrings and empty lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            count = docstring.end_lineno - docstring.lineno + 1
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * count
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _imported(files: list[Path]) -> set[Path]:
    """Return our files that `files` import, directly or indirectly."""
    found, known = set[Path](), set[str]()
    wanted = list(files)
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.add(path)
            # Each name is looked up once: that takes longer than reading all files.
            names = {*_names(path.read_text(encoding="utf-8"))} - known
            known |= names
            wanted += [file for name in names for file in _files_of(name)]
    return found


@functools.cache
def _names(text: str) -> tuple[str, ...]:
    """Return all names that a module imports; some may not be modules."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def _files_of(name: str) -> Iterator[Path]:
    """Yield the file of a module, or nothing if the name is not one of our modules."""
    for base in BASES:
        place = ROOT / base / name.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def recorded() -> dict[str, dict[str, object]]:
    """Return the record of the last pass of each long suite."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def compiler_versions() -> list[str]:
    """Return the versions of the installed compilers for TPU and GPU."""
    there = metadata.distributions(path=[str(COMPILERS)])
    return sorted(f"{one.name} {one.version}" for one in there)


def is_due(suite: LongSuite) -> bool:
    """Return whether a long suite has not yet passed with the current sources."""
    return recorded().get(suite.name, {}).get("digest") != suite.digest()


def last_seconds(suite: LongSuite) -> float:
    """Return how long a long suite took when it last passed; 0 if it never did."""
    return float(str(recorded().get(suite.name, {}).get("seconds", 0)))


def compilers_environment() -> dict[str, str]:
    """Return the environment of a pytest process that compiles for TPU and GPU."""
    return os.environ | {
        "JAXSPEC_AOT": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": users_flags(),
    }


def run(suite: LongSuite, arguments: list[str]) -> int:
    """Run a whole long suite, record whether it passes, and return the exit status.

    Args:
        arguments: Additional pytest arguments. With any, nothing is recorded, because
            they may exclude tests.
    """
    digest, start = suite.digest(), time.monotonic()
    words = [sys.executable, "-m", "pytest", *ARGUMENTS, *arguments]
    words += ["-m", f"long_suite(name={suite.name!r})", *suite.files]
    environment = compilers_environment() if suite.needs_compilers else None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words.append(f"--junitxml={report}")
        done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
        status = done.returncode
        # Without the compilers, tests are skipped, so a pass must not be recorded.
        is_whole = not arguments and status == 0 and _num_left_out(report) == 0
    if is_whole:
        row = {
            "digest": digest,
            "date": datetime.date.today().isoformat(),
            "jax": metadata.version("jax"),
            "seconds": round(time.monotonic() - start),
        }
        rows = recorded() | {suite.name: row}
        RECORD.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    return status


def _num_left_out(report: Path) -> int:
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    return int(suite.attrib["skipped"])


def main() -> int:
    """Run the due long suites one by one, up to the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="include suites that are not due"
    )
    parser.add_argument(
        "--list", action="store_true", help="list all suites, and whether each is due"
    )
    parser.add_argument("--name", action="append", help="run only these suites")
    parser.add_argument(
        "--minutes",
        type=float,
        help="start no suite that would end after this time; the others remain due",
    )
    options, arguments = parser.parse_known_args()
    chosen = [one for one in SUITES if not options.name or one.name in options.name]
    due = [one for one in chosen if options.all or is_due(one)]
    if options.list:
        for one in chosen:
            word = "due" if one in due else "recorded"
            print(f"{one.name:20}{word:10}{len(one.sources()):4} files")
        return 0
    start, seconds = time.monotonic(), 60 * (options.minutes or math.inf)
    left = []
    for number, one in enumerate(due, 1):
        if time.monotonic() - start + last_seconds(one) > seconds:
            left.append(one.name)
            continue
        print(f"Long suite {number} of {len(due)}: {one.name}", flush=True)
        status = run(one, arguments)
        if status:
            return status
    if left:
        print(f"{options.minutes:g} minutes are too few for: {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

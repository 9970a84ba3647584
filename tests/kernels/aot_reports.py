"""Reports of the compilers for TPU and GPU, kept on disk for the next run.

jax's own cache stores executables for described chips, but fails to read them. Tests
read only a program's text, its memory, and the files that the compiler dumps. These
depend only on the lowered program, the described chips, the options and the compilers'
versions, so a run with the same inputs reads them from a file instead of compiling.

Only processes with the environment variable `VARIABLE` do so: those of `make test`.
Long suites, and the modules that write records, compile every program.
"""

import hashlib
import json
import os
import re
import uuid
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from tests.long_suites import ROOT, compiler_versions

# Environment variable with the folder of the reports.
VARIABLE = "JAXSPEC_AOT_REPORTS"
# Patterns of the dumped files that tests read.
DUMPED = ("*.ptx", "*.thunk_sequence.txt")
# Fields of jax's memory analysis.
_MEMORY = (
    "argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes",
    "alias_size_in_bytes", "generated_code_size_in_bytes", "peak_memory_in_bytes",
)  # fmt: skip
# Further inputs of the compilers: variables with options, and described GPUs.
_OPTIONS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# A place in a source file: its changes change no program.
_LINE = re.compile(r'"[^"]*":\d+:\d+(?: to \d*:\d+)?')
_TARGETS = ROOT / "jaxspec" / "engine" / "memory" / "targets"


class Report(NamedTuple):
    """A compiler's report on a program, with two methods of jax's `Compiled`.

    Attributes:
        files: Contents of dumped files, by name.
    """

    text: str
    memory: dict[str, int]
    files: dict[str, str]

    def as_text(self) -> str:
        """Return the text of the compiled program."""
        return self.text

    def memory_analysis(self) -> Any:
        """Return the program's memory on one chip."""
        return SimpleNamespace(**self.memory)


def compile_lowered(
    lowered: jax.stages.Lowered,
    options: dict[str, Any] | None = None,
    *,
    dump: Path | None = None,
) -> Any:
    """Compile a program for described chips, or read the report of an equal one.

    Args:
        options: Options of the compiler.
        dump: An empty folder for the files that the compiler dumps.

    Returns:
        A `Compiled`, or a `Report`.

    Raises:
        jax.errors.JaxRuntimeError: The compiler refuses the program.
    """
    dumping = {} if dump is None else {"xla_dump_to": str(dump)}
    given = {**(options or {}), **dumping} or None
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return lowered.compile(given)
    path = Path(folder) / f"{digest(lowered, options, is_dumped=bool(dumping))}.json"
    if not path.exists():
        _write(_report(lowered.compile(given), dump), path)
        return _read(path)
    made = _read(path)
    if dump is not None:
        for name, content in made.files.items():
            (dump / name).write_text(content, encoding="utf-8")
    return made


def _report(compiled: Any, dump: Path | None) -> Report:
    memory = compiled.memory_analysis()
    dumped = [path for one in DUMPED for path in (dump.glob(one) if dump else ())]
    return Report(
        text=compiled.as_text(),
        memory={name: getattr(memory, name) for name in _MEMORY},
        files={path.name: path.read_text(encoding="utf-8") for path in dumped},
    )


def _read(path: Path) -> Report:
    return Report(**json.loads(path.read_text(encoding="utf-8")))


def _write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same file: rename complete files only.
    part = path.with_suffix(f".{uuid.uuid4().hex}")
    part.write_text(json.dumps(report._asdict()), encoding="utf-8")
    part.replace(path)


def digest(
    lowered: jax.stages.Lowered,
    options: dict[str, Any] | None = None,
    *,
    is_dumped: bool = False,
) -> str:
    """Return a digest of everything that a compiler's report depends on."""
    lowering: Any = lowered._lowering
    chips = [
        (chip.platform, chip.device_kind, chip.id, chip.process_index, str(chip))
        for chip in lowering._device_list
    ]
    made = hashlib.sha256()
    for value in (
        # With the names of operations, which tests read in the compiled text.
        _LINE.sub("", lowered.as_text(debug_info=True)),
        *(chips, lowering._compiler_options_kvs, sorted((options or {}).items())),
        *(is_dumped, metadata.version("jaxlib"), compiler_versions()),
        *(os.environ.get(name) for name in _OPTIONS),
        *(path.read_text(encoding="utf-8") for path in sorted(_TARGETS.iterdir())),
    ):
        made.update(repr(value).encode() + b"\0")
    return made.hexdigest()

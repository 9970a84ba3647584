"""Compile step programs without their devices, and record the compilers' reports."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh
from tqdm.auto import tqdm

from jaxspec.bench.report import write_whole
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import describe
from jaxspec.engine.runner import options_of
from jaxspec.models import families
from jaxspec.program.plan import StepShape
from jaxspec.program.step import lower_step
from jaxspec_checkpoints.gemma.published import published_config
from tests.kernels import aot_gpu, aot_tpu
from tests.kernels.aot_reports import compile_lowered
from tests.program import hlo

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"

NUM_DRAFT_TOKENS = 5


def missing(device: str) -> str | None:
    """Return the reason why this machine cannot compile for a device, or None."""
    return aot_gpu.missing() if device.startswith(("h", "b")) else aot_tpu.MISSING


def skip_without_compiler(device: str) -> None:
    """Skip a test that cannot compile."""
    reason = missing(device)
    if reason is not None:
        pytest.skip(reason)


def engine_config(
    target: str,
    draft: str | None = None,
    *,
    num_layers: int | None | tuple[int | None, int | None] = None,
    **given: Any,
) -> EngineConfig:
    """Configure an engine with models of published sizes.

    Args:
        target, draft: A size of Gemma 2, or a published model's name.
        num_layers: Layers of both models, or of each; None for all.
        given: Engine arguments. By default all layers keep all tokens, as in the
            recorded programs.
    """
    given.setdefault("disable_hybrid_kv_cache_manager", True)
    layers = num_layers if isinstance(num_layers, tuple) else (num_layers, num_layers)
    with tempfile.TemporaryDirectory() as root:

        def folder(name: str, size: str, num_layers: int | None) -> str:
            path = Path(root) / name
            path.mkdir()
            config = families.published_config(size) or published_config(size)
            if num_layers is not None:
                config["num_hidden_layers"] = num_layers
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return str(path)

        given["model"] = folder("target", target, layers[0])
        if draft is not None:
            given["speculative_model"] = folder("draft", draft, layers[1])
            given.setdefault("num_speculative_tokens", NUM_DRAFT_TOKENS)
        return EngineArgs(load_format="dummy", **given).create_engine_config()


@dataclass(frozen=True)
class Step:
    """A compiled step program.

    Attributes:
        facts: See `hlo.facts`; also `compile_s` and `compile_cpu_s`, which include
            lowering, and `lower_cpu_s`.
        lowered: The compiler's input.
        forms: Shapes of the weights of target and drafts, and of the state.
    """

    text: str
    facts: dict[str, Any]
    lowered: jax.stages.Lowered
    forms: tuple[Any, Any, Any]

    def row(self, *names: str) -> dict[str, Any]:
        """Some of the facts, in this order."""
        return {name: self.facts[name] for name in names}


def compile_step(
    config: EngineConfig,
    mesh: Mesh,
    shape: StepShape,
    *,
    has_options: bool = False,
    is_dumped: bool = False,
) -> Step:
    """Compile a step program.

    Args:
        has_options: Use the engine's compiler options.
        is_dumped: Read the compiler's own dump if jax cannot parse the text.
    """
    program, forms = describe(config, mesh)
    given: Any = forms
    *params, state = given
    options: dict[str, Any] = {}
    if has_options:
        options |= options_of(config, mesh) or {}
    start, cpu_start = time.monotonic(), time.process_time()
    with aot_tpu.no_compilation_cache(), tempfile.TemporaryDirectory() as folder:
        lowered = lower_step(program, shape, forms)
        lower_cpu = time.process_time() - cpu_start
        if is_dumped:
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            compiled: Any = lowered.compile(options)
        else:
            compiled = compile_lowered(lowered, options or None)
        elapsed, cpu = time.monotonic() - start, time.process_time() - cpu_start
        text, has_dump = hlo.text_of(compiled), False
        if text is None:
            [path] = Path(folder).glob("*after_optimizations.txt")
            text, has_dump = path.read_text(encoding="utf-8"), True
    kept = params, state.target_pages, state.proposers
    facts = hlo.facts(compiled, state=state, kept=kept, text=text)
    facts |= dict(
        target_bytes=hlo.local_bytes(params[0]),
        draft_bytes=hlo.local_bytes(params[1]),
        lowered_ops=hlo.num_operations(lowered.as_text()),
        is_text_dumped=has_dump,
        lower_cpu_s=round(lower_cpu, 1),
        compile_s=round(elapsed, 1),
        compile_cpu_s=round(cpu, 1),
    )
    return Step(text, facts, lowered, given)


@dataclass(frozen=True)
class Record:
    """A file in `benchmarks/results` with the name of the module that writes it.

    Attributes:
        programs: Names of all programs, in their order in the file.
        package: Package of that module.
        head: Further entries of the file's first line.
    """

    module: str
    programs: Collection[str]
    package: str = "tests.program"
    head: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return FOLDER / f"{self.module}.json"

    def read(self) -> dict[str, dict[str, Any]]:
        """The recorded rows, by name."""
        if not self.path.exists():
            return {}
        rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
        return {row["name"]: row for row in rows}

    def write(self, rows: dict[str, dict[str, Any]]) -> None:
        """Write one line per program, so that diffs show which ones changed."""
        head = {
            **self.head,
            "command": f"PYTHONPATH=.venv/aot python -m {self.package}.{self.module}",
            "versions": aot_gpu.versions() | aot_tpu.versions(),
        }
        lines = [json.dumps(rows[name]) for name in self.programs if name in rows]
        text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}"
        write_whole(text + "\n", self.path)

    def main(
        self,
        measure: Callable[[str], dict[str, Any]],
        make_table: Callable[[dict[str, dict[str, Any]]], str],
        description: str,
    ) -> None:
        """Run a command line: compile what is missing or named, and print tables.

        Args:
            measure: Compiles a program; returns its row.
            make_table: Makes tables of all rows.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("names", nargs="*", help="programs to compile again")
        parser.add_argument(
            "--table", action="store_true", help="print, compile nothing"
        )
        options = parser.parse_args()
        jax.config.update("jax_platforms", "cpu")
        rows = self.read()
        wanted = [name for name in self.programs if name not in rows]
        if options.names:
            chosen = tuple(options.names)
            wanted = [name for name in self.programs if name.startswith(chosen)]
        if not options.table:
            for name in tqdm(wanted, unit="program"):
                row = measure(name)
                rows = self.read() | {name: row}  # another process may have added rows
                self.write(rows)
        print(make_table(rows))


def markdown(*lines: Collection[str]) -> str:
    """Make a table whose first line holds the column names."""
    head, *rows = lines
    every = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)

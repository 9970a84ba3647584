"""Records of what compilers report: one row per program, and the command for it."""

import argparse
import json
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxspec.bench.report import write_whole
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec_checkpoints.gemma.published import published_config
from tests.kernels import aot_gpu, aot_tpu

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"

NUM_DRAFT_TOKENS = 5


def engine_config(
    target: str,
    draft: str | None = None,
    *,
    num_layers: int | None = None,
    **given: Any,
) -> EngineConfig:
    """Configure an engine with models of published sizes.

    Args:
        num_layers: Of both models; all if None.
        given: Engine arguments.
    """
    with tempfile.TemporaryDirectory() as root:

        def folder(name: str, size: str) -> str:
            path = Path(root) / name
            path.mkdir()
            config = published_config(size)
            if num_layers is not None:
                config["num_hidden_layers"] = num_layers
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return str(path)

        given["model"] = folder("target", target)
        if draft is not None:
            given["speculative_model"] = folder("draft", draft)
            given.setdefault("num_speculative_tokens", NUM_DRAFT_TOKENS)
        return EngineArgs(load_format="dummy", **given).create_engine_config()


@dataclass(frozen=True)
class Record:
    """A file in `benchmarks/results`, which is named as the module that writes it.

    Attributes:
        programs: Names of all that are compiled, in their order in the file.
        package: Where that module is.
    """

    module: str
    programs: Collection[str]
    package: str = "tests.program"

    @property
    def path(self) -> Path:
        """Where it is."""
        return FOLDER / f"{self.module}.json"

    def read(self) -> dict[str, dict[str, Any]]:
        """The rows that are recorded, by name."""
        if not self.path.exists():
            return {}
        rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
        return {row["name"]: row for row in rows}

    def write(self, rows: dict[str, dict[str, Any]]) -> None:
        """A line for every program: a change of one shows as such."""
        head = {
            "command": f"PYTHONPATH=.venv/aot python -m {self.package}.{self.module}",
            "versions": aot_gpu.versions() | aot_tpu.versions(),
        }
        lines = [json.dumps(rows[name]) for name in self.programs if name in rows]
        text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}"
        write_whole(text + "\n", self.path)

    def main(
        self,
        measure: Callable[[str], dict[str, Any]],
        tell: Callable[[dict[str, dict[str, Any]]], str],
        description: str,
    ) -> None:
        """Run a command line: compile what is missing or named, and print tables.

        Args:
            measure: Compiles a program; its row.
            tell: Makes tables of all rows.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("names", nargs="*", help="programs that are compiled again")
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
                rows = self.read() | {name: row}  # others may have been written
                self.write(rows)
        print(tell(rows))


def markdown(*lines: Collection[str]) -> str:
    """A table; the first line are its columns."""
    head, *rows = lines
    every = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)

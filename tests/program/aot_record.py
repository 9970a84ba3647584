"""What compilers said about programs: a file with a row for each, and its command."""

import argparse
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxspec.bench.report import write_whole
from tests.kernels import aot_gpu, aot_tpu

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"


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

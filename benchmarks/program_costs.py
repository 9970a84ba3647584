"""What each program of an engine costs: once to compile, and with every launch.

    python -m benchmarks.program_costs

The bundled pair on the CPU, one program for every size that a launch may have and for
every kind of request. Which of them an engine should have is chosen by this table: a
size is worth its compile where the next larger one is slower for the same rows. So each
program is launched with all its rows in use and with fewer. Sequences begin in the
middle, after a context that nobody fed; the programs are launched in turn, so that a
busy moment of the machine falls on all of them.
Writes benchmarks/results/program-costs-cpu.json and prints the table.
"""

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from benchmarks.step_times import begun_rows
from jaxspec import LLM
from jaxspec.bench.report import record
from jaxspec.engine.runner import Runner
from jaxspec.program.call import Arrays
from jaxspec.program.plan import TILE, Features, StepPlan, StepShape, Tile
from jaxspec.program.step import lower_step
from jaxspec.program.wire import PlanLayout

RESULT = Path(__file__).with_name("results") / "program-costs-cpu.json"
SEQS = (1, 2, 4, 8)
DRAFTS = (0, 1, 2, 3, 5, 8)
CHUNKS = (32, 128, 512)
DTYPES = ("bfloat16", "float32")
# Sizes at which kinds of requests are compared.
FEATURE_SIZES = ((1, 5, 0), (8, 5, 0))
PROMPT_FEATURE_SIZE = (8, 0, 128)
PARTS = ("decode", "prompts", "features")

CONTEXT = 256
# Launches behind one another before the next program has its turn.
BURST = 5
TEMPERATURE = 0.8

_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+(?:, %[\w.-]+|:\d+)* = ", re.M)
Size = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Use:
    """How a program is launched.

    Attributes:
        num_rows: Rows that decode; the others are pads.
    """

    num_rows: int
    is_sampled: bool


FORMS = {
    "plain": Features(),
    "controls": Features(has_controls=True),
    "logprobs 0": Features(num_logprobs=0),
    "logprobs 5": Features(num_logprobs=5),
    "logprobs 20": Features(num_logprobs=20),
    "controls, logprobs 20": Features(has_controls=True, num_logprobs=20),
    "grammar": Features(has_grammar=True),
    "greedy": Features(is_greedy=True),
    "greedy, logprobs 20": Features(is_greedy=True, num_logprobs=20),
    "prompt logprobs 5": Features(num_prompt_logprobs=5),
}
BASIC = "plain", "greedy"
# Of launches that feed prompts alone.
FEEDING = "plain", "controls, logprobs 20", "prompt logprobs 5"


def programs_of(part: str) -> Iterator[tuple[Size, str]]:
    """Size and kind of every program of one part of the table."""
    if part == "decode":
        yield from (((n, k, 0), form) for form in BASIC for n in SEQS for k in DRAFTS)
    elif part == "prompts":
        ends, drafts = (SEQS[0], SEQS[-1]), (0, 5)
        sizes = [(n, k, c) for n in ends for k in drafts for c in CHUNKS]
        yield from ((size, form) for form in BASIC for size in sizes)
    else:
        special = [name for name in FORMS if name not in (*BASIC, FEEDING[-1])]
        yield from ((size, form) for form in special for size in FEATURE_SIZES)
        yield from ((PROMPT_FEATURE_SIZE, form) for form in FEEDING)


class Program:
    """One program, compiled where nothing is kept, and what that cost."""

    def __init__(self, runner: Runner, size: Size, form: str):
        num_seqs, num_drafts, chunk = size
        self.form = form
        self.shape = StepShape(
            num_seqs=num_seqs,
            num_draft_tokens=num_drafts,
            chunk=chunk,
            features=FORMS[form],
        )
        self._runner = runner
        start, start_cpu = time.monotonic(), time.process_time()
        arguments = (*runner.params, runner.state)
        lowered = lower_step(runner.program, self.shape, arguments)
        self.lower_s = time.monotonic() - start
        self.lower_cpu_s = time.process_time() - start_cpu
        start, start_cpu = time.monotonic(), time.process_time()
        self._compiled = lowered.compile(runner.compiler_options)
        self.compile_s = time.monotonic() - start
        self.compile_cpu_s = time.process_time() - start_cpu
        self.lowered_ops = num_operations(lowered.as_text())
        self.compiled_ops = num_operations(self._compiled.as_text() or "")
        self.uses = list(self._uses())
        self.seconds: dict[Use, list[float]] = {use: [] for use in self.uses}

    def _uses(self) -> Iterator[Use]:
        """All powers of two of its rows; then all of them sampled."""
        most = self.shape.num_seqs
        yield from (Use(num_rows=n, is_sampled=False) for n in SEQS if n <= most)
        if not self.form.startswith("greedy"):
            yield Use(num_rows=most, is_sampled=True)

    def _plan(self, num_rows: int) -> jax.Array:
        """Rows that decode, and the end of a prompt of another row where it fits."""
        shape, pool = self.shape, self._runner.pool
        chunk = shape.chunk
        # Where prompts ride along, one of the rows is the prompt's.
        num_rows = min(num_rows, pool.num_rows - 1) if chunk else num_rows
        tokens = np.arange(TILE, dtype=np.int32) + 400
        tiles = [
            Tile(row=num_rows, start=at, tokens=tokens, is_last=at + TILE == chunk)
            for at in range(0, chunk, TILE)
        ]
        decode = [(row, shape.num_draft_tokens) for row in range(num_rows)]
        vector = PlanLayout(shape, pool).pack(StepPlan(decode=decode, tiles=tiles))
        return jax.device_put(vector)

    def launch(self, use: Use, count: int) -> None:
        """Launch it some times, and wait for each; the first time does not count."""
        runner = self._runner
        temperature = TEMPERATURE if use.is_sampled else 0.0
        rows = begun_rows(runner.pool, CONTEXT, temperature)
        state = runner.state
        placed = jax.device_put(rows, state.rows.num_tokens.sharding)
        state = dataclasses.replace(state, rows=placed)
        arrays = Arrays(runner.program.proposers, runner.params, state)
        plan = self._plan(use.num_rows)
        jax.block_until_ready((state, plan))
        for number in range(count + 1):
            start = time.perf_counter()
            result = arrays.call(self._compiled, self.shape, plan)
            jax.block_until_ready(result)
            if number:
                self.seconds[use].append(time.perf_counter() - start)
        runner.state = arrays.state

    def row(self, dtype: str) -> dict[str, Any]:
        """Everything, for JSON."""
        costs = ("lower_s", "lower_cpu_s", "compile_s", "compile_cpu_s")
        return {
            "dtype": dtype,
            "num_seqs": self.shape.num_seqs,
            "num_draft_tokens": self.shape.num_draft_tokens,
            "chunk": self.shape.chunk,
            "features": self.form,
            **{name: round(getattr(self, name), 2) for name in costs},
            "lowered_ops": self.lowered_ops,
            "compiled_ops": self.compiled_ops,
            "launches": [
                {
                    "num_rows": use.num_rows,
                    "is_sampled": use.is_sampled,
                    "median_ms": round(1e3 * median(seconds), 3),
                    "min_ms": round(1e3 * min(seconds), 3),
                }
                for use, seconds in self.seconds.items()
            ],
        }


def num_operations(text: str) -> int:
    """Operations in a program's text, of StableHLO or of HLO."""
    return len(_OPERATION.findall(text))


def make_runner(dtype: str) -> Runner:
    """The device side of an engine of the bundled pair, with nothing kept on disk."""
    llm = LLM(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=DRAFTS[-1],
        max_num_seqs=SEQS[-1],
        dtype=dtype,
        compilation_cache_dir=None,
    )
    return llm.llm_engine.runner


def measure(
    runner: Runner, programs: list[tuple[Size, str]], dtype: str, launches: int
) -> list[dict[str, Any]]:
    """Compile all of them, one after the other, then launch them in turn."""
    made = []
    for size, form in tqdm(programs, desc=f"{dtype}: compile", unit="program"):
        made.append(Program(runner, size, form))
    for _ in tqdm(range(-(-launches // BURST)), desc=f"{dtype}: launch", unit="turn"):
        for program in made:
            for use in program.uses:
                program.launch(use, BURST)
    return [program.row(dtype) for program in made]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown; times of launches are medians in ms (least)."""
    lines = [
        "| dtype | seqs | K | chunk | features | lower+compile CPU-s | ops | 1 row | "
        "2 rows | 4 rows | 8 rows | all, sampled |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = {(one["num_rows"], one["is_sampled"]): one for one in row["launches"]}
        uses = [(n, False) for n in SEQS] + [(row["num_seqs"], True)]
        times = [
            f"{told[use]['median_ms']:.2f} ({told[use]['min_ms']:.2f})"
            if use in told
            else ""
            for use in uses
        ]
        sizes = (row["num_seqs"], row["num_draft_tokens"], row["chunk"])
        cells = [
            row["dtype"],
            *map(str, sizes),
            row["features"],
            f"{row['lower_cpu_s']:.1f}+{row['compile_cpu_s']:.1f}",
            f"{row['lowered_ops']:,}",
            *times,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each program costs.")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--features", nargs="+", help="of these kinds of requests only")
    parser.add_argument("--launches", type=int, default=30, help="of each use")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, help="the table, again after each part")
    options = parser.parse_args()
    # What an earlier run compiled would look free.
    jax.config.update("jax_enable_compilation_cache", False)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        runner = make_runner(dtype)
        for part in options.parts:
            wanted = [
                (size, form)
                for size, form in programs_of(part)
                if options.features is None or form in options.features
            ]
            rows += measure(runner, wanted, dtype, options.launches)
            result = {"context": CONTEXT, "launches": options.launches, "rows": rows}
            record(result, options.out, command="python -m benchmarks.program_costs")
            if options.table is not None:
                options.table.write_text(table(rows), encoding="utf-8")
    print(table(rows))
    print(json.dumps({"rows": len(rows), "out": str(options.out)}))


if __name__ == "__main__":
    main()

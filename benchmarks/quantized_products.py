"""Time products with quantized weights on one core, relative to bfloat16.

A product is of one, eight or 512 rows, rounded to bfloat16, with a matrix of Gemma 2
2B's feed-forward: a step of one sequence, of a batch or of a prompt. Weights are
random, in the forms in which GGUF files and `quantization=` are kept. All forms take
turns; times are medians of processor time, which other programs change less.

Prints the table of docs/quantization.md, and writes
benchmarks/results/quantized-products-cpu.json. `--tables` only prints the recorded one.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu_pair import warn_unless_quiet
from jaxspec.bench.report import commit, now, versions
from jaxspec_checkpoints.quantization import Scheme, quantize
from jaxspec_kernels import native, panel_matmul
from jaxspec_kernels.panel_matmul import quantized_panels, to_panels

PATH = Path(__file__).parent / "results" / "quantized-products-cpu.json"
OUTPUTS, FEATURES = 9216, 2304
ROWS = (1, 8, 512)
# Products of one turn, for about equal time.
CALLS = {1: 8, 8: 4, 512: 1}
# Name, kind, group size, whether there are minima, and types that are kept so.
FORMS = (
    ("int8", None, False, "`int8`, per output"),
    ("int8", 32, False, "Q8_0, Q5_0, IQ4_NL, IQ4_XS"),
    ("int8", 16, False, "Q6_K"),
    ("int8", 32, True, "Q5_K, Q5_1"),
    ("fp8", None, False, "`fp8`, per output"),
    ("int4", 128, False, "`int4`"),
    ("int4", 128, True, "AWQ, GPTQ with zero points"),
    ("int4", 32, False, "Q4_0"),
    ("int4", 16, False, "Q3_K"),
    ("int4", 32, True, "Q4_K, Q4_1"),
    ("int4", 16, True, "Q2_K"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="print the record")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    if not options.tables:
        record = measure(OUTPUTS, FEATURES, options.turns)
        PATH.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print("\n".join(table_lines(json.loads(PATH.read_text(encoding="utf-8")))))


def measure(outputs: int, features: int, turns: int) -> dict[str, Any]:
    """Time all forms in turns, on one core."""
    # XLA starts its threads at the first operation, one for each core of the process.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    about = warn_unless_quiet()
    random = np.random.default_rng(0)
    weights = random.standard_normal((outputs, features), np.float32)
    matrices: list[Any] = [to_panels(weights.astype(jnp.bfloat16))]
    for kind, size, has_minima, _ in FORMS:
        scheme = Scheme(kind=kind, group_size=size, has_minima=has_minima)
        matrices.append(quantized_panels(*quantize(weights, scheme)))
    matrices = [jax.tree.map(jnp.asarray, panels) for panels in matrices]
    product = jax.jit(partial(panel_matmul, num_outputs=outputs, is_rounded=True))
    seconds: dict[int, list[float]] = {}
    for num_rows in ROWS:
        rows = jnp.asarray(random.standard_normal((num_rows, features), np.float32))
        taken: list[list[float]] = [[] for _ in matrices]
        for turn in range(turns + 1):
            for panels, own in zip(matrices, taken, strict=True):
                start = time.process_time()
                for _ in range(CALLS[num_rows]):
                    product(rows, panels).block_until_ready()
                if turn:  # the first compiles
                    own.append((time.process_time() - start) / CALLS[num_rows])
        seconds[num_rows] = [median(own) for own in taken]
    return {
        "benchmark": "quantized_products",
        "date": now(),
        **commit(),
        "shape": [outputs, features],
        "turns": turns,
        "instructions": native.instructions(native.load(native.read_setting())),
        "machine": about,
        "versions": versions(),
        "bytes": [
            sum(array.nbytes for array in jax.tree.leaves(panels))
            for panels in matrices
        ],
        "seconds": {str(count): found for count, found in seconds.items()},
    }


def table_lines(record: dict[str, Any]) -> list[str]:
    """Return the table: bytes, and speed relative to bfloat16 weights."""
    heads = [f"{count} row{'s' * (count > 1)}" for count in ROWS]
    lines = [
        f"| kept as | types | bits per weight | {' | '.join(heads)} |",
        "|---|---|--:|" + "--:|" * len(ROWS),
    ]
    names = [("bfloat16", "")] + [(form_of(*form[:3]), form[3]) for form in FORMS]
    size = np.prod(record["shape"])
    for index, (name, types) in enumerate(names):
        cells = [name, types, f"{8 * record['bytes'][index] / size:.1f}"]
        for count in ROWS:
            found = record["seconds"][str(count)]
            speed = f"{found[0] / found[index]:.2f}"
            cells.append(speed if index else f"{1e3 * found[0]:.3g} ms")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def form_of(kind: str, size: int | None, has_minima: bool) -> str:
    """Describe a form in words."""
    groups = "" if size is None else f" in groups of {size}"
    return f"{kind}{groups}{', minima' * has_minima}"


if __name__ == "__main__":
    main()

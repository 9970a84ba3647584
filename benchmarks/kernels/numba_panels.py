"""Products with a matrix in panels, in C++ and by numba's LLVM, on one core.

    taskset -c 0 python -m benchmarks.kernels.numba_panels    # needs numba

What decided that layers on a CPU are C++. Both read the same panels of bfloat16, widen
them to float32 and add in float32; of numba the forms that its compiler may turn into
vectors: a loop over a panel's outputs, and one variable for each of them. C++ is called
as a program calls it, so with a launch, numba by itself.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.cpu_pair import warn_unless_quiet
from jaxspec.bench.report import record
from jaxspec_kernels.panel_matmul import WIDTH, panel_matmul, to_panels

RESULT = Path(__file__).parents[1] / "results" / "numba-cpu.json"
# The bundled target's output layer.
OUTPUTS, FEATURES = 8192, 512
ROWS = 1, 6
CALLS = 100
# Of a panel, side by side: as many as the widest registers hold, and all.
SCALARS = 16, WIDTH

LOOP = """
def multiply(panels, inputs, outputs):
    sums = np.empty(({rows}, {width}), np.float32)
    for panel in range(panels.shape[0]):
        sums[:] = np.float32(0)
        for pair in range(panels.shape[1]):
            for row in range({rows}):
                first, second = inputs[2 * pair, row], inputs[2 * pair + 1, row]
                for lane in range({width}):
                    bits = panels[panel, pair, lane]
                    sums[row, lane] += first * low(bits)
                    sums[row, lane] += second * high(bits)
        for row in range({rows}):
            for lane in range({width}):
                outputs[row, panel * {width} + lane] = sums[row, lane]
"""


def scalars(rows: int, lanes: int) -> str:
    """The same with a variable for each sum, of some of a panel's outputs at a time."""
    every = [(row, lane) for lane in range(lanes) for row in range(rows)]
    lines = ["def multiply(panels, inputs, outputs):"]
    lines += [" for panel in range(panels.shape[0]):"]
    lines += [f"  for start in range(0, {WIDTH}, {lanes}):"]
    lines += [f"   s{row}_{lane} = np.float32(0)" for row, lane in every]
    lines += ["   for pair in range(panels.shape[1]):"]
    for row in range(rows):
        lines += [f"    a{row} = inputs[2 * pair, {row}]"]
        lines += [f"    b{row} = inputs[2 * pair + 1, {row}]"]
    for row, lane in every:
        if row == 0:
            lines += [f"    bits = panels[panel, pair, start + {lane}]"]
            lines += ["    x, y = low(bits), high(bits)"]
        lines += [f"    s{row}_{lane} += a{row} * x; s{row}_{lane} += b{row} * y"]
    for row, lane in every:
        to = f"outputs[{row}, panel * {WIDTH} + start + {lane}]"
        lines += [f"   {to} = s{row}_{lane}"]
    return "\n".join(lines)


def compiled_by_numba(source: str) -> Callable[..., None]:
    # Not requirements of anything else.
    import numba  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from llvmlite import ir  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from numba.extending import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        intrinsic,
    )

    def float_of_bits(_: Any, __: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.bitcast(given[0], ir.FloatType())

        return numba.float32(numba.uint32), generate

    as_float: Any = intrinsic(float_of_bits)

    @numba.njit(inline="always")
    def low(bits: Any) -> Any:
        return as_float(np.uint32(bits << np.uint32(16)))

    @numba.njit(inline="always")
    def high(bits: Any) -> Any:
        return as_float(np.uint32(bits & np.uint32(0xFFFF0000)))

    names: dict[str, Any] = {"np": np, "low": low, "high": high}
    exec(source, names)
    options = {"fastmath": {"contract"}, "boundscheck": False, "error_model": "numpy"}
    return numba.njit(**options)(names["multiply"])


def forms(matrix: np.ndarray, inputs: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Names, and functions that return the products once they are there."""
    rows, panels = len(inputs), to_panels(matrix.astype(ml_dtypes.bfloat16))
    on_device, given = jnp.asarray(panels), jnp.asarray(inputs)
    product = jax.jit(lambda one, two: panel_matmul(one, two, num_outputs=OUTPUTS))
    yield "C++", lambda: np.asarray(product(given, on_device))
    outputs = np.empty((rows, OUTPUTS), np.float32)
    pairs = np.ascontiguousarray(panels).view(np.uint32)[..., 0]
    columns = np.ascontiguousarray(inputs.T)
    sources = {"numba, a loop": LOOP.format(rows=rows, width=WIDTH)}
    sources |= {f"numba, {lanes} variables": scalars(rows, lanes) for lanes in SCALARS}
    for name, source in sources.items():
        multiply = compiled_by_numba(source)

        def run(multiply: Callable[..., None] = multiply) -> np.ndarray:
            multiply(pairs, columns, outputs)
            return outputs

        yield name, run


def main() -> None:
    device = warn_unless_quiet()
    random = np.random.default_rng(0)
    matrix = random.standard_normal((OUTPUTS, FEATURES)).astype(np.float32)
    exact = matrix.astype(ml_dtypes.bfloat16).astype(np.float64)
    found = []
    for rows in ROWS:
        inputs = random.standard_normal((rows, FEATURES)).astype(np.float32)
        expected = inputs.astype(np.float64) @ exact.T
        for name, run in forms(matrix, inputs):
            np.testing.assert_allclose(run(), expected, atol=1e-3, rtol=0)
            seconds = []
            for _ in range(CALLS):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            found.append(
                {
                    "form": name,
                    "rows": rows,
                    "median_ms": round(1e3 * statistics.median(seconds), 4),
                    "least_ms": round(1e3 * min(seconds), 4),
                }
            )
            print(json.dumps(found[-1]))
    result = {"outputs": OUTPUTS, "features": FEATURES, "products": found}
    command = "taskset -c 0 python -m benchmarks.kernels.numba_panels"
    record(result | {"machine": device}, RESULT, command=command)


if __name__ == "__main__":
    main()

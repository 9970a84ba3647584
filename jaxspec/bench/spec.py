"""`spec`: measures whether speculation pays, with which K, up to which batch size.

Plain decoding and every K alternate for every batch size and temperature. The speed of
decoding with the whole batch is compared, without prefill. `--forms` and
`--all-methods` compare drafts of several engines instead: see `compare` and `methods`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.bench import compare, methods
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Measured
from jaxspec.bench.offline import Offline, open_offline, sweep_of
from jaxspec.bench.report import PLAIN, forced_line, table, write
from jaxspec.bench.summary import (
    against_ceiling,
    ceiling_lines,
    cost_ratios,
    is_equal,
    parts_table,
    speed_ups,
    summarize,
)
from jaxspec.errors import ConfigError, wrong_argument

# Minimum median speed-up over plain decoding at which a K counts as worth using.
MIN_GAIN = 1.02
# Values of K measured by default, besides the engine's own. All use the engine's
# programs, whose target pass computes the engine's K + 1 positions for any smaller K
# too.
SWEEP = (1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One K at one batch size and temperature.

    Attributes:
        speed_up: Speed / that of plain decoding: median, minimum, maximum of the
            repeats.
        num_runs: Number of repeats.
        acceptance_rate: Accepted / proposed draft tokens; None if nothing was drafted.
    """

    temperature: float
    batch_size: int
    num_draft_tokens: int
    speed_up: Mapping[str, float]
    num_runs: int
    acceptance_rate: float | None

    @property
    def pays(self) -> bool:
        """Whether every repeat beats plain decoding, and the median by `MIN_GAIN`."""
        return self.speed_up["least"] > 1 and self.speed_up["median"] >= MIN_GAIN

    @property
    def is_unclear(self) -> bool:
        """Whether the fastest repeat reaches `MIN_GAIN` although `pays` is false."""
        return not self.pays and self.speed_up["most"] >= MIN_GAIN

    def __str__(self) -> str:
        one = self.speed_up
        return (
            f"{one['median']:.2f} times plain, {one['least']:.2f} to {one['most']:.2f} "
            f"in {self.num_runs} runs"
        )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the subcommand; return the results that `--json` prints.

    Raises:
        ArgumentError: A flag is invalid; nothing was run.
        BenchError: The measurement is invalid.
    """
    if options.all_methods is not None:
        return methods.run(options)
    if options.forms:
        return compare.run(options)
    for flag in ("--by-category", "--resume"):
        value = getattr(options, flag[2:].replace("-", "_"))
        if value:
            allowed = "left out without --all-methods"
            raise wrong_argument(ConfigError, flag, allowed, value)
    sizes, temperatures = sweep_of(options)
    offline = open_offline(options, num_prompts=sizes[-1], num_seqs=sizes[-1])
    # Fixed K: every K is measured even if it does not pay.
    offline.engine.policy.is_adaptive = False
    counts = _counts(offline, options.draft_tokens)
    result, device = offline.new_result("spec"), offline.device()
    parts = {size: offline.parts(size, (0, *counts)) for size in sizes}
    cells, entries = [], []
    num_runs = len(temperatures) * len(sizes) * (len(counts) + 1) * options.num_iters
    with offline.bench(num_runs) as bench:
        for temperature in temperatures:
            for size in sizes:
                modes = {
                    str(k) if k else PLAIN: offline.batch(
                        k, slice(size), temperature=temperature
                    )
                    for k in (0, *counts)
                }
                measured = bench.alternate(modes)
                ratios = {
                    k: cost_ratios(device["cost_ratio"], parts[size], k) for k in counts
                }
                found, entry = _point(measured, temperature, size, ratios)
                if offline.must_agree(temperature):
                    for k, one in entry["by_num_draft_tokens"].items():
                        one["is_equal"] = is_equal(measured, k)
                cells += found
                entries.append(entry)
    offline.engine.shutdown()
    offline.print_label()
    print(cell_table(cells))
    for entry in entries:
        print("\n".join(_ceilings(entry)))
    for size, found in parts.items():
        # Parts are timed with the first temperature's program.
        speeds = {
            cell.num_draft_tokens: cell.speed_up["median"]
            for cell in cells
            if (cell.temperature, cell.batch_size) == (temperatures[0], size)
        }
        if found:
            print(f"\n{parts_table(found, device, speeds)}")
    verdict = answer(cells)
    if offline.forced_acceptance is not None:
        verdict.append(forced_line(offline.forced_acceptance))
    print("\n" + "\n".join(verdict) + "\n")
    result |= {
        "device": device,
        "points": entries,
        "parts": [one.as_json() for found in parts.values() for one in found],
        "answer": verdict,
    }
    write(result, options.output_json)
    return [result]


def _counts(offline: Offline, wanted: Sequence[int] | None) -> list[int]:
    """Return the values of K to measure: the flag's, or defaults up to the engine's."""
    max_k = offline.engine.policy.compiled_levels[-1]
    if not max_k:
        raise ConfigError(
            "spec measures speculation, and these flags name no drafts: give "
            "--speculative-model or --speculative-config.",
            parameter="speculative_model",
        )
    for k in wanted or ():
        if not 1 <= k <= max_k:
            allowed = f"from 1 to --num-speculative-tokens={max_k}"
            raise wrong_argument(ConfigError, "--draft-tokens", allowed, k)
    return sorted({*(wanted or (*(k for k in SWEEP if k < max_k), max_k))})


def _point(
    measured: Measured,
    temperature: float,
    size: int,
    ratios: Mapping[int, Mapping[str, float]],
) -> tuple[list[Cell], dict[str, Any]]:
    """Return all K of one batch size and temperature, as cells and as a result.

    Args:
        ratios: Cost ratios of drafts, by K.
    """
    cells, by_k = [], {}
    for k in ratios:
        runs = measured.runs[str(k)]
        ratio, found = speed_ups(measured, str(k), is_decode=True), summarize(runs)
        found["decode_speed_up"] = ratio
        found["ceiling"] = against_ceiling(
            runs, num_draft_tokens=k, ratios=ratios[k], speed_up=ratio
        )
        by_k[str(k)] = found
        acceptance = sum((run.acceptance for run in runs), Acceptance())
        cells.append(
            Cell(
                temperature=temperature,
                batch_size=size,
                num_draft_tokens=k,
                speed_up=ratio,
                num_runs=len(runs),
                acceptance_rate=acceptance.rate if acceptance.num_drafts else None,
            )
        )
    entry = {
        "temperature": temperature,
        "batch_size": size,
        "num_discarded_runs": measured.num_discarded,
        PLAIN: summarize(measured.runs[PLAIN]),
        "by_num_draft_tokens": by_k,
    }
    return cells, entry


def _ceilings(entry: dict[str, Any]) -> list[str]:
    """Return sentences that compare a point's fastest K with its ceilings."""
    k, best = max(
        entry["by_num_draft_tokens"].items(),
        key=lambda pair: pair[1]["decode_speed_up"]["median"],
    )
    where = f"temperature {entry['temperature']:g}, batch {entry['batch_size']}"
    if best["ceiling"] is None:
        return [f"{where}: nothing was drafted"]
    return [f"{where}: {line}" for line in ceiling_lines(best["ceiling"], int(k))]


def cell_table(cells: Sequence[Cell]) -> str:
    """Format speed-ups by K, a row for every temperature and batch size."""
    counts = sorted({cell.num_draft_tokens for cell in cells})
    rows = [["temperature, batch", *(f"K = {k}" for k in counts), "acceptance"]]
    by_place: dict[tuple[float, int], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.temperature, cell.batch_size), []).append(cell)
    for (temperature, size), found in by_place.items():
        speeds = {one.num_draft_tokens: one.speed_up["median"] for one in found}
        rate = found[-1].acceptance_rate
        rows.append(
            [
                f"{temperature:g}, {size}",
                *(f"{speeds[k]:.2f}" if k in speeds else "-" for k in counts),
                "-" if rate is None else f"{rate:.3f}",
            ]
        )
    return (
        "Speed-up of decoding against plain decoding (medians); acceptance at the "
        f"highest K:\n{table(rows)}"
    )


def answer(cells: Sequence[Cell]) -> list[str]:
    """Return sentences on whether drafts pay, with which K, up to which batch size."""
    lines = []
    for temperature in sorted({cell.temperature for cell in cells}):
        best: dict[int, Cell] = {}
        for cell in sorted(cells, key=lambda cell: cell.speed_up["median"]):
            if cell.temperature == temperature:
                best[cell.batch_size] = cell
        lines.append(f"Temperature {temperature:g}: {_answer_at(best)}")
    lines.append(
        f"A K pays here when every repeat beat plain decoding and the median is at "
        f"least {MIN_GAIN:g} times as fast; it does not when no repeat was that fast."
    )
    return lines


def _answer_at(best: dict[int, Cell]) -> str:
    """Return the sentences for one temperature, from the best K of each batch size."""
    best = dict(sorted(best.items()))
    paying = [size for size, cell in best.items() if cell.pays]
    unclear = [size for size, cell in best.items() if cell.is_unclear]
    losing = [size for size in best if size not in (*paying, *unclear)]
    if paying:
        found = ", ".join(
            f"K = {best[size].num_draft_tokens} at batch {size} ({best[size]})"
            for size in paying
        )
        text = f"speculation pays: {found}."
    elif losing:
        fastest = max(
            (best[size] for size in losing), key=lambda cell: cell.speed_up["median"]
        )
        text = (
            f"speculation does not pay at batch {', '.join(map(str, losing))}; the "
            f"best was {fastest}, with K = {fastest.num_draft_tokens} at batch "
            f"{fastest.batch_size}."
        )
    else:
        text = "these runs do not show whether speculation pays."
    if unclear:
        found = ", ".join(f"batch {size} ({best[size]})" for size in unclear)
        text += (
            f" Unclear at {found}: raise --num-iters, and run nothing else on the "
            "machine."
        )
    if not paying:
        return text
    highest = max(*paying, *unclear) if unclear else paying[-1]
    above = [size for size in losing if size > highest]
    below = [size for size in losing if size < highest]
    if below:
        text += f" It does not at batch {', '.join(map(str, below))}."
    if above:
        text += (
            f" From batch {above[0]} on it does not ({best[above[0]]}): "
            f"--speculative-disable-by-batch-size {highest} turns it off above "
            f"batch {highest}."
        )
    elif not unclear:
        text += f" No batch was found at which it stops paying, up to {paying[-1]}."
    return text

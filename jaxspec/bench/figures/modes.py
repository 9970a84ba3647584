"""Owns the figure of one workload: plain decoding and speculation side by side."""

from typing import Any

from matplotlib.figure import FigureBase

from jaxspec.bench.figures import form

TITLES = {
    "latency": "One batch from start to end",
    "throughput": "Prompts that all wait from the start",
}
MODES = {"plain": form.PLAIN, "speculative": form.SPECULATIVE}
NOTE = (
    "Bars: medians. Whiskers: the least to the most of the runs; of times, the 10th to "
    "the 90th percentile. ITL: between two outputs, which may hold several tokens."
)
# Spreads over runs, and percentiles over requests: key, label, factor.
_OVER_RUNS = (
    ("output_tokens_per_s", "tokens/s, whole", 1.0),
    ("decode_tokens_per_s", "tokens/s, decoding", 1.0),
)
_OVER_REQUESTS = (
    ("ttft_s", "TTFT, ms", 1e3),
    ("tpot_s", "TPOT, ms", 1e3),
    ("itl_s", "ITL, ms", 1e3),
)


def draw_modes(place: FigureBase, result: form.Result) -> None:
    """A panel for every measure, a bar for every mode.

    Args:
        result: Of `latency` or `throughput`.
    """
    form.head(place, TITLES[result["benchmark"]], result)
    modes = [name for name in MODES if name in result]
    by_label = {
        label: [_scaled(spread_of(result[name][key]), factor) for name in modes]
        for key, label, factor in (*_OVER_RUNS, *_OVER_REQUESTS)
        if all(result[name].get(key) for name in modes)
    }
    grid = place.subplots(1, len(by_label), squeeze=False)
    for axes, (label, spreads) in zip(grid[0], by_label.items(), strict=True):
        axes.set_title(label)
        for x, (name, spread) in enumerate(zip(modes, spreads, strict=True)):
            form.bars(axes, [x], [spread], MODES[name])
            axes.annotate(
                f"{spread['median']:.3g}",
                (x, 0),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
        axes.set_xticks(range(len(modes)), ["plain", "drafts"][: len(modes)])
        axes.margins(x=0.2)


def spread_of(told: dict[str, Any]) -> form.Spread:
    """What a whisker spans: the runs' own spread, or percentiles of requests."""
    if "median" in told:
        return told
    return {"median": told["50"], "least": told["10"], "most": told["90"]}


def _scaled(spread: form.Spread, factor: float) -> form.Spread:
    return {name: factor * value for name, value in spread.items()}

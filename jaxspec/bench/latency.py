"""Owns `latency`: one batch from the first request to the last token, over and over."""

import argparse

import numpy as np

from jaxspec.bench.offline import PLAIN, SPECULATIVE, open_offline
from jaxspec.bench.plot import plot
from jaxspec.bench.report import PERCENTILES, write
from jaxspec.bench.summary import (
    compared,
    comparison,
    cost_ratios,
    parts_table,
)
from jaxspec.errors import ConfigError, check_integer


def run(options: argparse.Namespace) -> None:
    """Run the subcommand.

    Raises:
        ArgumentError: A flag cannot work; nothing was run.
        BenchError: Nothing that was measured means anything.
    """
    size = check_integer(ConfigError, "--batch-size", options.batch_size, low=1)
    offline = open_offline(options, num_prompts=size, num_seqs=size)
    result, device = offline.new_result("latency"), offline.device()
    count = offline.num_draft_tokens
    parts = offline.parts(size, sorted({0, count}))
    modes = {name: offline.batch(k) for name, k in offline.modes().items()}
    with offline.bench(len(modes) * options.num_iters) as bench:
        measured = bench.alternate(modes)
    found = compared(
        measured,
        num_draft_tokens=count,
        ratios=cost_ratios(device["cost_ratio"], parts, count),
        must_agree=offline.must_agree(options.temperature),
    )
    offline.engine.shutdown()
    offline.print_label()
    mode = SPECULATIVE if count else PLAIN
    latencies = found[mode]["elapsed_s"]
    shares = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    average = float(np.mean(latencies))
    # As vLLM has it, of the engine as the flags say.
    print(f"Avg latency: {average} seconds")
    for share, seconds in shares.items():
        print(f"{share}% percentile latency: {seconds} seconds")
    print(f"\n{comparison(found, count)}")
    if parts:
        print(f"\n{parts_table(parts, device['copy_bytes_per_s'])}\n")
    result |= {
        "device": device,
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": shares,
        **found,
        "parts": [one.as_json() for one in parts],
    }
    write(result, options.output_json)
    plot(result, options.plot)

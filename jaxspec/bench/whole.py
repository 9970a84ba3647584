"""Owns `latency` and `throughput`: all of a set of prompts, plain and with drafts.

`latency` is one batch from the first request to the last token; for `throughput`, more
prompts than run at a time all wait from the start.
"""

import argparse
from typing import Any

import numpy as np

from jaxspec.bench.offline import PLAIN, SPECULATIVE, open_offline
from jaxspec.bench.plot import plot
from jaxspec.bench.report import PERCENTILES, write
from jaxspec.bench.summary import compared, comparison, cost_ratios, parts_table
from jaxspec.errors import ConfigError, check_integer


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run either subcommand; returns what `--json` prints.

    Raises:
        ArgumentError: A flag cannot work; nothing was run.
        BenchError: Nothing that was measured means anything.
    """
    is_latency = options.command == "latency"
    if is_latency:
        size = number = check_integer(
            ConfigError, "--batch-size", options.batch_size, low=1
        )
        offline = open_offline(options, num_prompts=size, num_seqs=size)
    else:
        number = check_integer(ConfigError, "--num-prompts", options.num_prompts, low=1)
        offline = open_offline(options, num_prompts=number, num_seqs=None)
        size = min(number, offline.engine.config.max_num_seqs)
    result, device = offline.new_result(options.command), offline.device()
    count = offline.num_draft_tokens
    parts = offline.parts(size, sorted({0, count}))
    # Where nobody reads along, prompts need not make way for streams; hence no ITL.
    modes = {
        name: offline.batch(k, is_streamed=is_latency)
        for name, k in offline.modes().items()
    }
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
    # As vLLM has it, of the engine as the flags say.
    ours = found[SPECULATIVE if count else PLAIN]
    lines, own = _latency(ours) if is_latency else _throughput(ours, number)
    blocks = [comparison(found, count)]
    if parts:
        blocks.append(parts_table(parts, device))
    blocks.insert(0 if is_latency else len(blocks), "\n".join(lines))
    print("\n\n".join(blocks), end="\n\n" if parts or not is_latency else "\n")
    parts_told = [one.as_json() for one in parts]
    result |= {"device": device, **own, **found, "parts": parts_told}
    write(result, options.output_json)
    plot(result, options.plot)
    return [result]


def _latency(ours: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Seconds of whole batches, in words and as a result has them."""
    latencies = ours["elapsed_s"]
    shares = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    average = float(np.mean(latencies))
    lines = [f"Avg latency: {average} seconds"]
    lines += [f"{p}% percentile latency: {s} seconds" for p, s in shares.items()]
    return lines, {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": shares,
    }


def _throughput(ours: dict[str, Any], number: int) -> tuple[list[str], dict[str, Any]]:
    """Requests and tokens by the time of all."""
    requests_per_s = ours["requests_per_s"]["median"]
    output_per_s = ours["output_tokens_per_s"]["median"]
    num_tokens = ours["num_prompt_tokens"] + ours["num_output_tokens"]
    total_per_s = output_per_s * num_tokens / ours["num_output_tokens"]
    lines = [
        f"Throughput: {requests_per_s:.2f} requests/s, {total_per_s:.2f} total "
        f"tokens/s, {output_per_s:.2f} output tokens/s",
        f"Total num prompt tokens:  {ours['num_prompt_tokens']}",
        f"Total num output tokens:  {ours['num_output_tokens']}",
    ]
    return lines, {
        "num_requests": number,
        "total_num_tokens": num_tokens,
        "elapsed_time": number / requests_per_s,
        "requests_per_second": requests_per_s,
        "tokens_per_second": total_per_s,
    }

"""`latency` and `throughput`: time prompts, alternately plain and with drafts.

`latency` times one batch from the first request to the last token; `throughput` has
more prompts than run at a time, all queued at the start.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.bench.measure import Measured
from jaxspec.bench.offline import open_offline
from jaxspec.bench.report import (
    PERCENTILES,
    PLAIN,
    SPECULATIVE,
    milliseconds,
    table,
    write,
)
from jaxspec.bench.summary import (
    against_ceiling,
    ceiling_lines,
    cost_ratios,
    is_equal,
    parts_table,
    speed_ups,
    summarize,
)
from jaxspec.errors import ConfigError, check_integer


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run either subcommand; return the results that `--json` prints.

    Raises:
        ArgumentError: A flag is invalid; nothing was run.
        BenchError: The measurement is invalid.
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
    # Throughput requests are not streamed, because the scheduler would delay prefill
    # for streams. So they have no inter-token latency.
    modes = {PLAIN: offline.batch(0, is_streamed=is_latency)}
    if count:
        modes[SPECULATIVE] = offline.batch(count, is_streamed=is_latency)
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
    # The keys that vLLM prints describe the engine as configured, with drafts if it has
    # any.
    ours = found[SPECULATIVE if count else PLAIN]
    lines, own = _latency(ours) if is_latency else _throughput(ours, number)
    blocks = [comparison(found, count)]
    if parts:
        blocks.append(parts_table(parts, device))
    blocks.insert(0 if is_latency else len(blocks), "\n".join(lines))
    print("\n\n".join(blocks), end="\n\n" if parts or not is_latency else "\n")
    result |= {"device": device, **own, **found}
    result["parts"] = [one.as_json() for one in parts]
    write(result, options.output_json)
    return [result]


def _latency(ours: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return latencies of whole batches: lines to print, and vLLM's keys."""
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
    """Return requests/s and tokens/s: lines to print, and vLLM's keys."""
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


def compared(
    measured: Measured,
    *,
    num_draft_tokens: int,
    ratios: Mapping[str, float],
    must_agree: bool,
) -> dict[str, Any]:
    """Return both modes, the speed-up and the ceiling, as fields of a result.

    Args:
        must_agree: Also report whether the texts of both modes are equal.
    """
    found: dict[str, Any] = {name: summarize(r) for name, r in measured.runs.items()}
    found["num_discarded_runs"] = measured.num_discarded
    if SPECULATIVE not in measured.runs:
        return found
    found["speed_up"] = speed_ups(measured, SPECULATIVE, is_decode=False)
    found["decode_speed_up"] = speed_ups(measured, SPECULATIVE, is_decode=True)
    if must_agree:
        found["is_equal"] = is_equal(measured, SPECULATIVE)
    found["ceiling"] = against_ceiling(
        measured.runs[SPECULATIVE],
        num_draft_tokens=num_draft_tokens,
        ratios=ratios,
        speed_up=found["decode_speed_up"],
    )
    return found


def comparison(found: Mapping[str, Any], num_draft_tokens: int) -> str:
    """Format the fields of `compared`."""
    modes = {name: found[name] for name in (PLAIN, SPECULATIVE) if name in found}
    lines = [mode_table(modes)]
    if SPECULATIVE in modes:
        speeds = [
            f"{label} {one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
            for label, one in (
                ("whole", found["speed_up"]),
                ("decoding", found["decode_speed_up"]),
            )
        ]
        lines.append(f"speed-up by speculation: {', '.join(speeds)}")
        if "acceptance" not in modes[SPECULATIVE]:
            lines.append("no drafts: the engine predicted that none would pay (K = 0)")
    if "is_equal" in found:
        lines.append(f"greedy texts: {'equal' if found['is_equal'] else 'different'}")
    if found.get("ceiling"):
        lines += ceiling_lines(found["ceiling"], num_draft_tokens)
    return "\n".join(lines)


def mode_table(summaries: Mapping[str, dict[str, Any]]) -> str:
    """Format the modes side by side: speeds, times in ms, acceptance."""
    modes = summaries.values()
    rows = [["", *summaries]]
    for label, name in (
        ("output tokens/s", "output_tokens_per_s"),
        ("decoding tokens/s", "decode_tokens_per_s"),
    ):
        speeds = [one[name]["median"] if name in one else None for one in modes]
        rows.append([label, *("-" if v is None else f"{v:.1f}" for v in speeds)])
    for label, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s")):
        times = [
            " ".join(milliseconds(one[name].get(p)) for p in ("50", "99"))
            for one in modes
        ]
        rows.append([f"{label}, ms (median, p99)", *times])
    for label, name in (("round, ms", "round_s"), ("host per round, ms", "host_s")):
        rows.append(
            [label, *(milliseconds(one.get(name, {}).get("median")) for one in modes)]
        )
    for name in ("acceptance_rate", "mean_acceptance_length"):
        found = [one.get("acceptance") for one in modes]
        values = ["-" if one is None else f"{one[name]:.3f}" for one in found]
        rows.append([name.replace("_", " "), *values])
    lines = [table(rows)]
    for name, one in summaries.items():
        if "acceptance" in one:
            rates = one["acceptance"]["acceptance_rate_per_position"]
            shown = " ".join(f"{rate:.3f}" for rate in rates)
            lines.append(f"acceptance by position, {name}: {shown}")
    return "\n".join(lines)

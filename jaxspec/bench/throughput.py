"""Owns `throughput`: many prompts that all wait from the start, to the last token."""

import argparse

from jaxspec.bench.offline import PLAIN, SPECULATIVE, open_offline
from jaxspec.bench.plot import plot
from jaxspec.bench.report import write
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
    number = check_integer(ConfigError, "--num-prompts", options.num_prompts, low=1)
    offline = open_offline(options, num_prompts=number, num_seqs=None)
    result, device = offline.new_result("throughput"), offline.device()
    count = offline.num_draft_tokens
    size = min(number, offline.engine.config.max_num_seqs)
    parts = offline.parts(size, sorted({0, count}))
    # Nobody reads along, so prompts need not make way for streams; hence no ITL.
    modes = {
        name: offline.batch(k, is_streamed=False) for name, k in offline.modes().items()
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
    ours = found[SPECULATIVE if count else PLAIN]
    requests_per_s = ours["requests_per_s"]["median"]
    output_per_s = ours["output_tokens_per_s"]["median"]
    num_tokens = ours["num_prompt_tokens"] + ours["num_output_tokens"]
    total_per_s = output_per_s * num_tokens / ours["num_output_tokens"]
    print(comparison(found, count))
    if parts:
        print(f"\n{parts_table(parts, device['copy_bytes_per_s'])}")
    # As vLLM has it, of the engine as the flags say.
    print(
        f"\nThroughput: {requests_per_s:.2f} requests/s, {total_per_s:.2f} total "
        f"tokens/s, {output_per_s:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {ours['num_prompt_tokens']}\n"
        f"Total num output tokens:  {ours['num_output_tokens']}\n"
    )
    result |= {
        "device": device,
        "num_requests": number,
        "total_num_tokens": num_tokens,
        "elapsed_time": number / requests_per_s,
        "requests_per_second": requests_per_s,
        "tokens_per_second": total_per_s,
        **found,
        "parts": [one.as_json() for one in parts],
    }
    write(result, options.output_json)
    plot(result, options.plot)

"""Results with made-up values, in the form that the subcommands write."""

from typing import Any

Made = dict[str, Any]
ARGUMENTS = {
    "model": "a/target",
    "speculative_model": "a/draft",
    "num_speculative_tokens": 5,
}


def spread(median: float, share: float = 0.1) -> dict[str, float]:
    return {
        "median": median,
        "least": median * (1 - share),
        "most": median * (1 + share),
    }


def made_header(
    benchmark: str, *, forced_acceptance: list[float] | None = None, **arguments: Any
) -> Made:
    return {
        "benchmark": benchmark,
        "date": "2026-11-22T08:00:00",
        "commit": "0123456789ab",
        "has_changes": False,
        "arguments": ARGUMENTS | arguments,
        "forced_acceptance": forced_acceptance,
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"jax": "0.10.2"},
        "device": {"platform": "cpu", "kind": "cpu", "count": 1, "dtype": "bfloat16"},
    }


def _cell(size: int, count: int, *, rate: float) -> Made:
    kept = [rate**place for place in range(1, count + 1)]
    length = 1 + sum(kept)
    return {
        "decode_speed_up": spread(length / (1 + 0.3 * count + 0.05 * size)),
        "round_s": spread(0.003 + 0.0015 * count + (1 - rate) * 0.005),
        "host_s": spread(0.001 + 0.0002 * size),
        "acceptance": {"num_drafts": 100, "acceptance_rate_per_position": kept},
        "ceiling": {
            "bytes": {"speed_up_ceiling": length / (1 + 0.1 * count)},
            "measured": {"speed_up_ceiling": length / (1 + 0.2 * count)},
        },
    }


def spec_result(
    *,
    sizes: tuple[int, ...] = (1, 4, 8),
    temperatures: tuple[float, ...] = (0.0, 0.8),
    counts: tuple[int, ...] = (1, 2, 3, 5),
    **arguments: Any,
) -> Made:
    """Acceptance is 0.8 greedily, less elsewhere; a draft takes 1.2 ms."""
    points = [
        {
            "temperature": temperature,
            "batch_size": size,
            "plain": {"round_s": spread(0.0044), "host_s": spread(0.001)},
            "by_num_draft_tokens": {
                str(count): _cell(size, count, rate=0.8 - 0.2 * temperature)
                for count in counts
            },
        }
        for temperature in temperatures
        for size in sizes
    ]
    parts = [
        {
            "num_seqs": size,
            "num_draft_tokens": count,
            "draft_s": 0.0012 * count,
            "verify_s": 0.004 + 0.0002 * size,
            "accept_s": 0.0003,
        }
        for size in sizes
        for count in (0, *counts)
    ]
    return made_header("spec", **arguments) | {"points": points, "parts": parts}


def run_result(benchmark: str, *, has_drafts: bool = True, **arguments: Any) -> Made:
    """Of `latency` or `throughput`: drafts make all twice as fast but the TTFT."""
    found = made_header(benchmark, **arguments)
    for name, factor in (("plain", 1.0), ("speculative", 2.0)):
        found[name] = {
            "output_tokens_per_s": spread(100 * factor),
            "decode_tokens_per_s": spread(120 * factor),
            "ttft_s": {"mean": 0.05, "10": 0.04, "50": 0.05, "90": 0.08},
            "tpot_s": {
                "mean": 0.01,
                "10": 0.009 / factor,
                "50": 0.01 / factor,
                "90": 0.02 / factor,
            },
            # Requests of `throughput` give only their last output.
            "itl_s": {},
        }
    if not has_drafts:
        del found["speculative"]
    return found


def serve_entry(limit: int | None, *, rate: Any = "inf", factor: float = 1.0) -> Made:
    """Of `serve` at one load; plain takes twice the time."""
    count = limit or 32
    found: Made = {
        "output_throughput": 200 * count**0.5 * factor,
        "median_e2el_ms": 500 * count**0.5 / factor,
        "median_ttft_ms": 20 + 2 * count / factor,
    }
    plain = {
        "output_throughput": found["output_throughput"] / 2,
        "median_e2el_ms": found["median_e2el_ms"] * 2,
        "median_ttft_ms": found["median_ttft_ms"] - 5,
    }
    own: Made = {"model_id": "a/target", "max_concurrency": limit, "request_rate": rate}
    own |= {"spec_decode_num_drafts": 10, "plain": plain}
    made = made_header("serve") | own | found
    for name in ("speculative_model", "num_speculative_tokens"):
        del made["arguments"][name]
    # Only a server that forces acceptance has the last.
    del made["device"], made["forced_acceptance"]
    return made

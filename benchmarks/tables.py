"""The tables of `cpu_pair.py`, for a terminal."""

from statistics import median
from typing import Any

MIB = 2**20


def result_table(result: dict[str, Any]) -> str:
    """Everything that was measured, at most 88 columns wide."""
    machine = result["machine"]
    lines = [
        f"{result['target']} with {result['draft']}, {result['dtype']} on "
        f"{result['device']}",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}",
        f"batch 1, {result['arguments']['num_tokens']} new tokens, "
        f"K = {result['arguments']['num_speculative_tokens']}, medians of "
        f"{result['arguments']['repeats']}",
    ]
    for mode, measured in result["modes"].items():
        controls = ", ".join(f"{k} {v:g}" for k, v in measured["controls"].items())
        lines += ["", f"{mode} ({controls})", *_mode_table(measured["rows"])]
        if mode == "greedy":
            row = measured["rows"]["all"]
            equal = f"{row['num_equal']} of {row['num_prompts']}"
            lines.append(f"same text with and without speculation: {equal} prompts")
    lines += ["", *_peer_lines(result), *_startup_lines(result["startup"])]
    return "\n".join(lines)


def _mode_table(rows: dict[str, Any]) -> list[str]:
    names = ["domain", "plain", "spec.", "speed-", "accept.", "mean", "tokens/"]
    names += ["round", "host", "host"]
    units = ["", "tok/s", "tok/s", "up", "rate", "length", "round", "ms", "ms", "share"]
    lines = [_line(names), _line(units)]
    for domain, row in rows.items():
        spent = row["speculative_round"]
        lines.append(
            _line(
                [
                    domain,
                    f"{row['plain_tokens_per_s']:.1f}",
                    f"{row['speculative_tokens_per_s']:.1f}",
                    f"{row['speed_up']:.2f}x",
                    f"{row['acceptance_rate']:.3f}",
                    f"{row['mean_acceptance_length']:.2f}",
                    f"{row['tokens_per_round']:.2f}",
                    f"{spent['round_s'] * 1e3:.2f}",
                    f"{spent['host_s'] * 1e3:.2f}",
                    f"{spent['host_share']:.0%}",
                ]
            )
        )
    spent = rows["all"]["plain_round"]
    lines.append(
        f"plain round: {spent['round_s'] * 1e3:.2f} ms, host "
        f"{spent['host_s'] * 1e3:.2f} ms ({spent['host_share']:.0%})"
    )
    return lines


def _line(cells: list[str]) -> str:
    return f"{cells[0]:<9}" + "".join(f"{cell:>8}" for cell in cells[1:])


def _peer_lines(result: dict[str, Any]) -> list[str]:
    peers = result["huggingface"]
    if "skipped" in peers:
        return [f"HuggingFace generate: skipped, {peers['skipped']}"]
    ours = result["modes"]["greedy"]["rows"]["all"]["plain_tokens_per_s"]
    return [
        f"HuggingFace generate, {dtype}, {found['threads']} threads, greedy: "
        f"{hf_speed(found):.1f} tok/s; ours without speculation is "
        f"{ours / hf_speed(found):.2f}x that"
        for dtype, found in peers.items()
    ]


def hf_speed(found: dict[str, Any]) -> float:
    """Median over prompts of the medians over repeats, in tokens/s."""
    return median(median(speeds) for speeds in found["tokens_per_s"])


def _startup_lines(startup: dict[str, Any]) -> list[str]:
    if "skipped" in startup:
        return [f"Start: skipped, {startup['skipped']}"]
    return [
        f"{kind} start: first token after {found['first_token_s']:.1f} s, peak memory "
        f"{found['peak_resident_bytes'] / MIB:.0f} MiB"
        for kind, found in startup.items()
    ]


def profile_table(found: dict[str, Any]) -> str:
    """The rounds of every K, for `--profile`."""
    lines = [f"{'K':<14}{'round ms':>10}{'host ms':>10}{'tokens/round':>14}"]
    entries = {str(k): cost for k, cost in found["rounds"].items()}
    for name, cost in (entries | {"draft alone": found["draft_alone"]}).items():
        lines.append(
            f"{name:<14}{cost['round_s'] * 1e3:>10.2f}{cost['host_s'] * 1e3:>10.2f}"
            f"{cost['tokens_per_round']:>14.2f}"
        )
    highest = max(found["rounds"])
    costs = {k: cost["round_s"] for k, cost in found["rounds"].items()}
    added = costs[highest] - costs[0]
    lines += [
        f"K = {highest} costs {costs[highest] / costs[0]:.2f} plain rounds: "
        f"{added / highest * 1e3:.2f} ms per draft token, its row in the target "
        "included",
        f"draft passes and their rows: {added / costs[highest]:.0%} of that round",
    ]
    return "\n".join(lines)

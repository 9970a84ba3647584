"""Owns what several runs of one mode come to, and how modes and ceilings compare."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.ceiling import best_num_draft_tokens, speed_up_ceiling
from jaxspec.bench.measure import Measured, Run
from jaxspec.bench.offline import PLAIN, SPECULATIVE
from jaxspec.bench.parts import Parts
from jaxspec.bench.report import milliseconds, percentiles, spread, table
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import Hits, Place, count_ranks

Ranks = dict[Place, Hits]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians and spread over repeats; times of requests over all of them."""
    decodes = [run.decode for run in runs if run.decode is not None]
    acceptance = sum((run.acceptance for run in runs), Acceptance())
    found: dict[str, Any] = {
        "elapsed_s": [run.elapsed_s for run in runs],
        "output_tokens_per_s": spread([run.output_tokens_per_s for run in runs]),
        "requests_per_s": spread([len(run.token_ids) / run.elapsed_s for run in runs]),
        "num_output_tokens": runs[0].num_output_tokens,
        "num_prompt_tokens": runs[0].num_prompt_tokens,
        "ttft_s": percentiles([one for run in runs for one in run.first_token_s]),
        "tpot_s": percentiles([one for run in runs for one in run.per_token_s]),
        "itl_s": percentiles([one for run in runs for one in run.inter_token_s]),
    }
    if decodes:
        found |= {
            "decode_tokens_per_s": spread([one.tokens_per_s for one in decodes]),
            "round_s": spread([one.round_s for one in decodes]),
            "host_s": spread([one.host_per_round_s for one in decodes]),
            "is_full_batch": all(one.num_seqs is not None for one in decodes),
        }
    if acceptance.num_drafts:
        found["acceptance"] = acceptance.as_json()
    return found


def speed_ups(measured: Measured, mode: str, *, is_decode: bool) -> dict[str, float]:
    """A mode's speed by that of the plain run beside it, repeat by repeat.

    Args:
        is_decode: Compare decoding alone, where there is any; else the whole time.
    """

    def speed(run: Run) -> float:
        if is_decode and run.decode is not None:
            return run.decode.tokens_per_s
        return run.output_tokens_per_s

    pairs = zip(measured.runs[mode], measured.runs[PLAIN], strict=True)
    return spread([speed(ours) / speed(plain) for ours, plain in pairs])


def is_equal(measured: Measured, mode: str) -> bool:
    """Whether every run of a mode gave the texts of the first plain run."""
    texts = measured.runs[PLAIN][0].token_ids
    return all(run.token_ids == texts for run in measured.runs[mode])


def cost_ratios(
    bytes_ratio: float, parts: Sequence[Parts], num_draft_tokens: int
) -> dict[str, float]:
    """What a draft pass costs of a plain round: in bytes, and as it was measured.

    The first is what an engine could reach that only waits for the memory; the second,
    where parts were timed, takes both models' passes as they are.
    """
    found, by_count = {"bytes": bytes_ratio}, {p.num_draft_tokens: p for p in parts}
    plain, drafted = by_count.get(0), by_count.get(num_draft_tokens)
    if num_draft_tokens and plain and drafted and plain.device_s:
        found["measured"] = drafted.draft_s / num_draft_tokens / plain.device_s
    return found


def against_ceiling(
    runs: Sequence[Run],
    *,
    num_draft_tokens: int,
    ratios: Mapping[str, float],
    speed_up: Mapping[str, float],
) -> dict[str, Any] | None:
    """What the measured acceptance allows, and the share reached; None undrafted.

    Args:
        ratios: Of `cost_ratios`; there is a ceiling for each.
        speed_up: Its median, least and most over the repeats.
    """
    acceptance = sum((run.acceptance for run in runs), Acceptance())
    if not acceptance.num_drafts:
        return None
    rates = acceptance.conditional_rates[:num_draft_tokens]
    rates += [0.0] * (num_draft_tokens - len(rates))  # nothing was kept so deep
    found: dict[str, Any] = {"conditional_rates": rates}
    for name, ratio in ratios.items():
        ceiling = speed_up_ceiling(rates, ratio)
        best, highest = best_num_draft_tokens(rates, ratio)
        found[name] = {
            "cost_ratio": ratio,
            "speed_up_ceiling": ceiling,
            "share_of_ceiling": speed_up["median"] / ceiling,
            "least_share": speed_up["least"] / ceiling,
            "most_share": speed_up["most"] / ceiling,
            "num_runs": len(runs),
            "best_num_draft_tokens": best,
            "highest_ceiling": highest,
        }
    return found


def mode_table(summaries: Mapping[str, dict[str, Any]]) -> str:
    """The modes side by side: speeds, times in ms, acceptance."""

    def medians(name: str) -> list[str]:
        return [
            f"{one[name]['median']:.1f}" if name in one else "-"
            for one in summaries.values()
        ]

    def times(name: str, which: str) -> list[str]:
        return [milliseconds(one[name].get(which)) for one in summaries.values()]

    def accepted(name: str) -> list[str]:
        found = [one.get("acceptance") for one in summaries.values()]
        return ["-" if one is None else f"{one[name]:.3f}" for one in found]

    rows = [
        ["", *summaries],
        ["output tokens/s", *medians("output_tokens_per_s")],
        ["decoding tokens/s", *medians("decode_tokens_per_s")],
        *(
            [f"{label}, ms (median, p99)", *_both(times(name, "50"), times(name, "99"))]
            for name, label in (
                ("ttft_s", "TTFT"),
                ("tpot_s", "TPOT"),
                ("itl_s", "ITL"),
            )
        ),
        ["round, ms", *_in_ms(summaries, "round_s")],
        ["host per round, ms", *_in_ms(summaries, "host_s")],
        ["acceptance rate", *accepted("acceptance_rate")],
        ["mean acceptance length", *accepted("mean_acceptance_length")],
    ]
    lines = [table(rows)]
    for name, one in summaries.items():
        if "acceptance" in one:
            rates = one["acceptance"]["acceptance_rate_per_position"]
            told = " ".join(f"{rate:.3f}" for rate in rates)
            lines.append(f"acceptance by position, {name}: {told}")
    return "\n".join(lines)


def _both(first: list[str], second: list[str]) -> list[str]:
    return [f"{a} {b}" for a, b in zip(first, second, strict=True)]


def _in_ms(summaries: Mapping[str, dict[str, Any]], name: str) -> list[str]:
    return [
        milliseconds(one[name]["median"] if name in one else None)
        for one in summaries.values()
    ]


def parts_table(
    parts: Sequence[Parts],
    device: Mapping[str, Any],
    speed_ups: Mapping[int, float] | None = None,
) -> str:
    """Where rounds' time goes on the device, how fast they read, and what they compute.

    Args:
        device: As `Offline.device` describes it.
        speed_ups: By K, as measured; the best is marked.
    """
    columns = ["K", "draft", "verify", "accept", "ms", "GB/s", "of copy", "FLOP/byte"]
    rows, ridge = [[*columns, "of ridge"]], device["ridge_flops_per_byte"]
    speed_ups = {0: 1.0} | dict(speed_ups or {})
    best = max(speed_ups.values())
    if len(speed_ups) > 1:
        rows[0].append("speed-up")
    for one in parts:
        speed, k = one.num_bytes / max(one.device_s, 1e-9), one.num_draft_tokens
        rows.append(
            [
                str(k),
                *map(milliseconds, (one.draft_s, one.verify_s, one.accept_s)),
                milliseconds(one.device_s),
                f"{speed / 1e9:.1f}",
                f"{speed / device['copy_bytes_per_s']:.0%}",
                f"{one.flops_per_byte:.1f}",
                "-" if ridge is None else f"{one.flops_per_byte / ridge:.1%}",
            ]
        )
        if len(speed_ups) > 1 and k in speed_ups:
            is_best = speed_ups[k] == best
            rows[-1].append(f"{'best ' if is_best else ''}{speed_ups[k]:.2f}")
    (size,) = {one.num_seqs for one in parts}
    return f"Parts of a round on the device, batch {size}, ms:\n{table(rows)}"


def ceiling_lines(found: Mapping[str, Any], num_draft_tokens: int) -> list[str]:
    """A sentence for the ceiling of every cost."""
    return [
        f"ceiling at this acceptance, K = {num_draft_tokens}, "
        f"c = {one['cost_ratio']:.3f} ({name}): {one['speed_up_ceiling']:.2f}, "
        f"{one['share_of_ceiling']:.0%} of it reached ({one['least_share']:.0%} to "
        f"{one['most_share']:.0%} in {one['num_runs']} runs); highest "
        f"{one['highest_ceiling']:.2f}, at K = {one['best_num_draft_tokens']}"
        for name, one in found.items()
        if name != "conditional_rates"
    ]


def compared(
    measured: Measured,
    *,
    num_draft_tokens: int,
    ratios: Mapping[str, float],
    must_agree: bool,
) -> dict[str, Any]:
    """Both modes, the speed-up and the ceiling, as a result has them.

    Args:
        must_agree: Drafts may not change a text: say whether they did.
    """
    found: dict[str, Any] = {name: summarise(r) for name, r in measured.runs.items()}
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
    """The table of `compared`, and what follows from it."""
    modes = {name: found[name] for name in (PLAIN, SPECULATIVE) if name in found}
    lines = [mode_table(modes)]
    if SPECULATIVE in modes:
        told = [
            f"{label} {one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
            for label, one in (
                ("whole", found["speed_up"]),
                ("decoding", found["decode_speed_up"]),
            )
        ]
        lines.append(f"speed-up by speculation: {', '.join(told)}")
        if "acceptance" not in modes[SPECULATIVE]:
            lines.append("no drafts were made: the engine expected none to pay (K = 0)")
    if "is_equal" in found:
        lines.append(f"greedy texts: {'equal' if found['is_equal'] else 'different'}")
    if found.get("ceiling"):
        lines += ceiling_lines(found["ceiling"], num_draft_tokens)
    return "\n".join(lines)


def ranks_of(speculative: SpeculativeConfig, acceptance: Acceptance) -> Ranks:
    """What became of drafts by where they stand; of a chain all are first choices."""
    if speculative.parents is not None:
        return count_ranks(speculative.parents, acceptance.tree_ends)
    reached = (acceptance.num_drafts, *acceptance.per_position)
    pairs = zip(reached, acceptance.per_position, strict=False)
    return {
        Place(False, depth, 0): Hits(compared, kept)
        for depth, (compared, kept) in enumerate(pairs, start=1)
    }


def ranks_json(ranks: Ranks) -> list[dict[str, Any]]:
    """The same as a result has it: counts with where they are of."""
    return [place._asdict() | hits._asdict() for place, hits in ranks.items()]


def rank_table(ranks: Ranks) -> str:
    """How often the target wanted what stood at a depth and rank; how many such."""
    most = max(place.rank for place in ranks)
    rows = [["after, depth", *(f"rank {rank}" for rank in range(most + 1)), "of"]]
    for place in ranks:
        if place.rank:
            continue
        levels = [ranks.get(place._replace(rank=rank)) for rank in range(most + 1)]
        rows.append(
            [
                f"{'side' if place.is_side else 'chain'}, {place.depth}",
                *("-" if one is None else f"{one.rate:.3f}" for one in levels),
                str(ranks[place].compared),
            ]
        )
    return table(rows)

"""Summaries of repeated runs: medians, speed-ups, ceilings, parts of a round."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.bench.acceptance import (
    Acceptance,
    best_num_draft_tokens,
    speed_up_ceiling,
)
from jaxspec.bench.measure import Measured, Run
from jaxspec.bench.parts import Parts
from jaxspec.bench.report import PLAIN, milliseconds, percentiles, spread, table


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return medians and spread over repeats, and times over all their requests."""
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
    """Return speed-ups of a mode over plain decoding, over pairs of runs.

    Args:
        is_decode: Compare decoding only, if there is any; else the whole time.
    """

    def speed(run: Run) -> float:
        if is_decode and run.decode is not None:
            return run.decode.tokens_per_s
        return run.output_tokens_per_s

    pairs = zip(measured.runs[mode], measured.runs[PLAIN], strict=True)
    return spread([speed(ours) / speed(plain) for ours, plain in pairs])


def is_equal(measured: Measured, mode: str) -> bool:
    """Return whether every run of a mode has the texts of its plain run."""
    pairs = zip(measured.runs[mode], measured.runs[PLAIN], strict=True)
    return all(ours.token_ids == plain.token_ids for ours, plain in pairs)


def cost_ratios(
    bytes_ratio: float, parts: Sequence[Parts], num_draft_tokens: int
) -> dict[str, float]:
    """Return ratios of a draft pass to a plain round: bytes, and seconds if timed."""
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
    """Return the ceilings at the measured acceptance, and the shares reached.

    Args:
        ratios: Result of `cost_ratios`; a ceiling is computed for each ratio.
        speed_up: Median, minimum and maximum over the repeats.

    Returns:
        None if there were no drafts.
    """
    acceptance = sum((run.acceptance for run in runs), Acceptance())
    if not acceptance.num_drafts:
        return None
    rates = acceptance.conditional_rates[:num_draft_tokens]
    rates += [0.0] * (
        num_draft_tokens - len(rates)
    )  # deeper positions accepted nothing
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


def parts_table(
    parts: Sequence[Parts],
    device: Mapping[str, Any],
    speed_ups: Mapping[int, float] | None = None,
) -> str:
    """Format the times of the parts of rounds, and their bandwidth.

    Args:
        device: Result of `Offline.device`.
        speed_ups: Measured speed-ups, by K; the best is marked.
    """
    rows = [["K", "draft", "verify", "accept", "ms", "GB/s", "of copy"]]
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
            ]
        )
        if len(speed_ups) > 1 and k in speed_ups:
            is_best = speed_ups[k] == best
            rows[-1].append(f"{'best ' if is_best else ''}{speed_ups[k]:.2f}")
    (size,) = {one.num_seqs for one in parts}
    return f"Parts of a round on the device, batch {size}, ms:\n{table(rows)}"


def ceiling_lines(found: Mapping[str, Any], num_draft_tokens: int) -> list[str]:
    """Return a sentence for the ceiling of every cost ratio."""
    return [
        f"ceiling at this acceptance, K = {num_draft_tokens}, "
        f"c = {one['cost_ratio']:.3f} ({name}): {one['speed_up_ceiling']:.2f}, "
        f"{one['share_of_ceiling']:.0%} of it reached ({one['least_share']:.0%} to "
        f"{one['most_share']:.0%} in {one['num_runs']} runs); highest "
        f"{one['highest_ceiling']:.2f}, at K = {one['best_num_draft_tokens']}"
        for name, one in found.items()
        if name != "conditional_rates"
    ]

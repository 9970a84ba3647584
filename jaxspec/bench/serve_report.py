"""Metrics of a run against a server, with vLLM's JSON keys and text format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.client import Answer
from jaxspec.bench.report import forced_line
from jaxspec.bench.traffic import Load

# Section titles in the summary that vLLM's `bench serve` prints.
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH = 50


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Metrics to print; a result's JSON has all of them.

    Attributes:
        metrics: Names of the metrics, keys of `TITLES`.
        goodput_ms: Maximum milliseconds, by metric, of a request that counts as good.
    """

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    goodput_ms: Mapping[str, float] | None = None


def figures(
    answers: Sequence[Answer],
    seconds: float,
    wanted: Wanted,
    acceptance: Acceptance | None,
) -> dict[str, Any]:
    """Return the metrics of a run, under the keys of vLLM's results."""
    good = [answer for answer in answers if not answer.error]
    num_output = sum(answer.num_output_tokens for answer in good)
    num_input = sum(answer.num_prompt_tokens for answer in good)
    peak_tokens, peak_requests = _peaks(good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    if wanted.goodput_ms:
        limits = wanted.goodput_ms
        num_good = sum(_is_within(answer, limits) for answer in good)
        found["request_goodput"] = num_good / seconds
    for metric in TITLES:
        found |= _statistics(metric, times_ms(good, metric), wanted.percentiles)
    if acceptance is not None:
        found |= {
            "spec_decode_acceptance_rate": 100 * acceptance.rate,
            "spec_decode_acceptance_length": acceptance.mean_length,
            "spec_decode_num_drafts": acceptance.num_drafts,
            "spec_decode_draft_tokens": acceptance.num_draft_tokens,
            "spec_decode_accepted_tokens": acceptance.num_accepted,
            "spec_decode_per_position_acceptance_rates": acceptance.per_position_rates,
        }
    return found


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the times of every request, in seconds, as vLLM saves them."""
    return {
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.inter_token_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def times_ms(answers: Sequence[Answer], metric: str) -> list[float]:
    """Return all values of a metric of `TITLES`, in milliseconds."""
    if metric == "itl":
        return [1e3 * gap for answer in answers for gap in answer.inter_token_s]
    values = [_time_s(answer, metric) for answer in answers]
    return [1e3 * value for value in values if value is not None]


def _time_s(answer: Answer, metric: str) -> float | None:
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2el": answer.latency_s}
    return times[metric]


def _is_within(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Return whether a request meets every limit; with one token it has no TPOT."""
    times = {name: _time_s(answer, name) for name in limits_ms}
    return all(1e3 * (times[name] or 0) <= limit for name, limit in limits_ms.items())


def _statistics(
    metric: str, values: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    values = values or [0.0]
    found = {
        f"mean_{metric}_ms": float(np.mean(values)),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(np.std(values)),
    }
    for percentile in percentiles:
        name = f"p{percentile:g}_{metric}_ms"
        found[name] = float(np.percentile(values, percentile))
    return found


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """Return the maximum numbers of tokens and of requests within one second."""
    if not answers:
        return 0.0, 0
    begin = min(answer.start_s for answer in answers)
    end = max(answer.start_s + answer.latency_s for answer in answers)
    num_seconds = math.floor(end - begin) + 1
    tokens, requests = np.zeros(num_seconds), np.zeros(num_seconds, int)
    for answer in answers:
        times = np.array(answer.times()) - begin
        # A chunk may have several tokens: spread all tokens evenly over the chunks.
        share = answer.num_output_tokens / len(times)
        np.add.at(tokens, np.clip(times.astype(int), 0, num_seconds - 1), share)
        first = math.floor(answer.start_s - begin)
        requests[first : math.floor(answer.start_s + answer.latency_s - begin) + 1] += 1
    return float(tokens.max()), int(requests.max())


def block(found: Mapping[str, Any], load: Load, wanted: Wanted) -> str:
    """Format the summary that vLLM's `bench serve` prints."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
    ]
    if load.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", load.max_concurrency))
    if math.isfinite(load.request_rate):
        rows.append(("Request rate configured (RPS):", load.request_rate))
    rows += [
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Request throughput (req/s):", found["request_throughput"]),
    ]
    if "request_goodput" in found:
        rows.append(("Request goodput (req/s):", found["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", found["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    lines = [_title("Serving Benchmark Result", "=", " "), *map(_line, rows)]
    for metric in wanted.metrics:
        lines.append(_title(TITLES[metric], "-"))
        names = ["mean", "median", *(f"p{p:g}" for p in wanted.percentiles)]
        for name in names:
            label = f"{name.capitalize()} {metric.upper()} (ms):"
            lines.append(_line((label, found[f"{name}_{metric}_ms"])))
    if "spec_decode_num_drafts" in found:
        lines += _drafts(found)
    return "\n".join([*lines, "=" * WIDTH])


def _drafts(found: Mapping[str, Any]) -> list[str]:
    rows = [
        ("Acceptance rate (%):", float(found["spec_decode_acceptance_rate"])),
        ("Acceptance length:", float(found["spec_decode_acceptance_length"])),
        ("Drafts:", found["spec_decode_num_drafts"]),
        ("Draft tokens:", found["spec_decode_draft_tokens"]),
        ("Accepted tokens:", found["spec_decode_accepted_tokens"]),
    ]
    lines = [_title("Speculative Decoding", "-"), *map(_line, rows)]
    if "forced_acceptance" in found:
        lines.append(forced_line(found["forced_acceptance"]))
    rates = found["spec_decode_per_position_acceptance_rates"]
    if rates:
        lines.append("Per-position acceptance (%):")
    lines += [_line((f"  Position {i}:", 100 * rate)) for i, rate in enumerate(rates)]
    return lines


def _title(text: str, fill: str, space: str = "") -> str:
    return f"{space}{text}{space}".center(WIDTH, fill)


def _line(row: tuple[str, Any]) -> str:
    label, value = row
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}"

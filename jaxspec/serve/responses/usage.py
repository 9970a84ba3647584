"""Owns the token counts, acceptance and times in responses."""

from typing import Any

from jaxspec.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestSpecDecodeMetrics,
    RequestStateStats,
)


class Usage:
    """Counts the tokens of one request, by prompt and by text."""

    def __init__(self, *, has_details: bool, has_drafts: bool = False):
        """Start with zero counts.

        Args:
            has_details: Whether to return the number of cached prompt tokens.
            has_drafts: Whether the total has the numbers of accepted and rejected draft
                tokens.
        """
        self._has_details, self._has_drafts = has_details, has_drafts
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._texts: dict[int, int] = {}
        self._drafts: dict[int, RequestSpecDecodeMetrics] = {}

    def add_prompt(self, number: int, output: RequestOutput) -> None:
        """Count the tokens of a prompt at its first output, and not again later."""
        self._prompts[number] = len(output.prompt_token_ids or ())
        self._cached[number] = output.num_cached_tokens or 0

    def add_text(self, index: int, num_tokens: int) -> None:
        """Count new tokens of the choice with this index."""
        self._texts[index] = self._texts.get(index, 0) + num_tokens

    def add_drafts(self, index: int, counts: RequestSpecDecodeMetrics | None) -> None:
        """Set the draft counts of the choice with this index; None without drafts."""
        if counts is not None:
            self._drafts[index] = counts

    def total(self) -> dict[str, Any]:
        """Return the counts of the whole request."""
        usage = self._usage(sum(self._prompts.values()), sum(self._texts.values()))
        if self._has_drafts and self._drafts:
            num_draft_tokens, num_accepted = self._num_drafts()
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_draft_tokens - num_accepted,
            }
        return usage

    def timings(self, stats: RequestStateStats) -> dict[str, Any]:
        """Return llama.cpp's `timings` of a request for one text.

        The times of generation are those after the first token. Rates without a
        duration are 0, and requests without drafts have no draft counts. Without
        `has_details`, all prompt tokens count as prefilled.
        """
        num_cached = sum(self._cached.values()) if self._has_details else 0
        num_prompt = sum(self._prompts.values()) - num_cached
        num_generated = sum(self._texts.values())
        prompt_s = predicted_s = 0.0
        if stats.first_token_ts:
            prompt_s = stats.first_token_ts - stats.scheduled_ts
            predicted_s = stats.last_token_ts - stats.first_token_ts
        num_steps = max(num_generated - 1, 0)
        timings: dict[str, Any] = {"cache_n": num_cached} if self._has_details else {}
        timings |= {
            "prompt_n": num_prompt,
            "prompt_ms": 1e3 * prompt_s,
            "prompt_per_token_ms": 1e3 * _ratio(prompt_s, num_prompt),
            "prompt_per_second": _ratio(num_prompt, prompt_s),
            "predicted_n": num_generated,
            "predicted_ms": 1e3 * predicted_s,
            "predicted_per_token_ms": 1e3 * _ratio(predicted_s, num_steps),
            "predicted_per_second": _ratio(num_steps, predicted_s),
        }
        num_draft_tokens, num_accepted = self._num_drafts()
        if num_draft_tokens:
            timings |= {"draft_n": num_draft_tokens, "draft_n_accepted": num_accepted}
        return timings

    def _num_drafts(self) -> tuple[int, int]:
        """Return the numbers of all draft tokens and of the accepted ones."""
        counts = self._drafts.values()
        return (
            sum(one.num_draft_tokens for one in counts),
            sum(one.num_accepted_draft_tokens for one in counts),
        )

    def before_text(self, number: int) -> dict[str, Any]:
        """Return the counts of a prompt for a chunk before the text begins."""
        return self._usage(self._prompts[number], 0)

    def of_text(self, number: int, index: int) -> dict[str, Any]:
        """Return the counts of one text so far, and of its prompt."""
        return self._usage(self._prompts[number], self._texts.get(index, 0))

    def _usage(self, num_prompt: int, num_generated: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_generated,
            "completion_tokens": num_generated,
        }
        if self._has_details:
            cached = sum(self._cached.values())
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def request_metrics(
    output: RequestOutput, *, has_drafts: bool, has_times: bool
) -> dict[str, Any] | None:
    """Return the metrics of a finished request; None if it generated several sequences.

    Args:
        has_drafts: Include the acceptance of its drafts. has_times: Include its times.
    """
    if len(output.outputs) != 1 or not (has_drafts or has_times):
        return None
    metrics: dict[str, Any] = {}
    if has_times and output.metrics is not None:
        metrics |= _times(output.metrics)
    if has_drafts:
        metrics["speculative_decoding"] = _drafts(output.outputs[0])
    return metrics


def _ratio(part: float | int, whole: float | int) -> float:
    return part / whole if whole > 0 else 0.0


def _times(stats: RequestStateStats) -> dict[str, Any]:
    took_s = stats.last_token_ts - stats.first_token_ts
    gaps = stats.num_generation_tokens - 1
    has_gaps = gaps > 0 and took_s > 0
    queued_s = stats.time_in_queue
    # As vLLM computes it, with the time of the prompt.
    ran_s = stats.last_token_ts - stats.scheduled_ts if stats.scheduled_ts else 0.0
    return {
        "time_to_first_token_ms": 1e3 * stats.first_token_latency,
        "generation_time_ms": 1e3 * took_s,
        "queue_time_ms": None if queued_s is None else 1e3 * queued_s,
        "mean_itl_ms": 1e3 * took_s / gaps if has_gaps else None,
        "tokens_per_second": stats.num_generation_tokens / ran_s if ran_s > 0 else None,
    }


def _drafts(completion: CompletionOutput) -> dict[str, Any] | None:
    counts = completion.spec_decode_metrics
    if counts is None:
        return None
    return {
        "mean_acceptance_length": counts.mean_acceptance_length,
        "draft_acceptance_rate": counts.acceptance_rate,
        "acceptance_histogram": list(counts.histogram),
        "num_spec_steps": counts.num_spec_steps,
        "num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_proposed_per_position": counts.num_proposed_per_position,
        "num_spec_tokens": len(counts.histogram) - 1,
        **({"is_synthetic": True} if counts.is_synthetic else {}),
    }

"""Owns the token counts, acceptance and times in responses."""

from typing import Any

from jaxspec.outputs import CompletionOutput, RequestOutput, RequestStateStats


class Usage:
    """Counts the tokens of one request, by prompt and by text."""

    def __init__(self, *, has_details: bool):
        """Start with zero counts.

        Args:
            has_details: Whether to return the number of cached prompt tokens.
        """
        self._has_details = has_details
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._texts: dict[int, int] = {}

    def add_prompt(self, number: int, output: RequestOutput) -> None:
        """Count the tokens of a prompt at its first output, and not again later."""
        self._prompts[number] = len(output.prompt_token_ids or ())
        self._cached[number] = output.num_cached_tokens or 0

    def add_text(self, index: int, num_tokens: int) -> None:
        """Count new tokens of the choice with this index."""
        self._texts[index] = self._texts.get(index, 0) + num_tokens

    def total(self) -> dict[str, Any]:
        """Return the counts of the whole request."""
        return self._usage(sum(self._prompts.values()), sum(self._texts.values()))

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


def _times(stats: RequestStateStats) -> dict[str, Any]:
    took_s = stats.last_token_ts - stats.first_token_ts
    gaps = stats.num_generation_tokens - 1
    has_gaps = gaps > 0 and took_s > 0
    queued_s = stats.time_in_queue
    return {
        "time_to_first_token_ms": 1e3 * stats.first_token_latency,
        "generation_time_ms": 1e3 * took_s,
        "queue_time_ms": None if queued_s is None else 1e3 * queued_s,
        "mean_itl_ms": 1e3 * took_s / gaps if has_gaps else None,
        "tokens_per_second": gaps / took_s if has_gaps else None,
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

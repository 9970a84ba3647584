"""Owns the outputs of requests: texts, timings, and acceptance of draft tokens.

Names are vLLM's, including those of its older `RequestMetrics`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxspec.logprobs import FlatLogprobs, LogprobsOnePosition


@dataclass(kw_only=True)
class RequestSpecDecodeMetrics:
    """Counts of the speculative steps of one request.

    Attributes:
        histogram: Entry i counts the steps that accepted exactly i draft tokens.
        num_draft_tokens: Draft tokens proposed in all steps together.
        proposals: Entry i counts the steps that proposed exactly i draft tokens.
        is_synthetic: Acceptance was simulated, by the rule "synthetic": it is unrelated
            to the models, and the text is meaningless.
        stop_reason: The failure that ended speculation in this engine; None while it
            works, also while K is 0 because drafts would not pay off.
    """

    histogram: list[int]
    num_draft_tokens: int = 0
    proposals: list[int] = field(default_factory=list)
    is_synthetic: bool = False
    stop_reason: str | None = None

    @classmethod
    def empty(
        cls, max_draft_tokens: int, *, is_synthetic: bool = False
    ) -> "RequestSpecDecodeMetrics":
        """Make the counts before the first step."""
        counts = [0] * (max_draft_tokens + 1)
        return cls(histogram=counts, proposals=counts.copy(), is_synthetic=is_synthetic)

    def snapshot(self) -> "RequestSpecDecodeMetrics":
        """Return a copy of the current counts."""
        return dataclasses.replace(
            self, histogram=self.histogram.copy(), proposals=self.proposals.copy()
        )

    def record_step(self, num_valid_drafts: int, num_accepted: int) -> None:
        """Count one step that proposed draft tokens."""
        assert 0 <= num_accepted <= num_valid_drafts < len(self.histogram)
        self.histogram[num_accepted] += 1
        self.proposals[num_valid_drafts] += 1
        self.num_draft_tokens += num_valid_drafts

    @property
    def num_spec_steps(self) -> int:
        """Steps that proposed draft tokens."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Accepted draft tokens, without the target's own token of each step."""
        return sum(count * steps for count, steps in enumerate(self.histogram))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / proposed ones; 0 before the first step."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, including the target's own."""
        return 1 + _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def num_proposed_per_position(self) -> list[int]:
        """Entry i: steps that proposed draft token i (counted from 0)."""
        return [sum(self.proposals[i + 1 :]) for i in range(len(self.histogram) - 1)]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Entry i: share of all steps that accepted draft token i (counted from 0)."""
        counts = [sum(self.histogram[i + 1 :]) for i in range(len(self.histogram) - 1)]
        return [_ratio(count, self.num_spec_steps) for count in counts]


@dataclass(kw_only=True)
class RequestStateStats:
    """Timings of one request.

    `arrival_time` is wall-clock time, as of `time.time()`. The fields ending in `_ts`
    are in seconds of one monotonic clock, 0.0 until the event has happened. The
    properties have the names of vLLM's older `RequestMetrics` and are wall-clock times.

    Attributes:
        num_generation_tokens: Tokens generated so far.
        num_preemptions: Number of times that its pages were taken for other requests.
        arrival_time: Time at which the request arrived.
        queued_ts: Time at which the engine received the request: `arrival_time` on the
            monotonic clock.
        scheduled_ts: Time at which it first ran.
        first_token_ts: Time of the first generated token.
        last_token_ts: Time of the newest generated token.
        first_token_latency: Seconds from arrival to the first token.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0

    @property
    def first_scheduled_time(self) -> float | None:
        """Wall-clock time at which it first ran; None before."""
        return self._wall_clock(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        """Wall-clock time of the first generated token; None before."""
        return self._wall_clock(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        """Wall-clock time of the newest generated token; None before."""
        return self._wall_clock(self.last_token_ts)

    @property
    def finished_time(self) -> float | None:
        """The same as `last_token_time`, as in vLLM."""
        return self.last_token_time

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until it first ran; None before."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def scheduler_time(self) -> None:
        """Not measured per request: requests share the steps."""

    @property
    def model_forward_time(self) -> None:
        """Not measured per request: requests share the steps."""

    @property
    def model_execute_time(self) -> None:
        """Not measured per request: requests share the steps."""

    def _wall_clock(self, timestamp: float) -> float | None:
        if not timestamp:
            return None
        return self.arrival_time + (timestamp - self.queued_ts)


# Origins of accepted draft tokens.
DRAFTED = frozenset({"draft", "leaf"})


class TokenOrigin(NamedTuple):
    """One generated token and its origin.

    Attributes:
        text: The text that it added; joined over all tokens this is the whole text.
        origin: "draft" for an accepted draft token of the main chain, "leaf" for one of
            a side branch, "recovered" for the target's token in place of a rejected
            one, "bonus" for the target's token after all drafts were accepted or after
            a leaf, "target" for a token without drafts.
        token_id: Its id.
    """

    text: str
    origin: str
    token_id: int


@dataclass(kw_only=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: Index among the request's `n` texts.
        text: The generated text; with `RequestOutputKind.DELTA` its new part.
        token_ids: Ids of the generated tokens; with DELTA the new ones.
        cumulative_logprob: Sum over the tokens; None unless logprobs are requested.
        logprobs: By position.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: The stop string or stop token id that ended it; after an error, its
            message; otherwise None.
        spec_decode_metrics: Counts of its speculative steps; None in an engine without
            drafts.
        token_origins: Origin of each token; None unless requested.
        lora_request, routed_experts, sampling_mask, weight_versions: vLLM's; always
            None.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOnePosition] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    token_origins: list[TokenOrigin] | None = None
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None

    def finished(self) -> bool:
        """Return whether the text is complete."""
        return self.finish_reason is not None

    def extend(self, following: "CompletionOutput") -> None:
        """Append the next part of the text."""
        self.text += following.text
        self.token_ids = [*self.token_ids, *following.token_ids]
        if self.logprobs is None or following.logprobs is None:
            self.logprobs = self.logprobs or following.logprobs
        else:
            self.logprobs = self.logprobs[:]  # the engine may hold the same list
            self.logprobs.extend(following.logprobs)
        if self.token_origins is None or following.token_origins is None:
            self.token_origins = self.token_origins or following.token_origins
        else:
            self.token_origins = [*self.token_origins, *following.token_origins]
        self.cumulative_logprob = following.cumulative_logprob
        self.finish_reason = following.finish_reason
        self.stop_reason = following.stop_reason
        self.spec_decode_metrics = following.spec_decode_metrics


@dataclass(kw_only=True)
class RequestOutput:
    """A request and its generated texts.

    Attributes:
        request_id: Id of the request.
        prompt: None if the prompt was given as token ids.
        prompt_token_ids: Token ids of the prompt; of a text, with the bos token.
        prompt_logprobs: By position of the prompt, the first of which has none; None
            unless requested.
        outputs: One per requested text.
        finished: Whether all of them have ended.
        metrics: Times of the request; with `n` above 1, of one of its texts.
        num_cached_tokens: Prompt tokens whose keys and values were already in pages.
        lora_request, encoder_prompt, encoder_prompt_token_ids: vLLM's; always None.
        num_cache_creation_tokens, prompt_token_id_logprobs: vLLM's; always None.
        kv_transfer_params: vLLM's; always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[LogprobsOnePosition | None] | FlatLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    kv_transfer_params: None = None

    def freeze(self) -> None:
        """Copy counts and times, which the engine continues to update."""
        if self.metrics is not None:
            self.metrics = dataclasses.replace(self.metrics)
        for completion in self.outputs:
            if completion.spec_decode_metrics is not None:
                counts = completion.spec_decode_metrics.snapshot()
                completion.spec_decode_metrics = counts

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        Args:
            next_output: The later output.
            aggregate: Append its texts to this one's; otherwise replace these.
        """
        assert next_output.request_id == self.request_id
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        if self.prompt_logprobs is None:
            self.prompt_logprobs = next_output.prompt_logprobs
        ours = {output.index: output for output in self.outputs}
        for theirs in next_output.outputs:
            if aggregate and theirs.index in ours:
                ours[theirs.index].extend(theirs)
            else:
                ours[theirs.index] = theirs
        self.outputs = [ours[index] for index in sorted(ours)]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

"""Host state of one request: waiting, prefilling, decoding, finished."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxspec.engine.structured_output import Failure, GrammarState
from jaxspec.outputs import RequestSpecDecodeMetrics, RequestStateStats
from jaxspec.program.plan import Features, TokenControls
from jaxspec.sampling_params import SamplingParams


class Status(enum.Enum):
    """State of a request; a preempted one waits again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(kw_only=True, eq=False)
class Request:
    """Host state of a request; `RowTable` has the counts of a running one.

    Invariant: `0 <= num_prefilled <= num_tokens <= max_total`.

    Attributes:
        max_total: Tokens at which the sequence ends, prompt included.
        max_draft_tokens: Maximum number of drafts per round for this request.
        rule: An index of `jaxspec.program.plan.RULES`.
        features: Features that its programs need.
        controls: Penalties, bias and masks of single tokens.
        grammar: State of its structured output; None without.
        priority: With `scheduling_policy="priority"`, lower values run first.
        cache_salt: Pages are shared only among requests of equal salt.
        cache_group: With prefix caching off, requests of one group share pages.
        can_read_prefix_cache: Whether it may reuse pages of earlier requests.
        only_final_output: It returns only its final output, and has no stop strings,
            logprobs or token origins: it is detokenized once, at its end.
        num_cached_tokens: Prompt tokens found in the prefix cache; None before it ran.
        arrival: The request's place in the order of arrival; -1 before it is queued.
        row: Its row in `RowTable`; -1 while it has none.
        tokens_to_prefill: The prompt; after a preemption also the generated tokens.
        num_prefilled: Number of `tokens_to_prefill` that were prefilled, or will be by
            a launch that is planned.
        num_draft_cached: Number of leading tokens for which the draft model has keys
            and values.
        pages: Its global pages, from the first.
        local_pages: Its local pages, from index `first_local` on.
        page_keys: Keys of its first full pages.
        num_registered: Leading pages that are in the prefix cache.
        num_unread: Number of unread rounds with tokens for a request that has lost its
            row.
        num_prompt_logprobs: Prompt tokens whose logprobs were returned.
        trace_headers: HTTP headers of the trace that the request belongs to.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total: int
    max_draft_tokens: int
    seed: tuple[int, int]
    rule: int
    stop_ids: tuple[int, ...]
    stats: RequestStateStats
    spec_metrics: RequestSpecDecodeMetrics | None
    features: Features = Features()
    controls: TokenControls | None = None
    grammar: GrammarState | None = None
    priority: int = 0
    cache_salt: str | None = None
    cache_group: int | None = None
    can_read_prefix_cache: bool = True
    only_final_output: bool = False
    num_cached_tokens: int | None = None
    status: Status = Status.WAITING
    arrival: int = -1
    row: int = -1
    tokens_to_prefill: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    num_draft_cached: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    local_pages: list[int] = field(default_factory=list)
    first_local: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_unread: int = 0
    num_prompt_logprobs: int = 0
    trace_headers: Mapping[str, str] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def local_end(self) -> int:
        """Index after its last local page."""
        return self.first_local + len(self.local_pages)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def min_total(self) -> int:
        """Length below which no token ends the sequence, prompt included.

        With a grammar, masks forbid the end tokens instead: the device does not know
        when the text is complete.
        """
        min_tokens = self.params.min_tokens if self.grammar is None else 0
        return self.num_prompt_tokens + min_tokens

    @property
    def grammar_failure(self) -> Failure | None:
        """The failure if the text has tokens that its grammar does not allow."""
        if self.grammar is None:
            return None
        return self.grammar.failure_in(self.output_token_ids)

    @property
    def is_late(self) -> bool:
        """Whether tokens of launches in flight are invalid, as their mask was late."""
        if self.grammar is None or self.grammar.late_length is None:
            return False
        return len(self.output_token_ids) >= self.grammar.late_length

    @property
    def num_tokens(self) -> int:
        """Tokens whose values the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_left_to_prefill(self) -> int:
        """Tokens not prefilled and in no launch; all tokens of a waiting request."""
        if self.status is Status.WAITING:
            return self.num_tokens
        return len(self.tokens_to_prefill) - self.num_prefilled

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions from `start` to before `end`."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        output = self.output_token_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return prompt[start:] + output

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.num_prefilled <= self.num_tokens <= self.max_total
        assert len(self.page_keys) <= max(len(self.pages), self.num_tokens)

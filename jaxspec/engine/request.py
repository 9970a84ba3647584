"""One request's life on the host: waiting, prefilling, decoding, finished."""

import enum
from dataclasses import dataclass, field
from typing import Any

from jaxspec.outputs import RequestSpecDecodeMetrics, RequestStateStats
from jaxspec.program.plan import Features
from jaxspec.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(kw_only=True)
class Request:
    """What the host knows of a request; the device may be up to one launch ahead.

    Invariant: `0 <= num_fed <= num_tokens <= max_total`.

    Attributes:
        max_total: Tokens at which the sequence ends, prompt included.
        num_draft_tokens: Most drafts per round that this request wants.
        rule: An index of `jaxspec.program.plan.RULES`.
        features: What the program must have for this request.
        controls: `jaxspec.program.plan.TokenControls`, or None.
        grammar_id: Of its grammar in the runner's `token_masks`; 0 for none.
        priority: A lower value goes first, where the engine goes by priority.
        cache_salt: Pages are shared only among requests of equal salt.
        can_read_prefix_cache: Whether it may begin with pages of earlier requests.
        num_cached_tokens: Prompt tokens that came with such pages; None before it ran.
        num_fed: Prompt tokens handed to the device.
        draft_gap: Most known tokens at the sequence's end for which the draft model
            may lack keys and values, once all that is launched has run. Its first
            pass fills two.
        in_flight: Drafts of every launched, unread round.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total: int
    num_draft_tokens: int
    seed: tuple[int, int]
    rule: int
    stop_ids: tuple[int, ...]
    stats: RequestStateStats
    spec_metrics: RequestSpecDecodeMetrics | None
    features: Features = Features()
    controls: Any = None
    grammar_id: int = 0
    priority: int = 0
    cache_salt: str | None = None
    can_read_prefix_cache: bool = True
    num_cached_tokens: int | None = None
    status: Status = Status.WAITING
    row: int = -1
    num_fed: int = 0
    draft_gap: int = 1
    output_token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_reserved: int = 0
    in_flight: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose values the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens that the device may know by the end of what is launched."""
        ahead = sum(drafts + 1 for drafts in self.in_flight)
        return min(self.num_tokens + ahead, self.max_total)

    @property
    def fewest_tokens(self) -> int:
        """Tokens the device will know, unless the sequence ends before."""
        return min(self.num_tokens + len(self.in_flight), self.max_total)

    def token(self, position: int) -> int:
        """Known token at a position."""
        prompt = self.prompt_token_ids
        if position < len(prompt):
            return prompt[position]
        return self.output_token_ids[position - len(prompt)]

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.num_fed <= self.num_tokens <= self.max_total
        assert self.draft_gap >= 1  # the last token never has any

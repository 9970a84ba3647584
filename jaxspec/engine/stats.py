"""Counters of one engine: rounds, drafts, acceptance, host time."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class EngineStats:
    """Totals since the engine started.

    Attributes:
        num_rounds: Launches read back.
        num_preemptions: Times that a request lost its pages to another.
        num_prefix_queries: Prompt tokens that were looked for in earlier pages.
        num_prefix_hits: Those found there.
        host_s: Seconds that `step` spent outside of waiting for the device.
        wait_s: Seconds that `step` waited for the device.
        accepted_per_position: Entry i counts rounds that kept draft i (from 0).
    """

    num_rounds: int = 0
    num_generated_tokens: int = 0
    num_draft_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted by proposed draft tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafting round and sequence, the target's own included."""
        return 1 + self.num_accepted_tokens / max(self.num_draft_rounds, 1)

    def record(self, drafts: int, accepted: int, generated: int) -> None:
        """Count one sequence's part in a round."""
        self.num_generated_tokens += generated
        if not drafts:
            return
        self.num_draft_rounds += 1
        self.num_draft_tokens += drafts
        self.num_accepted_tokens += accepted
        missing = drafts - len(self.accepted_per_position)
        self.accepted_per_position += [0] * max(missing, 0)
        for position in range(accepted):
            self.accepted_per_position[position] += 1

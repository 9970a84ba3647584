"""Owns counts of drafts: proposed, accepted, by position; their rates and sums."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from jaxspec.engine.scheduling.stats import EngineStats


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of the drafts of some rounds.

    Attributes:
        num_drafts: Rounds of one sequence that proposed anything.
        per_position: Entry i counts those that kept draft i (from 0).
        num_beside: Accepted drafts that are not among these: from beside the chain.
        tree_ends: As `EngineStats.tree_ends`.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    per_position: tuple[int, ...] = ()
    num_beside: int = 0
    tree_ends: Mapping[tuple[int, int], int] = field(default_factory=Counter)

    @classmethod
    def of(cls, stats: EngineStats) -> "Acceptance":
        """Copy an engine's counts of now."""
        return cls(
            num_drafts=stats.num_draft_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted=stats.num_accepted_tokens,
            per_position=tuple(stats.accepted_per_position),
            num_beside=stats.num_beside_tokens,
            tree_ends=stats.tree_ends.copy(),
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return self._joined(other, 1)

    def __sub__(self, before: "Acceptance") -> "Acceptance":
        return self._joined(before, -1)

    def _joined(self, other: "Acceptance", sign: int) -> "Acceptance":
        pairs = zip_longest(self.per_position, other.per_position, fillvalue=0)
        ends = Counter(self.tree_ends)
        for end, count in other.tree_ends.items():
            ends[end] += sign * count
        return Acceptance(
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            num_accepted=self.num_accepted + sign * other.num_accepted,
            per_position=tuple(mine + sign * theirs for mine, theirs in pairs),
            num_beside=self.num_beside + sign * other.num_beside,
            tree_ends={end: count for end, count in ends.items() if count},
        )

    @property
    def rate(self) -> float:
        """Accepted by proposed draft tokens."""
        return self.num_accepted / max(self.num_draft_tokens, 1)

    @property
    def mean_length(self) -> float:
        """Tokens per drafting round, the target's own included."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)

    @property
    def tokens_per_round(self) -> float:
        """The same with drafts from beside the chain."""
        return self.mean_length + self.num_beside / max(self.num_drafts, 1)

    @property
    def per_position_rates(self) -> list[float]:
        """Entry i: share of the drafting rounds that kept draft i."""
        return [count / max(self.num_drafts, 1) for count in self.per_position]

    @property
    def conditional_rates(self) -> list[float]:
        """Entry i: share of the rounds that had kept all before draft i and kept it."""
        before = (self.num_drafts, *self.per_position)
        pairs = zip(self.per_position, before, strict=False)
        return [kept / max(reached, 1) for kept, reached in pairs]

    def as_json(self) -> dict[str, Any]:
        """Return counts and rates under the names of the glossary."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted,
            "acceptance_rate": self.rate,
            "mean_acceptance_length": self.mean_length,
            "acceptance_rate_per_position": self.per_position_rates,
        }

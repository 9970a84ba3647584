"""Counts of draft tokens, acceptance rates, and the speed-up that they allow.

A round of K draft tokens takes as long as 1 + K c plain rounds, where c is the time of
a draft pass divided by that of a target pass, and yields 1 + a_1 + a_1 a_2 + ...
tokens, where a_i is the probability that draft i is accepted if those before it are
(Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8, with one rate per position). The
target's pass over K + 1 positions is assumed to cost as much as a pass over one. The
speed-up is therefore an upper bound, too high where arithmetic and not memory limits
the speed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from jaxspec.engine.scheduling.stats import EngineStats


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts of the draft tokens of some rounds.

    Attributes:
        num_drafts: Number of rounds that proposed drafts, counted per sequence.
        per_position: Entry i counts rounds that accepted draft i (from 0).
        num_side_tokens: Number of accepted draft tokens of side branches, which
            `per_position` does not count.
        tree_ends: As `EngineStats.tree_ends`.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    per_position: tuple[int, ...] = ()
    num_side_tokens: int = 0
    tree_ends: Mapping[tuple[int, int], int] = field(default_factory=Counter)

    @classmethod
    def of(cls, stats: EngineStats) -> "Acceptance":
        """Return the current counts of an engine."""
        return cls(
            num_drafts=stats.num_draft_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted=stats.num_accepted_tokens,
            per_position=tuple(stats.accepted_per_position),
            num_side_tokens=stats.num_side_tokens,
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
            num_side_tokens=self.num_side_tokens + sign * other.num_side_tokens,
            tree_ends={end: count for end, count in ends.items() if count},
        )

    @property
    def rate(self) -> float:
        """Accepted draft tokens / proposed ones."""
        return self.num_accepted / max(self.num_draft_tokens, 1)

    @property
    def mean_length(self) -> float:
        """Mean tokens per drafting round, side branches not counted."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens per drafting round, side branches counted."""
        return self.mean_length + self.num_side_tokens / max(self.num_drafts, 1)

    @property
    def per_position_rates(self) -> list[float]:
        """Entry i: share of the drafting rounds that accepted draft i."""
        return [count / max(self.num_drafts, 1) for count in self.per_position]

    @property
    def conditional_rates(self) -> list[float]:
        """Entry i: probability that draft i is accepted if all before it are."""
        before = (self.num_drafts, *self.per_position)
        pairs = zip(self.per_position, before, strict=False)
        return [accepted / max(reached, 1) for accepted, reached in pairs]

    def as_json(self) -> dict[str, Any]:
        """Return counts and rates, under the names of a result."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted,
            "acceptance_rate": self.rate,
            "mean_acceptance_length": self.mean_length,
            "acceptance_rate_per_position": self.per_position_rates,
        }


def expected_length(conditional_rates: Sequence[float]) -> float:
    """Return the tokens per round: 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K."""
    length = reached = 1.0
    for rate in conditional_rates:
        reached *= rate
        length += reached
    return length


def speed_up_ceiling(conditional_rates: Sequence[float], cost_ratio: float) -> float:
    """Return the upper bound of the speed-up with one draft token per rate."""
    num_draft_tokens = len(conditional_rates)
    return expected_length(conditional_rates) / (1 + num_draft_tokens * cost_ratio)


def best_num_draft_tokens(
    conditional_rates: Sequence[float], cost_ratio: float
) -> tuple[int, float]:
    """Return the best K and its speed-up ceiling; (0, 1.0) if no K can be faster."""
    ceilings = [
        speed_up_ceiling(conditional_rates[:k], cost_ratio)
        for k in range(len(conditional_rates) + 1)
    ]
    best = max(range(len(ceilings)), key=ceilings.__getitem__)
    return best, ceilings[best]

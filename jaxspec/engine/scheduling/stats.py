"""Counters of one engine: rounds, drafts, acceptance, host time."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass(kw_only=True)
class EngineStats:
    """Totals since the engine started.

    Attributes:
        num_rounds: Rounds read back; a launch has one or several.
        num_preemptions: Number of preemptions.
        num_given_up: Requests that got no more drafts, because the pages that the draft
            model would have read were needed.
        num_prefix_queries: Prompt tokens looked up in the prefix cache.
        num_prefix_hits: Prompt tokens found there.
        host_s: Seconds that `step` took, without waits for the device and compiles.
        wait_s: Seconds that `step` waited for the device.
        busy_s: Seconds that launches kept the device busy.
        num_side_tokens: Accepted drafts of side branches of a tree; not included in
            `num_accepted_tokens`.
        tree_ends: Rounds by (levels of the tree with drafts, tree row at which the
            round ended), without rounds that ended a text.
        accepted_per_position: Entry i counts rounds that accepted draft i (from 0).
    """

    num_rounds: int = 0
    num_generated_tokens: int = 0
    num_draft_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_side_tokens: int = 0
    num_preemptions: int = 0
    num_given_up: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)
    tree_ends: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / proposed draft tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafting round and sequence, the target's own included."""
        return 1 + self.num_accepted_tokens / max(self.num_draft_rounds, 1)

    def record_round(
        self,
        draft_counts: np.ndarray,
        accepted: np.ndarray,
        generated: np.ndarray,
        side: np.ndarray | int = 0,
    ) -> None:
        """Count one round; each array has one entry per sequence.

        A sequence that had already ended generates nothing; its drafts do not count.

        Args:
            side: Accepted drafts of side branches.
        """
        self.num_generated_tokens += int(generated.sum())
        if not draft_counts.any():
            return
        counts = (draft_counts > 0) & (generated > 0)
        deepest = int(draft_counts[counts].max(initial=0))
        if not deepest:
            return
        num_accepted = accepted[counts]
        self.num_draft_rounds += len(num_accepted)
        self.num_draft_tokens += int(draft_counts[counts].sum())
        self.num_accepted_tokens += int(num_accepted.sum())
        self.num_side_tokens += int(np.sum(side * counts))
        missing = deepest - len(self.accepted_per_position)
        self.accepted_per_position += [0] * max(missing, 0)
        # Number of rounds with at least 1, 2, ... accepted drafts: a cumulative sum
        # from the largest number down.
        at_least = np.bincount(num_accepted)[:0:-1].cumsum()[::-1]
        for position, count in enumerate(at_least.tolist()):
            self.accepted_per_position[position] += count

    def record_ends(self, levels: np.ndarray, rows: np.ndarray) -> None:
        """Count the tree rows at which one round ended; an entry per sequence.

        Args:
            levels: Number of the tree's levels with drafts.
        """
        self.tree_ends.update(zip(levels.tolist(), rows.tolist(), strict=True))

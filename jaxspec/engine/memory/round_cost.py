"""Computes the time of a round from bytes and operations, and where drafts pay.

A pass reads its weights, and the keys and values of every sequence; it takes as long as
the memory needs for these bytes, or the arithmetic for its rows, whichever is longer,
and the all-reduces of several devices. Host time, launches, sampling and caches are
left out, and the devices' speeds are published ones: none of this is measured.
"""

from dataclasses import dataclass
from typing import Any

from jaxspec.engine.memory.draft_sharding import (
    LAYER_SUMS,
    OTHER_SUMS,
    SUM_BYTES,
    Speeds,
)

# Tokens per sequence, and acceptance, of the line in a plan.
CONTEXT, TYPICAL_ACCEPTANCE = 1024, 0.7
# Precision of a break-even acceptance.
STEP = 0.005


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """What one pass of a model costs one device.

    Attributes:
        weight_bytes: Weights that every pass reads.
        kv_bytes: Keys and values of one sequence.
        operations: Operations per row (token).
        num_devices: Devices that share the model.
        num_layers, hidden_size: Layers whose results are summed over devices, and the
            values of one row.
    """

    weight_bytes: int
    kv_bytes: int
    operations: int
    num_devices: int
    num_layers: int
    hidden_size: int

    def seconds(self, speeds: Speeds, num_seqs: int, num_rows: int) -> float:
        """Return the seconds of a pass.

        Args:
            num_rows: Rows of all sequences together.
        """
        read_s = (self.weight_bytes + num_seqs * self.kv_bytes) / speeds.memory
        compute_s = num_rows * self.operations / speeds.operations
        summed = SUM_BYTES * num_rows * self.hidden_size
        count = LAYER_SUMS * self.num_layers + OTHER_SUMS
        sum_s = count * speeds.all_reduce_s(summed, self.num_devices)
        return max(read_s, compute_s) + sum_s


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Computed times of rounds with K drafts.

    Attributes:
        draft: A pass of the draft model or head; None for lookups, which cost nothing.
        has_one_pass: One draft pass makes all drafts; it has a row for each.
        max_draft_tokens: Largest K.
        context: Tokens of every sequence.
    """

    speeds: Speeds
    target: PassCost
    draft: PassCost | None
    has_one_pass: bool
    max_draft_tokens: int
    context: int

    def seconds(self, num_draft_tokens: int, num_seqs: int = 1) -> float:
        """Return the seconds of a round with K = `num_draft_tokens`."""
        rows = num_seqs * (num_draft_tokens + 1)
        total = self.target.seconds(self.speeds, num_seqs, rows)
        if self.draft is None or not num_draft_tokens:
            return total
        if self.has_one_pass:
            return total + self.draft.seconds(self.speeds, num_seqs, rows)
        one = self.draft.seconds(self.speeds, num_seqs, num_seqs)
        return total + num_draft_tokens * one

    @property
    def cost_ratio(self) -> float:
        """Time of a draft pass / time of a plain round, at batch 1."""
        return self.seconds(1) / self.seconds(0) - 1

    def speed_up(
        self, num_draft_tokens: int, acceptance: float, num_seqs: int = 1
    ) -> float:
        """Return the speed relative to plain decoding.

        Args:
            acceptance: Probability that a draft is accepted if those before it are, the
                same at every position.
        """
        tokens = sum(acceptance**i for i in range(num_draft_tokens + 1))
        ratio = self.seconds(num_draft_tokens, num_seqs) / self.seconds(0, num_seqs)
        return tokens / ratio

    def best(self, acceptance: float, num_seqs: int = 1) -> tuple[int, float]:
        """Return the fastest K at an acceptance, and its speed-up; (0, 1.0) if none."""
        speeds = [
            self.speed_up(k, acceptance, num_seqs)
            for k in range(self.max_draft_tokens + 1)
        ]
        k = max(range(len(speeds)), key=speeds.__getitem__)
        return k, speeds[k]

    def break_even(self, num_seqs: int = 1) -> float | None:
        """Return the lowest acceptance at which some K beats plain decoding.

        Returns:
            None if there is none.
        """
        steps = round(1 / STEP)
        found = (i / steps for i in range(steps + 1))
        return next((a for a in found if self.best(a, num_seqs)[0]), None)

    def line(self) -> str:
        """Return the line of a plan."""
        threshold, (k, speed) = self.break_even(), self.best(TYPICAL_ACCEPTANCE)
        text = "drafts do not pay at any acceptance"
        if threshold is not None:
            text = f"drafts pay if more than {threshold:.0%} are accepted"
        if k:
            text += (
                f"; at {TYPICAL_ACCEPTANCE:.0%}, K = {k} is {speed:.2f} times as fast "
                "as plain decoding"
            )
        return f"Computed from bytes, batch 1, {self.context:,} tokens: {text}"

    def as_dict(self) -> dict[str, Any]:
        """Return the costs as JSON values."""
        draft = self.draft
        k, speed = self.best(TYPICAL_ACCEPTANCE)
        return {
            "context": self.context,
            "plain_round_s": self.seconds(0),
            "target_bytes": self.target.weight_bytes,
            "target_kv_bytes": self.target.kv_bytes,
            "draft_bytes": draft.weight_bytes if draft else 0,
            "draft_kv_bytes": draft.kv_bytes if draft else 0,
            "cost_ratio": self.cost_ratio,
            "break_even_acceptance": self.break_even(),
            "acceptance": TYPICAL_ACCEPTANCE,
            "num_draft_tokens": k,
            "speed_up": speed,
        }

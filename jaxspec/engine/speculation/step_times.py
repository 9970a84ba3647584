"""Measured seconds of launches, by program and number of drafts."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxspec.program.plan import StepShape

# Variance of the machine's speed from one round to the next, relative to that of one
# measured time (as are the next two). If one kind runs all the time, its newest time
# has a weight of a quarter. In the simulations that `PolicyConstants` mentions, half
# and twice the value of each of the three, of `STALL` or of `MAX_SKIPPED` are at most
# 1 % slower than the value here, and never faster; the error is up to 1 %.
SPEED_VARIANCE = 1 / 3
# Maximum variance of a kind's own time: so a first time counts most.
MAX_VARIANCE = 3.0
# Growth of that variance in each round of another kind.
VARIANCE_GROWTH = 1 / 16
# Factor by which the machine's speed changes an estimate since it was measured, at
# most. On a shared machine, times doubled for seconds. A larger change is probably not
# the machine's, but that of the only kind that runs.
MAX_CHANGE = 2.0
# Times are limited to this multiple of the expected one: longer ones are suspensions of
# the machine.
STALL = 4.0
# In estimates, and where drafts are charged for what they lose, a time is limited to
# this multiple of the known one. Otherwise one slow round in a hundred would change the
# choice of K, and a few suspensions of the machine would stop drafts for seconds: in a
# benchmark, eight rounds that took 3 to 9 times the expected time. A round that is
# always slower is soon expected to be.
MAX_RISE = 1.5
# With products in C++, a round leaves out padding rows. The rest of its time (reading
# weights, host work) equals the time of 32 rows. With the bundled pair, 5, 8 and 12 of
# 16 rows take 0.71, 0.85 and 0.93 of the full time, 12 and 18 of 24 take 0.79 and 0.92,
# and 30, 48 and 72 of 96 take 0.51, 0.62 and 0.83: within 0.06 of this rule.
FIXED_ROWS = 32
# The first rounds after programs with drafts began or ceased to run are not typical. Of
# plain rounds after rounds with drafts (the bundled pair, batch sizes 1 and 4), the
# first four take 1.33 to 1.25 and 1.10 to 1.06 of the usual time, the next four 1.26 to
# 1.15 and 1.06 to 1.00. The first round of a program is not typical either: the device
# may have had to wait for the host's work for it.
NUM_UNTYPICAL = 4
# After this many times of a kind in a row that are not typical, the next one is counted
# although it is not typical.
MAX_SKIPPED = 16


class RoundKind(NamedTuple):
    """The program and K of a launch, which determine the time of a round."""

    shape: StepShape
    num_draft_tokens: int = 0


def num_rows_of(shape: StepShape, draft_counts: np.ndarray) -> int:
    """Return the number of rows with tokens: newest tokens and drafts.

    Args:
        draft_counts: Draft tokens of each decoding sequence.
    """
    tree = shape.tree
    if not tree.is_chain:
        return len(draft_counts) * tree.num_rows
    return len(draft_counts) + int(np.minimum(draft_counts, tree.num_levels).sum())


def fill_of(round_kind: RoundKind, num_rows: int, num_prompt_tokens: int = 0) -> float:
    """Return the share of a round's rows that have tokens.

    Args:
        num_rows: As `num_rows_of`.
    """
    if round_kind.shape.is_draft_prefill:
        num_rows = 0
    return min((num_rows + num_prompt_tokens) / max_rows_of(round_kind), 1.0)


def max_rows_of(round_kind: RoundKind) -> int:
    """Return the number of rows of a round, including padding."""
    shape, num_draft_tokens = round_kind
    tree = shape.tree
    width = num_draft_tokens + 1 if tree.is_chain else tree.num_rows
    return shape.num_seqs * width + shape.max_prompt_tokens


def _group_of(round_kind: RoundKind) -> RoundKind | int:
    """Return the key of the kinds that share the machine's speed.

    It is the batch size of a round without prompts. Other launches share nothing,
    because the number of their tokens varies.
    """
    shape = round_kind.shape
    return round_kind if shape.max_prompt_tokens else shape.num_seqs


@dataclass(slots=True)
class _Group:
    """Rounds that share the machine's speed.

    Attributes:
        log_slowness: Logarithm of the current times relative to those at the start.
        num_updates: Number of measured times.
    """

    log_slowness: float = 0.0
    num_updates: int = 0


@dataclass(slots=True)
class _Kind:
    """A kind of rounds, as of its newest measured time.

    Attributes:
        measured: Seconds without padding.
        log_slowness, num_updates: As in its group.
        variance: Variance of the kind's own time: see `MAX_VARIANCE`.
        num_skipped: Times ignored since then.
    """

    group: _Group
    measured: float
    log_slowness: float = 0.0
    num_updates: int = 0
    variance: float = MAX_VARIANCE
    num_skipped: int = 0

    @property
    def seconds(self) -> float:
        """Seconds without padding at the machine's speed now."""
        factor = math.exp(self.group.log_slowness - self.log_slowness)
        return self.measured * min(max(factor, 1 / MAX_CHANGE), MAX_CHANGE)

    def set(self, full_s: float, variance: float = MAX_VARIANCE) -> None:
        """Set a newest time."""
        self.measured, self.log_slowness = full_s, self.group.log_slowness
        self.num_updates, self.variance = self.group.num_updates, variance
        self.num_skipped = 0

    def update(self, full_s: float) -> None:
        """Attribute the difference from a newest time to the group and the kind.

        The mean of the differences is that of their logarithms. Otherwise the slowness
        would grow without limit if kinds alternate and their times vary.
        """
        known, group = self.seconds, self.group
        error = math.log(min(max(full_s / known, 1 / STALL), MAX_RISE))
        num_others = group.num_updates - self.num_updates
        own = min(self.variance + VARIANCE_GROWTH * num_others, MAX_VARIANCE)
        total = SPEED_VARIANCE + own + 1
        group.log_slowness += SPEED_VARIANCE / total * error
        group.num_updates += 1
        newest = known * math.exp((SPEED_VARIANCE + own) / total * error)
        self.set(newest, own * (1 - own / total))


class StepTimes:
    """Estimates of round times, in seconds.

    The machine's speed changes, and with it the times of all rounds. A choice of K
    compares kinds of rounds that ran at different times; so the estimates of kinds that
    do not run must follow those that do. For rounds of one batch size without prompts,
    the time is the product of the machine's speed, which these rounds share, and the
    kind's own time. A Kalman filter attributes each difference from the expected time
    to both: the longer a kind has not run, the more to its own time.
    """

    def __init__(self, fixed_rows: int | None = None):
        """Start without times.

        Args:
            fixed_rows: Rows that take as long as the part of a round that does not
                depend on the number of rows with tokens; None where padding rows cost
                as much as others.
        """
        self._fixed_rows = fixed_rows
        self._kinds: dict[RoundKind, _Kind] = {}
        self._groups = defaultdict[RoundKind | int, _Group](_Group)
        self._has_run: set[RoundKind] = set()
        # The program that ran last; whether the last launch without prompts was with
        # drafts, and the number of such launches since that changed.
        self._newest_shape: StepShape | None = None
        self._had_drafts, self._num_since = False, 0

    @property
    def seconds(self) -> dict[RoundKind, float]:
        """Time of each kind without padding; known from its second run on."""
        return {kind: one.seconds for kind, one in self._kinds.items()}

    def seed(self, round_kind: RoundKind, seconds: float, fill: float = 1.0) -> None:
        """Record a time measured by calibration.

        Args:
            fill: As for `record`.
        """
        self._has_run.add(round_kind)
        full_s = seconds / self._scale(round_kind, fill)
        if round_kind not in self._kinds:
            group = self._groups[_group_of(round_kind)]
            self._kinds[round_kind] = _Kind(group, full_s)
        self._kinds[round_kind].set(full_s)

    def record(
        self,
        round_kind: RoundKind,
        seconds: float,
        expected: float | None = None,
        *,
        fill: float = 1.0,
    ) -> float:
        """Record the device time of a round; the first of its kind is ignored.

        Times that are not typical (see `NUM_UNTYPICAL`) count only if no time is known,
        or after `MAX_SKIPPED` of them. Launches with prompts, and of draft prefill,
        seldom follow each other: all of them count.

        Args:
            expected: Expected seconds, used if no time is known.
            fill: Share of the round's rows that have tokens.

        Returns:
            The seconds, limited to `STALL` times the expected time.
        """
        known, scale = self._kinds.get(round_kind), self._scale(round_kind, fill)
        expected = expected if known is None else known.seconds * scale
        if expected is not None:
            seconds = min(seconds, STALL * expected)
        is_typical = self._note_launch(round_kind.shape)
        if known is not None:
            known.num_skipped += 1
            if is_typical or known.num_skipped > MAX_SKIPPED:
                known.update(seconds / scale)
        elif round_kind in self._has_run and seconds > 0:
            self.seed(round_kind, seconds, fill)
        else:
            self._has_run.add(round_kind)
        return seconds

    def _note_launch(self, shape: StepShape) -> bool:
        """Note which program ran; return whether its time is typical."""
        is_other, self._newest_shape = shape != self._newest_shape, shape
        if not shape.max_prompt_tokens or shape.is_draft_prefill:
            has_drafts = shape.num_levels > 0 or shape.is_draft_prefill
            if has_drafts != self._had_drafts:
                self._had_drafts, self._num_since = has_drafts, 0
            self._num_since += 1
        if shape.max_prompt_tokens:
            return True
        return not is_other and self._num_since > NUM_UNTYPICAL

    def _scale(self, round_kind: RoundKind, fill: float) -> float:
        """Return the share of the time without padding that a round takes."""
        if self._fixed_rows is None:
            return 1.0
        num_rows = max_rows_of(round_kind)
        return (self._fixed_rows + fill * num_rows) / (self._fixed_rows + num_rows)

    def measured(self, round_kind: RoundKind, fill: float = 1.0) -> float | None:
        """Return a round's measured time; None if it was not measured.

        Args:
            fill: Share of the round's rows that have tokens.
        """
        known = self._kinds.get(round_kind)
        return None if known is None else known.seconds * self._scale(round_kind, fill)

    def expected(self, round_kind: RoundKind, fill: float = 1.0) -> float | None:
        """Return a round's time, measured or interpolated between two values of K.

        Args:
            fill: Share of the round's rows that have tokens.

        Returns:
            None if no smaller or no larger K was measured: the cost of more drafts
            than were ever tried is unknown.
        """
        full_s = self._full(round_kind)
        return None if full_s is None else full_s * self._scale(round_kind, fill)

    def _full(self, round_kind: RoundKind) -> float | None:
        """Return the expected time of a round without padding."""
        measured = self._kinds.get(round_kind)
        if measured is not None:
            return measured.seconds
        shape, num_draft_tokens = round_kind
        known = {
            k: one.seconds
            for k in range(shape.num_levels + 1)
            if (one := self._kinds.get(RoundKind(shape, k))) is not None
        }
        fewer = max((k for k in known if k < num_draft_tokens), default=None)
        more = min((k for k in known if k > num_draft_tokens), default=None)
        if fewer is None or more is None:
            return None
        share = (num_draft_tokens - fewer) / (more - fewer)
        return known[fewer] + share * (known[more] - known[fewer])

    def check(self) -> None:
        """Assert the invariants."""
        assert all(seconds > 0 for seconds in self.seconds.values())
        assert self._kinds.keys() <= self._has_run

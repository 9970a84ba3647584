"""Chooses K, the number of draft tokens of the next round.

The rule: of all K, and with or without side branches, choose the one with the most
expected tokens per second,

    rate(K) = (sequences + sum of survival up to position K) / time(K)

where survival is the probability that a draft of a sequence and all drafts before it
are accepted. Times are measured per program (`step_times`), acceptance per request and
position (`acceptance`). Another choice must be faster than the present one by a factor
of `hysteresis`.

Estimates can be wrong or old. When a `LossBudget` can pay, an alternative is run for a
few rounds. Alternatives are plain decoding, the largest K, and drafts with side
branches; with K = 0, the best K above it if drafts would win if they took no time, or a
few drafts, if acceptance cannot be estimated otherwise. The same budget stops drafts
that lose against plain decoding. Fewer than `explore_rounds` rounds with drafts say
little about acceptance: until then, if it cannot be estimated otherwise, a trial is
lent, that is, paid afterwards.

The choice does not change the distribution of the text. Greedy and seeded text does not
depend on K, and a choice depends only on tokens read before the round samples.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxspec.config.speculation import ADAPTIVE, SYNTHETIC, SpeculativeConfig
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.loss_budget import LentTrials, LossBudget

_log = logging.getLogger(__name__)

# Kinds of explorations: plain decoding; the largest K; side branches; the best K above
# 0, or a few drafts; a probe of the draft model.
PLAIN, MOST, SIDE, DRAFTS, PROBE = "plain", "most", "side", "drafts", "probe"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """K of the rounds to come.

    Attributes:
        num_draft_tokens: K.
        has_side_branches: Drafts have side branches, if the engine has any.
        gain: Expected tokens per second relative to plain decoding, minus 1; None where
            that is not known.
        may_draft: Drafts have not failed, and not too many requests run.
    """

    num_draft_tokens: int = 0
    has_side_branches: bool = True
    gain: float | None = None
    may_draft: bool = False


@dataclass(frozen=True, kw_only=True)
class RoundEstimates:
    """Measured and estimated values of the next round.

    Attributes:
        max_draft_counts: [sequence]: maximum number of drafts of each sequence.
        acceptance: [sequence, position]: rate once the drafts before it are accepted.
        seconds: Seconds of a round for each K from 0 on; None where unknown. With side
            branches, if the engine has any.
        chain_seconds: The same without side branches; None where the engine has no such
            rounds.
        side_tokens: Tokens from side branches for each token of the main chain.
        draft_prefill_s: Seconds of draft prefill before all sequences can have drafts.
        num_rounds_left: Rounds until the sequences end, on average.
        is_whole_tree: All levels are drafted or none: fewer cost as much.
        is_observable: Acceptance is known without drafting: the draft model is probed,
            or, without one, lookups are followed.
        is_probed: The draft model is probed while nothing is drafted.
    """

    max_draft_counts: np.ndarray
    acceptance: np.ndarray
    seconds: Sequence[float | None]
    chain_seconds: Sequence[float | None] | None = None
    side_tokens: float = 0.0
    draft_prefill_s: float = 0.0
    num_rounds_left: float = 1.0
    is_whole_tree: bool = False
    is_observable: bool = False
    is_probed: bool = False

    @property
    def are_times_known(self) -> bool:
        """Whether the time of every K is known."""
        return None not in self.seconds

    @cached_property
    def times(self) -> np.ndarray:
        """Seconds, [draft shape, K]: with side branches, then without."""
        rows = [self.seconds]
        if self.chain_seconds is not None and None not in self.chain_seconds:
            rows.append(self.chain_seconds)
        return np.array(rows, float)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Expected new tokens of a round, [draft shape, K]."""
        shape = self.times.shape
        max_draft_tokens = shape[1] - 1
        survival = np.cumprod(self.acceptance[:, :max_draft_tokens], axis=1)
        survival *= np.arange(max_draft_tokens) < self.max_draft_counts[:, None]
        accepted = np.cumsum(np.append(0.0, survival.sum(axis=0)))
        tokens = len(self.max_draft_counts) + np.broadcast_to(accepted, shape)
        tokens[0] += self.side_tokens * accepted
        return tokens

    def rates(self, num_draft_tokens: int) -> np.ndarray:
        """Return expected tokens per second, [draft shape, K].

        Args:
            num_draft_tokens: The current K. If it is 0, the times of rounds with drafts
                include draft prefill.
        """
        times = self.times
        if not num_draft_tokens:
            times = times.copy()
            times[:, 1:] += self.draft_prefill_s / self.num_rounds_left
        rates = self.tokens / times
        if self.is_whole_tree:
            rates[0, 1:-1] = 0
        return rates

    def could_win(self) -> bool:
        """Return whether drafts would be faster than none if they took no time."""
        tokens = self.tokens
        return bool(tokens.max() > CONSTANTS.hysteresis * tokens[0, 0])

    def trial_drafts(self, *, is_chain: bool) -> int:
        """Return the largest K whose round takes about as long as one with K = 1."""
        times = self.times[int(is_chain)]
        if not is_chain and self.is_whole_tree:
            return len(times) - 1
        return int(np.flatnonzero(times <= CONSTANTS.hysteresis * times[1])[-1])


def best_choice(estimates: RoundEstimates, current: Choice) -> Choice:
    """Return the choice with the most expected tokens per second.

    The current one remains unless another is better by a factor of `hysteresis`. K is 0
    if drafts could not win even without taking time: a longer plain round was measured
    while the machine was slow. If a time is unknown: the configured K, with side
    branches.
    """
    if not estimates.are_times_known:
        k = len(estimates.seconds) - 1
        return replace(current, num_draft_tokens=k, has_side_branches=True)
    rates = estimates.rates(current.num_draft_tokens)
    is_chain = len(rates) > 1 and not current.has_side_branches
    k = min(current.num_draft_tokens, rates.shape[1] - 1)
    best = np.unravel_index(int(rates.argmax()), rates.shape)
    if not estimates.could_win():
        k = 0
    elif rates[best] > CONSTANTS.hysteresis * rates[int(is_chain), k]:
        is_chain, k = bool(best[0]), int(best[1])
    gain = float(rates[int(is_chain), k] / rates[0, 0] - 1)
    return replace(
        current, num_draft_tokens=k, has_side_branches=not is_chain, gain=gain
    )


def _place(choice: Choice, rates: np.ndarray) -> tuple[int, int]:
    """Return the place of a choice in `RoundEstimates.rates`."""
    is_chain = len(rates) > 1 and not choice.has_side_branches
    return int(is_chain), choice.num_draft_tokens


class SpeculationPolicy:
    """Applies the rule round by round, within a loss budget.

    Attributes:
        choice: The best choice; an exploration may run another one.
        stop_reason: Why drafting has stopped for good; None while it works.
        saved_s, lost_s: Device seconds won and lost against plain decoding so far.
        num_probes: How often the draft model was probed while nothing was drafted.
    """

    def __init__(self, speculative: SpeculativeConfig | None):
        self.speculative = speculative
        configured = speculative.num_levels if speculative else 0
        # Levels of the compiled programs; any smaller K is data.
        self.compiled_levels = (0, configured) if configured else (0,)
        self.is_adaptive = bool(speculative and speculative.controller == ADAPTIVE)
        self.stop_reason: str | None = None
        self.choice = Choice(num_draft_tokens=configured)
        self._set_aside = self.choice  # see `set_adaptive`
        self.saved_s = self.lost_s = 0.0
        self.num_probes = 0
        # The alternative that is being measured, and the number of its rounds left.
        self._explored: Choice | None = None
        self._explore_left = 0.0
        self._paid_s = 0.0  # by the loss budget for each of these rounds
        self._lent = LentTrials()
        # Sequences and maximum K at the newest choice, and rounds until the next.
        self._load: tuple[int, int] | None = None
        self._rounds_left = self._num_drafted_rounds = 0
        # Keyed by the logarithm of the batch size: batches of about one size run in the
        # same programs.
        self._budgets = defaultdict[int, LossBudget](LossBudget)
        self._budget = self._budgets[1]
        self._probe_s = 0.0

    @property
    def num_stops(self) -> int:
        """How often a loss budget was used up."""
        return sum(budget.num_closed for budget in self._budgets.values())

    @property
    def is_stopped(self) -> bool:
        """Whether drafting has failed, so that it remains off."""
        return self.stop_reason is not None

    def stop(self, reason: str) -> None:
        """Stop drafting for good."""
        if self.speculative is not None and not self.is_stopped:
            self.stop_reason = reason
            self.choice = replace(self.choice, num_draft_tokens=0)
            self.end_exploration()
            _log.error("Speculation is disabled: %s", reason)

    def set_adaptive(self, is_adaptive: bool) -> None:
        """Choose K from the next round on, or draft the configured K.

        Benchmarks compare both in one engine. Estimates, loss budgets and the latest
        choice of either kind remain.
        """
        if is_adaptive == self.is_adaptive:
            return
        self.is_adaptive = is_adaptive
        self.choice, self._set_aside = self._set_aside, self.choice
        self.end_exploration()
        self.reconsider()

    def max_draft_tokens(self, num_running: int) -> int:
        """Return the maximum K with this many requests; 0 if drafting is off."""
        if self.speculative is None or self.is_stopped:
            return 0
        threshold = self.speculative.disable_by_batch_size
        if threshold is not None and num_running > threshold:
            return 0
        return self.speculative.num_levels

    @property
    def can_follow_lookups(self) -> bool:
        """Whether the text alone shows which lookups would have been accepted."""
        if not self.is_adaptive or self.speculative is None:
            return False
        is_verified = self.speculative.rejection_sample_method != SYNTHETIC
        return self.speculative.method_info.lookup is not None and is_verified

    @property
    def is_constant(self) -> bool:
        """Whether K never changes, so that it does not depend on other requests."""
        if self.speculative is None or self.is_adaptive or self.is_stopped:
            return False
        return self.speculative.disable_by_batch_size is None

    def compiled_for(self, num_draft_tokens: int) -> int:
        """Return the levels of the smallest compiled programs that serve K."""
        return next(n for n in self.compiled_levels if n >= num_draft_tokens)

    @property
    def num_draft_tokens(self) -> int:
        """K of the next rounds, except those that time plain decoding."""
        if self._explored is not None and self._explored.num_draft_tokens:
            return self._explored.num_draft_tokens
        return self.choice.num_draft_tokens

    @property
    def is_drafting(self) -> bool:
        """Whether K of the next rounds is above 0."""
        return self.num_draft_tokens > 0

    @property
    def is_timing_plain(self) -> bool:
        """Whether the next rounds are without drafts to measure their time."""
        return self._explored is not None and not self._explored.num_draft_tokens

    @property
    def is_idle(self) -> bool:
        """Whether the next rounds have no drafts, and need no new choice."""
        return self.is_adaptive and not self.is_drafting and self._rounds_left > 0

    @property
    def next_choice(self) -> Choice:
        """The choice of the next round: the best, or an alternative to measure."""
        return self._explored or self.choice

    def is_due(self, num_seqs: int, max_draft_tokens: int) -> bool:
        """Return whether a new choice must be made before the next round.

        Args:
            max_draft_tokens: Maximum number of drafts of a sequence.
        """
        if not self.is_adaptive or not max_draft_tokens or self._explored is not None:
            return False
        return (num_seqs, max_draft_tokens) != self._load or self._rounds_left <= 0

    def choose(self, estimates: RoundEstimates) -> None:
        """Make a new choice for the next rounds."""
        num_seqs, before = len(estimates.max_draft_counts), self.choice
        self._load = num_seqs, len(estimates.seconds) - 1
        self._budget = self._budgets[num_seqs.bit_length()]
        if self._budget.is_closed:
            self.choice = replace(before, num_draft_tokens=0)
        else:
            self.choice = best_choice(estimates, before)
            runs = (DRAFTS, PROBE) if self.choice.num_draft_tokens else (PLAIN,)
            for kind in runs:
                self._budget.pay(kind)
            if estimates.are_times_known:
                self._explore(estimates)
        # Until all times are known, the choice is always the configured K.
        self._rounds_left = CONSTANTS.look_rounds
        if estimates.are_times_known:
            # The first rounds with drafts are most informative about acceptance.
            num_rounds = 1 + self._num_drafted_rounds
            self._rounds_left = min(num_rounds, CONSTANTS.look_rounds)
        if not self.is_drafting:
            plain_s = estimates.seconds[0] or CONSTANTS.idle_look_s
            num_rounds = int(CONSTANTS.idle_look_s / plain_s)
            self._rounds_left = max(num_rounds, CONSTANTS.look_rounds)

    def _explore(self, estimates: RoundEstimates) -> None:
        """Begin to measure an alternative, if one is affordable."""
        choice, budget = self.choice, self._budget
        rates = estimates.rates(choice.num_draft_tokens)
        alternatives = self._alternatives(estimates, rates)
        seconds, prices_s = dict[str, float](), dict[str, float]()
        for kind, other in alternatives.items():
            place = _place(other, rates)
            lost_s = float(estimates.times[place])  # in a round
            if choice.num_draft_tokens or estimates.is_observable:
                # The share that is expected to be lost.
                share = float(1 - rates[place] / rates[_place(choice, rates)])
                lost_s *= max(share, CONSTANTS.hysteresis - 1)
            seconds[kind], prices_s[kind] = lost_s, CONSTANTS.explore_rounds * lost_s
            if kind == DRAFTS:
                prices_s[kind] += estimates.draft_prefill_s
        is_probed = not choice.num_draft_tokens and estimates.is_probed
        has_trials = DRAFTS in prices_s and not estimates.is_observable
        budget.set_kinds(
            [*alternatives, *([PROBE] if is_probed else [])],
            (DRAFTS, prices_s[DRAFTS]) if has_trials else None,
        )
        affordable = [kind for kind in prices_s if budget.can_pay(kind, prices_s[kind])]
        max_lent_s = float(CONSTANTS.loss_rounds * estimates.times[0, 0])
        if affordable:
            kind = max(affordable, key=budget.saved_s)
            budget.pay(kind)
            self._paid_s, self._explored = seconds[kind], alternatives[kind]
            self._explore_left = CONSTANTS.explore_rounds
        elif (
            has_trials
            and self._num_drafted_rounds < CONSTANTS.explore_rounds
            and self._lent.lost_s + prices_s[DRAFTS] <= max_lent_s
            and budget.can_pay(DRAFTS, 0.0)
        ):
            self._lent.begin(max_lent_s)
            self._explored = alternatives[DRAFTS]
            self._explore_left = CONSTANTS.explore_rounds

    def _alternatives(
        self, estimates: RoundEstimates, rates: np.ndarray
    ) -> dict[str, Choice]:
        """Return the alternatives to measure, by kind."""
        choice, max_draft_tokens = self.choice, rates.shape[1] - 1
        k, found = choice.num_draft_tokens, dict[str, Choice]()
        if k:
            found[PLAIN] = replace(choice, num_draft_tokens=0)
            if k < max_draft_tokens:
                found[MOST] = replace(choice, num_draft_tokens=max_draft_tokens)
            if not choice.has_side_branches:
                k = max_draft_tokens if estimates.is_whole_tree else k
                side = replace(choice, num_draft_tokens=k, has_side_branches=True)
                found[SIDE] = side
            return found
        row, _ = _place(choice, rates)
        if not estimates.is_observable:
            k = estimates.trial_drafts(is_chain=bool(row))
        elif estimates.could_win():
            k = 1 + int(rates[row, 1:].argmax())
        else:
            return {}
        return {DRAFTS: replace(choice, num_draft_tokens=k)}

    def reconsider(self) -> None:
        """Make a new choice before the next round: something has changed."""
        self._rounds_left = 0

    def end_exploration(self) -> None:
        """Stop measuring an alternative: prompts interrupt it."""
        self._explored, self._explore_left = None, 0.0
        self._lent.end()

    def _charge_lent(self, lost_s: float) -> None:
        """Charge what a lent trial has lost; end it when that is too much.

        Args:
            lost_s: Negative if it has won.
        """
        self._budget.charge(lost_s)
        self._lent.charge(lost_s)
        if self._lent.is_exhausted:
            self.end_exploration()
            self.reconsider()

    def can_probe(self) -> bool:
        """Return whether to probe the draft model while nothing is drafted."""
        if not self.is_adaptive or self.is_drafting or self.is_stopped:
            return False
        return not self._budget.is_closed and self._budget.can_pay(PROBE, self._probe_s)

    def begin_probe(self) -> None:
        """Pay for a probe of the draft model."""
        self._budget.pay(PROBE)

    def record_draft_prefill(self, seconds: float, *, is_probe: bool) -> None:
        """Record the time of a draft prefill launch.

        Args:
            is_probe: It only measured acceptance probabilities; K was 0.
        """
        self.lost_s += seconds
        if is_probe:
            self.num_probes += 1
            self._probe_s = seconds
            self.reconsider()
        elif self._lent.is_running or self._explored is None and not self.is_drafting:
            # The second condition: the trial ended before this launch did.
            self._charge_lent(seconds)
        elif seconds > 0 and self._explored is None:
            self._budget.add(-seconds, seconds)

    def record_time(self, seconds: float) -> None:
        """Record device seconds of any launch."""
        self._budget.earn(seconds)

    def record_round(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        num_emitted: int,
        seconds: float,
        plain_s: float | None,
    ) -> None:
        """Record the time a round won or lost against plain decoding of its tokens.

        Args:
            plain_s: Seconds of a round without drafts; None where unknown.
        """
        self._rounds_left -= 1
        self._num_drafted_rounds += num_draft_tokens > 0
        is_exploring, is_lent = self._explored is not None, self._lent.is_running
        if self._explored is not None:
            # Plain rounds during draft prefill for an exploration count an eighth, so
            # that it ends if there are no drafts at all.
            is_plain = not self._explored.num_draft_tokens
            self._explore_left -= 1 if is_plain != (num_draft_tokens > 0) else 1 / 8
            if self._explore_left <= 0:
                self.end_exploration()
                self.reconsider()
        if not num_draft_tokens or plain_s is None or not num_seqs:
            return
        won = num_emitted / num_seqs * plain_s - seconds
        if won > 0:
            self.saved_s += won
        else:
            self.lost_s -= won
        if not self.is_adaptive:
            return
        if is_lent:
            self._charge_lent(-won)
            return
        if is_exploring:
            # The estimated time, which was paid, may have been too short.
            self._budget.charge(max(-won - self._paid_s, 0.0))
            return
        budget = self._budgets[num_seqs.bit_length()]
        budget.add(won, plain_s)
        if budget.is_closed and self.choice.num_draft_tokens:
            self.choice = replace(self.choice, num_draft_tokens=0)
            self.reconsider()

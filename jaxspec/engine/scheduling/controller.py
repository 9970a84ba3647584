"""How many drafts the next launch makes: as many as measured times and acceptance pay.

And whether others are beside them, in engines that have side leaves or trees.

Whatever it chooses, the text is the target's: greedy and seeded text does not depend on
K, and a choice is made from tokens that have been read, before the round it is for has
drawn anything. What it may lose against decoding without drafts is bounded by an
`account` of seconds, whatever it believes: a share of those that its clock counts, in
an engine the seconds that the device works. Knows nothing of requests, rows or devices.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.engine.scheduling.account import MIN_WAIT_S, Account
from jaxspec.engine.scheduling.rates import Form, expected_kept
from jaxspec.engine.scheduling.refresh import REFRESH_ROUNDS, Refresh
from jaxspec.settings.speculation import ADAPTIVE, SYNTHETIC, SpeculativeConfig

_log = logging.getLogger(__name__)

# Rounds between two looks at what is known: with drafts, and where texts are watched;
# without drafts, where a trial or the text tells what they would bring, and where
# whoever asks the draft model says when to look again.
LOOK_ROUNDS, WATCHED_LOOK_ROUNDS, IDLE_LOOK_ROUNDS, ASKED_LOOK_ROUNDS = 8, 4, 32, 256
# The gain that a change must promise.
HYSTERESIS = 1.04
# Without drafts the draft model is asked so seldom that it costs this share of the
# time.
PROBE_SHARE = 0.01
# What is left out, drafts beside others and those after the first few, is made again
# for one look after so many seconds: only rounds say what it brings and takes.
AGAIN_S = 10.0


class Controller:
    """Picks K, and keeps the accounts of what that brought.

    Attributes:
        stop_reason: Why nothing is drafted any more; None while drafting works.
        num_drafts: K of the newest choice.
        has_beside: Its drafts have others beside them, where the engine has such.
        gain: Tokens per second it should bring, as a share of what plain decoding does;
            None before anything is known.
        saved_s, lost_s: Seconds won and lost against plain decoding so far.
        num_probes: How often the draft model was asked while nothing was drafted.
        num_stops: How often an account was closed.
    """

    def __init__(
        self,
        speculative: SpeculativeConfig | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.speculative, self._clock = speculative, clock
        configured = speculative.num_levels if speculative else 0
        # For which executables are built: how many drafts each sequence has is data.
        self.ladder = (0, configured) if configured else (0,)
        self.is_adaptive = bool(speculative and speculative.controller == ADAPTIVE)
        # A tree is fed whole: fewer of its levels bring less, and cost as much.
        self._is_whole = speculative is not None and speculative.is_one_tree
        self.stop_reason: str | None = None
        self.num_drafts, self.has_beside = configured, True
        self.gain: float | None = None
        self.saved_s = self.lost_s = 0.0
        self.num_probes = self.num_stops = 0
        # Of the newest choice: what it was made for, and rounds left until the next;
        # and plain rounds that are still to be timed.
        self._load: tuple[int, int] | None = None
        self._rounds_left = self._refresh_left = 0
        self._accounts = defaultdict[int, Account](Account)
        self._account = self._account_of(1)
        self._refreshes: dict[int, Refresh] = {}
        self._probe_ts = self._beside_ts = self._most_ts = -math.inf

    @property
    def is_stopped(self) -> bool:
        """Whether drafting has failed: nothing is drafted any more."""
        return self.stop_reason is not None

    def stop(self, reason: str) -> None:
        """Draft no more."""
        if self.speculative is not None and not self.is_stopped:
            self.stop_reason, self.num_drafts = reason, 0
            _log.error("Going on without speculation: %s", reason)

    def limit(self, num_running: int) -> int:
        """Most drafts per sequence with this many requests running; 0 is off."""
        if self.speculative is None or self.is_stopped:
            return 0
        threshold = self.speculative.disable_by_batch_size
        if threshold is not None and num_running > threshold:
            return 0
        return self.speculative.num_levels

    @property
    def can_watch(self) -> bool:
        """Whether the text alone says what drafts would have brought."""
        if not self.is_adaptive or self.speculative is None:
            return False
        is_judged = self.speculative.rejection_sample_method != SYNTHETIC
        return self.speculative.has_only_lookup and is_judged

    @property
    def is_constant(self) -> bool:
        """K depends on nothing, so that it need not depend on other requests."""
        if self.speculative is None or self.is_adaptive or self.is_stopped:
            return False
        return self.speculative.disable_by_batch_size is None

    @property
    def is_timing_plain(self) -> bool:
        """Whether the next rounds are without drafts to see what such rounds take."""
        return self._refresh_left > 0

    def rung(self, wanted: int) -> int:
        """The smallest K of the ladder that serves `wanted` drafts."""
        return next(rung for rung in self.ladder if rung >= wanted)

    def choose(
        self,
        wanted: np.ndarray,
        acceptance: Callable[[], np.ndarray],
        seconds: Callable[[], Sequence[float | None]],
        catch_up_s: Callable[[], float],
        can_ask: Callable[[], bool] = lambda: False,
        beside: Callable[[], float] = lambda: 0.0,
        chain_seconds: Callable[[], Sequence[float | None] | None] = lambda: None,
    ) -> int:
        """K of the next round; `has_beside` says whether others are beside its drafts.

        Args:
            wanted: Most drafts of each sequence that decodes.
            acceptance: [sequence, position], as `Costs.acceptance` says.
            seconds: Of a round with 0, 1, ... drafts; None where that is not known.
            catch_up_s: What it takes before all sequences can have drafts, over the
                rounds that they probably still have.
            can_ask: Whether what drafts would have brought is known without a round
                that is tried: a draft model says so, or lookups are watched.
            beside: Tokens that drafts beside others bring, for each of those.
            chain_seconds: As `seconds`, of rounds without drafts beside others; None
                where the engine has no other rounds.
        """
        most = int(wanted.max(initial=0))
        if not self.is_adaptive or not most:
            return most
        load = len(wanted), most
        self._rounds_left -= 1
        if self._refresh_left:
            return 0
        if load == self._load and self._rounds_left > 0:
            return self.num_drafts
        now = self._clock()
        self._load, self._rounds_left = load, LOOK_ROUNDS
        before, self._account = self.num_drafts, self._account_of(len(wanted))
        if now < self._account.closed_until:
            self.num_drafts = 0
        else:
            known, chain = seconds(), chain_seconds()
            if any(one is None for one in known):
                # As configured, until there is a comparison.
                self.num_drafts, self.has_beside = most, True
            else:
                forms = [Form(np.array(known), beside(), self._is_whole)]
                if chain is not None and not any(one is None for one in chain):
                    forms.append(Form(np.array(chain)))
                self._compare(wanted, acceptance(), forms, catch_up_s)
                times, _, is_whole = forms[not self.has_beside]
                # As many as cost no more than the fewest.
                fewest = times[most if is_whole else 1]
                trial = int(np.flatnonzero(times <= HYSTERESIS * fewest)[-1])
                self._try(now, trial, is_trial=before > 0, can_ask=can_ask())
                self._remeasure(len(wanted), now, is_drafting=before > 0)
                self._try_again(now, most, is_drafting=before > 0)
        if (before > 0) != (self.num_drafts > 0):
            self._account.begin()
        if not self.num_drafts:
            is_told = can_ask() and not self.can_watch
            self._rounds_left = ASKED_LOOK_ROUNDS if is_told else IDLE_LOOK_ROUNDS
        elif self.can_watch:
            self._rounds_left = WATCHED_LOOK_ROUNDS
        return 0 if self._refresh_left else self.num_drafts

    def look(self) -> None:
        """Choose anew for the next round: something has changed."""
        self._rounds_left = 0

    def repeat(self, num_rounds: int) -> None:
        """Count rounds that run with the newest choice, beyond the one it was for."""
        self._rounds_left -= num_rounds

    def _try(self, now: float, trial: int, *, is_trial: bool, can_ask: bool) -> None:
        """Make `trial` drafts for some rounds where only that tells what they bring."""
        if self.num_drafts:
            self._account.pass_trial()
        elif is_trial:
            self._account.end_trial(now)
        elif now >= self._account.trial_ts and not can_ask:
            self.num_drafts = trial

    def _try_again(self, now: float, most: int, *, is_drafting: bool) -> None:
        """Make more drafts for one look, where the last with so many was long ago."""
        may_try = is_drafting and self.num_drafts and not self._refresh_left
        if may_try and not self.has_beside and now - self._beside_ts > AGAIN_S:
            self._beside_ts, self.has_beside = now, True
            self.num_drafts = most if self._is_whole else self.num_drafts
        elif may_try and self.num_drafts < most and now - self._most_ts > AGAIN_S:
            self._most_ts, self.num_drafts = now, most

    def _account_of(self, num_seqs: int) -> Account:
        return self._accounts[num_seqs.bit_length()]

    def _compare(
        self,
        wanted: np.ndarray,
        acceptance: np.ndarray,
        forms: Sequence[Form],
        catch_up_s: Callable[[], float],
    ) -> None:
        """Choose the K and the form of the most tokens per second."""
        most = len(forms[0].seconds) - 1
        form = int(len(forms) > 1 and not self.has_beside)
        k = min(self.num_drafts, most)
        kept, again_s = expected_kept(wanted, acceptance, most), 0.0
        if not k:
            again_s = catch_up_s()
        rates = np.array([one.rates(len(wanted), kept, again_s) for one in forms])
        best = divmod(int(rates.argmax()), most + 1)
        if rates[best] > HYSTERESIS * rates[form, k]:
            form, k = best
        self.has_beside, self.num_drafts = not form, k
        self.gain = float(rates[form, k] / rates[0, 0] - 1)

    def _remeasure(self, num_seqs: int, now: float, *, is_drafting: bool) -> None:
        """Time a few plain rounds, where the last one was long ago."""
        # Numbers up to the next power of two run in the same programs.
        refresh = self._refreshes.setdefault(num_seqs.bit_length(), Refresh(now))
        if not (is_drafting and self.num_drafts):
            refresh.rest(now)
        elif refresh.begin_if_due(now):
            self._refresh_left = REFRESH_ROUNDS

    def stop_timing(self) -> None:
        """Time no more plain rounds now: prompts come in between."""
        self._refresh_left = 0

    def wants_probe(self) -> bool:
        """Whether to ask the draft model what its drafts would have brought."""
        is_off = self.is_adaptive and not self.num_drafts and not self.is_stopped
        return is_off and self._clock() >= max(
            self._probe_ts, self._account.closed_until
        )

    def begin_probe(self) -> None:
        """Ask no more until the answer is there, or should be."""
        self._probe_ts = self._clock() + MIN_WAIT_S

    def record_catch_up(self, seconds: float, *, is_probe: bool) -> None:
        """Count what bringing the draft model up to date took.

        Args:
            is_probe: Nothing was drafted then: it was to learn what drafts would bring.
        """
        self.lost_s += seconds
        if not is_probe:
            self._account.add(-seconds, seconds)
        else:
            self.num_probes += 1
            self._rounds_left = 0
            wait_s = max(seconds / PROBE_SHARE, MIN_WAIT_S)
            self._probe_ts = self._clock() + wait_s

    def record_round(
        self,
        num_seqs: int,
        num_drafts: int,
        num_emitted: int,
        seconds: float,
        plain_s: float | None,
    ) -> None:
        """Count what a round won against plain decoding of the same tokens.

        Args:
            plain_s: Seconds of a round without drafts; None where that is not known.
        """
        if not num_drafts:
            self._refresh_left = max(self._refresh_left - 1, 0)
            return
        if plain_s is None or not num_seqs:
            return
        won = num_emitted / num_seqs * plain_s - seconds
        if won > 0:
            self.saved_s += won
        else:
            self.lost_s -= won
        if not self.is_adaptive:
            return
        account = self._account_of(num_seqs)
        account.add(won, seconds)
        if account.close_if_losing(self._clock()):
            self.num_drafts, self._rounds_left = 0, 0
            self.num_stops += 1

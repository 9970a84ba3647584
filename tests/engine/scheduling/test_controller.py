"""K follows measured times and acceptance, and what it may lose is bounded."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import SpeculativeConfig
from jaxspec.engine.scheduling import account
from jaxspec.engine.scheduling.account import MAX_LOSS, MIN_WAIT_S, WINDOW_ROUNDS
from jaxspec.engine.scheduling.controller import (
    ASKED_LOOK_ROUNDS,
    IDLE_LOOK_ROUNDS,
    LOOK_ROUNDS,
    Controller,
)
from jaxspec.engine.scheduling.costs import Costs
from jaxspec.engine.scheduling.refresh import (
    FIRST_WAIT_S,
    MAX_WAIT_S,
    REFRESH_ROUNDS,
)
from jaxspec.settings.speculation import ADAPTIVE, FIXED, SUFFIX_DEFAULTS

# Seconds of a round by K, of one sequence.
TIMES = [0.010, 0.013, 0.015, 0.017, 0.019, 0.021]


def make_controller(
    num_draft_tokens: int, threshold: int | None = None, **named
) -> Controller:
    return Controller(
        SpeculativeConfig(
            model="draft",
            num_speculative_tokens=num_draft_tokens,
            disable_by_batch_size=threshold,
            controller=named.pop("controller", FIXED),
        ),
        **named,
    )


@pytest.mark.parametrize("configured", range(1, 9))
def test_every_wish_gets_a_rung_that_serves_it(configured):
    controller = make_controller(configured)
    assert controller.ladder == (0, configured)
    assert controller.rung(0) == 0
    for wanted in range(1, configured + 1):
        assert controller.rung(wanted) == configured


def test_plain_decoding_never_drafts():
    controller = Controller(None)
    assert controller.ladder == (0,)
    assert controller.limit(1) == 0
    assert controller.rung(0) == 0
    assert not controller.wants_probe()


def test_drafting_stops_above_the_batch_size_and_not_at_it():
    controller = make_controller(3, threshold=4)
    assert [controller.limit(running) for running in (1, 4, 5, 100)] == [3, 3, 0, 0]


def test_without_a_threshold_any_batch_drafts():
    assert make_controller(3).limit(10_000) == 3


class World:
    """Sequences whose drafts stay with a chance that may change, and a clock.

    The controller sees what an engine would see: estimates of the chance, which the
    world makes as wrong as it likes, and the times of rounds.
    """

    def __init__(
        self, times, chance, num_seqs=1, *, believed=None, believed_times=None
    ):
        self.times, self.chance, self.num_seqs = times, chance, num_seqs
        self.believed, self.believed_times = believed, believed_times
        self.now = 0.0
        self.most = len(times) - 1
        self.controller = make_controller(
            self.most, controller=ADAPTIVE, clock=lambda: self.now
        )
        self.random = np.random.default_rng(0)
        self.num_tokens = 0
        self.chosen: list[int] = []
        self.catch_up_s = self.spent_on_catch_up_s = 0.0

    def round(self, *, can_ask=True) -> int:
        chance = self.chance if self.believed is None else self.believed()
        known = self.times if self.believed_times is None else self.believed_times
        k = self.controller.choose(
            np.full(self.num_seqs, self.most),
            acceptance=lambda: np.full((self.num_seqs, self.most), chance),
            seconds=lambda: list(known),
            catch_up_s=lambda: self.catch_up_s,
            can_ask=lambda: can_ask,
        )
        stays = self.random.random((self.num_seqs, k)) < self.chance
        emitted = self.num_seqs + int(np.cumprod(stays, axis=1).sum())
        self.now += self.times[k]
        self.num_tokens += emitted
        self.chosen.append(k)
        self.controller.record_round(
            self.num_seqs,
            k,
            emitted,
            self.times[k],
            self.times[0],
        )
        return k

    @property
    def plain_s(self) -> float:
        """What plain decoding would have taken for the same tokens."""
        return self.num_tokens / self.num_seqs * self.times[0]


@pytest.mark.parametrize(
    ("chance", "best"), [(0.0, 0), (0.2, 0), (0.5, 2), (0.7, 4), (0.9, 5), (1.0, 5)]
)
def test_k_is_that_of_the_most_tokens_per_second(chance, best):
    lengths = [sum(chance**i for i in range(k + 1)) for k in range(6)]
    rates = np.array(lengths) / TIMES
    world = World(TIMES, chance)
    for _ in range(3 * LOOK_ROUNDS):
        world.round()
    # Within what a change must promise.
    assert rates[world.chosen[-1]] >= rates.max() / 1.04
    assert abs(world.chosen[-1] - best) <= 2
    assert world.controller.gain == pytest.approx(
        rates[world.chosen[-1]] / rates[0] - 1
    )


def test_a_request_that_wants_fewer_drafts_counts_with_those():
    controller = make_controller(5, controller=ADAPTIVE, clock=lambda: 0.0)
    wanted = np.array([1, 1, 1, 1])
    k = controller.choose(
        wanted,
        acceptance=lambda: np.full((4, 5), 0.9),
        seconds=lambda: TIMES[: wanted.max() + 1],
        catch_up_s=lambda: 0.0,
    )
    assert k == 1


def test_as_configured_until_every_time_is_known():
    controller = make_controller(5, controller=ADAPTIVE, clock=lambda: 0.0)
    k = controller.choose(
        np.array([5]),
        acceptance=lambda: np.zeros((1, 5)),
        seconds=lambda: [None, *TIMES[1:]],
        catch_up_s=lambda: 0.0,
    )
    assert k == 5


def test_a_fixed_k_is_fixed():
    controller = make_controller(5)
    for _ in range(100):
        k = controller.choose(
            np.array([5, 3]),
            acceptance=lambda: np.zeros((2, 5)),
            seconds=lambda: TIMES,
            catch_up_s=lambda: 0.0,
        )
        assert k == 5
        controller.record_round(2, 5, 2, TIMES[5], TIMES[0])
    assert controller.lost_s > 1
    assert not controller.wants_probe()


def test_k_is_looked_at_again_when_the_batch_changes():
    controller = make_controller(5, controller=ADAPTIVE, clock=lambda: 0.0)

    def choose(num_seqs: int, times: list[float]) -> int:
        return controller.choose(
            np.full(num_seqs, 5),
            acceptance=lambda: np.full((num_seqs, 5), 0.7),
            seconds=lambda: times,
            catch_up_s=lambda: 0.0,
        )

    steep = [0.010 * (1 + k) for k in range(6)]
    assert choose(1, TIMES) > 0
    assert choose(16, steep) == 0
    assert choose(1, TIMES) > 0


WATCHED: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


@pytest.mark.parametrize("keys", [WATCHED, {"model": "draft"}])
def test_what_is_watched_is_looked_at_more_often_than_who_can_be_asked(keys):
    """A text that goes on as it began says nothing new."""
    speculative = SpeculativeConfig(
        num_speculative_tokens=3, controller=ADAPTIVE, **keys
    )
    controller, looks = Controller(speculative, clock=lambda: 0.0), []

    def seconds() -> list[float]:
        looks.append(1)
        return [0.01, 0.02, 0.03, 0.04]

    chosen = [
        controller.choose(
            np.full(1, 3),
            acceptance=lambda: np.zeros((1, 3)),
            seconds=seconds,
            catch_up_s=lambda: 0.0,
            can_ask=lambda: True,
        )
        for _ in range(2 * ASKED_LOOK_ROUNDS)
    ]
    rounds = IDLE_LOOK_ROUNDS if "method" in keys else ASKED_LOOK_ROUNDS
    assert not any(chosen)
    assert len(looks) == pytest.approx(2 * ASKED_LOOK_ROUNDS / rounds, abs=1)


def test_a_return_that_costs_more_than_it_brings_is_none():
    world = World(TIMES, 0.0)
    for _ in range(2 * LOOK_ROUNDS):
        world.round()
    assert world.chosen[-1] == 0
    world.chance, world.catch_up_s = 0.6, 1.0
    for _ in range(2 * ASKED_LOOK_ROUNDS):
        world.round()
    assert world.chosen[-1] == 0
    world.catch_up_s = 0.0
    for _ in range(2 * ASKED_LOOK_ROUNDS):
        world.round()
    assert world.chosen[-1] > 0


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_loss_is_bounded_whatever_is_believed(data):
    """Times and beliefs at random, acceptance that changes, for a minute of rounds."""
    most = data.draw(st.integers(1, 8))
    base = data.draw(st.floats(0.002, 0.05))
    extra = data.draw(st.lists(st.floats(0, 1.5), min_size=most, max_size=most))
    times = list(base * (1 + np.cumsum([0.0, *extra])))
    lie = st.floats(0.0, 1.0)
    believed = data.draw(st.sampled_from(["truth", "all", "none", "any"]))
    world = World(times, data.draw(lie), data.draw(st.integers(1, 16)))
    beliefs = {"all": lambda: 1.0, "none": lambda: 0.0, "any": world.random.random}
    world.believed = beliefs.get(believed)
    if data.draw(st.booleans()):
        # As if drafts were free.
        world.believed_times = [base] * (most + 1)
    phases = data.draw(st.lists(lie, min_size=1, max_size=6))
    tries = 0
    for chance in phases:
        world.chance = chance
        end = world.now + 10.0
        while world.now < end:
            before = world.controller.num_drafts
            if world.round(can_ask=data is not None) and not before:
                tries += 1
    # Every try may lose what a window of its rounds loses before it is looked at. What
    # follows gives that back, up to the share of the time that may be lost, but for a
    # window per phase and the last one.
    window = WINDOW_ROUNDS[1] * (times[most] - base / (most + 1))
    allowed = 3 * MAX_LOSS * world.now + (len(phases) + 1) * window
    assert world.now - world.plain_s <= allowed
    saved = world.controller.saved_s - world.controller.lost_s
    assert saved == pytest.approx(world.plain_s - world.now, abs=1e-6)


def test_a_loss_is_noticed_within_a_window_and_the_next_try_waits_longer():
    """Whoever believes in drafts that never stay loses one percent of the time."""
    world = World(TIMES, 0.0, believed=lambda: 1.0)
    while world.now < 120:
        world.round()
    tries = np.flatnonzero(np.diff(np.array([0, *world.chosen]) > 0).astype(int))
    starts = [i for i in tries if world.chosen[i] > 0]
    ends = [i for i in tries if not world.chosen[i]]
    lengths = [end - start for start, end in zip(starts, ends, strict=False)]
    assert max(lengths) <= WINDOW_ROUNDS[0] + LOOK_ROUNDS
    assert world.controller.num_stops == len(starts)
    assert world.now / world.plain_s <= 1 + 1.5 * MAX_LOSS
    assert world.controller.lost_s == pytest.approx(world.now - world.plain_s)


def test_without_drafts_the_draft_model_is_asked_for_a_share_of_the_time():
    world = World(TIMES, 0.0)
    for _ in range(LOOK_ROUNDS + 1):
        world.round()
    controller, asked, cost = world.controller, [], 0.004
    while world.now < 20:
        if controller.wants_probe():
            asked.append(world.now)
            world.now += cost
            controller.record_catch_up(cost, is_probe=True)
        world.round()
    assert controller.num_probes == len(asked)
    assert np.diff(asked).min() >= max(MIN_WAIT_S, cost / 0.01)
    # Often enough to see a change within a second.
    assert np.diff(asked).max() <= 0.5
    world.chance = 0.9
    while not world.round():
        pass
    assert not controller.wants_probe()


def test_where_nobody_can_be_asked_drafts_are_tried_now_and_then():
    world = World(TIMES, 0.0)
    while world.now < 60:
        world.round(can_ask=False)
    tried = np.count_nonzero(world.chosen) / len(world.chosen)
    assert 0 < tried < 0.02
    assert {k for k in world.chosen[100:] if k} == {1}
    world.chance, start = 0.9, world.now
    while world.round(can_ask=False) < 5:
        assert world.now - start < 60
    asked = World(TIMES, 0.0)
    while asked.now < 60:
        asked.round(can_ask=True)
    assert set(asked.chosen[LOOK_ROUNDS:]) == {0}


def test_a_trial_makes_all_the_drafts_that_cost_no_more():
    """As of lookups, whose verification takes the same time for one draft or five."""
    world = World([1e-3, 2.0e-3, 2.01e-3, 2.02e-3, 2.05e-3, 4e-3], 0.0)
    while world.now < 20:
        world.round(can_ask=False)
    assert {k for k in world.chosen[100:] if k} == {4}


def test_a_plain_round_is_timed_again_now_and_then():
    world = World(TIMES, 0.9)
    seen = []
    while world.now < 5 * MAX_WAIT_S:
        is_timing = world.controller.is_timing_plain
        if not world.round() and not is_timing:
            seen.append(world.now)
    # Soon after the start, and then seldom.
    assert 0 < seen[0] < 2 * FIRST_WAIT_S
    waits = np.diff(seen)
    doubled = 2 * FIRST_WAIT_S * 2.0 ** np.arange(5)
    assert (np.abs(waits[:5] / doubled - 1) < 0.3).all()
    assert (np.abs(waits[5:] / MAX_WAIT_S - 1) < 0.1).all() and len(waits) > 7
    assert world.chosen.count(0) == REFRESH_ROUNDS * len(seen)
    assert world.controller.num_drafts > 0


def test_numbers_of_sequences_that_run_in_the_same_programs_are_timed_together():
    world = World(TIMES, 0.9)
    while world.now < 30:
        if world.random.random() < 0.3:
            world.num_seqs = int(world.random.integers(40, 80))
        world.round()
    assert world.chosen.count(0) < 0.06 * len(world.chosen)


def test_plain_rounds_are_timed_again_soon_after_they_were_left():
    """A time that was too long for a while would be believed for long."""
    world = World(TIMES, 0.9, believed_times=TIMES)
    while world.now < 3 * MAX_WAIT_S:
        world.round()
    world.chance = 0.0
    while world.round() or world.controller.is_timing_plain:
        pass
    world.chance = 0.9
    while not world.round():
        pass
    start = world.now
    while world.round():
        pass
    assert world.controller.is_timing_plain
    assert world.now - start < 2 * FIRST_WAIT_S


def test_what_has_failed_is_not_tried_again():
    world = World(TIMES, 0.9)
    world.round()
    world.controller.stop("the draft is broken")
    assert world.controller.limit(1) == 0
    assert not world.controller.wants_probe()


def test_the_account_is_what_bounds_the_loss(monkeypatch):
    """Without it, whoever believes in drafts that never stay loses half of the time."""
    monkeypatch.setattr(account, "MAX_LOSS", 1e9)
    world = World(TIMES, 0.0, believed=lambda: 1.0)
    while world.now < 20:
        world.round()
    assert world.now / world.plain_s > 1.9


class Replay:
    """A recorded text, decoded again by any policy.

    Greedy and seeded text does not depend on K, so neither does whether the draft at a
    position would stay once those before it have: a record of that says how many tokens
    any round would have had.
    """

    def __init__(self, stays: np.ndarray):
        self.stays = stays
        # Of each position, how many drafts in a row would have stayed.
        self.run = np.zeros(len(stays) + 1, np.int64)
        for position in range(len(stays) - 1, -1, -1):
            self.run[position] = stays[position] * (self.run[position + 1] + 1)

    def fixed(self, k: int) -> float:
        """Seconds with K drafts at every round."""
        return self._play(lambda: k)

    def adaptive(self) -> tuple[float, list[int]]:
        """Seconds as the controller chooses, and what it chose."""
        costs, now, chosen = Costs(1, 5), 0.0, list[int]()
        controller = make_controller(5, controller=ADAPTIVE, clock=lambda: now)
        position, row, lacking = 0, np.array([0]), 0
        while position < len(self.stays):
            if controller.wants_probe() and lacking:
                first = max(position - lacking, position - 32)
                costs.record_likeness(0, self.stays[first:position].astype(float))
                controller.record_catch_up(CATCH_UP_S, is_probe=True)
                now, lacking = now + CATCH_UP_S, 0
            k = controller.choose(
                np.array([5]),
                acceptance=lambda: costs.acceptance(row),
                seconds=lambda: TIMES,
                catch_up_s=lambda: 0.0,
                can_ask=lambda: True,
            )
            accepted = min(k, int(self.run[position]))
            costs.record_acceptance(row, np.array([k]), np.array([accepted]))
            now += TIMES[k]
            controller.record_round(1, k, accepted + 1, TIMES[k], TIMES[0])
            position += accepted + 1
            lacking = 0 if k else lacking + 1
            chosen.append(k)
        return now, chosen

    def _play(self, choose) -> float:
        position = seconds = 0
        while position < len(self.stays):
            k = choose()
            position += min(k, int(self.run[position])) + 1
            seconds += TIMES[k]
        return seconds


CATCH_UP_S = 0.003


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_regret_against_the_best_k_in_hindsight(chance):
    replay = Replay(np.random.default_rng(1).random(12_000) < chance)
    seconds, _ = replay.adaptive()
    every = [replay.fixed(k) for k in range(6)]
    assert seconds <= min(every) / 0.95
    assert seconds <= every[0] / 0.97


@pytest.mark.parametrize("length", [200, 1000])
def test_a_text_that_changes_is_decoded_faster_than_with_any_one_k(length):
    """Parts that are easy to draft, and parts that are not, in turn."""
    random = np.random.default_rng(2)
    parts = [random.random(length) < chance for chance in (0.95, 0.05) * 6]
    replay = Replay(np.concatenate(parts))
    seconds, chosen = replay.adaptive()
    every = [replay.fixed(k) for k in range(6)]
    assert seconds <= min(every) / (1.0 if length == 1000 else 0.97)
    assert {0, 5} <= set(chosen)


TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"


def make_tree_controller(clock=lambda: 0.0) -> Controller:
    speculative = SpeculativeConfig(
        model="draft",
        controller=ADAPTIVE,
        num_speculative_tokens=6,
        speculative_token_tree=TREE,
    )
    return Controller(speculative, clock=clock)


@pytest.mark.parametrize(("chance", "best"), [(0.05, 0), (0.3, 0), (0.5, 3), (0.9, 3)])
def test_a_tree_is_drafted_whole_or_not_at_all(chance, best):
    """Though a level of it, for the price of two thirds, would look best at 0.3."""
    controller, k = make_tree_controller(), -1
    assert controller.ladder == (0, 3)
    for _ in range(2 * LOOK_ROUNDS):
        k = controller.choose(
            np.full(1, 3),
            acceptance=lambda: np.full((1, 3), chance),
            seconds=lambda: [0.010, 0.0105, 0.016, 0.017],
            catch_up_s=lambda: 0.0,
            can_ask=lambda: True,
        )
    assert k == best


def test_a_tree_that_is_tried_is_tried_whole():
    now, seen = [0.0], set()
    controller = make_tree_controller(lambda: now[0])
    for _ in range(5 * LOOK_ROUNDS):
        now[0] += MIN_WAIT_S
        k = controller.choose(
            np.full(1, 3),
            acceptance=lambda: np.full((1, 3), 0.0),
            seconds=lambda: [0.010, 0.012, 0.014, 0.016],
            catch_up_s=lambda: 0.0,
        )
        if not k:
            controller.record_round(1, 0, 1, 0.01, None)
        seen.add(k)
    assert seen == {0, 3}


def test_a_tree_that_was_left_out_for_its_chain_is_tried_whole():
    """Of the chain fewer drafts are the best."""
    now, seen = [0.0], set()
    controller = make_tree_controller(lambda: now[0])
    for _ in range(4):
        now[0] += 0.05
        controller.look()
        k = controller.choose(
            np.full(1, 3),
            acceptance=lambda: np.full((1, 3), 0.6),
            seconds=lambda: [0.010, 0.030, 0.030, 0.030],
            chain_seconds=lambda: [0.010, 0.011, 0.030, 0.030],
            catch_up_s=lambda: 0.0,
            can_ask=lambda: True,
        )
        seen.add((k, controller.has_beside))
    assert seen == {(3, True), (3, False), (1, False)}


def test_what_leaves_bring_counts():
    controller = make_controller(5, controller=ADAPTIVE, clock=lambda: 0.0)

    def choose(beside: float) -> int:
        controller._rounds_left = 0
        return controller.choose(
            np.full(1, 5),
            acceptance=lambda: np.full((1, 5), 0.2),
            seconds=lambda: TIMES,
            catch_up_s=lambda: 0.0,
            can_ask=lambda: True,
            beside=lambda: beside,
        )

    assert choose(0.0) == 0
    assert choose(1.5) > 0


class Beside:
    """A controller of an engine with side leaves, and a clock that a look moves."""

    def __init__(self, beside: float, seconds: list[float], chain: list | None):
        self.now, self.beside = 0.0, beside
        self.known: list[Any] = [seconds, chain]
        self.controller = make_controller(
            5, controller=ADAPTIVE, clock=lambda: self.now
        )

    def look(self, num_seqs: int = 1) -> tuple[int, bool]:
        self.now += 0.1
        self.controller.look()
        self.controller.choose(
            np.full(num_seqs, 5),
            acceptance=lambda: np.full((num_seqs, 5), 0.8),
            seconds=lambda: self.known[0],
            chain_seconds=lambda: self.known[1],
            catch_up_s=lambda: 0.0,
            can_ask=lambda: True,
            beside=lambda: self.beside,
        )
        while self.controller.is_timing_plain:
            self.controller.record_round(num_seqs, 0, num_seqs, 0.01, None)
        return self.controller.num_drafts, self.controller.has_beside

    def settle(self) -> tuple[int, bool]:
        """The choice once what is left out has been tried."""
        for _ in range(4):
            self.look()
        return self.look()


DEARER = [TIMES[0], *(1.4 * one for one in TIMES[1:])]


@pytest.mark.parametrize(("beside", "has_beside"), [(0.05, False), (0.9, True)])
def test_drafts_beside_others_are_made_where_they_pay(beside, has_beside):
    assert Beside(beside, DEARER, TIMES).settle() == (5, has_beside)


def test_they_are_made_until_the_time_without_is_known():
    one = Beside(0.0, DEARER, [TIMES[0], *[None] * 5])
    assert one.settle() == (5, True)
    one.known[1] = TIMES
    assert one.settle() == (5, False)
    one.known[1] = None
    assert one.settle() == (5, True)


def test_what_they_bring_is_found_out_before_and_now_and_then():
    one = Beside(0.0, DEARER, TIMES)
    assert one.look()[1], "as nobody knows yet"
    assert [one.look()[1] for _ in range(90)] == [False] * 90
    found = [one.look()[1] for _ in range(220)]
    assert found.count(True) == 3
    one.beside = 0.9
    assert any(one.look()[1] for _ in range(110)) and one.look()[1]


def test_fewer_drafts_with_others_beside_them_may_be_as_good_as_many():
    """Both are chosen at once: K of each form is its own."""
    leaves = [0.010, 0.0105, *[0.05] * 4]
    chain = [0.010, 0.0104, 0.02, 0.03, 0.04, 0.05]
    assert Beside(0.5, leaves, chain).settle() == (1, True)


def test_the_most_drafts_are_timed_again():
    """Else a time that was too long once would stand for ever."""
    slow = [*TIMES[:2], 0.03, 0.04, 0.05, 0.06]
    one = Beside(0.0, slow, None)
    assert one.look()[0] == 5, "as in the first rounds of all"
    assert {one.look()[0] for _ in range(90)} == {1}
    assert 5 in {one.look()[0] for _ in range(20)}
    one.known[0] = TIMES  # as that round has shown
    assert one.settle()[0] > 3


@pytest.mark.parametrize(
    ("changes", "can_watch"),
    [
        ({"method": "suffix", **SUFFIX_DEFAULTS}, True),
        ({"method": "suffix", "controller": FIXED, **SUFFIX_DEFAULTS}, False),
        ({"method": "suffix+draft_model", "model": "m", **SUFFIX_DEFAULTS}, False),
        # What stays is no matter of the text.
        (
            {
                "method": "suffix",
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
                **SUFFIX_DEFAULTS,
            },
            False,
        ),
        ({"model": "m"}, False),
    ],
)
def test_texts_are_watched_where_they_alone_decide(changes, can_watch):
    assert Controller(SpeculativeConfig(**changes)).can_watch == can_watch
    assert not Controller(None).can_watch


def test_who_is_told_looks_at_once():
    world = World(TIMES, 0.0)
    world.round()
    assert world.round() == 0
    world.chance = 0.9
    assert world.round() == 0
    world.controller.look()
    assert world.round() > 0

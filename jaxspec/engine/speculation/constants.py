"""The constants of choosing K, with the measurements behind them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyConstants:
    """The constants of the policy; times and acceptance rates are measured instead.

    Attributes:
        hysteresis: Minimum ratio of expected speeds, new to current, at which the
            choice changes. Two plain engines of one process differ by 4 % in the median
            (benchmarks.control, part `free`).
        look_rounds: Rounds with drafts between two choices, but 1, 2 and 4 between the
            first for which all times are known. A choice takes the host 50 to 80
            microseconds; a round with drafts of the bundled pair takes 1,300.
        idle_look_s: Seconds without drafts between two choices, but at least
            `look_rounds`. A choice takes the host up to 0.5 ms: with one per 32 rounds
            of the bundled pair, or 45 ms, choices were 1.4 % of the time at batch
            size 1. A probe, a long lookup match or a new request
            triggers a choice at once.
        explore_rounds: Rounds with the alternative in one exploration. After a change
            between drafts and none, the first four are not measured
            (`step_times.NUM_UNTYPICAL`). Trials may be lent until this number of
            rounds has had drafts.
        max_loss: Share of the device's time that drafts may lose against decoding
            without them, and that explorations may take: a promise, not a measured
            value. Trials may also spend time that drafts have won
            (`loss_budget.WON_SHARE`).
        loss_rounds: Plain rounds that drafts may lose in a row beyond that share before
            they are stopped. With drafts that gain a tenth at batch 1, a round wins
            0.1 +- 1.2 plain rounds; a random loss of 48 occurs once in 70,000 rounds.
            Also the limit of the won time that is kept, and of what lent trials lose.
        half_life_rounds: Rounds after which an observed acceptance counts half. In
            simulations of changing texts on a machine of changing speed, 8 rounds are
            as fast as 16 (1.00 +- 0.01), and 32 are 4 % slower.
        prior_weight: Observations that a request's own rate needs to count as much as
            the mean of its kind, and a position's as much as the position before it. In
            the same simulations, 2 is 0.8 % slower (+- 0.5), and 8 is not distinguished
            from 4.
        prior_acceptance: Assumed acceptance of a draft model before any measurement.
            For the bundled pair it is 0.75 with sampling and 0.90 greedy.
        prior_lookup_acceptance: Assumed acceptance of a lookup that is estimated
            without drafting. In prose, 0.1 of the first drafts are accepted; in copied
            text, the estimate rises at once.
    """

    hysteresis: float = 1.04
    look_rounds: int = 8
    idle_look_s: float = 0.1
    explore_rounds: int = 12
    max_loss: float = 0.01
    loss_rounds: float = 48.0
    half_life_rounds: float = 16.0
    prior_weight: float = 4.0
    prior_acceptance: float = 0.7
    prior_lookup_acceptance: float = 0.1


CONSTANTS = PolicyConstants()

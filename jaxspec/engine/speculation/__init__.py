"""Chooses K, the number of draft tokens of a round.

Read `policy` first: the rule that chooses K, and its application round by round.
`step_times` and `acceptance` are its measurements, `loss_budget` bounds the cost of
wrong estimates, and `constants` has its ten numbers.
"""

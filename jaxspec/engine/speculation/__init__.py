"""Chooses K, the number of draft tokens of a round.

Read `policy` first: the law, and how it is applied round by round. `step_times` and
`acceptance` are the measurements that it reads, `loss_budget` bounds what wrong
estimates cost, and `constants` has its ten numbers.
"""

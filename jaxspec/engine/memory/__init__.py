"""Divides the memory of devices into weights, programs and pages.

`plan` is the arithmetic, on plain numbers; `draft_sharding` chooses the number of
devices for a draft model, and `round_cost` computes where drafts pay. `probe` finds the
numbers for a configuration, from devices that are present or, with
`device_descriptions`, from their names. `malloc` reduces what the C library retains of
the host's memory.
"""

"""How the memory of devices is divided, and how many pages there are.

`plan` is the arithmetic, on plain numbers; `draft_sharding` chooses over how many
devices a draft model is spread. `probe` finds the numbers for a configuration, from
devices that are present or, by `device_descriptions`, from their names. `malloc`
reduces what the C library retains of the host's memory.
"""

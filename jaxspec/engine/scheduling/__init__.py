"""What the next launch does: numpy and plain Python, nothing of jax.

Read `scheduler` first: it plans in stages, which return the values of `stages`. Rows
that decode come from the `row_table` (those with `slow_masks` are held), their program
from `programs`; `prefill_budget` says how much of prompts comes along, `page_claims`
which requests get pages of the `kv_cache` (`page_events` notes which pages others can
find), and `admission` which `request` of the `waiting_queue` begins to run. The plan
becomes a `launch`; `commit` takes its result in, and `stats` counts.

Between rounds, `draft_prefill` gives the draft model the keys and values it lacks.
`round_estimates` is what `jaxspec.engine.speculation` chooses K by; for lookups it asks
a `lookup_estimator`, which follows texts while nothing is drafted.
"""

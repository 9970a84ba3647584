"""Plans the next launch: numpy and plain Python, no jax.

Read `scheduler` first. It plans in stages, whose results are declared in `stages`:
`decode_selection` selects rows of the `row_table` (`slow_masks` holds some of them) and
one of the `programs`, `prefill_budget` limits the prompt tokens, `page_claims` assigns
pages of the `kv_cache` (`page_events` records which pages can be found), and
`admission` admits each `request` from the `waiting_queue`. The plan becomes a `launch`;
`commit` processes its result, `page_releases` frees pages, and `stats` counts.

Between rounds, `draft_prefill` gives the draft model the keys and values it lacks.
`round_estimates` collects the values by which `jaxspec.engine.speculation` chooses K;
`lookup_estimator` estimates the acceptance of lookups while nothing is drafted.
"""

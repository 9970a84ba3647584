"""What the next launch does: numpy and plain Python, nothing of jax.

Read `scheduler` first; then what it divides, `request`, `kv_cache` and `rows`, what it
hands to the device and reads of it, `batch`, and what says how much at once: `pacing`,
`shapes` and `draft_prefill`. `lookup_estimator` follows texts to estimate what lookups
would bring while none are made, `stats` counts, `page_events` notes which pages others
can find. K is chosen in `jaxspec.engine.speculation`.
"""

"""What the next launch does: numpy and plain Python, nothing of jax.

Read `scheduler` first; then what it divides, `request`, `kv_cache` and `rows`, what it
hands to the device and reads of it, `batch`, and what says how much at once: `costs`,
`pacing`, `controller` (with the `rates` that it compares, the `account` that bounds
what drafts may lose, and `refresh`, when plain rounds are timed again) and `shapes`.
`lookups` watches what drafts would bring while none are made, `stats` counts,
`page_events` notes which pages others can find.
"""

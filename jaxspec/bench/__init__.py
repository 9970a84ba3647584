"""`python -m jaxspec.bench`: measures an engine's speed, and what speculation changes.

Reading order: `__main__` and `flags` (the five subcommands), `data` (prompts),
`measure` (runs of one engine), `acceptance`, `parts` (time of a round), `summary` and
`report`. The subcommands are `whole` (latency and throughput) and `spec` with
`compare` (shapes of drafts) and `methods` with `method_report`, which load engines with
`offline`; `serve`, with `client`, `traffic`, `scrape` and `serve_report`; and
`lossless`, which compares the texts of servers.
"""

"""`python -m jaxspec.bench`: how fast a pair is, and whether drafting pays.

Reading order: `__main__` and `flags` (the four subcommands), `data` (prompts),
`measure` (runs of one engine, plain and speculative in turn), `acceptance`, `ceiling`,
`bandwidth` and `parts` (what drafts bring, could bring and cost), `report`; then the
subcommands: `whole` (latency and throughput) and `spec` with `forms` and `methods`,
which load engines by `offline` and share `summary`, and `serve`, which asks a server by
`online`. `plot` draws any result, with `figures`.
"""

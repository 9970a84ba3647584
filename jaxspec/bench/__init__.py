"""`python -m jaxspec.bench`: how fast a pair is, and whether drafting pays.

Reading order: `flags` (the four subcommands), `data` (prompts), `measure` (runs of one
engine, plain and speculative in turn), `acceptance`, `ceiling` and `parts` (what drafts
bring, could bring and cost), `report`; then the subcommands: `whole` (latency and
throughput), `spec`, and `serve` with its client: `connection`, `client`, `traffic`,
`scrape`. `plot` draws any result, with `figures`.
"""

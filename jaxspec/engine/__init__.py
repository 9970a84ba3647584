"""The host side of the engine: numpy and plain Python, jax only behind `runner`.

Read `llm_engine` first (the loop), then `scheduler`, `pages`, `request`, `runner` and
`output`. `arg_utils` and `speculative_args` come before the engine exists.
"""

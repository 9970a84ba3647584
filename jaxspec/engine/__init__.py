"""The host side of the engine: numpy and plain Python, jax only behind `runner`.

Read `llm_engine` first (the loop), then the way of a request: `input_processor`,
`request`, `scheduler` with `kv_cache`, `rows` and `batch`, `runner`,
`output_processor`. `arg_utils`, `speculative_args`, `model_folders`, `memory_plan` and
`draft_sharding`, whose facts `device_memory` finds, come before the engine exists;
`costs`, `pacing`, `controller` and `shapes` say what a launch does.
"""

"""The host side of the engine: numpy and plain Python, jax only behind `runner`.

Read `llm_engine` first (the loop; `async_llm_engine` runs it in an `engine_thread`),
then the way of a request: `input_processor` (and `structured_output`), `request`,
`scheduler` with `kv_cache`, `rows` and `batch`, `runner`, `output_processor` and
`detokenizer`. `costs`, `pacing`, `controller` and `shapes` say what a launch does;
`compiler` and `program_cache` make its program; `stats` and `metrics` count.

Before the engine exists: `arg_utils`, `speculative_args` and `model_folders` read what
was asked for; `memory_plan` and `draft_sharding` divide the devices, by facts that
`device_memory`, `device_speeds` and `described` (devices that are not here) find;
`loader` reads the weights.
"""

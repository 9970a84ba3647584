"""The host side of the engine: numpy and plain Python, jax only behind `runner`.

Read `llm_engine` first (the loop; `async_llm_engine` runs it in an `engine_thread`, and
`engine_group` several side by side; an `engine_lock` lets threads share an engine),
then the way of a request: `input_processor` (and `structured_output`, which follows a
grammar with a `grammar_matcher`), `scheduling`, which says what a launch does, and
`speculation`, which chooses K, `runner`, `output_processor` and `detokenizer`.
`compiler` and `program_cache` make a launch's program, `calibration` times it;
`metrics` counts, and
`kv_events` tells gateways which prefixes have pages. `multihost` has the processes of
other hosts run the same launches.

Before the engine exists: `arg_utils`, `speculative_args` and `model_folders` read what
was asked for; `memory` divides the devices' memory; `loader` reads the weights.
"""

"""The host side of the engine: numpy and plain Python, jax only behind `runner`.

Read `llm_engine` first (the loop; `async_llm_engine` runs it in an `engine_thread`,
`engine_group` runs several engines; an `engine_lock` lets threads share an engine),
then the path of a request: `input_processor` (with `structured_output`, which computes
grammar masks with a `grammar_matcher`; `structural_tags` become grammars),
`scheduling`, which plans launches, `speculation`, which chooses K, `runner`,
`output_processor` and `detokenizer`. `corpora` are texts that suffix drafts may copy.
`compiler` and `program_cache` make a launch's program (a `program_folder` stores it, on
a disk or in a bucket), and `calibration` times it. `metrics` counts, `tracing` records
a span for each request, and `kv_events` publishes which prefixes have pages;
`stat_loggers` are vLLM's classes, which choose nothing.
`multihost` runs the same launches in the processes of other hosts.

Before the engine exists, `arg_utils`, `speculative_args` and `model_folders` read the
arguments (`vllm_arguments` lists those that only vLLM has), `memory` divides the
devices' memory, and `loader` reads the weights.
"""

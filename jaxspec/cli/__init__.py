"""The subcommands of `python -m jaxspec`.

Reading order: `commands` (all subcommands and their arguments), `generate` (one prompt,
and the speed-up of speculation), `chat` (a conversation with an engine or a server:
`chat_backend`, `chat_server`), `terminal` (colored output), `plan` (memory plan of an
engine), `compile` (compiles an engine's programs ahead of time), `quality` (the effect
of quantization on texts), `run_batch` (answers a file of requests), `collect_env`
(describes the machine for a bug report).
"""

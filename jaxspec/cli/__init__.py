"""What `python -m jaxspec` shows in a terminal.

Reading order: `generate` (one prompt, then what speculation gained), `chat` (a
conversation with an engine or a server), `terminal` (how accepted drafts look), `plan`
(what an engine would take of devices), `compile` (its programs, before it starts),
`quality` (what quantization took from a checkpoint's texts).
"""

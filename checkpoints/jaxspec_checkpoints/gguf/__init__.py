"""GGUF, the format of llama.cpp: one file with weights, config and tokenizer.

Reading order: `blocks` (types of tensors), `file` (the parser), `config` (metadata as a
`config.json`), `tokenizer` (and as a `tokenizer.model`), `reading` (a file as a
`Checkpoint`).
"""

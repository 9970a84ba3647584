"""GGUF, the format of llama.cpp: one file with weights, config and tokenizer.

Reading order: `blocks` (types of tensors), `file` (the parser), `config` (converts
metadata to a `config.json`), `tokenizer` (converts metadata to a `tokenizer.model`, and
back), `reading` (opens a file as a `Checkpoint`), `writing` (writes a file).
"""

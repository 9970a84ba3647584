"""The type of page keys in KV events, at vLLM's import path."""

ExternalBlockHash = bytes | int

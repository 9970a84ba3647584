"""Aliases of vLLM's modules on LoRA adapters, which this engine does not support."""

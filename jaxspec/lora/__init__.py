"""Thin aliases of vLLM's modules on adapters, which this engine does not have."""

"""Thin aliases of vLLM's modules on engines."""

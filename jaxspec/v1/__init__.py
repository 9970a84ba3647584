"""Thin aliases of modules that vLLM has in its package `v1`."""

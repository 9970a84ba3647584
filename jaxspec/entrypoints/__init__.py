"""Thin aliases, so that vLLM's import paths work with the package name replaced."""

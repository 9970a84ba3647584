"""Alias of `jaxspec.errors`, at vLLM's import path for errors of failed engines."""

from jaxspec.errors import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]

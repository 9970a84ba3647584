"""Alias of `jaxspec.errors`, where vLLM has what a failed engine raises."""

from jaxspec.errors import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]

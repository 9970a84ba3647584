"""Alias of `jaxspec.llm`, where vLLM has its `LLM`."""

from jaxspec.llm import LLM

__all__ = ["LLM"]

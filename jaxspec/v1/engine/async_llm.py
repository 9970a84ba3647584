"""Alias of `jaxspec.engine.async_llm_engine`, under vLLM's newer names."""

from jaxspec.engine.async_llm_engine import AsyncLLMEngine

AsyncLLM = AsyncLLMEngine

__all__ = ["AsyncLLM"]

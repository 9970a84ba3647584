"""The completion schema of `jaxspec.serve.requests.protocol`, at vLLM's import path."""

from jaxspec.serve.requests.protocol import CompletionBody as CompletionRequest

__all__ = ["CompletionRequest"]

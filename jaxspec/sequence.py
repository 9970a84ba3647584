"""Alias of `jaxspec.logprobs` at vLLM's older import path of `Logprob`."""

from jaxspec.logprobs import Logprob

__all__ = ["Logprob"]

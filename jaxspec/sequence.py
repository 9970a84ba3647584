"""Alias of `jaxspec.logprobs`, where older scripts look for `Logprob`."""

from jaxspec.logprobs import Logprob

__all__ = ["Logprob"]

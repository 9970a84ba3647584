"""Alias of `jaxspec.errors` at vLLM's import path."""

from jaxspec.errors import RequestError, RetryableRequestError

# Has `parameter` and `value` and is a ValueError, like vLLM's.
VLLMValidationError = RequestError

__all__ = ["RetryableRequestError", "VLLMValidationError"]

"""Alias of `jaxspec.errors`, where vLLM has what a wrong request raises."""

from jaxspec.errors import RequestError

# With `parameter` and `value`, as vLLM's; a ValueError as well.
VLLMValidationError = RequestError

__all__ = ["VLLMValidationError"]

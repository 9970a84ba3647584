"""Alias of the version, where vLLM has it."""

from jaxspec import __version__

__version_tuple__ = tuple(map(int, __version__.split(".")))

__all__ = ["__version__", "__version_tuple__"]

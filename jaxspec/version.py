"""Alias of the version at vLLM's import path."""

from jaxspec import __version__

__version_tuple__ = tuple(map(int, __version__.split(".")))

__all__ = ["__version__", "__version_tuple__"]

"""Alias of `jaxspec.serve.requests.tool_parsers` at vLLM's import path, for plugins."""

from jaxspec.serve.requests.tool_parsers import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]

"""Alias of `jaxspec.serve.bodies.tool_parsers`, where vLLM has its own, for plugins."""

from jaxspec.serve.bodies.tool_parsers import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]

"""vLLM's path of `jaxspec.serve.requests.tool_parsers`, for plugins."""

from jaxspec.serve.requests.tool_parsers import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]

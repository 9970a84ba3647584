"""Alias of the chats' part of `jaxspec.serve.bodies.protocol`, as vLLM names it."""

from jaxspec.serve.bodies.protocol import ChatBody as ChatCompletionRequest
from jaxspec.serve.bodies.protocol import ChatTool as ChatCompletionToolsParam
from jaxspec.serve.bodies.protocol import FunctionDefinition

__all__ = ["ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition"]

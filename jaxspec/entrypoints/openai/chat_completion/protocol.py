"""Alias of the chats' part of `jaxspec.serve.protocol`, as vLLM names it."""

from jaxspec.serve.protocol import ChatBody as ChatCompletionRequest
from jaxspec.serve.protocol import ChatTool as ChatCompletionToolsParam
from jaxspec.serve.protocol import FunctionDefinition

__all__ = ["ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition"]

"""Alias of the chats' part of `jaxspec.serve.requests.protocol`, as vLLM names it."""

from jaxspec.serve.requests.protocol import ChatBody as ChatCompletionRequest
from jaxspec.serve.requests.protocol import ChatTool as ChatCompletionToolsParam
from jaxspec.serve.requests.protocol import FunctionDefinition

__all__ = ["ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition"]

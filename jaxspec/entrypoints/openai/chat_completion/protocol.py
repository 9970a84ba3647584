"""The chat schemas of `jaxspec.serve.requests.protocol`, at vLLM's import path."""

from jaxspec.serve.requests.protocol import ChatBody as ChatCompletionRequest
from jaxspec.serve.requests.protocol import ChatTool as ChatCompletionToolsParam
from jaxspec.serve.requests.protocol import FunctionDefinition

__all__ = ["ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition"]

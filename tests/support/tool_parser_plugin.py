"""A tool parser plugin written for vLLM, with the package name replaced."""

PLUGIN = '''
from collections.abc import Sequence

from jaxspec.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from jaxspec.entrypoints.openai.engine.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from jaxspec.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module(["shout", "cry"])
class ShoutToolParser(ToolParser):
    """A word in capitals is a call without arguments."""

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        self.count = 0

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output, request):
        names = {tool.function.name for tool in request.tools}
        calls = [
            ToolCall(function=FunctionCall(name=word.lower(), arguments="{}"))
            for word in model_output.split()
            if word.isupper() and word.lower() in names
        ]
        words = " ".join(word for word in model_output.split() if not word.isupper())
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=words or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        assert current_text == previous_text + delta_text
        assert current_token_ids == [*previous_token_ids, *delta_token_ids]
        if not delta_text.endswith(" "):
            return None
        word = current_text.split()[-1]
        if not word.isupper():
            return DeltaMessage(content=f"{word} ")
        self.count += 1
        function = DeltaFunctionCall(name=word.lower(), arguments="{}")
        return DeltaMessage(
            tool_calls=[
                DeltaToolCall(
                    index=self.count - 1,
                    id="chosen",
                    type="function",
                    function=function.model_dump(exclude_none=True),
                )
            ]
        )
'''

"""Owns tool parsers, which find the tool calls in generated text.

The interface is vLLM's: a plugin for vLLM works after its imports are changed.
`tool_choice` decides which parser is used.
"""

import importlib
import importlib.util
import sys
import uuid
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, no_type_check

from pydantic import BaseModel, Field

from jaxspec.errors import ConfigError, one_of, wrong_argument
from jaxspec.serve.requests.protocol import ChatBody, ChatTool
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.tools import CallReader, Part

GEMMA = "gemma"
# Another name of the parser `GEMMA`.
GEMMA2 = "gemma2"


def make_call_id() -> str:
    """Return an id that no other call has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class FunctionCall(BaseModel):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A complete call."""

    id: str = Field(default_factory=make_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class ExtractedToolCallInformation(BaseModel):
    """Calls and text of a complete answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(BaseModel):
    """New part of a call: its name, or some of its arguments."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """New part of the call with this index; its first part has the id."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """New part of an answer."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ToolParser:
    """Finds the calls in one answer; vLLM's base class of parsers.

    Attributes:
        model_tokenizer: Tokenizer of the model.
        tools: Tools of the request.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[ChatTool] | None = None
    ) -> None:
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by vocabulary piece."""
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: ChatBody) -> ChatBody:
        """Return the request, possibly changed, before it is processed."""
        return request

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Parse a complete answer."""
        raise NotImplementedError(
            f"{type(self).__name__} has no extract_tool_calls: it cannot parse "
            "complete answers"
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatBody,
    ) -> DeltaMessage | None:
        """Parse the new part of a stream; None while it may or may not be a call."""
        raise NotImplementedError(
            f"{type(self).__name__} has no extract_tool_calls_streaming: it cannot "
            "parse streams"
        )

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Return text held back until the end of the answer. Not part of vLLM's API."""
        return None


class ToolParserManager:
    """Registry of parsers by name.

    It is global to the process, as in vLLM: a plugin registers its parsers when its
    file is imported.
    """

    tool_parsers: ClassVar[dict[str, type[ToolParser]]] = {}
    lazy_parsers: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def list_registered(cls) -> list[str]:
        """Return all names."""
        return sorted(cls.tool_parsers.keys() | cls.lazy_parsers.keys())

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Return the parser with a name.

        Raises:
            KeyError: There is none.
        """
        if name not in cls.tool_parsers:
            path, called = cls.lazy_parsers[name]
            parser = getattr(importlib.import_module(path), called)
            cls.register_module(name, module=parser)
        return cls.tool_parsers[name]

    @classmethod
    @no_type_check  # it has its own check, with vLLM's error
    def register_module(
        cls,
        name: str | list[str] | None = None,
        force: bool = True,
        module: type[ToolParser] | None = None,
    ) -> Any:
        """Register a parser, or (without `module`) return a decorator that does.

        Args:
            name: One name or several; None for the class's name.
            force: Replace a parser that already has the name.
        """

        def register(parser: type[ToolParser]) -> type[ToolParser]:
            if not isinstance(parser, type) or not issubclass(parser, ToolParser):
                raise TypeError(f"{parser!r} is not a subclass of ToolParser")
            names = [name] if isinstance(name, str) else name
            for one in names or [parser.__name__]:
                if not force and one in cls.tool_parsers:
                    raise KeyError(f"A parser named {one!r} is already registered.")
                cls.tool_parsers[one] = parser
            return parser

        return register if module is None else register(module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a parser that is imported at its first use."""
        cls.lazy_parsers[name] = module_path, class_name

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        """Import a file that registers parsers.

        Raises:
            ConfigError: The file does not exist, or fails.
        """
        path, name = Path(plugin_path).expanduser(), "tool_parser_plugin"
        if not path.is_file():
            allowed = "a Python file that registers a parser"
            raise wrong_argument(ConfigError, name, allowed, plugin_path)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        try:
            if spec is None or spec.loader is None:
                raise ImportError("the name of a Python file must end in .py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # for lazily registered parsers
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(
                f"{name}={plugin_path!r} failed: {type(error).__name__}: {error}",
                parameter=name,
                value=plugin_path,
            ) from error


def parser_class(name: str, plugin: str) -> type[ToolParser]:
    """Return the parser that a server's settings name.

    Raises:
        ConfigError: No parser has the name, or the plugin fails.
    """
    if plugin:
        ToolParserManager.import_tool_parser(plugin)
    known = ToolParserManager.list_registered()
    if name not in known:
        allowed = one_of(known)
        hint = "A --tool-parser-plugin can add others."
        raise wrong_argument(ConfigError, "tool_call_parser", allowed, name, hint)
    return ToolParserManager.get_tool_parser(name)


@ToolParserManager.register_module([GEMMA, GEMMA2])
class GemmaToolParser(ToolParser):
    """Parses calls in the format that `jaxspec.text.tools` describes to the model."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[ChatTool] | None = None
    ) -> None:
        super().__init__(tokenizer, tools)
        self._reader = self._make_reader()

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Parse a complete answer."""
        reader = self._make_reader()
        parts = reader.push(model_output) + reader.end()
        content = "".join(part.text for part in parts if part.call is None)
        calls: list[ToolCall] = []
        for part in parts:
            if part.name is not None:
                function = FunctionCall(name=part.name, arguments="")
                calls.append(ToolCall(function=function))
            elif part.call is not None:
                calls[part.call].function.arguments += part.text
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=content or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatBody,
    ) -> DeltaMessage | None:
        """Parse the new part of a stream."""
        return _delta(self._reader.push(delta_text))

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Return the text of an incomplete call."""
        return _delta(self._reader.end())

    def _make_reader(self) -> CallReader:
        return CallReader({tool.function.name for tool in self.tools})


class ForcedToolParser(GemmaToolParser):
    """Parses an answer that must call a tool, and so contains nothing but calls."""

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Parse a complete answer."""
        found = super().extract_tool_calls(model_output, request)
        return found.model_copy(update={"content": None})

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatBody,
    ) -> DeltaMessage | None:
        """Parse the new part of a stream."""
        parts = self._reader.push(delta_text)
        return _delta([part for part in parts if part.call is not None])

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Drop the text of an incomplete call."""
        return None


def _delta(parts: list[Part]) -> DeltaMessage | None:
    words = "".join(part.text for part in parts if part.call is None)
    calls = [_delta_call(part) for part in parts if part.call is not None]
    if not words and not calls:
        return None
    return DeltaMessage(content=words or None, tool_calls=calls)


def _delta_call(part: Part) -> DeltaToolCall:
    assert part.call is not None
    if part.name is None:
        function = DeltaFunctionCall(arguments=part.text)
        return DeltaToolCall(index=part.call, function=function)
    return DeltaToolCall(
        index=part.call,
        id=make_call_id(),
        type="function",
        function=DeltaFunctionCall(name=part.name, arguments=""),
    )


class ToolStream:
    """Streams one answer through a tool parser.

    Attributes:
        has_calls: Whether a call has begun.
    """

    def __init__(self, parser: ToolParser, request: ChatBody):
        self._parser, self._request = parser, request
        self._text = ""
        self._token_ids: list[int] = []
        self.has_calls = False

    def deltas(
        self, text: str, token_ids: Sequence[int], *, is_last: bool
    ) -> list[dict[str, Any]]:
        """Add text; return OpenAI's deltas for it: none, one or several."""
        before, ids_before = self._text, self._token_ids
        self._text, self._token_ids = before + text, [*ids_before, *token_ids]
        messages: list[DeltaMessage | None] = []
        if text:
            messages.append(
                self._parser.extract_tool_calls_streaming(
                    before,
                    self._text,
                    text,
                    ids_before,
                    self._token_ids,
                    token_ids,
                    self._request,
                )
            )
        if is_last:
            messages.append(self._parser.finish_streaming(self._request))
        return [delta for one in messages if one for delta in self._split(one)]

    def _split(self, message: DeltaMessage) -> list[dict[str, Any]]:
        """Make a delta per part: clients may reject a delta with one index twice."""
        found: list[dict[str, Any]] = []
        if message.content:
            found.append({"content": message.content})
        calls = shown_calls(message.tool_calls, self._request)
        self.has_calls |= bool(calls)
        found += [{"tool_calls": [one.model_dump(exclude_none=True)]} for one in calls]
        return found


_Call = TypeVar("_Call", ToolCall, DeltaToolCall)


def shown_calls(calls: list[_Call], request: ChatBody) -> list[_Call]:
    """Return the calls to show: only the first if parallel calls are off."""
    if request.parallel_tool_calls is not False:
        return calls
    return [
        one
        for at, one in enumerate(calls)
        if (one.index if isinstance(one, DeltaToolCall) else at) == 0
    ]

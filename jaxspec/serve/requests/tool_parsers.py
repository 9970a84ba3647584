"""Owns parsers: what finds the calls in answers of chats that may call tools.

The interface is vLLM's, so that a plugin written for it needs only the package's name
replaced. Which parser is used, and when, is not decided here.
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
# The parser's name when Gemma 2 was the only family; scripts may still use it.
GEMMA2 = "gemma2"


def make_call_id() -> str:
    """Return an id that no other call has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class FunctionCall(BaseModel):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call, whole."""

    id: str = Field(default_factory=make_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class ExtractedToolCallInformation(BaseModel):
    """What a whole answer is: calls, and what is said beside them."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(BaseModel):
    """What is new of a call: its name, or some of its arguments."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """What is new of the call with this index; the first has its id."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """What is new of an answer."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ToolParser:
    """Finds the calls in one answer; vLLM's base of parsers.

    Attributes:
        model_tokenizer: Of the model.
        tools: That the request names.
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
        """Ids by piece."""
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: ChatBody) -> ChatBody:
        """Change a request before it is answered."""
        return request

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Read a whole answer."""
        raise NotImplementedError(f"{type(self).__name__} reads no whole answers")

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
        """Read what is new of an answer; None where nothing can be told of it yet."""
        raise NotImplementedError(f"{type(self).__name__} reads no streams")

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Tell what was held back, at the end of an answer. Ours, not vLLM's."""
        return None


class ToolParserManager:
    """Knows parsers by name.

    The names are the process's, which is how vLLM's plugins add theirs: by what happens
    when their file is imported.
    """

    tool_parsers: ClassVar[dict[str, type[ToolParser]]] = {}
    lazy_parsers: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def list_registered(cls) -> list[str]:
        """Return all names."""
        return sorted(cls.tool_parsers.keys() | cls.lazy_parsers.keys())

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Return the parser of a name.

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
        """Name a parser, or (without one) return a decorator that does.

        Args:
            name: One or several; None is the class's own.
            force: Take a name that another has.
        """

        def register(parser: type[ToolParser]) -> type[ToolParser]:
            if not isinstance(parser, type) or not issubclass(parser, ToolParser):
                raise TypeError(f"{parser!r} is no subclass of ToolParser")
            names = [name] if isinstance(name, str) else name
            for one in names or [parser.__name__]:
                if not force and one in cls.tool_parsers:
                    raise KeyError(f"There is a parser of the name {one!r} already.")
                cls.tool_parsers[one] = parser
            return parser

        return register if module is None else register(module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Name a parser that is imported when it is first wanted."""
        cls.lazy_parsers[name] = module_path, class_name

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        """Run a file that names parsers of its own.

        Raises:
            ConfigError: There is no such file, or it fails.
        """
        path, name = Path(plugin_path).expanduser(), "tool_parser_plugin"
        if not path.is_file():
            allowed = "a Python file that registers a parser"
            raise wrong_argument(ConfigError, name, allowed, plugin_path)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        try:
            if spec is None or spec.loader is None:
                raise ImportError("Python's files end in .py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # a lazy parser is looked for there
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
        ConfigError: There is none of the name, or the plugin fails.
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
    """Reads calls in the form in which `jaxspec.text.tools` tells Gemma of tools."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[ChatTool] | None = None
    ) -> None:
        super().__init__(tokenizer, tools)
        self._reader = self._make_reader()

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Read a whole answer."""
        reader = self._make_reader()
        parts = reader.feed(model_output) + reader.end()
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
        """Read what is new of an answer."""
        return _delta(self._reader.feed(delta_text))

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Tell what only began like a call."""
        return _delta(self._reader.end())

    def _make_reader(self) -> CallReader:
        return CallReader({tool.function.name for tool in self.tools})


class ForcedToolParser(GemmaToolParser):
    """Reads an answer that must call: other text is a call that was cut off."""

    def extract_tool_calls(
        self, model_output: str, request: ChatBody
    ) -> ExtractedToolCallInformation:
        """Read a whole answer."""
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
        """Read what is new of an answer."""
        parts = self._reader.feed(delta_text)
        return _delta([part for part in parts if part.call is not None])

    def finish_streaming(self, request: ChatBody) -> DeltaMessage | None:
        """Drop what only began like a call."""
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
    """One answer as it comes, through a parser.

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
        """Return what is new of it, in OpenAI's form: none, one or several deltas."""
        before, ids_before = self._text, self._token_ids
        self._text, self._token_ids = before + text, [*ids_before, *token_ids]
        told: list[DeltaMessage | None] = []
        if text:
            told.append(
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
            told.append(self._parser.finish_streaming(self._request))
        return [delta for message in told if message for delta in self._split(message)]

    def _split(self, message: DeltaMessage) -> list[dict[str, Any]]:
        """One delta for each part: clients may expect an index once in each."""
        found: list[dict[str, Any]] = []
        if message.content:
            found.append({"content": message.content})
        calls = shown_calls(message.tool_calls, self._request)
        self.has_calls |= bool(calls)
        found += [{"tool_calls": [one.model_dump(exclude_none=True)]} for one in calls]
        return found


_Call = TypeVar("_Call", ToolCall, DeltaToolCall)


def shown_calls(calls: list[_Call], request: ChatBody) -> list[_Call]:
    """Return those that a request wants: without parallel ones the first."""
    if request.parallel_tool_calls is not False:
        return calls
    return [
        one
        for at, one in enumerate(calls)
        if (one.index if isinstance(one, DeltaToolCall) else at) == 0
    ]

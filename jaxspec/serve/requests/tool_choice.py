"""Interprets `tools` and `tool_choice` of a chat, by vLLM's rules."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.errors import RequestError, wrong_argument
from jaxspec.serve.requests.protocol import ChatBody, ConversationBody
from jaxspec.serve.requests.tool_parsers import (
    ForcedToolParser,
    ToolParser,
    ToolParserManager,
)
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.tools import Tool, calls_schema, read_tools

_NAMED = "{'type': 'function', 'function': {'name': ...}}"


class ToolChoice(NamedTuple):
    """Which functions an answer may call, and whether it must.

    Attributes:
        kind: "none", "auto", "required" or "named".
        tools: All tools of the request.
        name: Name of the function that must be called.
    """

    kind: str
    tools: list[Tool]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls only."""
        return self.kind in ("required", "named")

    @property
    def allowed(self) -> list[tuple[int, Tool]]:
        """Functions that may be called, with their positions in the request."""
        return [
            (at, tool)
            for at, tool in enumerate(self.tools)
            if self.name in (None, tool.name)
        ]


def tools_as_given(body: ConversationBody) -> list[dict[str, Any]] | None:
    """Return a request's tools as the client sent them."""
    if body.tools is None:
        return None
    kind = {"type": "function"}
    return [kind | tool.model_dump(exclude_unset=True) for tool in body.tools]


def read_choice(body: ChatBody) -> ToolChoice:
    """Read `tools` and `tool_choice` of a request.

    Raises:
        RequestError: The fields are invalid, or contradict each other.
    """
    if body.tools == []:
        message = "`tools` must not be an empty array."
        raise RequestError(message, parameter="tools", value=[])
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if choice == "none":
        return ToolChoice("none", [])
    if body.tools is None:
        message = "When using `tool_choice`, `tools` must be set."
        raise RequestError(message, parameter="tools", value=None)
    tools = read_tools(tools_as_given(body))
    if choice in ("auto", "required"):
        return ToolChoice(str(choice), tools)
    name = _name_in(choice)
    if name not in [tool.name for tool in tools]:
        raise RequestError(
            f"tool_choice names {name!r}, which is not one of the `tools`: "
            f"{', '.join(repr(tool.name) for tool in tools)}.",
            parameter="tool_choice",
            value=choice,
        )
    return ToolChoice("named", tools, name)


def _name_in(choice: str | dict[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or not isinstance(name, str):
        allowed = f"'none', 'auto', 'required' or {_NAMED}"
        raise wrong_argument(RequestError, "tool_choice", allowed, choice)
    return name


def make_parser(
    body: ChatBody, choice: ToolChoice, name: str, tokenizer: Tokenizer
) -> ToolParser | None:
    """Make the tool parser for one answer; None if it may not call tools.

    Args:
        choice: Tools and `tool_choice` of the request.
        name: Name of the parser in the server's settings.
    """
    if choice.kind == "none":
        return None
    # Forced calls always have this package's format, because a grammar constrains them.
    kind = ForcedToolParser
    if not choice.is_forced:
        kind = ToolParserManager.get_tool_parser(name)
    return kind(tokenizer, body.tools)


def form_of(body: ChatBody) -> StructuredOutputsParams | None:
    """Return the grammar of an answer that must call a tool; None if it need not.

    Raises:
        RequestError: The fields are invalid.
    """
    choice = read_choice(body)
    if not choice.is_forced:
        return None
    is_parallel = choice.name is None and body.parallel_tool_calls is not False
    allowed = [tool for _, tool in choice.allowed]
    return StructuredOutputsParams(json=calls_schema(allowed, is_parallel=is_parallel))


def check_form(
    body: ChatBody, check: Callable[[StructuredOutputsParams], object]
) -> None:
    """Check that the grammar of an answer that must call a tool can be compiled.

    Args:
        check: Raises `RequestError` if it cannot.

    Raises:
        RequestError: Names the function with the invalid schema.
    """
    form = form_of(body)
    if form is None:
        return
    try:
        check(form)
    except RequestError:
        for at, tool in read_choice(body).allowed:
            _check_tool(at, tool, check)
        raise


def _check_tool(
    at: int, tool: Tool, check: Callable[[StructuredOutputsParams], object]
) -> None:
    schema = calls_schema([tool], is_parallel=False)
    try:
        check(StructuredOutputsParams(json=schema))
    except RequestError as error:
        reason = str(error).partition(": ")[2]
        name = f"tools[{at}]['function']['parameters']"
        raise RequestError(
            f"{name}, of {tool.name!r}, cannot be used: {reason}",
            parameter=name,
            value=tool.parameters,
        ) from error

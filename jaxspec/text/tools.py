"""Owns the format of tool use: functions in the prompt, calls, and call results.

Gemma was trained without tools, and its chat format has no place for them. This format
follows the one that Google describes for Gemma 3: the user's first turn lists the
functions as JSON, an answer that calls is a JSON list of
`{"name": ..., "parameters": {...}}`, and the user returns a result as
`{"name": ..., "result": ...}`. The prompt, the calls of earlier turns, the grammar of
answers and `CallReader` all use it.
"""

import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

from jaxspec.errors import RequestError, check_utf8, wrong_argument
from jaxspec.text.chat_turns import Message, map_texts

_INSTRUCTIONS = """\
You can call functions. To call, answer with nothing but a JSON list of calls:
[{"name": function name, "parameters": {argument name: value}}]
Put several calls into the list if several are needed, and answer in words if no \
function helps. What a function returns is told as \
{"name": function name, "result": what it returned}. The functions:
"""
_NO_PARAMETERS = {"type": "object", "properties": {}}
# Accepted keys of a call's arguments. The second key is that of OpenAI's API and of
# many models.
_ARGUMENTS = ("parameters", "arguments")
_SPACES = " \t\r\n"
_FENCE = "```"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of an object, with the arguments by name.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]

    def as_json(self) -> str:
        """Return the description of the tool in the prompt."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return _json(function | {"parameters": self.parameters})


def read_tools(tools: object) -> list[Tool]:
    """Read OpenAI's `tools`; None means no tools.

    Raises:
        RequestError: The value is not a list of functions with schemas.
    """
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        allowed = "a list of {'type': 'function', 'function': {...}}"
        raise wrong_argument(RequestError, "tools", allowed, tools)
    try:
        plain = map_texts(tools, lambda text: check_utf8(RequestError, "tools", text))
    except RequestError as error:
        message = f"tools must be plain data: {error}"
        raise RequestError(message, parameter="tools", value=tools) from error
    return [_read_tool(f"tools[{at}]", tool) for at, tool in enumerate(plain)]


def _read_tool(name: str, tool: Any) -> Tool:
    allowed = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise wrong_argument(RequestError, name, allowed, tool)
    if tool.get("type", "function") != "function":
        kind = f"{name}['type']"
        raise wrong_argument(RequestError, kind, "'function'", tool["type"])
    function, name = tool["function"], f"{name}['function']"
    called, description = function.get("name"), function.get("description")
    if not isinstance(called, str) or not called:
        allowed = "a string of at least one character"
        raise wrong_argument(RequestError, f"{name}['name']", allowed, called)
    if not isinstance(description, str | None):
        where = f"{name}['description']"
        raise wrong_argument(RequestError, where, "a string", description)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        allowed = "a JSON schema of an object, {'type': 'object', 'properties': {...}}"
        where = f"{name}['parameters']"
        raise wrong_argument(RequestError, where, allowed, parameters)
    return Tool(name=called, description=description, parameters=parameters)


def read_calls(messages: list[Message]) -> list[Message]:
    """Check calls of earlier turns; return copies whose arguments are dicts.

    OpenAI's deprecated format, a `function_call` and a message of the role "function",
    is read as a call and its result.

    Args:
        messages: A checked conversation.

    Raises:
        RequestError: A call is malformed, or its arguments are not a JSON object.
    """
    read: list[Message] = []
    call_id = ""
    for position, message in enumerate(messages):
        function = message.get("function_call")
        if message["role"] == "function":
            message = message | {"role": "tool", "tool_call_id": call_id}
        elif function is not None and not message.get("tool_calls"):
            call_id = f"call_{position}"
            call = {"id": call_id, "type": "function", "function": function}
            message = message | {"tool_calls": [call]}
        calls, name = message.get("tool_calls"), f"messages[{position}]['tool_calls']"
        if calls is not None and not isinstance(calls, list):
            allowed = "a list of {'id': ..., 'type': 'function', 'function': {...}}"
            raise wrong_argument(RequestError, name, allowed, calls)
        if calls:
            listed = [_read_call(f"{name}[{at}]", one) for at, one in enumerate(calls)]
            message = message | {"tool_calls": listed}
        read.append(message)
    return read


def _read_call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        allowed = "{'id': ..., 'function': {'name': ..., 'arguments': '{...}'}}"
        raise wrong_argument(RequestError, name, allowed, call)
    arguments, hint = function.get("arguments"), ""
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            hint = f"It is not valid JSON: {error}."
    if not isinstance(arguments, dict):
        where, allowed = f"{name}['function']['arguments']", "a JSON object, as text"
        raise wrong_argument(RequestError, where, allowed, arguments, hint)
    return call | {"function": function | {"arguments": arguments}}


def write_tools(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """Write tools, calls and results as text, for a chat format without tools.

    Args:
        messages: A conversation returned by `read_calls`.

    Returns:
        Turns of system, user and model: the system's lists the tools, the user's
        contain the results.
    """
    turns: list[Message] = []
    names: dict[str, str] = {}  # function names, by call id
    for message in messages:
        calls = message.get("tool_calls") or []
        names |= {str(call.get("id")): call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            call_id = str(message.get("tool_call_id"))
            name = names.get(call_id) or message.get("name")
            result = {"name": name} if name is not None else {}
            text = _json(result | {"result": message["content"]})
            turns.append({"role": "user", "content": text})
        elif calls:
            texts = [message["content"].strip(), _calls_text(calls)]
            plain = {key: message[key] for key in message if key != "tool_calls"}
            turns.append(plain | {"content": "\n".join(filter(None, texts))})
        else:
            turns.append(message)
    if not tools:
        return turns
    listed = "[\n" + ",\n".join(tool.as_json() for tool in tools) + "\n]"
    text = _INSTRUCTIONS + listed
    opening = {"role": "system", "content": text}
    if turns[0]["role"] in ("system", "developer"):
        first = turns.pop(0)
        both = "\n\n".join(filter(None, [first["content"].rstrip(), text]))
        opening = first | {"content": both}
    return [opening, *turns]


def _calls_text(calls: list[dict[str, Any]]) -> str:
    functions = [call["function"] for call in calls]
    return _json(
        [{"name": one["name"], "parameters": one["arguments"]} for one in functions]
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def calls_schema(tools: list[Tool], *, is_parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of an answer that consists of calls of some tools.

    Args:
        is_parallel: Allow several calls in one answer.
    """
    parts: dict[str, Any] = {}
    used: list[Any] = []
    for number, tool in enumerate(tools):
        # An `$id` makes the schema a resource of its own, within which its references
        # are resolved.
        own = tool.parameters.get("$id")
        own = f"tool:{number}" if own is None or own in used else own
        used.append(own)
        schema = {"type": "object", **tool.parameters, "$id": own}
        schema.pop("$schema", None)
        parts[str(number)] = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [{"$ref": f"#/$defs/{number}"} for number in parts]},
        "$defs": parts,
    }
    return schema if is_parallel else schema | {"maxItems": 1}


class Part(NamedTuple):
    """A new part of an answer: text, a call's name, or some of its arguments.

    Attributes:
        text: Plain text, or arguments: all parts of a call together are JSON.
        call: Index of the call from 0; None for plain text.
        name: Name of the function in the first part of a call.
    """

    text: str = ""
    call: int | None = None
    name: str | None = None


class _NoCallError(Exception):
    """The text read so far is not a call."""


class CallReader:
    """Incremental parser of the calls in one answer.

    A call starts at the beginning of a line: a JSON object with the name of a known
    function and its arguments, alone or in a list, optionally in a Markdown fence.
    Everything else is plain text. Text that may be a call is held back until it is
    known to be one or not. The arguments of a call are then passed on unchanged.
    """

    def __init__(self, names: Collection[str]):
        """Begin an answer; `names` are those of the functions."""
        self._names = names
        self._parts: list[Part] = []
        # Letters that were read and held back, because they may be part of a call.
        self._held: list[str] = []
        self._num_calls = 0
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """Parse more text; return the new parts."""
        for letter in text:
            self._held.append(letter)
            self._reading.send(letter)
        return self._drain()

    def end(self) -> list[Part]:
        """Return the text held back at the end, unless a call precedes it.

        After a call, the held text is dropped: it is white space, a Markdown fence, or
        a call that was cut off.
        """
        if not self._num_calls:
            self._release()
        return self._drain()

    def _drain(self) -> list[Part]:
        taken, self._parts = self._parts, []
        return taken

    def _add(self, part: Part) -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and (last.call, last.name, part.name) == (
            part.call,
            None,
            None,
        ):
            self._parts[-1] = last._replace(text=last.text + part.text)
        elif part.text or part.name is not None:
            self._parts.append(part)

    def _release(self) -> None:
        """Return held letters as plain text."""
        self._add(Part("".join(self._held)))
        self._held.clear()

    # One generator per grammar rule. Each starts with the letter passed to it, is sent
    # one letter at a time, and returns the first letter that is not part of the rule.

    @no_type_check  # generators are not checked
    def _read(self) -> Generator[None, str, None]:
        letter = yield
        while True:
            try:
                letter = yield from self._calls(letter)
                continue  # more calls or plain text may follow
            except _NoCallError:
                letter = self._held[-1]
            self._release()
            while letter != "\n":
                letter = yield
                self._release()
            letter = yield

    @no_type_check
    def _calls(self, letter: str) -> Generator[None, str, str]:
        letter = yield from self._spaces(letter)
        is_fenced = letter == "`"
        if is_fenced:
            letter = yield from self._fence(letter)
            while letter.isalnum() or letter == "_":  # "json", "tool_code"
                letter = yield
            letter = yield from self._spaces(letter)
        is_list = letter == "["
        if is_list:
            letter = yield from self._spaces((yield))
        letter = yield from self._call(letter)
        while is_list:
            letter = yield from self._spaces(letter)
            if letter == "]":
                self._held.clear()
                letter = yield
                break
            letter = yield from self._spaces((yield from self._one(letter, ",")))
            letter = yield from self._call(letter)
        if is_fenced:
            letter = yield from self._spaces(letter)
            letter = yield from self._fence(letter)
            self._held[:-1] = []
        return letter

    @no_type_check
    def _call(self, letter: str) -> Generator[None, str, str]:
        """Read one call; its arguments are passed on once its name is known."""
        letter = yield from self._one(letter, "{")
        name, arguments = None, None
        while True:
            letter = yield from self._spaces(letter)
            key, letter = yield from self._string(letter)
            letter = yield from self._spaces(letter)
            letter = yield from self._spaces((yield from self._one(letter, ":")))
            if key == "name" and name is None:
                name, letter = yield from self._string(letter)
                if name not in self._names:
                    raise _NoCallError
                if arguments is not None:
                    self._begin(name, "".join(arguments))
                    self._held.append(letter)  # read already, and not an argument's
            elif key in _ARGUMENTS and arguments is None and letter == "{":
                if name is not None:
                    self._begin(name)
                arguments, letter = yield from self._object(letter, name is not None)
            else:
                raise _NoCallError
            letter = yield from self._spaces(letter)
            if letter == "}":
                break
            letter = yield from self._one(letter, ",")
        if name is None:
            raise _NoCallError
        if arguments is None:
            self._begin(name, "{}")
        self._held.clear()
        return (yield)

    def _begin(self, name: str, arguments: str = "") -> None:
        self._add(Part(call=self._num_calls, name=name))
        self._num_calls += 1
        self._add_arguments(arguments)

    def _add_arguments(self, text: str) -> None:
        self._add(Part(text, call=self._num_calls - 1))
        self._held.clear()

    @no_type_check
    def _object(
        self, letter: str, is_known: bool
    ) -> Generator[None, str, tuple[list[str], str]]:
        """Read a JSON object up to its closing brace, without validating it.

        Args:
            is_known: The call's function is known, so its letters are passed on as they
                come.
        """
        read, depth, is_text, is_escaped = [], 0, False, False
        while True:
            read.append(letter)
            if is_known:
                self._add_arguments(letter)
            if is_text:
                is_text = is_escaped or letter != '"'
                is_escaped = letter == "\\" and not is_escaped
            elif letter == '"':
                is_text = True
            else:
                depth += (letter in "{[") - (letter in "}]")
            if not depth:
                return read, (yield)
            letter = yield

    @no_type_check
    def _string(self, letter: str) -> Generator[None, str, tuple[str, str]]:
        read = [letter]
        letter = yield from self._one(letter, '"')
        is_escaped = False
        while letter != '"' or is_escaped:
            if letter == "\n":
                raise _NoCallError
            read.append(letter)
            is_escaped = letter == "\\" and not is_escaped
            letter = yield
        try:
            text = json.loads("".join((*read, '"')))
        except ValueError:
            raise _NoCallError from None
        return text, (yield)

    @no_type_check
    def _fence(self, letter: str) -> Generator[None, str, str]:
        for wanted in _FENCE:
            letter = yield from self._one(letter, wanted)
        return letter

    @no_type_check
    def _one(self, letter: str, wanted: str) -> Generator[None, str, str]:
        if letter != wanted:
            raise _NoCallError
        return (yield)

    @no_type_check
    def _spaces(self, letter: str) -> Generator[None, str, str]:
        while letter in _SPACES:
            letter = yield
        return letter

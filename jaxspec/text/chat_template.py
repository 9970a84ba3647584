"""Owns chat templates: finding one, and rendering it.

A template is code that comes with a model. It runs in Jinja's sandbox, with the names
that the transformers library defines, and on plain data only.
"""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.config.engine import read_json
from jaxspec.errors import (
    ArgumentError,
    ConfigError,
    RequestError,
    check_utf8,
    wrong_argument,
)
from jaxspec.models.families import DEFAULT_TURNS
from jaxspec.text.chat_turns import Marks, Message, map_texts
from jaxspec.text.pieces import folder_files
from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.files import expand
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.tokenizer import chat_template
from jaxspec_checkpoints.reading import GGUF

# Appended to the message that is to be continued, to find where to cut the rendered
# text. A lone surrogate, which no message contains.
_CUT = "\udfff"


class ChatTemplate:
    """A Jinja template that renders conversations.

    Attributes:
        text: Source text.
        source: Its name in error messages, without a folder: a server's clients see it.
        reads_tools: Whether it renders tools, their calls and results.
    """

    def __init__(self, text: str, source: str, path: Path | None = None):
        """Compile `text`; `source` is its name in error messages.

        Args:
            path: Its file, which the error for an invalid template names in full.

        Raises:
            ConfigError: `text` is not a valid template.
        """
        self.text, self.source = text, source
        environment = _environment()
        try:
            self._template = environment.from_string(text)
            read = meta.find_undeclared_variables(environment.parse(text))
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            where = source if path is None else source.replace(path.name, str(path))
            where += f", line {line}," if line else ""
            raise ConfigError(
                f"{where} must be a Jinja template: {error}. Correct it, or pass "
                "another one as chat_template.",
                parameter="chat_template",
                value=source,
            ) from error
        self.reads_tools = "tools" in read

    def write(
        self,
        messages: list[Message],
        *,
        marks: Marks | None,
        pieces: Mapping[str, str],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: list[Any] | None = None,
    ) -> str:
        """Render a checked conversation, with the text of its messages marked.

        Args:
            marks: Hides special pieces in the messages' text; None leaves these pieces
                unmarked.
            pieces: Texts of the special pieces by name: "bos_token" and others.
            variables: Further variables of the template, plain data; their texts are
                marked as well.
            tools: OpenAI's `tools`, for a template that reads them.

        Raises:
            RequestError: The template refuses the messages or fails on them.
            ConfigError: The template violates the sandbox.
        """
        values = dict(
            pieces,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            strftime_now=datetime.now().strftime,
        )
        _check_free(variables, {*values, "messages"})
        if tools is not None:
            variables = {**variables, "tools": tools}
        if continue_final_message:
            # After rendering, a missing space shows that the template trims the end of
            # the message.
            last = messages[-1] | {"content": messages[-1]["content"] + f"{_CUT} "}
            messages = [*messages[:-1], last]
        plain = self._render(messages, {**values, **variables})
        check_utf8(RequestError, f"The output of {self.source}", plain)
        if marks is None:
            return plain
        own: list[str] | None = None
        for mark in (marks.on, marks.on_first, marks.on_pieces):
            hidden = {**values, **map_texts(variables, mark)}
            try:
                marked = self._render(map_texts(messages, mark), hidden)
            except RequestError:
                continue  # the template refuses the marks, not the messages
            found = marks.split(marked)[1::2]
            # With the first two kinds of marks (all letters, first letters), no text of
            # a message can form a special piece. The third kind hides only whole
            # pieces, so the result counts as safe only if the template writes the same
            # pieces as with the kind before.
            is_safe = mark != marks.on_pieces or found == own
            if is_safe and marks.off(marked) == plain:
                return marked
            own = found
        raise RequestError(
            f"{self.source} depends on the messages' text, which contains special "
            f"pieces such as {DEFAULT_TURNS.markers[1]}: these cannot be distinguished "
            "from its own. Remove them from the messages, or pass "
            "parse_special_tokens=True to encode them as special tokens.",
            parameter="messages",
            value=messages,
        )

    def _render(self, messages: list[Message], values: Mapping[str, Any]) -> str:
        try:
            text = self._template.render(values, messages=messages)
        except _RefusedError as error:
            raise self._error(RequestError, f"refuses the messages: {error}") from error
        except jinja2.exceptions.SecurityError as error:
            reason = f"does something that the sandbox forbids: {error}"
            raise self._error(ConfigError, reason) from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"cannot render the messages: {type(error).__name__}: {error}"
            raise self._error(RequestError, reason) from error
        if _CUT not in messages[-1]["content"]:
            return text
        head, found, rest = text.rpartition(_CUT)
        if not found:
            reason = "leaves out the last message: pass continue_final_message=False"
            raise self._error(RequestError, reason)
        head = head.replace(f"{_CUT} ", "").replace(_CUT, "")
        return head if rest.startswith(" ") else head.rstrip()

    def _error(self, kind: type[ArgumentError], reason: str) -> ArgumentError:
        name = "messages" if kind is RequestError else "chat_template"
        return kind(f"{self.source} {reason}.", parameter=name, value=self.source)


def _check_free(variables: Mapping[str, Any], taken: set[str]) -> None:
    names = ", ".join(sorted(variables.keys() & taken))
    if names:
        allowed = f"a dict without {names}, which are set already"
        raise wrong_argument(RequestError, "chat_template_kwargs", allowed, variables)


class _RefusedError(jinja2.TemplateError):
    """Raised by `raise_exception` in a template."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


class _Generation(Extension):
    """`{% generation %}`, which marks text for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes characters of HTML such as "<".
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def given_template(given: object) -> ChatTemplate:
    """Read a `chat_template` argument: a template, or the path of a template file.

    Raises:
        ConfigError: The value is neither.
    """
    allowed = "a Jinja template or the path of a file with one"
    if isinstance(given, ChatTemplate):
        return given
    if not isinstance(given, str) or not given:
        raise wrong_argument(ConfigError, "chat_template", allowed, given)
    if any(letter in given for letter in "{}\n"):
        return ChatTemplate(given, "chat_template")
    path = expand(given)
    # `path.is_file()` would raise for a text that is too long for a path.
    if not os.path.isfile(path):
        hint = "No such file exists."
        raise wrong_argument(ConfigError, "chat_template", allowed, given, hint)
    return _from_file(path)


def folder_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a model, None if it has none.

    Searched are `chat_template.jinja`, then the key `chat_template` in
    `tokenizer_config.json` and in the older `chat_template.json`, then a GGUF file's
    metadata.

    Raises:
        ConfigError: The template is invalid.
    """
    files = folder_files(folder)
    if "chat_template.jinja" in files:
        return _from_file(files["chat_template.jinja"])
    path, given = None, None
    for name in ("tokenizer_config.json", "chat_template.json"):
        if given is None and name in files:
            path = files[name]
            given = read_json(path).get("chat_template")
    if given is None:
        return _from_gguf(files[GGUF]) if GGUF in files else None
    assert path is not None
    name, text = f"chat_template in {path.name}", given
    if isinstance(given, list):
        named = {
            item.get("name"): item.get("template")
            for item in given
            if isinstance(item, Mapping) and isinstance(item.get("name"), str)
        }
        text = named.get("default")
    if not isinstance(text, str):
        allowed = "a template or a list of {'name', 'template'}, one named 'default'"
        raise wrong_argument(ConfigError, f"chat_template in {path}", allowed, given)
    return ChatTemplate(text, name, path)


def can_hold_template(folder: Path) -> bool:
    """Return whether a model's files could contain a chat template.

    If this is true and there is no template, the model was not trained on
    conversations. False means that nothing is known: a `tokenizer.model` or
    `tokenizer.json` alone, as from Kaggle, cannot contain a template.
    """
    return bool({"tokenizer_config.json", GGUF} & folder_files(folder).keys())


def _from_gguf(path: Path) -> ChatTemplate | None:
    try:
        text = chat_template(read_gguf(path))
    except CheckpointError as error:
        name = "chat_template"
        raise ConfigError(f"{error}.", parameter=name, value=str(path)) from error
    if text is None:
        return None
    return ChatTemplate(text, f"chat_template in {path.name}", path)


def _from_file(path: Path) -> ChatTemplate:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} must be a readable text file: {error}.",
            parameter="chat_template",
            value=str(path),
        ) from error
    return ChatTemplate(text, path.name, path)

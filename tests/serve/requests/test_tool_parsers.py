"""Built-in tool parsers and plugins, and the tool calls that they return."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.requests.tool_parsers import (
    GEMMA,
    GemmaToolParser,
    ToolParser,
    ToolParserManager,
    ToolStream,
    parser_class,
)
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.tool_parser_plugin import PLUGIN

TOKENIZER = Tokenizer.from_folder(bundled_target())
TOOLS: Any = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
TEXT = 'Well.\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g"}]'


@pytest.fixture(autouse=True)
def _names_are_given_back(monkeypatch: pytest.MonkeyPatch):
    for name in ("tool_parsers", "lazy_parsers"):
        monkeypatch.setattr(
            ToolParserManager, name, dict(getattr(ToolParserManager, name))
        )


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "shout_parser.py"
    path.write_text(PLUGIN)
    return str(path)


def body(**given: Any) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    return ChatBody(messages=messages, tools=TOOLS, **given)


def stream(parser: ToolParser, text: str, request: ChatBody) -> list[dict[str, Any]]:
    """Return the deltas of a text streamed letter by letter."""
    reading = ToolStream(parser, request)
    found = [
        delta
        for at, letter in enumerate(text)
        for delta in reading.deltas(letter, [at], is_last=False)
    ]
    return found + reading.deltas("", [], is_last=True)


def test_stream_yields_text_and_calls():
    deltas = stream(GemmaToolParser(TOKENIZER, body().tools), TEXT, body())
    words, (begun, *letters, again, empty) = deltas[:6], deltas[6:]
    assert words == [{"content": letter} for letter in "Well.\n"]
    (call,) = begun["tool_calls"]
    assert call.pop("id").startswith("chatcmpl-tool-")
    function = {"name": "f", "arguments": ""}
    assert call == {"index": 0, "type": "function", "function": function}
    assert [one["tool_calls"] for one in letters] == [
        [{"index": 0, "function": {"arguments": letter}}] for letter in '{"a": 1}'
    ]
    assert again["tool_calls"][0]["function"] == {"name": "g", "arguments": ""}
    assert empty == {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}


def test_vllm_plugin_parses_calls(plugin: str):
    for name in ("shout", "cry"):
        kind = parser_class(name, plugin)
        parser, request = kind(TOKENIZER, body().tools), body()
        found = parser.extract_tool_calls("So F it is", request)
        assert [one.function.name for one in found.tool_calls] == ["f"]
        assert found.content == "So it is"
        deltas = stream(parser, "So F G it", request)
        assert [delta.get("content") for delta in deltas] == ["So ", None, None]
        begun = [delta["tool_calls"][0] for delta in deltas[1:]]
        assert [(one["id"], one["index"]) for one in begun] == [
            ("chosen", 0),
            ("chosen", 1),
        ]
    assert parser.vocab[TOKENIZER.id_to_piece(50)] == 50


def test_lazily_registered_parser_is_found(plugin: str):
    ToolParserManager.register_lazy_module("late", "shout_parser", "ShoutToolParser")
    ToolParserManager.import_tool_parser(plugin)
    assert "late" in ToolParserManager.list_registered()
    late = ToolParserManager.get_tool_parser("late")
    assert late is ToolParserManager.get_tool_parser("shout")
    with pytest.raises(KeyError, match="missing"):
        ToolParserManager.get_tool_parser("missing")


def test_registered_parser_is_found():
    class Own(ToolParser):
        pass

    assert ToolParserManager.register_module(module=Own) is Own
    assert ToolParserManager.get_tool_parser("Own") is Own
    with pytest.raises(KeyError, match="gemma"):
        ToolParserManager.register_module(GEMMA, force=False, module=Own)
    ToolParserManager.register_module(GEMMA, module=Own)
    assert parser_class(GEMMA, "") is Own
    wrong: Any = int
    with pytest.raises(TypeError, match="ToolParser"):
        ToolParserManager.register_module(module=wrong)
    for read in (
        lambda: Own(TOKENIZER).extract_tool_calls("", body()),
        lambda: stream(Own(TOKENIZER), "x", body()),
    ):
        with pytest.raises(NotImplementedError, match="Own"):
            read()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken_parser.py", None, "a Python file"),
        ("broken_parser.py", "import nothing_like_that", "ModuleNotFoundError"),
        ("broken_parser.py", "1 +", "SyntaxError"),
        ("broken_parser.py", "raise RuntimeError('boom')", "boom"),
        ("parser.txt", PLUGIN, r"end in \.py"),
    ],
    ids=["missing", "import", "syntax", "error", "suffix"],
)
def test_rejects_invalid_plugin(tmp_path: Path, name: str, text: Any, said: str):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        ServerSettings(tool_parser_plugin=str(path))
    assert refused.value.parameter == "tool_parser_plugin"


def test_settings_select_parser(plugin: str):
    assert ServerSettings().tool_call_parser == GEMMA
    names = ("gemma", "gemma2")  # the second name is an alias of the first
    assert len({ToolParserManager.get_tool_parser(name) for name in names}) == 1
    unknown = "one of 'gemma', 'gemma2', got 'shout'"
    with pytest.raises(ConfigError, match=unknown) as refused:
        ServerSettings(tool_call_parser="shout")
    assert refused.value.parameter == "tool_call_parser"
    ServerSettings(tool_call_parser="shout", tool_parser_plugin=plugin)


def test_vllm_import_paths_work():
    for path in ("jaxspec.tool_parsers", "jaxspec.tool_parsers.abstract_tool_parser"):
        assert importlib.import_module(path).ToolParser is ToolParser
    chats = "jaxspec.entrypoints.openai.chat_completion.protocol"
    assert importlib.import_module(chats).ChatCompletionRequest is ChatBody

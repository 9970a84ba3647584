"""The format of tool calls: rendering, grammar and parsing."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from jaxspec.errors import RequestError
from jaxspec.text.chat_turns import read_messages
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.tools import (
    CallReader,
    calls_schema,
    read_calls,
    read_tools,
    write_tools,
)
from jaxspec_checkpoints import bundled_target

TOKENIZER = Tokenizer.from_folder(bundled_target())
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": CITY}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "time"}},
]
READS_TOOLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "|{% endfor %}{{ tools | length if tools else 'none' }}"
)
FIRST = "tools[0]['function']"
CALLS = "messages[1]['tool_calls']"
ROM = {"name": "where", "parameters": {"place": "Rom"}}
DEEP = {"name": "where", "parameters": {"place": "Rom", "more": [{"place": "Oslo"}]}}
NOW = {"name": "time", "parameters": {}}
LEAF = {"value": {"$ref": "#/data"}}
NONE = '{"name": "time", "parameters": {}}'
ROME = '{"name": "weather", "parameters": {"city": "Rom"}}'
BOTH = [("weather", '{"city": "Rom"}'), ("time", "{}")]
PRETTY = json.dumps([json.loads(ROME)], indent=2)


def asked(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(arguments: Any, content: Any = None, call_id: Any = "c1") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text} | more


def rendered(messages: Any, tools: Any = None) -> list[tuple[str, str]]:
    given = read_calls(read_messages(messages))
    return [
        (one["role"], one["content"]) for one in write_tools(given, read_tools(tools))
    ]


def write(messages: Any, **options: Any) -> str:
    return TOKENIZER.write_chat(messages, **options)[0]


# --- Rendering. ---


def test_first_turn_lists_tools():
    """A system message precedes the tools."""
    text = write([asked()], tools=TOOLS)
    assert text.startswith("<bos><start_of_turn>user\nYou can call functions.")
    assert text.endswith("\n]\n\nHi<end_of_turn>\n<start_of_turn>model\n")
    listed = text[text.index("functions:\n[") + 11 : text.index("\n\nHi")]
    assert json.loads(listed) == [
        {"name": "weather", "description": "The weather.", "parameters": CITY},
        {"name": "time", "parameters": {"type": "object", "properties": {}}},
    ]
    system = {"role": "system", "content": "Be brief.\n"}
    before = "user\nBe brief.\n\nYou can call functions."
    assert write([system, asked()], tools=TOOLS) == text.replace(
        "user\nYou can call functions.", before
    )


def test_calls_and_results_are_turns():
    messages = [
        asked(),
        called('{"city": "Rom"}', "Let me see."),
        result("21 °C"),
        result("x", tool_call_id="other", name="time"),
        result("y", tool_call_id=None),
        {"role": "assistant", "content": "Warm."},
    ]
    call = '[{"name": "weather", "parameters": {"city": "Rom"}}]'
    assert rendered(messages) == [
        ("user", "Hi"),
        ("assistant", f"Let me see.\n{call}"),
        ("user", '{"name": "weather", "result": "21 °C"}'),
        ("user", '{"name": "time", "result": "x"}'),
        ("user", '{"result": "y"}'),
        ("assistant", "Warm."),
    ]
    # The results of parallel calls form one turn.
    text = write([*messages[:4], asked("So?")])
    assert text.count("<start_of_turn>user\n") == 2
    assert '"21 °C"}\n\n{"name": "time", "result": "x"}\n\nSo?<end_of_turn>' in text
    for arguments in ("", None, {}, "{}"):
        (_, turn) = rendered([asked(), called(arguments)])
        assert turn == ("assistant", '[{"name": "weather", "parameters": {}}]')
    # Calls of earlier turns are rendered in the format of generated calls.
    (_, (_, text)) = rendered([asked(), called('{"city": "}\\"{"}')])
    assert read(text) == ("", [("weather", '{"city": "}\\"{"}')])


def test_only_assistant_messages_may_lack_content():
    with pytest.raises(RequestError, match="content"):
        write([asked() | {"content": None}])
    empty = write([asked(), {"role": "assistant", "content": ""}, asked()])
    for more in ({}, {"tool_calls": None}, {"tool_calls": [], "function_call": None}):
        answer = {"role": "assistant", "content": None, "refusal": None} | more
        assert write([asked(), answer, asked()]) == empty


def test_tools_and_results_cannot_end_a_turn():
    end = TOKENIZER.encode("<end_of_turn>")[-1]
    spelled = "<end_of_turn>\n<start_of_turn>model\n"
    tool = {"function": {"name": "f", "description": spelled}}
    messages = [asked(), called(json.dumps({"city": spelled})), result(spelled)]
    for options in ({}, {"chat_template": "{{ tools[0].function.description }}<eos>"}):
        text, token_ids = TOKENIZER.write_chat(messages, tools=[tool], **options)
        assert spelled.strip() in text or json.dumps(spelled)[1:-1] in text
        assert token_ids.count(end) == (0 if options else 3)


def test_template_that_reads_tools_gets_them():
    messages = [asked(), called('{"city": "Rom"}'), result("21")]
    given = {"chat_template": READS_TOOLS, "tools": TOOLS}
    assert write(messages, **given) == "user: Hi|assistant: Rom|tool: 21|2"
    for none in (None, []):
        assert write([asked()], **given | {"tools": none}) == "user: Hi|none"
        assert write([asked()], tools=none) == write([asked()])
    assert write([asked()], **given, strict_roles=True) == "user: Hi|2"


def test_strict_roles_refuse_tools_without_template():
    for messages, tools in (
        ([asked()], TOOLS),
        ([asked(), called("{}"), result("")], 0),
    ):
        options = {"tools": tools} if tools else {}
        write(messages, **options)
        with pytest.raises(RequestError, match="With(out)? strict_roles"):
            write(messages, strict_roles=True, **options)


INVALID_TOOLS: list[tuple[Any, str]] = [
    *(({}, "tools"), ("f", "tools"), ([{1, 2}], "tools")),
    ([{"function": {"name": "\udfff"}}], "tools"),
    *(([7], "tools[0]"), ([{}], "tools[0]")),
    ([TOOLS[0], {"function": None}], "tools[1]"),
    ([{"type": "retrieval", "function": {"name": "f"}}], "tools[0]['type']"),
    ([{"function": {}}], f"{FIRST}['name']"),
    ([{"function": {"name": ""}}], f"{FIRST}['name']"),
    ([{"function": {"name": "f", "description": 7}}], f"{FIRST}['description']"),
    *(
        ([{"function": {"name": "f", "parameters": one}}], f"{FIRST}['parameters']")
        for one in (7, [], {"type": "string"}, {"type": ["object", "null"]})
    ),
]
INVALID_CALLS: list[tuple[Any, str]] = [
    *(({}, CALLS), ([7], f"{CALLS}[0]"), ([{}], f"{CALLS}[0]")),
    ([{"function": {"name": 7}}], f"{CALLS}[0]"),
    *(
        (
            [{"function": {"name": "f", "arguments": wrong}}],
            f"{CALLS}[0]['function']['arguments']",
        )
        for wrong in ("{", "[]", "7", 7, ["a"])
    ),
]


@pytest.mark.parametrize(
    ("tools", "calls", "name"),
    [
        *((tools, None, name) for tools, name in INVALID_TOOLS),
        *((None, calls, name) for calls, name in INVALID_CALLS),
    ],
)
def test_rejects_invalid_tools_and_calls(tools: Any, calls: Any, name: str):
    answer = {"role": "assistant", "content": "x", "tool_calls": calls}
    with pytest.raises(RequestError) as refused:
        write([asked()] if calls is None else [asked(), answer], tools=tools)
    assert refused.value.parameter == name
    assert name in str(refused.value)


def test_reads_deprecated_function_call():
    function = {"name": "f", "arguments": '{"a": 1}'}
    answer = {"role": "assistant", "content": None, "function_call": function}
    returned = {"role": "function", "name": "f", "content": "7"}
    messages = [asked(), called('{"a": 1}'), result("7"), asked()]
    messages[1]["tool_calls"][0]["function"]["name"] = "f"
    assert write([asked(), answer, returned, asked()]) == write(messages)
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        write([asked(), answer | {"function_call": {"name": 7}}, returned])


# --- The grammar of answers that must call. ---

PLACES = {
    "type": "object",
    "$id": "http://example.org/places",
    "$defs": {"place": {"type": "string", "enum": ["Rom", "Oslo"]}},
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["place"],
    "additionalProperties": False,
}


def functions(**schemas: Any) -> Any:
    """Read functions with parameters of these schemas."""
    given = [dict(name=name, parameters=one) for name, one in schemas.items()]
    return read_tools([{"function": function} for function in given])


def allows(schema: dict[str, Any], text: str) -> bool:
    """Return whether llguidance accepts this complete text."""
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("answer", "one", "several"),
    [
        ([ROM], True, True),
        ([DEEP], True, True),
        ([NOW], True, True),
        ([ROM, NOW], False, True),
        ([], False, False),
        (ROM, False, False),
        ([{"name": "other", "parameters": {}}], False, False),
        ([{"name": "where", "parameters": {}}], False, False),
        ([{"name": "where", "parameters": {"place": "Bonn"}}], False, False),
        ([{"name": "where", "parameters": {"place": "Rom", "x": 1}}], False, False),
        ([{"name": "where"}], False, False),
        ([ROM | {"id": 1}], False, False),
        ([{"name": "time", "parameters": 7}], False, False),
    ],
)
def test_forced_calls_follow_their_grammar(answer: Any, one: bool, several: bool):
    tools = functions(where=PLACES, time={})
    for is_parallel, expected in ((False, one), (True, several)):
        schema = calls_schema(tools, is_parallel=is_parallel)
        assert allows(schema, json.dumps(answer)) == expected
        # An independent validator checks the schema.
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid(answer) == expected


NODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "value": {"const": {"$ref": "#/data"}},
        "next": {"$ref": "#/$defs/node"},
    },
    "required": ["value"],
    "additionalProperties": False,
}
INNER = NODE | {
    "$id": "http://example.org/inner",
    "properties": {**NODE["properties"], "next": {"$ref": "#"}},
}


@pytest.mark.parametrize(
    "schema",
    [
        # The schema is that of a recursive pydantic model.
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {
            "$defs": {"node": NODE},
            "type": "object",
            "allOf": [{"$ref": "#/$defs/node"}],
        },
        NODE | {"$defs": {"node": NODE | {"$anchor": "node"}}},
        NODE
        | {
            "$id": "http://example.org/node",
            "$defs": {"node": {"$ref": "http://example.org/node"}},
        },
        {"$defs": {"node": INNER}, "$ref": "http://example.org/inner"},
    ],
)
def test_schema_references_are_local(schema: dict[str, Any]):
    calls = calls_schema(functions(where=schema, again=schema), is_parallel=True)
    for answer, expected in (
        (LEAF, True),
        (LEAF | {"next": LEAF | {"next": LEAF}}, True),
        ({"value": {"$ref": "#/moved"}}, False),
        (LEAF | {"next": {"value": 7}}, False),
        (LEAF | {"next": LEAF | {"next": {}}}, False),
    ):
        for name in ("where", "again"):
            text = json.dumps([{"name": name, "parameters": answer}])
            assert allows(calls, text) == expected, (name, answer)


# --- Parsing. ---


def read(text: str, step: int = 10**6) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text in pieces of `step` letters; return its plain text and calls."""
    reader, words = CallReader({"weather", "time"}), ""
    calls: list[tuple[str, str]] = []
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    for piece in (*pieces, None):
        for part in reader.end() if piece is None else reader.push(piece):
            assert part.text or part.name is not None, "an empty part"
            if part.call is None:
                words += part.text
            elif part.name is not None:
                assert (part.call, part.text) == (len(calls), "")
                calls.append((part.name, ""))
            else:
                assert part.call == len(calls) - 1
                name, arguments = calls.pop()
                calls.append((name, arguments + part.text))
    return words, calls


FORMS: list[tuple[str, str, list[tuple[str, str]]]] = [
    # Plain text.
    ("", "", []),
    (" \n", " \n", []),
    ("Hello.\nYou!\n", "Hello.\nYou!\n", []),
    ("[1, 2]", "[1, 2]", []),
    ("{}\n[]", "{}\n[]", []),
    ("```py\nprint(1)\n```", "```py\nprint(1)\n```", []),
    (f"Say {ROME}", f"Say {ROME}", []),
    # Text that is almost a call.
    ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    ('{"name": "time", "age": 3}', '{"name": "time", "age": 3}', []),
    ('{"parameters": {"a": 1}}', '{"parameters": {"a": 1}}', []),
    ('{"name": "time", "parameters": 7}', '{"name": "time", "parameters": 7}', []),
    ('{"name": 7}', '{"name": 7}', []),
    ('{"name": "ti\\qme"}', '{"name": "ti\\qme"}', []),
    ('{"name": "ti\nme"}', '{"name": "ti\nme"}', []),
    ("{name: 'time'}", "{name: 'time'}", []),
    ('{"name" "time"}', '{"name" "time"}', []),
    ('[{"na', '[{"na', []),
    ('```json\n[{"name": "ti', '```json\n[{"name": "ti', []),
    # Calls.
    (f"[{ROME}]", "", BOTH[:1]),
    (f"[{ROME}, {NONE}]", "", BOTH),
    (f" \n[ {ROME}\n,{NONE} ]\n", "", BOTH),
    (ROME, "", BOTH[:1]),
    (f"{ROME}\n{NONE}", "", BOTH),
    (f"{ROME} {NONE}", "", BOTH),
    (f"[{ROME}]\n[{NONE}]", "", BOTH),
    (ROME.replace("parameters", "arguments"), "", BOTH[:1]),
    ('{"parameters": {"city": "Rom"}, "name": "weather"}', "", BOTH[:1]),
    ('{"name": "time"}', "", BOTH[1:]),
    ('{"name": "t\\u0069me"}', "", BOTH[1:]),
    (PRETTY, "", [("weather", '{\n      "city": "Rom"\n    }')]),
    (f"```json\n[{ROME}]\n```", "", BOTH[:1]),
    (f"```tool_code\n{ROME}\n```\n```\n{NONE}```", "", BOTH),
    # Text and calls.
    (f"Let me see.\n\n{ROME}", "Let me see.\n", BOTH[:1]),
    (f"[{ROME}]\nDone.", "\nDone.", BOTH[:1]),
    (f"```json\n{ROME}\n```\nDone.", "\nDone.", BOTH[:1]),
    (f"[1]\n[{ROME}]", "[1]\n", BOTH[:1]),
    # Calls that are cut off.
    (f"[{ROME}, {{", "", BOTH[:1]),
    (f"```json\n[{ROME}]\n``", "", BOTH[:1]),
    (f"[{ROME[:-1]}", "", BOTH[:1]),
    (f"[{ROME[:-3]}", "", [("weather", '{"city": "Rom')]),
    # After a call that continues wrongly, the rest of the answer is plain text.
    (f"{ROME[:-1]}, }}", ", }", BOTH[:1]),
    ('{"parameters": {}, "name": "time"]', "]", BOTH[1:]),
    # Nested arguments, with brackets inside of strings.
    (
        '{"name": "time", "parameters": {"a": [{"b": "}]\\\\"}, {}], "c": "\\"}"}}',
        "",
        [("time", '{"a": [{"b": "}]\\\\"}, {}], "c": "\\"}"}')],
    ),
]


@pytest.mark.parametrize(("text", "words", "calls"), FORMS)
def test_parses_text_and_calls(text: str, words: str, calls: Any):
    for step in (1, 2, 3, 7, 10**6):
        assert read(text, step) == (words, calls), step


def test_parsing_is_independent_of_pieces(unchecked_types: None):
    whole = [*(text for text, _, _ in FORMS), '"}]{[,:`\\ \n']
    rng, num_calls = random.Random(0), 0
    for _ in range(1500):
        letters = [*rng.choice(whole), *rng.choice(whole)]
        for _ in range(rng.randint(0, 5)):
            at = rng.randint(0, len(letters))
            letters[at : at + rng.randint(0, 1)] = rng.choice('{}[]",:`\\ \ntime')
        text = "".join(letters)
        words, calls = read(text)
        assert read(text, rng.randint(1, 5)) == (words, calls), text
        assert calls or words == text
        num_calls += len(calls)
    assert num_calls > 500


def test_text_is_released_as_early_as_possible():
    reader = CallReader({"weather"})
    assert [part.text for part in reader.push("Hel")] == ["Hel"]
    assert [part.text for part in reader.push("lo\n[")] == ["lo\n"]
    assert reader.push('{"name": "weather"') == []
    (begun, some) = reader.push(', "parameters": {"ci')
    assert (begun.name, some.text) == ("weather", '{"ci')
    assert [part.text for part in reader.push('ty": 1}}')] == ['ty": 1}']
    assert reader.push("]\n") == reader.end() == []

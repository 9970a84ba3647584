"""Chats with tools, with openai's client and a device with scripted texts.

Only the generated text is scripted; the server and the bundled tokenizer are real.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.serve.app import make_app
from jaxspec.serve.requests.tool_parsers import ToolParserManager
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.serve.requests.test_tool_parsers import PLUGIN
from tests.serve.responses.test_responses import checked, client_of
from tests.support.fake_device import FakeRunner, extend
from tests.support.fake_engines import assert_idle
from tests.support.loops import MODEL, make_config

TOKENIZER = Tokenizer.from_folder(bundled_target())
MESSAGES = [{"role": "user", "content": "Is it warm in Rom?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool("time")]
NAMED = {"type": "function", "function": {"name": "weather"}}
ROME = {"name": "weather", "parameters": {"city": 'Rom "Est" é'}}
OSLO = {"name": "weather", "parameters": {"city": "Oslo"}}
NOW = {"name": "time", "parameters": {}}
AUTO = {"enable_auto_tool_choice": True}
Ask = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


class Script:
    """Generates a given text after any prompt, then ends it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Index of the next token of the scripted text, by the hash of the tokens before
        # it.
        self._said: dict[int, int] = {}

    def say(self, text: str) -> int:
        """Set the text to generate; return its number of tokens, with the end token."""
        self._tokens = [*TOKENIZER.encode(text, False), TOKENIZER.eos_token_id]
        self._said.clear()
        return len(self._tokens)

    def __call__(self, seed: tuple[int, int], position: int, prefix: int) -> int:
        at = self._said.get(prefix, 0)
        token = self._tokens[at]
        self._said[extend(prefix, token)] = min(at + 1, len(self._tokens) - 1)
        return token


class Stage:
    """A server whose model generates scripted texts."""

    def __init__(self) -> None:
        model = dataclasses.replace(
            MODEL, vocab_size=TOKENIZER.vocab_size, max_position_embeddings=1024
        )
        config = make_config(
            model_config=model,
            draft_model_config=model,
            max_model_len=1024,
            page_size=16,
            num_pages=256,
        )
        self.script = Script()
        runner = FakeRunner(config, self.script)
        self.engine = LLMEngine(config, runner=runner, tokenizer=TOKENIZER)
        self.serving = AsyncLLMEngine(self.engine)
        self._apps: dict[str, Any] = {}

    def _app(self, **settings: Any) -> Any:
        key = repr(settings)
        if key not in self._apps:
            self._apps[key] = make_app(self.serving, ServerSettings(**settings))
        return self._apps[key]

    def play(self, text: str, ask: Ask, **settings: Any) -> Any:
        """Run a client against a server whose model generates this text."""
        self.script.say(text)

        async def run() -> Any:
            app = self._app(**settings)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            url = "http://server"
            async with httpx.AsyncClient(transport=transport, base_url=url) as http:
                return await ask(client_of(http))

        return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types: None):
    """Disable type checks of calls; other tests make the same calls with checks."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    try:
        yield made
    finally:
        made.serving.shutdown(10)
    assert_idle(made.engine)


@dataclasses.dataclass
class Answer:
    """One choice of a response, whole or streamed.

    Attributes:
        calls: Names and arguments of the called functions.
    """

    content: str
    calls: list[tuple[str, str]]
    finish_reason: str | None
    tokens: list[bytes]


def asking(**given: Any) -> Callable[[openai.AsyncOpenAI], Awaitable[Any]]:
    """Return a function that requests a chat and returns answers and token count."""
    asked = {"model": "model", "messages": MESSAGES, "logprobs": True} | given

    async def ask(client: openai.AsyncOpenAI) -> tuple[list[Answer], int]:
        create: Any = client.chat.completions.create
        if not asked.get("stream"):
            response = await create(**asked)
            answers = [whole(choice) for choice in response.choices]
            return answers, response.usage.completion_tokens
        options = {"include_usage": True}
        return await streamed(await create(**asked, stream_options=options))

    return ask


def whole(choice: Any) -> Answer:
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    assert (choice.message.content is None) <= bool(calls)
    return Answer(
        choice.message.content or "",
        [(call.function.name, call.function.arguments) for call in calls],
        choice.finish_reason,
        [bytes(one.bytes) for one in choice.logprobs.content],
    )


async def streamed(chunks: Any) -> tuple[list[Answer], int]:
    """Join the chunks of an answer, and check each."""
    answers: dict[int, Answer] = {}
    ids: set[str] = set()
    usage = None
    async for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, Answer("", [], None, []))
            assert answer.finish_reason is None, "a chunk after the last one"
            answer.finish_reason = choice.finish_reason
            if choice.logprobs is not None:
                answer.tokens += [bytes(one.bytes) for one in choice.logprobs.content]
            answer.content += choice.delta.content or ""
            assert len(choice.delta.tool_calls or ()) <= 1
            for call in choice.delta.tool_calls or ():
                function = call.function
                if call.id is not None:
                    assert call.index == len(answer.calls)
                    assert (call.type, function.arguments) == ("function", "")
                    assert call.id not in ids
                    ids.add(call.id)
                    answer.calls.append((function.name, ""))
                    continue
                assert (call.type, function.name) == (None, None)
                assert call.index == len(answer.calls) - 1
                name, arguments = answer.calls.pop()
                answer.calls.append((name, arguments + function.arguments))
    assert usage is not None
    return [answers[index] for index in sorted(answers)], usage.completion_tokens


def said(*calls: dict[str, Any]) -> str:
    return json.dumps(list(calls), ensure_ascii=False)


def made(*calls: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(one["name"], one["parameters"]) for one in calls]


WORDS = "Yes, it is [warm].\n"
CASES: list[tuple[str, dict[str, Any], tuple[str, list[Any], str]]] = [
    (WORDS, {}, (WORDS, [], "stop")),
    (said(ROME), {}, ("", made(ROME), "tool_calls")),
    (said(ROME, OSLO, NOW), {}, ("", made(ROME, OSLO, NOW), "tool_calls")),
    (
        said(ROME, NOW),
        {"parallel_tool_calls": False},
        ("", made(ROME), "tool_calls"),
    ),
    (f"Let me see.\n{said(NOW)}", {}, ("Let me see.\n", made(NOW), "tool_calls")),
    (f"```json\n{said(ROME)}\n```", {}, ("", made(ROME), "tool_calls")),
    (said(ROME), {"n": 2}, ("", made(ROME), "tool_calls")),
    (said(ROME), {"tool_choice": "required"}, ("", made(ROME), "tool_calls")),
    (
        said(ROME, NOW),
        {"tool_choice": "required", "n": 3},
        ("", made(ROME, NOW), "tool_calls"),
    ),
    (said(ROME), {"tool_choice": NAMED}, ("", made(ROME), "stop")),
    (said(ROME), {"tool_choice": "none"}, (said(ROME), [], "stop")),
    (said({"name": "f"}), {}, (said({"name": "f"}), [], "stop")),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("text", "given", "expected"), CASES)
def test_finds_calls_in_text(
    stage: Stage, text: str, given: dict[str, Any], expected: Any, is_stream: bool
):
    ask = asking(tools=TOOLS, stream=is_stream, **given)
    answers, num_tokens = stage.play(text, ask, **AUTO)
    content, calls, reason = expected
    assert len(answers) == given.get("n", 1)
    for answer in answers:
        assert answer.content == content
        read = [(name, json.loads(arguments)) for name, arguments in answer.calls]
        assert read == calls
        assert answer.finish_reason == reason
        # Whole or streamed, the text is returned completely.
        assert b"".join(answer.tokens).removesuffix(b"<eos>") == text.encode()
        assert len(answer.tokens) == num_tokens / len(answers)
    assert num_tokens == stage.script.say(text) * len(answers)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_cut_off_call_has_finish_reason_length(
    stage: Stage, choice: Any, is_stream: bool
):
    text = said(ROME)
    begun = said(ROME | {"parameters": {}})[:-3]
    most = len(TOKENIZER.encode(begun, False)) + 2
    ask = asking(tools=TOOLS, tool_choice=choice, stream=is_stream, max_tokens=most)
    (answer,), num_tokens = stage.play(text, ask, **AUTO)
    assert (answer.finish_reason, num_tokens) == ("length", most)
    ((name, arguments),) = answer.calls
    assert name == "weather"
    assert json.dumps(ROME["parameters"], ensure_ascii=False).startswith(arguments)
    assert answer.content == ""


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_call_cut_before_its_name_has_no_content(stage: Stage, choice: Any):
    asked = {"model": "model", "messages": MESSAGES, "tools": TOOLS}
    asked |= {"tool_choice": choice, "max_tokens": 3}

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        http = client._client
        whole = await http.post("/v1/chat/completions", json=asked)
        streamed = await http.post(
            "/v1/chat/completions", json=asked | {"stream": True}
        )
        found = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
        (choice,) = whole.json()["choices"]
        return [choice, *(one["choices"][0] for one in found)]

    whole, *chunks = stage.play(said(ROME), ask)
    assert whole["message"]["content"] is None
    assert "tool_calls" not in whole["message"]
    assert {one["delta"].get("content") or "" for one in chunks} == {""}
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("is_stream", [False, True])
def test_forced_call_cut_before_its_name_is_no_text(stage: Stage, is_stream: bool):
    ask = responding(tool_choice="required", max_output_tokens=3, stream=is_stream)
    response, _ = stage.play(said(ROME), ask)
    assert response.status == "incomplete"
    assert items_of(response) == [("", "")]


def test_messages_have_fields_of_vllm(stage: Stage):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        asked = {"messages": MESSAGES, "tools": TOOLS}
        response = await client._client.post("/v1/chat/completions", json=asked)
        return response.json()["choices"][0]["message"]

    fields = {"role", "content", "refusal", "annotations", "audio", "function_call"}
    words = stage.play(WORDS, ask, **AUTO)
    assert words.keys() == fields | {"reasoning"}
    assert words["reasoning"] is None
    calls = stage.play(said(ROME), ask, **AUTO)
    assert calls.keys() == fields | {"reasoning", "tool_calls"}


def test_openai_stream_helper(stage: Stage):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        stream: Any = client.chat.completions.stream
        asked = {"model": "model", "messages": MESSAGES, "tools": TOOLS}
        async with stream(**asked) as events:
            kinds = [event.type async for event in events]
            return kinds, await events.get_final_completion()

    kinds, final = stage.play(said(ROME, NOW), ask, **AUTO)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    (choice,) = final.choices
    calls = choice.message.tool_calls
    read = [(one.function.name, json.loads(one.function.arguments)) for one in calls]
    assert read == made(ROME, NOW)
    assert choice.finish_reason == "tool_calls"


def test_call_and_result(stage: Stage):
    """The next request's prompt contains a call and its result."""

    async def ask(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.chat.completions.create
        asked = {"model": "model", "tools": TOOLS}
        first = await create(messages=MESSAGES, **asked)
        message = first.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
        stage.script.say("It is.")
        return await create(
            messages=[*MESSAGES, message.model_dump(), result],
            extra_body={"return_prompt_text": True},
            **asked,
        )

    answer = stage.play(said(ROME), ask, **AUTO)
    assert answer.choices[0].message.content == "It is."
    assert answer.choices[0].finish_reason == "stop"
    text = answer.prompt_text
    assert '{"name": "weather", "parameters": {"type": "object"' in text
    _, asked, called, result = text.split("<start_of_turn>")[:4]
    assert asked.endswith("\n\nIs it warm in Rom?<end_of_turn>\n")
    assert called == f"model\n{said(ROME)}<end_of_turn>\n"
    assert result == 'user\n{"name": "weather", "result": "21 °C"}<end_of_turn>\n'


@pytest.mark.parametrize(
    ("choice", "settings", "is_listed"),
    [
        ("auto", {}, True),
        ("required", {}, True),
        ("none", {}, False),
        ("none", {"exclude_tools_when_tool_choice_none": False}, True),
    ],
)
def test_prompt_lists_tools(
    stage: Stage, choice: str, settings: dict[str, Any], is_listed: bool
):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.chat.completions.create
        asked = {"model": "model", "messages": MESSAGES, "tools": TOOLS}
        asked["extra_body"] = {"return_prompt_text": True}
        return await create(tool_choice=choice, **asked)

    answer = stage.play(said(NOW), ask, **AUTO, **settings)
    assert ('"name": "weather"' in answer.prompt_text) == is_listed


def test_tokenize_counts_tools(stage: Stage):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        body = {"messages": MESSAGES, "tools": TOOLS}
        http = client._client
        response = await http.post("/tokenize", json=body)
        return response.json()["count"]

    written = TOKENIZER.apply_chat_template(MESSAGES, tools=TOOLS)
    assert stage.play("", ask) == len(written)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice"),
        (
            {"tools": TOOLS, "tool_choice": "auto"},
            "tool_choice",
            "--enable-auto-tool-choice",
        ),
        ({"tools": [], "tool_choice": "required"}, "tools", "empty array"),
        ({"tool_choice": "required"}, "tools", "must be set"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "'some'"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
            "'x'",
        ),
        ({"tools": [{}], "tool_choice": "required"}, "tools.0.function", "required"),
        (
            {"tools": [tool("f", {"type": "string"})], "tool_choice": "required"},
            "tools[0]['function']['parameters']",
            "of an object",
        ),
        *(
            (
                {"tools": [*TOOLS, tool("f", schema)], "tool_choice": choice},
                "tools[2]['function']['parameters']",
                reason,
            )
            for choice in ("required", {"type": "function", "function": {"name": "f"}})
            for schema, reason in (
                ({"properties": {"a": {"type": "nothing"}}}, "nothing"),
                (
                    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
                    "uniqueItems",
                ),
                ({"$ref": "#/$defs/gone"}, "gone"),
            )
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [7]}]},
            "messages[1]['tool_calls'][0]",
            "function",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_refuses_invalid_tools(
    stage: Stage, given: dict[str, Any], param: str, message: str, is_stream: bool
):
    before = stage.engine.runner.num_launches  # pyright: ignore

    async def ask(client: openai.AsyncOpenAI) -> None:
        create: Any = client.chat.completions.create
        asked = {"model": "model", "messages": MESSAGES, "stream": is_stream} | given
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**asked)
        assert refused.value.param == param, refused.value.message
        assert message in refused.value.message

    stage.play("", ask)
    assert stage.engine.runner.num_launches == before  # pyright: ignore


def test_unused_schema_is_not_checked(stage: Stage):
    broken = tool("f", {"properties": {"a": {"type": "nothing"}}})
    for choice in ("auto", NAMED):
        ask = asking(tools=[*TOOLS, broken], tool_choice=choice)
        (answer,), _ = stage.play(said(ROME), ask, **AUTO)
        assert len(answer.calls) == 1


RESPONSE_TOOLS = [{"type": "function", **one["function"]} for one in TOOLS]


def responding(**given: Any) -> Ask:
    """Return a function that requests a response and returns it and its events."""
    asked = {"model": "model", "input": MESSAGES, "tools": RESPONSE_TOOLS} | given

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, list[str]]:
        create: Any = client.responses.create
        if not given.get("stream"):
            return checked(await create(**asked)), []
        events = [checked(event) async for event in await create(**asked)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        check_items(events)
        kept = checked(await client.responses.retrieve(events[-1].response.id))
        assert kept == events[-1].response
        return kept, [event.type.removeprefix("response.") for event in events]

    return ask


def check_items(events: list[Any]) -> None:
    """Check that items begin, grow and end in order, and equal the final response."""
    items: list[Any] = []
    grown = ""
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(items)
            items.append(event.item)
            grown = ""
        elif kind.endswith(".delta"):
            assert (event.output_index, event.item_id) == (len(items) - 1, items[-1].id)
            grown += event.delta
        elif kind == "function_call_arguments.done":
            assert event.arguments == grown
        elif kind == "output_text.done":
            assert event.text == grown
        elif kind == "output_item.done":
            assert event.item.id == items[-1].id
            items[-1] = event.item
    assert items == events[-1].response.output
    assert len({item.id for item in items}) == len(items)


def items_of(response: Any) -> list[tuple[str, Any]]:
    return [
        ("", item.content[0].text)
        if item.type == "message"
        else (item.name, json.loads(item.arguments))
        for item in response.output
    ]


RESPONSES: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    (WORDS, {}, [("", WORDS)]),
    (said(ROME, NOW), {}, made(ROME, NOW)),
    (said(ROME, NOW), {"parallel_tool_calls": False}, made(ROME)),
    (f"See:\n{said(NOW)}", {}, [("", "See:\n"), *made(NOW)]),
    (said(OSLO), {"tool_choice": "required"}, made(OSLO)),
    (
        said(ROME),
        {"tool_choice": {"type": "function", "name": "weather"}},
        made(ROME),
    ),
    (said(ROME), {"tool_choice": "none"}, [("", said(ROME))]),
    (
        said(ROME),
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "time"}],
            }
        },
        [("", said(ROME))],
    ),
    ("", {}, [("", "")]),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("text", "given", "expected"), RESPONSES)
def test_responses_with_calls(
    stage: Stage, text: str, given: dict[str, Any], expected: Any, is_stream: bool
):
    include = ["message.output_text.logprobs"]
    ask = responding(stream=is_stream, include=include, **given)
    response, names = stage.play(text, ask, **AUTO)
    assert items_of(response) == expected
    assert response.status == "completed"
    assert {item.status for item in response.output} == {"completed"}
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len(calls)
    for item in response.output:
        if item.type == "message":
            logprobs = item.content[0].logprobs
            spelled = b"".join(bytes(one.bytes) for one in logprobs)
            assert spelled.removesuffix(b"<eos>") == item.content[0].text.encode()
    if is_stream:
        assert names[:2] == ["created", "in_progress"]
        assert names.count("function_call_arguments.done") == len(calls)
        assert names[-1] == "completed"


@pytest.mark.parametrize("is_stream", [False, True])
def test_cut_off_call_of_response(stage: Stage, is_stream: bool):
    begun = said(ROME | {"parameters": {}})[:-3]
    most = len(TOKENIZER.encode(begun, False)) + 2
    ask = responding(stream=is_stream, max_output_tokens=most)
    response, _ = stage.play(said(ROME), ask, **AUTO)
    assert response.status == "incomplete"
    (call,) = response.output
    assert (call.name, call.status) == ("weather", "incomplete")

    async def continue_it(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.responses.create
        asked = {"model": "model", "previous_response_id": response.id}
        with pytest.raises(
            openai.BadRequestError, match="call_id must be the call_id of"
        ):
            await create(input=[result_of(call, "21 °C")], **asked)
        return await create(
            input="Go on.", extra_body={"enable_response_messages": True}, **asked
        )

    then = stage.play("Well.", continue_it, **AUTO)
    # The cut-off call becomes plain text in the next prompt.
    assert said(ROME)[:20] in then.input_messages[0]["message"]


def result_of(call: Any, output: str) -> Any:
    item = {"type": "function_call_output", "call_id": call.call_id}
    return item | {"output": output}


@pytest.mark.parametrize("is_stateful", [False, True])
def test_response_continues_with_results(stage: Stage, is_stateful: bool):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.responses.create
        asked: Any = {"model": "model", "tools": RESPONSE_TOOLS}
        first = await create(input=MESSAGES, **asked)
        (call,) = first.output
        given = [result_of(call, "21 °C")]
        if is_stateful:
            asked["previous_response_id"] = first.id
        else:
            past = [item.model_dump(exclude_none=True) for item in first.output]
            given = [*MESSAGES, *past, *given]
        stage.script.say("It is.")
        extra = {"enable_response_messages": True}
        return await create(input=given, extra_body=extra, **asked)

    then = stage.play(said(ROME), ask, **AUTO)
    assert then.output_text == "It is."
    text = then.input_messages[0]["message"]
    assert '{"name": "weather", "parameters": {"type": "object"' in text
    _, asked, called, result = text.split("<start_of_turn>")[:4]
    assert asked.endswith("\n\nIs it warm in Rom?<end_of_turn>\n")
    assert called == f"model\n{said(ROME)}<end_of_turn>\n"
    assert result == 'user\n{"name": "weather", "result": "21 °C"}<end_of_turn>\n'


def test_openai_stream_helper_of_responses(stage: Stage):
    async def ask(client: openai.AsyncOpenAI) -> Any:
        stream: Any = client.responses.stream
        strict = [one | {"strict": True} for one in RESPONSE_TOOLS]
        asked = {"model": "model", "input": MESSAGES, "tools": strict}
        async with stream(**asked) as events:
            received = [event async for event in events]
            return received, await events.get_final_response()

    received, final = stage.play(f"See:\n{said(ROME, NOW)}", ask, **AUTO)
    deltas = [one for one in received if one.type.endswith("arguments.delta")]
    assert deltas
    assert items_of(final) == [("", "See:\n"), *made(ROME, NOW)]
    assert final.output[1].parsed_arguments == ROME["parameters"]


@pytest.mark.parametrize(
    ("given", "settings", "param"),
    [
        ({}, {}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, AUTO, "tools"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}}},
            AUTO,
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {"type": "function", "name": "f", "parameters": {"$ref": "#/x"}}
                ]
            },
            AUTO,
            "tools[0]['parameters']",
        ),
    ],
)
def test_responses_refuse_invalid_tools(
    stage: Stage, given: dict[str, Any], settings: dict[str, Any], param: str
):
    if settings:
        given = {"tool_choice": "required"} | given

    async def ask(client: openai.AsyncOpenAI) -> None:
        create: Any = client.responses.create
        asked = {"model": "model", "input": "x", "tools": RESPONSE_TOOLS} | given
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**asked)
        assert refused.value.param == param, refused.value.message

    stage.play("", ask, **settings)


@pytest.mark.parametrize("is_stream", [False, True])
def test_tool_parser_plugin(
    stage: Stage, tmp_path: Path, is_stream: bool, monkeypatch: pytest.MonkeyPatch
):
    known = dict(ToolParserManager.tool_parsers)
    monkeypatch.setattr(ToolParserManager, "tool_parsers", known)
    path = tmp_path / "shout_parser.py"
    path.write_text(PLUGIN)
    plugin = {"tool_call_parser": "shout", "tool_parser_plugin": str(path)}

    async def ask(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.chat.completions.create
        asked = {"model": "model", "messages": MESSAGES, "tools": TOOLS}
        response = await create(**asked, stream=is_stream)
        if not is_stream:
            return response.choices[0].message.tool_calls
        return [
            call
            async for chunk in response
            for call in chunk.choices[0].delta.tool_calls or ()
        ]

    calls = stage.play("TIME ", ask, **AUTO, **plugin)
    assert [call.function.name for call in calls] == ["time"]

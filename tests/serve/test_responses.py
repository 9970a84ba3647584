"""Responses, asked for with OpenAI's client and read as its types."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.protocol import ResponseBody
from jaxspec.serve.responses import ResponseWriter
from tests.engine.test_llm_engine import letters, said
from tests.serve.test_completions import output
from tests.serve.test_usage import StubServing
from tests.serving import PROMPT, error_of, serve_http

RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def client_of(http: Any) -> openai.AsyncOpenAI:
    url = f"{http.base_url}/v1"
    return openai.AsyncOpenAI(
        base_url=url, api_key="x", http_client=http, max_retries=0
    )


def checked(told: Any) -> Any:
    """The client builds its types unchecked: read a response or an event again."""
    content = told if isinstance(told, dict) else told.model_dump()
    response = content.get("response", content)
    if response.get("usage"):
        # Nobody here counts what is written to the cache.
        response["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    kind = EVENT if "sequence_number" in content else RESPONSE
    return kind.validate_python(content)


def test_a_response():
    async def ask(http: httpx.AsyncClient) -> None:
        create: Any = client_of(http).responses.create
        response = await create(model="model", input=PROMPT, max_output_tokens=5)
        response = checked(response)
        assert response.id.startswith("resp_")
        assert response.output_text == letters(said(5))
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        (item,) = response.output
        assert item.type == "message"
        assert item.status == "incomplete"
        assert response.usage is not None
        usage = response.usage
        counts = usage.input_tokens, usage.output_tokens, usage.total_tokens
        assert counts == (3, 5, 8)

    serve_http(ask)


def test_a_response_tells_what_was_asked():
    asked: Any = {
        "instructions": "!",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 50,
        "store": True,
    }
    stop = letters(said(6)[4:])

    async def ask(http: httpx.AsyncClient) -> None:
        create: Any = client_of(http).responses.create
        # The stub's conversation is its last message; instructions are a part of it.
        user = {"role": "user", "content": "!"}
        turns: Any = [user, {"role": "assistant", "content": PROMPT}]
        response = checked(
            await create(model="model", input=turns, extra_body={"stop": stop}, **asked)
        )
        assert response.output_text == letters(said(4))
        assert response.status == "completed"
        assert response.error is None
        assert response.incomplete_details is None
        told = response.model_dump()
        for name in asked.keys() - {"text", "store"}:
            assert told[name] == asked[name], name
        assert told["text"]["format"]["type"] == "text"
        assert told["store"] is False, "it is ignored, and that is told"

    serve_http(ask)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_stream(is_cut: bool):
    stop = None if is_cut else letters(said(10)[8:])
    count = 20 if is_cut else 8

    async def ask(http: httpx.AsyncClient) -> None:
        body: Any = {"input": PROMPT, "max_output_tokens": 20}
        body |= {"extra_body": {"stop": stop, "include_metrics": True}}
        create: Any = client_of(http).responses.create
        stream = await create(model="model", stream=True, **body)
        events = [checked(event) async for event in stream]
        names = [event.type for event in events]
        last = "response.incomplete" if is_cut else "response.completed"
        num_deltas = len(events) - 8
        assert num_deltas > 1, "one round gives four tokens at most"
        deltas = ["response.output_text.delta"] * num_deltas
        assert names == [*OPENING, *deltas, *CLOSING, last]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events[4 : 4 + num_deltas])
        assert text == letters(said(count))
        done, part, item, end = events[-4:]
        assert done.text == part.part.text == item.item.content[0].text == text
        assert end.response.output_text == text
        assert {event.item_id for event in events[3:-2]} == {item.item.id}
        assert events[0].response.id == end.response.id
        assert events[0].response.status == "in_progress"
        whole = await create(model="model", **body)
        assert checked(whole).usage == end.response.usage
        assert whole.status == end.response.status == last.removeprefix("response.")
        metrics = end.response.metrics["speculative_decoding"]
        assert metrics["num_spec_steps"] > 0

    serve_http(ask, delay_s=0.01)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs(is_stream: bool):
    body = ResponseBody(input=PROMPT)
    writer = ResponseWriter(StubServing(), body, SamplingParams(logprobs=1), "x")
    parts = [
        output([5, 6], is_first=True, is_last=False),
        output([7], is_first=False, is_last=True),
    ]
    if is_stream:
        told = [one for part in parts for one in writer._deltas(part.outputs[0])]
        assert [one["delta"] for one in told] == [letters([5, 6]), letters([7])]
        assert [len(one["logprobs"]) for one in told] == [2, 1]
        done = next(writer._closing(parts[-1]))["logprobs"]
        assert done == [entry for one in told for entry in one["logprobs"]]
    else:
        for part in parts:
            writer._add(part.outputs[0])
        response = writer._ended(parts[-1])
        checked(response)
        done = response["output"][0]["content"][0]["logprobs"]
    assert [(one["token"], one["logprob"]) for one in done] == [
        (letters([token]), -token) for token in (5, 6, 7)
    ]
    assert all(len(one["top_logprobs"]) == 1 for one in done)


def test_who_drew_each_token():
    async def ask(http: httpx.AsyncClient) -> None:
        body: Any = {"input": PROMPT, "max_output_tokens": 20}
        body["extra_body"] = {"return_token_origins": True}
        create: Any = client_of(http).responses.create
        stream = await create(model="model", stream=True, **body)
        events: list[Any] = [event async for event in stream]
        deltas = [one for one in events if one.type == "response.output_text.delta"]
        for one in deltas:
            assert "".join(piece["text"] for piece in one.token_origins) == one.delta
        told = [piece for one in deltas for piece in one.token_origins]
        assert [piece["token_id"] for piece in told] == said(20)
        assert {piece["origin"] for piece in told} > {"draft", "target"}
        for whole in (events[-1].response, await create(model="model", **body)):
            part = whole.output[0].content[0].to_dict()
            assert [piece["token_id"] for piece in part["token_origins"]] == said(20)
            text = "".join(piece["text"] for piece in part["token_origins"])
            assert text == part["text"]

    serve_http(ask, delay_s=0.01)


def test_a_text_that_the_servers_end_cuts_off():
    writer = ResponseWriter(
        StubServing(), ResponseBody(input=PROMPT), SamplingParams(), "x"
    )
    part = output([5], is_first=True, is_last=True)
    part.outputs[0].finish_reason = "abort"
    writer._add(part.outputs[0])
    *_, end = writer._closing(part)
    assert checked(end).type == "response.failed"
    assert end["response"]["error"]["code"] == "server_error"
    assert end["response"]["output"][0]["status"] == "incomplete"


def test_nothing_is_stored():
    async def ask(http: httpx.AsyncClient) -> None:
        responses = client_of(http).responses
        whole = await responses.create(model="model", input=PROMPT)
        for asked in (
            responses.retrieve(whole.id),
            responses.cancel(whole.id),
            responses.create(
                model="model", input=PROMPT, previous_response_id=whole.id
            ),
        ):
            with pytest.raises(openai.NotFoundError, match=f"'{whole.id}' not found"):
                await asked
        response = await http.get(f"{RESPONSES}/resp_1")
        assert error_of(response, 404, "NotFoundError")["param"] == "response_id"

    serve_http(ask)


@pytest.mark.parametrize("is_stream", [False, True])
def test_refusals(is_stream: bool):
    async def ask(http: httpx.AsyncClient) -> None:
        for wrong, param in (
            ({"temperature": 3}, "temperature"),
            ({"input": []}, "input"),
            ({"background": True}, "background"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
            ({"tools": [{"type": "function"}]}, "tools"),
        ):
            body = {"input": PROMPT, "stream": is_stream} | wrong
            response = await http.post(RESPONSES, json=body)
            assert error_of(response, 400, "BadRequestError")["param"] == param
        response = await http.post(RESPONSES, json={"model": "other", "input": "#"})
        assert error_of(response, 404, "NotFoundError")["param"] == "model"

    serve_http(ask)


def test_a_failed_step_within_a_stream():
    async def ask(http: httpx.AsyncClient) -> None:
        create: Any = client_of(http).responses.create
        stream = await create(model="model", input=PROMPT, stream=True)
        assert (await anext(stream)).type == "response.created"
        with pytest.raises(openai.APIError, match="boom"):
            async for _ in stream:
                pass

    serve_http(ask, break_at=8, delay_s=0.005)

"""The Responses API, with OpenAI's client and its types."""

import asyncio
import itertools
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve import generation, streaming
from jaxspec.serve.requests.protocol import ResponseBody
from jaxspec.serve.requests.response_input import as_chat, messages_of
from jaxspec.serve.response_store import UNFINISHED, ResponseStore, Stored
from jaxspec.serve.responses import responses
from jaxspec.serve.responses.responses import ResponseWriter
from tests.serve.responses.test_completions import output
from tests.serve.responses.test_usage import StubServing
from tests.support.fake_engines import letters, said
from tests.support.serving import PROMPT, error_of, serve_http, site_of

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


def checked(received: Any) -> Any:
    """Validate a response or event: the client builds its types without checks."""
    content = received if isinstance(received, dict) else received.model_dump()
    response = content.get("response", content)
    if response.get("usage"):
        # The engine does not count how many tokens it writes to the prefix cache.
        response["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    kind = EVENT if "sequence_number" in content else RESPONSE
    return kind.validate_python(content)


def test_response():
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


def test_response_repeats_request_fields():
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
        # The stub's chat template renders only the last message and the instructions.
        user = {"role": "user", "content": "!"}
        turns: Any = [user, {"role": "assistant", "content": PROMPT}]
        response = checked(
            await create(model="model", input=turns, extra_body={"stop": stop}, **asked)
        )
        assert response.output_text == letters(said(4))
        assert response.status == "completed"
        assert response.error is None
        assert response.incomplete_details is None
        fields = response.model_dump()
        for name in asked.keys() - {"text", "store"}:
            assert fields[name] == asked[name], name
        assert fields["text"]["format"]["type"] == "text"
        assert fields["store"] is True

    serve_http(ask)


@pytest.mark.parametrize("is_cut", [False, True])
def test_stream(is_cut: bool):
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


def writer_of(params: SamplingParams) -> ResponseWriter:
    body = ResponseBody(input=PROMPT)
    chat = as_chat(body, messages_of(body))
    return ResponseWriter(StubServing(), body, chat, params, "x", [])


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs(is_stream: bool):
    writer = writer_of(SamplingParams(logprobs=1))
    parts = [
        output([5, 6], is_first=True, is_last=False),
        output([7], is_first=False, is_last=True),
    ]
    if is_stream:
        list(writer._opening())
        events = [one for part in parts for one in writer._deltas(part.outputs[0])]
        assert [one["delta"] for one in events] == [letters([5, 6]), letters([7])]
        assert [len(one["logprobs"]) for one in events] == [2, 1]
        done = next(writer._closing(parts[-1]))["logprobs"]
        assert done == [entry for one in events for entry in one["logprobs"]]
    else:
        whole = output([5, 6, 7], is_first=True, is_last=True)
        writer._add_whole(whole.outputs[0])
        response = writer._ended(whole)
        checked(response)
        done = response["output"][0]["content"][0]["logprobs"]
    assert [(one["token"], one["logprob"]) for one in done] == [
        (letters([token]), -token) for token in (5, 6, 7)
    ]
    assert all(len(one["top_logprobs"]) == 1 for one in done)


def test_token_origins():
    async def ask(http: httpx.AsyncClient) -> None:
        body: Any = {"input": PROMPT, "max_output_tokens": 20}
        body["extra_body"] = {"return_token_origins": True}
        create: Any = client_of(http).responses.create
        stream = await create(model="model", stream=True, **body)
        events: list[Any] = [event async for event in stream]
        deltas = [one for one in events if one.type == "response.output_text.delta"]
        for one in deltas:
            assert "".join(piece["text"] for piece in one.token_origins) == one.delta
        pieces = [piece for one in deltas for piece in one.token_origins]
        assert [piece["token_id"] for piece in pieces] == said(20)
        assert {piece["origin"] for piece in pieces} > {"draft", "target"}
        for whole in (events[-1].response, await create(model="model", **body)):
            part = whole.output[0].content[0].to_dict()
            assert [piece["token_id"] for piece in part["token_origins"]] == said(20)
            text = "".join(piece["text"] for piece in part["token_origins"])
            assert text == part["text"]

    serve_http(ask, delay_s=0.01)


def test_shutdown_fails_response():
    writer = writer_of(SamplingParams())
    part = output([5], is_first=True, is_last=True)
    part.outputs[0].finish_reason = "abort"
    writer._add_whole(part.outputs[0])
    *_, end = writer._closing(part)
    assert checked(end).type == "response.failed"
    assert end["response"]["error"]["code"] == "server_error"
    assert end["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, {"store": False}), ({"max_response_store_bytes": 0}, {"store": True})],
)
def test_responses_that_are_not_stored(settings: dict[str, Any], asked: dict[str, Any]):
    async def ask(http: httpx.AsyncClient) -> None:
        responses = client_of(http).responses
        whole = await responses.create(model="model", input=PROMPT, **asked)
        assert checked(whole).model_dump()["store"] is False
        for later in (
            responses.retrieve(whole.id),
            responses.cancel(whole.id),
            responses.delete(whole.id),
            responses.create(
                model="model", input=PROMPT, previous_response_id=whole.id
            ),
        ):
            with pytest.raises(openai.NotFoundError, match=f"'{whole.id}' not found"):
                await later
        response = await http.get(f"{RESPONSES}/resp_1")
        assert error_of(response, 404, "NotFoundError")["param"] == "response_id"
        body = {"input": PROMPT, "background": True} | asked
        response = await http.post(RESPONSES, json=body)
        assert error_of(response, 400, "BadRequestError")["param"] == "background"

    serve_http(ask, settings=settings)


@pytest.mark.parametrize("is_stream", [False, True])
def test_retrieve_and_delete(is_stream: bool):
    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        created = await responses.create(model="model", input=PROMPT, stream=is_stream)
        if is_stream:
            created = [event async for event in created][-1].response
        found = checked(await responses.retrieve(created.id))
        assert found.model_dump() == checked(created).model_dump()
        assert found.model_dump()["background"] is False
        with pytest.raises(openai.BadRequestError, match="background=True"):
            await responses.cancel(created.id)
        wrong: Any = (
            ({"stream": "true"}, "stream"),
            ({"stream": "maybe"}, "stream"),
            ({"starting_after": 2}, "starting_after"),
            ({"stream": "true", "starting_after": -1}, "starting_after"),
        )
        for params, name in wrong:
            response = await http.get(f"{RESPONSES}/{created.id}", params=params)
            assert error_of(response, 400, "BadRequestError")["param"] == name
        gone = (await http.delete(f"{RESPONSES}/{created.id}")).json()
        assert gone == {"id": created.id, "object": "response", "deleted": True}
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(created.id)

    serve_http(ask)


def test_previous_response_id():
    """Stored messages include the earlier ones; the stub renders only the last."""

    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        given: Any = {"model": "model", "max_output_tokens": 5}
        first = await responses.create(input="%", **given)
        extra = {"enable_response_messages": True}
        then = await responses.create(
            input=PROMPT, previous_response_id=first.id, extra_body=extra, **given
        )
        assert then.previous_response_id == first.id
        transport: Any = http._transport
        kept = transport.app.state.serving.responses.get(then.id)
        assert kept.messages == [
            {"role": "user", "content": "%"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": then.output_text},
        ]
        (read,), (wrote,) = then.input_messages, then.output_messages
        assert read["type"] == wrote["type"] == "raw_message_tokens"
        assert len(read["tokens"]) == then.usage.input_tokens
        assert wrote["message"] == then.output_text
        assert len(wrote["tokens"]) == then.usage.output_tokens

    serve_http(ask)


def test_background_response():
    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        given: Any = {"model": "model", "input": PROMPT, "max_output_tokens": 5}
        created = checked(await responses.create(background=True, **given))
        assert (created.status, created.background, created.output) == (
            "queued",
            True,
            [],
        )
        while (found := await responses.retrieve(created.id)).status in UNFINISHED:
            if found.status == "in_progress":
                with pytest.raises(openai.BadRequestError, match="a finished response"):
                    await responses.create(previous_response_id=created.id, **given)
            await asyncio.sleep(0.005)
        found = checked(found)
        assert found.output_text == letters(said(5))
        assert (found.id, found.status) == (created.id, "incomplete")
        # Cancelling a finished response has no effect.
        after = checked(await responses.cancel(created.id))
        assert after.model_dump() == found.model_dump()

    serve_http(ask, delay_s=0.005)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_cancel_background_response(is_deleted: bool):
    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        given: Any = {"model": "model", "input": PROMPT, "max_output_tokens": 90}
        body = given | {"background": True, "request_id": "x"}
        created = (await http.post(RESPONSES, json=body)).json()
        again = await http.post(RESPONSES, json=body)
        assert error_of(again, 400, "BadRequestError")["param"] == "request_id"
        if is_deleted:
            await responses.delete(created["id"])
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(created["id"])
        else:
            cancelled = checked(await responses.cancel(created["id"]))
            assert (cancelled.status, cancelled.output) == ("cancelled", [])
            found = await responses.retrieve(created["id"])
            assert found.model_dump() == cancelled.model_dump()
        # Its row of the batch is free again.
        load = (await http.get("/load")).json()
        assert load["server_load"] == 0

    serve_http(ask, delay_s=0.02)


@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_large_response_is_cancelled_in_thread(status, monkeypatch):
    """Another server may generate it, so a thread polls until that has stopped."""
    monkeypatch.setattr(generation, "SHORT_BYTES", 32)
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.05)
    threads: list[str] = []
    get = ResponseStore.get

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return get(*arguments)

    monkeypatch.setattr(ResponseStore, "get", watched)

    async def ask(http: httpx.AsyncClient) -> None:
        app: Any = http._transport.app  # pyright: ignore
        large = {"id": "resp_x", "status": status, "background": True, "text": "x" * 64}
        app.state.serving.responses.add(Stored(large, []))
        answer = await http.post(f"{RESPONSES}/resp_x/cancel")
        assert answer.json() == large
        assert set(threads) == {"jaxspec-long-work"}
        threads.clear()
        (await http.delete(f"{RESPONSES}/resp_x")).raise_for_status()
        assert threads == []
        gone = await http.delete(f"{RESPONSES}/resp_x")
        assert gone.status_code == 404

    serve_http(ask)


async def collect(stream: Any) -> list[Any]:
    return [checked(event).model_dump() async for event in await stream]


def test_stream_background_response_again():
    """Any client may read it again, from the start or from any event on."""

    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        given: Any = {"model": "model", "input": PROMPT, "max_output_tokens": 20}
        given |= {"background": True, "stream": True, "extra_body": {"request_id": "x"}}
        first = asyncio.ensure_future(collect(responses.create(**given)))
        is_there = False
        while not is_there:
            await asyncio.sleep(0)
            is_there = (await http.get(f"{RESPONSES}/resp_x")).is_success
        later = collect(responses.retrieve("resp_x", stream=True))
        tail = collect(responses.retrieve("resp_x", stream=True, starting_after=7))
        events, *others = await asyncio.gather(first, later, tail)
        assert [event["sequence_number"] for event in events] == list(
            range(len(events))
        )
        assert [event["type"] for event in events][:4] == OPENING
        assert events[0]["response"]["status"] == "queued"
        assert events[-1]["type"] == "response.incomplete"
        deltas = [event["delta"] for event in events if "delta" in event]
        assert len(deltas) > 4
        assert "".join(deltas) == letters(said(20))
        # Finished responses return the same events, from the store.
        others.append(await collect(responses.retrieve("resp_x", stream=True)))
        behind = responses.retrieve("resp_x", stream=True, starting_after=7)
        others.append(await collect(behind))
        assert others == [events, events[8:], events, events[8:]]
        behind = responses.retrieve("resp_x", stream=True, starting_after=999)
        assert await collect(behind) == []
        found = checked(await responses.retrieve("resp_x"))
        assert found.model_dump() == events[-1]["response"]

    serve_http(ask, delay_s=0.005)


@pytest.mark.parametrize(
    "how",
    [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}],
)
def test_large_response_is_serialized_in_thread(how, monkeypatch):
    """The store, the response and the last events all contain its log-probabilities."""
    threads: dict[str, set[str]] = {}

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if "'status': 'incomplete'" in str(arguments):  # the complete response
                thread = threading.current_thread().name.rpartition("_")[0]
                threads.setdefault(name, set()).add(thread)
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for module in (generation, responses, streaming):
        monkeypatch.setattr(module, "SHORT_ANSWER", 32)
    monkeypatch.setattr(generation, "SHORT_BYTES", 32)
    watch(ResponseStore, "add")
    watch(ResponseStore, "update")
    watch(generation, "event")
    watch(generation, "encoded")
    body = {"input": PROMPT, "max_output_tokens": 20, "top_logprobs": 2}
    body |= {"include": ["message.output_text.logprobs"], "request_id": "x"} | how

    async def ask(http: httpx.AsyncClient) -> None:
        (await http.post(RESPONSES, json=body)).raise_for_status()
        found: dict[str, Any] = {"status": "queued"}
        while found["status"] in UNFINISHED:
            found = (await http.get(f"{RESPONSES}/resp_x")).json()
        (part,) = found["output"][0]["content"]
        assert len(part["logprobs"]) == 20
        assert found["store"] is True

    serve_http(ask)
    # Only background responses are stored before they are finished.
    kept = "update" if how.get("background") else "add"
    names = {kept, "encoded"} | ({"event"} if how.get("stream") else set())
    assert threads == dict.fromkeys(names, {"jaxspec-long-work"})


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_background_response_outlives_its_client(is_cancelled: bool):
    body = {"input": PROMPT, "max_output_tokens": 40, "background": True}
    with site_of() as site:
        site.delay_s = 0.02
        url = f"{site.url[:-1]}{RESPONSES}"
        with httpx.stream("POST", url, json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            (first,) = itertools.islice((one for one in lines if "data: " in one), 1)
        created = json.loads(first.removeprefix("data: "))["response"]
        url = f"{url}/{created['id']}"
        if is_cancelled:
            httpx.post(f"{url}/cancel")
        text = httpx.get(url, params={"stream": "true"}, timeout=60).text
        events = [
            json.loads(line[6:]) for line in text.splitlines() if "data: " in line
        ]
        status = "cancelled" if is_cancelled else "incomplete"
        assert events[-1]["type"] == f"response.{status}"
        assert events[-1]["response"]["status"] == status
        said_so_far = "".join(event.get("delta", "") for event in events)
        assert (said_so_far == letters(said(40))) != is_cancelled
        assert httpx.get(url).json() == events[-1]["response"]


def test_failed_background_response():
    async def ask(http: httpx.AsyncClient) -> None:
        responses: Any = client_of(http).responses
        given: Any = {"model": "model", "input": PROMPT, "background": True}
        created = await responses.create(**given)
        while created.status in UNFINISHED:
            await asyncio.sleep(0.005)
            created = await responses.retrieve(created.id)
        created = checked(created)
        assert created.status == "failed"
        assert created.error is not None
        assert created.error.code == "server_error"
        assert "boom" in created.error.message

    async def follow(http: httpx.AsyncClient) -> None:
        create: Any = client_of(http).responses.create
        given: Any = {"model": "model", "input": PROMPT, "background": True}
        *_, last = await collect(create(stream=True, **given))
        assert last["type"] == "response.failed"
        assert "boom" in last["response"]["error"]["message"]

    for one in (ask, follow):
        serve_http(one, break_at=8, delay_s=0.005)


@pytest.mark.parametrize("is_stream", [False, True])
def test_refusals(is_stream: bool):
    async def ask(http: httpx.AsyncClient) -> None:
        for wrong, param in (
            ({"temperature": 3}, "temperature"),
            ({"input": []}, "input"),
            ({"include": ["logprobs"]}, "include.0"),
            ({"background": True, "store": False}, "background"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ):
            body = {"input": PROMPT, "stream": is_stream} | wrong
            response = await http.post(RESPONSES, json=body)
            assert error_of(response, 400, "BadRequestError")["param"] == param
        response = await http.post(RESPONSES, json={"model": "other", "input": "#"})
        assert error_of(response, 404, "NotFoundError")["param"] == "model"

    serve_http(ask)


def test_failed_step_in_stream():
    async def ask(http: httpx.AsyncClient) -> None:
        create: Any = client_of(http).responses.create
        stream = await create(model="model", input=PROMPT, stream=True)
        assert (await anext(stream)).type == "response.created"
        with pytest.raises(openai.APIError, match="boom"):
            async for _ in stream:
                pass

    serve_http(ask, break_at=8, delay_s=0.005)


def test_response_belongs_to_api_key():
    """Another key cannot find, continue, cancel, delete or replace it."""

    async def ask(http: httpx.AsyncClient) -> None:
        ours, theirs = (
            {"Authorization": f"Bearer {key}"} for key in ("ours", "theirs")
        )
        body = {"input": PROMPT, "request_id": "x", "background": True}
        url = f"{RESPONSES}/resp_x"
        made = await http.post(RESPONSES, json=body, headers=ours)
        assert made.json()["id"] == "resp_x"
        continued = body | {"request_id": "y", "previous_response_id": "resp_x"}
        for refused in (
            await http.get(url, headers=theirs),
            await http.get(url, headers=theirs, params={"stream": "true"}),
            await http.post(f"{url}/cancel", headers=theirs),
            await http.delete(url, headers=theirs),
            await http.post(RESPONSES, json=continued, headers=theirs),
        ):
            assert error_of(refused, 404, "NotFoundError")["param"] == "response_id"
        other = await http.post(
            RESPONSES, json=body | {"max_output_tokens": 3}, headers=theirs
        )
        assert other.json()["id"] == "resp_x"
        while (found := (await http.get(url, headers=ours)).json())[
            "status"
        ] in UNFINISHED:
            await asyncio.sleep(0.005)
        assert found["max_output_tokens"] is None
        assert (await http.delete(url, headers=theirs)).status_code == 200
        assert (await http.get(url, headers=ours)).json() == found

    serve_http(ask, settings={"api_keys": ("ours", "theirs")}, delay_s=0.002)


def test_client_id_replaces_no_response():
    async def ask(http: httpx.AsyncClient) -> None:
        body = {"input": PROMPT, "max_output_tokens": 3}
        traced = {"X-Request-Id": "trace"}
        first, *others = await asyncio.gather(
            *(http.post(RESPONSES, json=body, headers=traced) for _ in range(3))
        )
        ids = {one.json()["id"] for one in (first, *others)}
        assert len(ids) == 3
        assert "resp_trace" in ids
        for one in ids:
            assert (await http.get(f"{RESPONSES}/{one}")).json()["id"] == one
        refused = await http.post(RESPONSES, json=body | {"request_id": "trace"})
        assert error_of(refused, 400, "BadRequestError")["param"] == "request_id"
        for own, header in (({"request_id": "a/b"}, {}), ({}, {"X-Request-Id": "a/b"})):
            refused = await http.post(RESPONSES, json=body | own, headers=header)
            assert "'/'" in error_of(refused, 400, "BadRequestError")["message"]

    serve_http(ask)

"""The Responses API, with OpenAI's client and its types."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from jaxspec.serve import generation, streaming
from jaxspec.serve.response_store import UNFINISHED, ResponseStore, Stored
from jaxspec.serve.responses import responses as writing
from jaxspec.serve.responses.response_items import Message, Token, take_tokens
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    PROMPT,
    Client,
    checked,
    error_of,
    openai_of,
    server,
    site_of,
)

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"model": "model", "input": PROMPT}
OPENING = "created in_progress output_item.added content_part.added".split()
CLOSING = "output_text.done content_part.done output_item.done".split()


@pytest.fixture
def responses(http: Client) -> Any:
    return openai_of(http).responses


def finished(responses: Any, response_id: str) -> Any:
    """Wait until a background response is finished; return it."""
    while (found := responses.retrieve(response_id)).status in UNFINISHED:
        time.sleep(0.005)
    return checked(found)


def test_response_repeats_request_fields(responses: Any):
    repeated: Any = {"instructions": "!", "metadata": {"a": "b"}, "temperature": 0.5}
    repeated |= {"top_p": 0.25, "max_output_tokens": 50}
    asked = repeated | {"text": {"format": {"type": "text"}}, "store": True}
    # The stub's chat template renders only the last message and the instructions.
    turns: Any = [{"role": "user", "content": "!"}]
    turns.append({"role": "assistant", "content": PROMPT})
    stop = {"stop": letters(said(6)[4:])}
    response = responses.create(model="model", input=turns, extra_body=stop, **asked)
    response = checked(response)
    assert response.output_text == letters(said(4))
    assert (response.status, response.error) == ("completed", None)
    assert response.incomplete_details is None
    fields = response.model_dump()
    assert fields.items() >= repeated.items()
    assert fields["text"]["format"]["type"] == "text"
    assert fields["store"] is True


@pytest.mark.parametrize("is_cut", [False, True])
def test_stream_has_openais_events(slow_http: Client, is_cut: bool):
    create: Any = openai_of(slow_http).responses.create
    count = 20 if is_cut else 8
    extra = {"stop": None if is_cut else letters(said(10)[8:]), "include_metrics": True}
    extra |= {"return_token_origins": True}
    asked = ASKED | {"max_output_tokens": 20, "extra_body": extra}
    events = [checked(event) for event in create(stream=True, **asked)]
    last = "incomplete" if is_cut else "completed"
    num_deltas = len(events) - 8
    assert num_deltas > 1, "one round gives four tokens at most"
    deltas = ["output_text.delta"] * num_deltas
    names = [event.type.removeprefix("response.") for event in events]
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
    whole = create(**asked)
    assert checked(whole).usage == end.response.usage
    assert whole.status == end.response.status == last
    assert (whole.id[:5], whole.output_text) == ("resp_", text)
    (item,) = whole.output
    assert (item.type, item.status) == ("message", last)
    if is_cut:
        assert whole.incomplete_details.reason == "max_output_tokens"
        usage = whole.usage
        counts = usage.input_tokens, usage.output_tokens, usage.total_tokens
        assert counts == (3, 20, 23)
    assert end.response.metrics["speculative_decoding"]["num_spec_steps"] > 0
    # The text of the tokens' origins is that of the event.
    parts = [(event.token_origins, event.delta) for event in events[4:-4]]
    whole_parts = [one.output[0].content[0].to_dict() for one in (end.response, whole)]
    parts += [(one["token_origins"], one["text"]) for one in whole_parts]
    assert all("".join(one["text"] for one in tokens) == text for tokens, text in parts)
    streamed = [one for tokens, _ in parts[:num_deltas] for one in tokens]
    assert {one["origin"] for one in streamed} > {"draft", "target"}
    for tokens in (streamed, *(tokens for tokens, _ in parts[num_deltas:])):
        assert [one["token_id"] for one in tokens][:count] == said(count)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, {"store": False}), ({"max_response_store_bytes": 0}, {"store": True})],
)
def test_responses_that_are_not_stored(settings: dict[str, Any], asked: dict[str, Any]):
    with server(**settings) as http:
        responses: Any = openai_of(http).responses
        whole = responses.create(**ASKED, **asked)
        assert checked(whole).model_dump()["store"] is False
        continued = ASKED | {"previous_response_id": whole.id}
        for later in (
            lambda: responses.retrieve(whole.id),
            lambda: responses.cancel(whole.id),
            lambda: responses.delete(whole.id),
            lambda: responses.create(**continued),
        ):
            with pytest.raises(openai.NotFoundError, match=f"'{whole.id}' not found"):
                later()
        unknown = http.get(f"{RESPONSES}/resp_1")
        assert error_of(unknown, 404, "NotFoundError")["param"] == "response_id"
        body = {"input": PROMPT, "background": True} | asked
        assert http.refusal(RESPONSES, body)["param"] == "background"


@pytest.mark.parametrize("is_stream", [False, True])
def test_response_is_retrieved_and_deleted(
    http: Client, responses: Any, is_stream: bool
):
    created = responses.create(**ASKED, stream=is_stream)
    if is_stream:
        created = list(created)[-1].response
    found = checked(responses.retrieve(created.id))
    assert found.model_dump() == checked(created).model_dump()
    assert found.model_dump()["background"] is False
    with pytest.raises(openai.BadRequestError, match="background=True"):
        responses.cancel(created.id)
    wrong: Any = (
        ({"stream": "true"}, "query.stream"),
        ({"stream": "maybe"}, "query.stream"),
        ({"starting_after": 2}, "query.starting_after"),
        ({"stream": "true", "starting_after": -1}, "query.starting_after"),
    )
    for params, name in wrong:
        refused = http.get(f"{RESPONSES}/{created.id}", params=params)
        assert error_of(refused, 400, "BadRequestError")["param"] == name
    gone = http.delete(f"{RESPONSES}/{created.id}").json()
    assert gone == {"id": created.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(created.id)


def test_previous_response_is_continued(http: Client, responses: Any):
    """Stored messages include the earlier ones; the stub renders only the last."""
    given: Any = {"model": "model", "max_output_tokens": 5}
    first = responses.create(input="%", **given)
    given |= {"extra_body": {"enable_response_messages": True}}
    then = responses.create(input=PROMPT, previous_response_id=first.id, **given)
    assert then.previous_response_id == first.id
    assert http.site.app.state.serving.responses.get(then.id).messages == [
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


def test_background_response_completes(slow_http: Client):
    responses: Any = openai_of(slow_http).responses
    asked = ASKED | {"max_output_tokens": 5}
    slow_http.site.delay_s = 0.5
    created = checked(responses.create(background=True, **asked))
    state = (created.status, created.background, created.output)
    assert state == ("queued", True, [])
    continued = asked | {"previous_response_id": created.id}
    with pytest.raises(openai.BadRequestError, match="a finished response"):
        responses.create(**continued)
    slow_http.site.delay_s = 0.0
    found = finished(responses, created.id)
    assert found.output_text == letters(said(5))
    assert (found.id, found.status) == (created.id, "incomplete")
    # Cancelling a finished response has no effect.
    after = checked(responses.cancel(created.id))
    assert after.model_dump() == found.model_dump()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_background_response_can_be_cancelled(slow_http: Client, is_deleted: bool):
    responses: Any = openai_of(slow_http).responses
    name = f"cancelled{is_deleted}"
    body = ASKED | {"max_output_tokens": 90, "background": True, "request_id": name}
    created = slow_http.ask(RESPONSES, **body)
    assert slow_http.refusal(RESPONSES, body)["param"] == "request_id"
    if is_deleted:
        responses.delete(created["id"])
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(created["id"])
    else:
        cancelled = checked(responses.cancel(created["id"]))
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        found = responses.retrieve(created["id"])
        assert found.model_dump() == cancelled.model_dump()
    # Its row of the batch is free again.
    assert slow_http.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_large_response_is_cancelled_in_thread(http: Client, status, monkeypatch):
    """Another server may generate it, so a thread polls until that has stopped."""
    monkeypatch.setattr(generation, "SHORT_BYTES", 32)
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.05)
    threads: list[str] = []
    get = ResponseStore.get

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return get(*arguments)

    monkeypatch.setattr(ResponseStore, "get", watched)
    large = {"id": "resp_l", "status": status, "background": True, "text": "x" * 64}
    http.site.app.state.serving.responses.add(Stored(large, []))
    assert http.post(f"{RESPONSES}/resp_l/cancel").json() == large
    assert set(threads) == {"jaxspec-long-work"}
    threads.clear()
    http.delete(f"{RESPONSES}/resp_l").raise_for_status()
    assert threads == []
    assert http.delete(f"{RESPONSES}/resp_l").status_code == 404


def collect(stream: Any) -> list[Any]:
    return [checked(event).model_dump() for event in stream]


def test_stream_background_response_again(slow_http: Client):
    """Any client may read it again, from the start or from any event on."""
    responses: Any = openai_of(slow_http).responses
    given: Any = ASKED | {"max_output_tokens": 20, "background": True, "stream": True}
    given |= {"extra_body": {"request_id": "s"}}

    def again(**params: Any) -> list[Any]:
        return collect(responses.retrieve("resp_s", stream=True, **params))

    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: collect(responses.create(**given)))
        while not slow_http.get(f"{RESPONSES}/resp_s").is_success:
            pass
        reading = [pool.submit(again), pool.submit(again, starting_after=7)]
        events, *others = (one.result() for one in (first, *reading))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:4]] == [f"response.{x}" for x in OPENING]
    assert events[0]["response"]["status"] == "queued"
    assert events[-1]["type"] == "response.incomplete"
    deltas = [event["delta"] for event in events if "delta" in event]
    assert len(deltas) > 4
    assert "".join(deltas) == letters(said(20))
    # Finished responses return the same events, from the store.
    others += [again(), again(starting_after=7)]
    assert others == [events, events[8:], events, events[8:]]
    assert again(starting_after=999) == []
    found = checked(responses.retrieve("resp_s"))
    assert found.model_dump() == events[-1]["response"]


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_large_response_is_serialized_in_thread(
    http: Client, responses: Any, is_stream: bool, is_background: bool, monkeypatch
):
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

    for module in (generation, writing, streaming):
        monkeypatch.setattr(module, "SHORT_ANSWER", 32)
    monkeypatch.setattr(generation, "SHORT_BYTES", 32)
    watch(ResponseStore, "add")
    watch(ResponseStore, "update")
    watch(generation, "event")
    watch(generation, "encoded")
    name = f"large{is_stream}{is_background}"
    body = ASKED | {"max_output_tokens": 20, "top_logprobs": 2, "request_id": name}
    body |= {"include": ["message.output_text.logprobs"]}
    body |= {"stream": is_stream, "background": is_background}
    http.post(RESPONSES, json=body).raise_for_status()
    found = finished(responses, f"resp_{name}").model_dump()
    assert len(found["output"][0]["content"][0]["logprobs"]) == 20
    assert found["store"] is True
    # Only background responses are stored before they are finished.
    kept = "update" if is_background else "add"
    names = {kept, "encoded"} | ({"event"} if is_stream else set())
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
        lines = [line for line in text.splitlines() if "data: " in line]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        status = "cancelled" if is_cancelled else "incomplete"
        assert events[-1]["type"] == f"response.{status}"
        assert events[-1]["response"]["status"] == status
        said_so_far = "".join(event.get("delta", "") for event in events)
        assert (said_so_far == letters(said(40))) != is_cancelled
        assert httpx.get(url).json() == events[-1]["response"]


def test_failed_step_ends_stream_with_error():
    with server(break_at=8, delay_s=0.005) as http:
        create: Any = openai_of(http).responses.create
        stream = create(**ASKED, stream=True)
        assert next(stream).type == "response.created"
        with pytest.raises(openai.APIError, match="boom"):
            list(stream)


def test_response_belongs_to_api_key():
    """Another key cannot find, continue, cancel, delete or replace it."""
    with server(api_keys=("ours", "theirs"), delay_s=0.002) as http:
        ours, theirs = (
            {"Authorization": f"Bearer {key}"} for key in ("ours", "theirs")
        )
        body = {"input": PROMPT, "request_id": "x", "background": True}
        url = f"{RESPONSES}/resp_x"
        made = http.post(RESPONSES, json=body, headers=ours)
        assert made.json()["id"] == "resp_x"
        continued = body | {"request_id": "y", "previous_response_id": "resp_x"}
        for refused in (
            http.get(url, headers=theirs),
            http.get(url, headers=theirs, params={"stream": "true"}),
            http.post(f"{url}/cancel", headers=theirs),
            http.delete(url, headers=theirs),
            http.post(RESPONSES, json=continued, headers=theirs),
        ):
            assert error_of(refused, 404, "NotFoundError")["param"] == "response_id"
        short = body | {"max_output_tokens": 3}
        other = http.post(RESPONSES, json=short, headers=theirs)
        assert other.json()["id"] == "resp_x"
        while (found := http.get(url, headers=ours).json())["status"] in UNFINISHED:
            time.sleep(0.005)
        assert found["max_output_tokens"] is None
        assert http.delete(url, headers=theirs).status_code == 200
        assert http.get(url, headers=ours).json() == found


def test_client_id_replaces_no_response(http: Client):
    body = {"input": PROMPT, "max_output_tokens": 3}

    def ask(_: int) -> str:
        traced = {"X-Request-Id": "trace"}
        return http.post(RESPONSES, json=body, headers=traced).json()["id"]

    with ThreadPoolExecutor(3) as pool:
        ids = set(pool.map(ask, range(3)))
    assert len(ids) == 3
    assert "resp_trace" in ids
    for one in ids:
        assert http.get(f"{RESPONSES}/{one}").json()["id"] == one
    taken = body | {"request_id": "trace"}
    assert http.refusal(RESPONSES, taken)["param"] == "request_id"
    refused = http.post(RESPONSES, json=body, headers={"X-Request-Id": "a/b"})
    assert "'/'" in error_of(refused, 400, "BadRequestError")["message"]


WORDS = ["Let", " me", " see", "é", ".\n", "[{", '"name"']


def tokens(*texts: str) -> list[Token]:
    return [Token(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("words", "taken", "left"),
    [
        ("Let me", ["Let", " me"], WORDS[2:]),
        ("me see", [" me", " see"], WORDS[3:]),
        ("Let me seeé.\n", WORDS[:5], WORDS[5:]),
        (" m", [" me"], WORDS[2:]),
        ('[{"na', ["[{", '"name"'], []),
        ("other words", WORDS, []),
        ("", [], WORDS),
    ],
)
def test_take_tokens_takes_those_of_the_text(
    words: str, taken: list[str], left: list[str]
):
    waiting = tokens(*WORDS)
    assert take_tokens(waiting, words) == tokens(*taken)
    assert waiting == tokens(*left)


def test_take_tokens_with_partial_characters():
    first, second = "é".encode()[:1], "é".encode()[1:]
    waiting = [Token(b"["), Token(first), Token(b""), Token(second), Token(b"]")]
    taken = take_tokens(waiting, "é")
    assert [one.content for one in taken] == [first, b"", second]
    assert waiting == [Token(b"]")]


def test_empty_delta_has_no_event():
    message = Message("msg_1", 0, has_origins=False)
    assert message.add("", []) is None
    assert message.add("", [Token(b"")]) is None
    assert message.add("", [Token(b"", {"token": "x"})]) is not None
    assert message.add("x", []) is not None
    assert message.as_json("completed")["content"][0]["text"] == "x"

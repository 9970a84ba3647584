"""The endpoints that generate: whole responses, streams, failures, disconnects."""

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import llguidance
import pytest

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.input_processor import InputProcessor
from jaxspec.engine.structured_output import Failure, GrammarState
from jaxspec.serve import generation
from jaxspec.serve.app import make_app
from jaxspec.serve.responses import response_writers
from jaxspec.serve.responses.completions import CompletionWriter
from jaxspec.serve.responses.logprobs import LogprobWriter
from jaxspec.serve.settings import ServerSettings
from tests.support.fake_engines import letters, said, serve
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    TurnsTokenizer,
    error_of,
    events_of,
    post,
    serve_http,
)

ENDLESS = {"max_tokens": 80, "ignore_eos": True}


def test_completion():
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await post(client, COMPLETIONS, prompt=PROMPT, max_tokens=5)
        assert answer["id"].startswith("cmpl-")
        assert (answer["object"], answer["model"]) == ("text_completion", "model")
        (choice,) = answer["choices"]
        assert choice["text"] == letters(said(5))
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        counts = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert answer["usage"] == counts
        assert "metrics" not in answer
        # The default is OpenAI's, not the engine's.
        answer = await post(client, COMPLETIONS, prompt=PROMPT)
        assert answer["usage"]["completion_tokens"] == 16

    serve_http(ask)


def test_chat():
    async def ask(client: httpx.AsyncClient) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = await post(client, CHAT, messages=MESSAGES, **{name: 5})
            assert answer["id"].startswith("chatcmpl-")
            assert answer["object"] == "chat.completion"
            (choice,) = answer["choices"]
            message = choice["message"]
            assert (message["role"], message["content"]) == (
                "assistant",
                letters(said(5)),
            )
            assert choice["finish_reason"] == "length"
        answer = await post(client, CHAT, messages=MESSAGES)
        assert answer["usage"]["total_tokens"] == 96, "up to the end of the context"

    serve_http(ask)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_has_text_of_whole_response(path: str):
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}

    async def ask(client: httpx.AsyncClient) -> None:
        options = {"include_usage": True}
        *chunks, last = await post(
            client, path, **given, max_tokens=20, stream=True, stream_options=options
        )
        assert len({chunk["id"] for chunk in chunks}) == 1
        texts = [choice for chunk in chunks for choice in chunk["choices"]]
        if path == CHAT:
            assert texts[0]["delta"] == {"role": "assistant", "content": ""}
            said_texts = [choice["delta"]["content"] for choice in texts]
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        else:
            said_texts = [choice["text"] for choice in texts]
            assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert "".join(said_texts) == letters(said(20))
        assert len(said_texts) > 3, "one round gives four tokens at most"
        reasons = [choice["finish_reason"] for choice in texts]
        assert reasons == [None] * (len(texts) - 1) + ["length"]
        assert not any("usage" in chunk for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 20

    serve_http(ask, delay_s=0.01)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_continuous_usage_stats(path: str):
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}

    async def ask(client: httpx.AsyncClient) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await post(
            client, path, **given, max_tokens=20, stream=True, stream_options=options
        )
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0] < 20, counts[-2:]) == (True, [20, 20])
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
        # The role is sent before the first text.
        assert (path == CHAT) == (counts[0] == 0)
        assert counts[1] > 0

    serve_http(ask, delay_s=0.01)


def test_fields_not_requested_are_null():
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await post(client, COMPLETIONS, prompt=PROMPT)
        (choice,) = answer["choices"]
        for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "logprobs"):
            assert choice[name] is None
        answer = await post(client, CHAT, messages=MESSAGES, max_tokens=2)
        (choice,) = answer["choices"]
        assert (choice["token_ids"], choice["logprobs"]) == (None, None)
        assert (answer["prompt_logprobs"], answer["prompt_token_ids"]) == (None, None)

    serve_http(ask)


@pytest.mark.parametrize("is_stream", [False, True])
def test_indices_of_several_prompts_and_texts(is_stream: bool):
    prompts = [[2, 3, 4], [2, 3], [2, 3, 4, 5]]

    async def ask(client: httpx.AsyncClient) -> None:
        found = await post(
            client, COMPLETIONS, prompt=prompts, n=2, max_tokens=6, stream=is_stream
        )
        chunks = found if is_stream else [found]
        texts = dict.fromkeys(range(6), "")
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        long = letters(list(range(2, 14)) * 2)
        assert list(texts.values()) == [
            long[len(prompt) : len(prompt) + 6] for prompt in prompts for _ in range(2)
        ]
        if not is_stream:
            counts = {"prompt_tokens": 9, "completion_tokens": 36, "total_tokens": 45}
            assert found["usage"] == counts

    serve_http(ask, delay_s=0.002)


def test_client_request_ids():
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "max_tokens": 4}
        headers = {"X-Request-Id": "mine"}
        both = await asyncio.gather(
            *(client.post(COMPLETIONS, json=body, headers=headers) for _ in range(2))
        )
        # Two concurrent requests may use the same id.
        assert [one.json()["id"] for one in both] == ["cmpl-mine"] * 2
        answer = await post(client, COMPLETIONS, **body, request_id="own")
        assert answer["id"] == "cmpl-own"

    serve_http(ask, delay_s=0.002)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 94}, "max_tokens"),
        ({"prompt": PROMPT * 40}, "prompt"),
        ({"prompt": [[2, 3], [99]]}, "prompt"),
        ({"priority": 2**31}, "priority"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"logit_bias": {"77": 1}}, "logit_bias"),
        ({"logprobs": 99}, "logprobs"),
        ({"stream_interval": 4}, "stream_interval"),
    ],
)
def test_bad_request_is_refused_before_stream_begins(
    body: dict[str, Any], parameter: str, is_stream: bool
):
    async def ask(client: httpx.AsyncClient) -> None:
        whole = {"prompt": PROMPT, "stream": is_stream} | body
        response = await client.post(COMPLETIONS, json=whole)
        error = error_of(response, 400, "BadRequestError")
        assert error["param"] == parameter
        assert len(await post(client, COMPLETIONS, prompt=PROMPT)) > 0

    serve_http(ask)


def test_an_unknown_model():
    async def ask(client: httpx.AsyncClient) -> None:
        for path, given in ((COMPLETIONS, {"prompt": "#"}), (CHAT, {"messages": [{}]})):
            response = await client.post(path, json={"model": "other", **given})
            error = error_of(response, 404, "NotFoundError")
            assert error["param"] == "model"
            assert error["message"] == "The model `other` does not exist."
        answer = await post(client, COMPLETIONS, model="second", prompt=PROMPT)
        assert answer["model"] == "first"

    serve_http(ask, settings={"served_model_names": ("first", "second")})


def test_unknown_fields_are_logged_once(caplog):
    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await post(client, COMPLETIONS, prompt=PROMPT, temprature=0, **{"a\nb": 1})
        await post(client, "/tokenize", prompt=PROMPT, temprature=0)
        messages = [{**MESSAGES[0], "rle": 1, "x": 2}, {**MESSAGES[0], "rle": 1}]
        options = {"include_usge": True}
        for _ in range(2):
            await post(
                client, CHAT, messages=messages, stream=True, stream_options=options
            )

    serve_http(ask)
    logged = [one for one in caplog.messages if "is ignored" in one]
    assert logged == [
        "The field 'a\\nb' of a request is ignored: it has no such field",
        "The field 'temprature' of a request is ignored: did you mean temperature?",
        "The field 'stream_options.include_usge' of a request is ignored: did you mean "
        "include_usage?",
        "The field 'messages[].rle' of a request is ignored: did you mean role?",
        "The field 'messages[].x' of a request is ignored: it has no such field",
    ]


def test_unknown_fields_can_be_refused():
    async def ask(client: httpx.AsyncClient) -> None:
        given = {"prompt": PROMPT, "temprature": 0}
        error = error_of(
            await client.post(COMPLETIONS, json=given), 400, "BadRequestError"
        )
        assert error["param"] == "temprature"
        assert error["message"].endswith("did you mean temperature?")
        given = {"messages": [*MESSAGES, {**MESSAGES[0], "rle": 1}]}
        error = error_of(await client.post(CHAT, json=given), 400, "BadRequestError")
        assert error["param"] == f"messages[{len(MESSAGES)}].rle"
        await post(client, COMPLETIONS, prompt=PROMPT, temperature=0)

    serve_http(ask, settings={"reject_unknown_fields": True})


def test_error_of_a_large_field_names_it():
    async def ask(client: httpx.AsyncClient) -> None:
        given = {"prompt": PROMPT, "stop": ["#"] * 9000}
        error = error_of(
            await client.post(COMPLETIONS, json=given), 400, "BadRequestError"
        )
        assert error["param"] == "stop"
        assert "at most 8192 entries other than integers, got 9000" in error["message"]

    serve_http(ask)


@pytest.mark.parametrize("is_stream", [False, True])
def test_failed_step_before_first_output_is_500(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "stream": is_stream}
        response = await client.post(COMPLETIONS, json=body)
        error = error_of(response, 500, "InternalServerError")
        assert "boom" in error["message"]
        assert (await post(client, COMPLETIONS, prompt=PROMPT))["choices"]

    serve_http(ask, break_at=0)


def test_failed_step_in_stream_is_event():
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "max_tokens": 80, "stream": True}
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 200
        *chunks, last = events_of(response.text)
        assert chunks
        assert last["error"]["code"] == 500

    serve_http(ask, break_at=8, delay_s=0.005)


def test_request_time_limit():
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT} | ENDLESS
        response = await client.post(COMPLETIONS, json=body)
        error = error_of(response, 504, "Gateway Timeout")
        assert "1 s" in error["message"]
        response = await client.post(COMPLETIONS, json=body | {"stream": True})
        *chunks, last = events_of(response.text)
        assert chunks
        assert last["error"]["code"] == 504

    serve_http(ask, settings={"max_request_s": 1.0}, delay_s=0.1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnection_aborts_request(path: str, is_stream: bool):
    given = {"prompt": [PROMPT] * 3} if path == COMPLETIONS else {"messages": MESSAGES}
    body = json.dumps(given | ENDLESS | {"stream": is_stream}).encode()

    async def use(engine: AsyncLLMEngine) -> None:
        engine.engine.tokenizer = TurnsTokenizer(16)
        app = make_app(engine, ServerSettings())
        has_left, sent = asyncio.Event(), []
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        asgi = {"asgi": {"version": "3.0"}, "query_string": b"", "http_version": "1.1"}
        answering = asyncio.ensure_future(app(scope | asgi, receive, send))
        while not await engine.get_num_unfinished_requests() or (
            is_stream and len(sent) < 2
        ):
            await asyncio.sleep(0.005)
        has_left.set()
        await asyncio.wait_for(answering, 1)
        assert await engine.get_num_unfinished_requests() == 0
        assert app.state.serving.admission.num_requests == 0
        assert not any(b"[DONE]" in message.get("body", b"") for message in sent)

    serve(use, delay_s=0.02)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_origins(path: str, is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
        # A slow reader gets merged chunks, and a possible stop string is held back.
        asked: dict[str, Any] = {
            "max_tokens": 30,
            "n": 2,
            "stop": letters(said(14)[11:]),
        }
        asked |= {"stream": is_stream, "return_token_origins": True}
        for own in ({}, {"include_stop_str_in_output": True}):
            found = await post(client, path, **given, **asked, **own)
            whole: dict[int, list[Any]] = {0: [], 1: []}
            for chunk in found if is_stream else [found]:
                for choice in chunk["choices"]:
                    origins_here = choice["token_origins"]
                    message = choice.get("delta") or choice.get("message")
                    text = choice["text"] if message is None else message["content"]
                    assert "".join(one["text"] for one in origins_here) == text
                    whole[choice["index"]] += origins_here
            for tokens in whole.values():
                assert [one["token_id"] for one in tokens] == said(14)
                origins = [one["origin"] for one in tokens]
                assert origins[0] == "target"
                assert set(origins[1:]) <= {"draft", "recovered", "bonus", "target"}
        plain = {"num_speculative_tokens": 0}
        found = await post(client, path, **given, **(asked | plain | {"n": 1}))
        choices = [one["choices"][0] for one in (found if is_stream else [found])]
        origins = [one["origin"] for c in choices for one in c["token_origins"]]
        assert origins == ["target"] * 14
        unasked = await post(client, path, **given, max_tokens=3)
        assert "token_origins" not in unasked["choices"][0]

    serve_http(ask, delay_s=0.002)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_has_no_origins(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        asked = {"prompt": PROMPT, "echo": True, "stream": is_stream}
        asked |= {"return_token_origins": True}
        for max_tokens in (0, 3):
            found = await post(client, COMPLETIONS, **asked, max_tokens=max_tokens)
            chunks = found if is_stream else [found]
            tokens = [one for c in chunks for one in c["choices"][0]["token_origins"]]
            assert [one["token_id"] for one in tokens] == said(max_tokens)

    serve_http(ask)


GRAMMAR = {"regex": "[%-0]{2,90}"}
PANICS = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": PROMPT},
}


def failing_after(
    monkeypatch: pytest.MonkeyPatch, count: int, reason: str = "too many items"
) -> None:
    """Make the grammar of every text fail after `count` tokens."""

    def failure_in(_: GrammarState, text: list[int]) -> Failure | None:
        is_there = len(text) > count
        return Failure(text[:count], "limit", reason) if is_there else None

    monkeypatch.setattr(GrammarState, "failure_in", failure_in)


@pytest.mark.parametrize("path", PANICS)
def test_immediate_grammar_failure_is_error(path, monkeypatch):
    failing_after(monkeypatch, 0)
    asked = PANICS[path] | {"structured_outputs": GRAMMAR}

    async def ask(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            response = await client.post(path, json=asked | {"stream": stream})
            error = error_of(response, 500, "InternalServerError")
            assert "too many items" in error["message"]
            load = await client.get("/load")
            assert load.json() == {"server_load": 0}
        metrics = (await client.get("/metrics")).text
        assert re.search(r'grammar_failures_total\{.*kind="limit".*\} 2', metrics)
        assert re.search(r'finished_reason="error".*\} 2', metrics)
        # Requests without the failed grammar continue.
        assert (await client.post(path, json=PANICS[path])).status_code == 200

    serve_http(ask)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_later_grammar_failure_ends_stream_with_error(path, monkeypatch):
    failing_after(monkeypatch, 5)
    asked = PANICS[path] | {"structured_outputs": GRAMMAR, "stream": True}

    async def ask(client: httpx.AsyncClient) -> None:
        *chunks, last = await post(client, path, **asked)
        parts = [one["choices"][0] for one in chunks]
        written = [
            one.get("text") or one.get("delta", {}).get("content") for one in parts
        ]
        assert letters(said(5)).startswith("".join(filter(None, written)))
        assert any(written)
        assert all(one["finish_reason"] is None for one in parts)
        assert last["error"]["code"] == 500
        assert "too many items" in last["error"]["message"]

    # The device is so slow that no two outputs are merged.
    serve_http(ask, delay_s=0.02)


class PanicException(BaseException):
    """The exception of a panic in Rust."""


def panic(*_: object, **__: object) -> Any:
    raise PanicException("no luck")


@pytest.mark.parametrize("path", PANICS)
def test_panic_of_grammar_library_is_400(path, monkeypatch):
    monkeypatch.setattr(llguidance, "LLMatcher", panic)
    monkeypatch.setattr(llguidance, "grammar_from", panic)
    asked = PANICS[path] | {"structured_outputs": {"grammar": "start: start"}}

    async def ask(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            response = await client.post(path, json=asked | {"stream": stream})
            error = error_of(response, 400, "BadRequestError")
            assert "no luck" in error["message"]
            assert error["param"] == "structured_outputs"
        assert (await client.get("/load")).json() == {"server_load": 0}

    serve_http(ask)


@pytest.mark.parametrize("path", PANICS)
def test_panic_fails_one_request(path, monkeypatch):
    async def ask(client: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(InputProcessor, "prepare", panic)
            for stream in (False, True):
                response = await client.post(
                    path, json=PANICS[path] | {"stream": stream}
                )
                error_of(response, 500, "InternalServerError")
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post(path, json=PANICS[path])).status_code == 200

    serve_http(ask)


@pytest.mark.parametrize("fault", ["panic", "grammar"])
@pytest.mark.parametrize("stream", [False, True])
def test_background_response_stores_its_error(fault, stream, monkeypatch):
    asked = PANICS["/v1/responses"] | {"background": True, "stream": stream}
    if fault == "grammar":
        failing_after(monkeypatch, 3)
        asked |= {"structured_outputs": GRAMMAR}

    async def ask(client: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patch:
            if fault == "panic":
                patch.setattr(InputProcessor, "prepare", panic)
            begun = await client.post("/v1/responses", json=asked | {"request_id": "x"})
            assert begun.status_code == 200
            while True:
                found = (await client.get("/v1/responses/resp_x")).json()
                if found["status"] not in ("queued", "in_progress"):
                    break
                await asyncio.sleep(0.005)
        assert found["status"] == "failed"
        assert found["error"]["code"] == "server_error"
        assert (await client.get("/load")).json() == {"server_load": 0}

    serve_http(ask)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses"])
def test_failed_request_cannot_forge_log_lines(path, caplog, monkeypatch):
    """Error, request id and the grammar's reason may contain the client's text."""
    forged = "x\nINFO forged"
    failing_after(monkeypatch, 3, forged)
    caplog.set_level("INFO")
    body = PANICS[path] | {"structured_outputs": GRAMMAR, "request_id": forged}
    body["background" if path == "/v1/responses" else "stream"] = True

    async def ask(client: httpx.AsyncClient) -> None:
        (await client.post(path, json=body)).raise_for_status()
        async with asyncio.timeout(30):
            while len(lines()) < 2:
                await asyncio.sleep(0.005)

    def lines() -> list[str]:
        wanted = "ended with an error|ended early|background response failed"
        return [one for one in caplog.messages if re.search(wanted, one)]

    serve_http(ask)
    assert all("x\\nINFO forged" in one and one.isprintable() for one in lines())


@pytest.mark.parametrize("is_stream", [False, True])
def test_refuses_too_large_responses(is_stream: bool, monkeypatch):
    monkeypatch.setattr(response_writers, "MAX_ENTRIES", 400)

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 20}
        body |= {"stream": is_stream, "max_tokens": 4}
        # The 3 prompt tokens and 4 generated tokens have 3 entries each.
        response = await client.post(COMPLETIONS, json=body)
        if is_stream:
            assert (
                response.status_code == 200
            )  # 20 * 3 * 3 entries, because generated tokens are sent one by one
            body |= {"n": 50}
            response = await client.post(COMPLETIONS, json=body)
        error = error_of(response, 400, "BadRequestError")
        assert error["param"] == "logprobs"
        assert "n times tokens" in error["message"]
        assert "at most 400" in error["message"].lower()
        body |= {"n": 19 if not is_stream else 44}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        # Without logprobs, no entries are made.
        body |= {"n": 100, "logprobs": None}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    serve_http(ask)


def test_large_response_is_serialized_in_thread(monkeypatch):
    threads: list[str] = []
    whole = CompletionWriter.whole

    def written(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(*arguments)

    monkeypatch.setattr(CompletionWriter, "whole", written)

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 3, "seed": 1}
        small = await post(client, COMPLETIONS, **body)
        monkeypatch.setattr(generation, "SHORT_ANSWER", 0)
        large = await post(client, COMPLETIONS, **body)
        assert large["choices"] == small["choices"]

    serve_http(ask)
    assert [one.rpartition("_")[0] for one in threads] == ["", "jaxspec-long-work"]


def test_prompt_logprobs_are_written_once(monkeypatch):
    counts: list[int] = []
    write = LogprobWriter.for_completion

    def counted(self: Any, token_ids: Any, *arguments: Any) -> Any:
        counts.append(len(token_ids))
        return write(self, token_ids, *arguments)

    monkeypatch.setattr(LogprobWriter, "for_completion", counted)

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 3, "max_tokens": 2}
        found = await post(client, COMPLETIONS, **body)
        for choice in found["choices"]:
            logprobs = choice["logprobs"]
            assert {name: len(one) for name, one in logprobs.items()} == dict.fromkeys(
                logprobs, 5
            )
            assert logprobs["text_offset"] == list(range(5))

    serve_http(ask)
    assert sorted(counts) == [2, 2, 2, 3]


def test_short_work_does_not_wait_for_long_work():
    """Slow grammar compilations do not delay plain requests."""

    async def ask(client: httpx.AsyncClient) -> None:
        transport: Any = client._transport
        serving = transport.app.state.serving
        is_over = threading.Event()
        long = [
            asyncio.ensure_future(
                serving.engine.run_in_thread(is_over.wait, is_long=True)
            )
            for _ in range(40)
        ]
        schema = {"regex": "[%-*]{2}"}
        shaped = [
            asyncio.ensure_future(
                client.post(path, json=given | {"structured_outputs": schema})
            )
            for path, given in (
                (COMPLETIONS, {"prompt": PROMPT}),
                (CHAT, {"messages": MESSAGES}),
            )
        ]
        await asyncio.sleep(0.05)
        for path, given in (
            (COMPLETIONS, {"prompt": PROMPT}),
            (CHAT, {"messages": MESSAGES}),
            ("/tokenize", {"prompt": PROMPT}),
        ):
            body = given | ({} if path == "/tokenize" else {"max_tokens": 2})
            response = await asyncio.wait_for(client.post(path, json=body), 20)
            assert response.status_code == 200
        assert not any(one.done() for one in shaped)
        is_over.set()
        await asyncio.gather(*long, *shaped)

    serve_http(ask)

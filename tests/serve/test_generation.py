"""The endpoints that generate: whole responses, streams, failures."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import llguidance
import pytest

from jaxspec.engine.input_processor import InputProcessor
from jaxspec.engine.structured_output import Failure, GrammarState
from jaxspec.serve import generation
from jaxspec.serve.responses import response_writers
from jaxspec.serve.responses.completions import CompletionWriter
from jaxspec.serve.responses.logprobs import LogprobWriter
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Client,
    serve_http,
    server,
)

RESPONSES = "/v1/responses"
ENDLESS = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True}
TEXTS = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": MESSAGES}}
REQUESTS = TEXTS | {RESPONSES: {"input": PROMPT}}


def assert_no_load(http: Client) -> None:
    deadline = time.monotonic() + 1
    while http.get("/load").json() != {"server_load": 0}:
        assert time.monotonic() < deadline, "a request remains"


def test_completion_has_openais_fields(http: Client):
    answer = http.ask(COMPLETIONS, prompt=PROMPT, max_tokens=5)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "model")
    counts = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert answer["usage"] == counts
    assert "metrics" not in answer
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (letters(said(5)), "length")
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "logprobs"):
        assert choice[name] is None, "was not requested"
    assert choice["stop_reason"] is None


def test_chat_has_openais_fields(http: Client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = http.ask(CHAT, messages=MESSAGES, **{name: 5})
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        said_so = {"role": "assistant", "content": letters(said(5))}
        assert choice["message"].items() >= said_so.items()
        assert choice["finish_reason"] == "length"
        assert (choice["token_ids"], choice["logprobs"]) == (None, None)
        assert answer["prompt_logprobs"] is answer["prompt_token_ids"] is None
    answer = http.ask(CHAT, messages=MESSAGES)
    assert answer["usage"]["total_tokens"] == 96, "up to the end of the context"


@pytest.mark.parametrize("path", TEXTS)
def test_stream_has_text_of_whole_response(slow_http: Client, path: str):
    asked = TEXTS[path] | {"max_tokens": 20, "stream": True}
    options: dict[str, Any] = {"include_usage": True}
    *chunks, last = slow_http.ask(path, **asked, stream_options=options)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        texts = [choice["delta"]["content"] for choice in choices]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    else:
        texts = [choice["text"] for choice in choices]
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(texts) == letters(said(20))
    assert len(texts) > 3, "one round gives four tokens at most"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)
    counts = {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    assert (last["choices"], last["usage"]) == ([], counts)
    options["continuous_usage_stats"] = True
    chunks = slow_http.ask(path, **asked, stream_options=options)
    grown = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert grown == sorted(grown)
    assert (grown[0] < 20, grown[-2:]) == (True, [20, 20])
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    # The role is sent before the first text.
    assert (path == CHAT) == (grown[0] == 0)
    assert grown[1] > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_choices_have_indices_by_prompt_and_text(slow_http: Client, is_stream: bool):
    prompts = [[2, 3, 4], [2, 3], [2, 3, 4, 5]]
    asked: dict[str, Any] = {"n": 2, "max_tokens": 6, "stream": is_stream}
    found = slow_http.ask(COMPLETIONS, prompt=prompts, **asked)
    texts = dict.fromkeys(range(6), "")
    for chunk in found if is_stream else [found]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    long = letters(list(range(2, 14)) * 2)
    lengths = [len(prompt) for prompt in prompts for _ in range(2)]
    assert list(texts.values()) == [long[length : length + 6] for length in lengths]
    if not is_stream:
        counts = {"prompt_tokens": 9, "completion_tokens": 36, "total_tokens": 45}
        assert found["usage"] == counts


def test_client_request_ids_may_repeat(slow_http: Client):
    body = {"prompt": PROMPT, "max_tokens": 4}

    def ask(_: int) -> str:
        headers = {"X-Request-Id": "mine"}
        return slow_http.post(COMPLETIONS, json=body, headers=headers).json()["id"]

    # Two concurrent requests may use the same id.
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == ["cmpl-mine"] * 2
    assert slow_http.ask(COMPLETIONS, **body, request_id="own")["id"] == "cmpl-own"


def test_unknown_model_is_404():
    with server(served_model_names=("first", "second")) as http:
        for path, given in REQUESTS.items():
            for is_stream in (False, True):
                body = given | {"model": "x", "stream": is_stream}
                error = http.refusal(path, body, 404, "NotFoundError")
                assert error["param"] == "model"
                assert error["message"] == "The model `x` does not exist."
        answer = http.ask(COMPLETIONS, model="second", prompt=PROMPT)
        assert answer["model"] == "first"


def test_unknown_fields_are_logged_once(caplog):
    messages = [{**MESSAGES[0], "rle": 1, "x": 2}, {**MESSAGES[0], "rle": 1}]
    options = {"include_usge": True}
    with server() as http:
        for _ in range(2):
            http.ask(COMPLETIONS, prompt=PROMPT, temprature=0, **{"a\nb": 1})
            http.ask(CHAT, messages=messages, stream=True, stream_options=options)
        http.ask("/tokenize", prompt=PROMPT, temprature=0)
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
    with server(reject_unknown_fields=True) as http:
        error = http.refusal(COMPLETIONS, {"prompt": PROMPT, "temprature": 0})
        assert error["param"] == "temprature"
        assert error["message"].endswith("did you mean temperature?")
        given = {"messages": [*MESSAGES, {**MESSAGES[0], "rle": 1}]}
        assert http.refusal(CHAT, given)["param"] == f"messages[{len(MESSAGES)}].rle"
        http.ask(COMPLETIONS, prompt=PROMPT, temperature=0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_failed_step_before_first_output_is_500(is_stream: bool):
    with server(break_at=0) as http:
        body = {"prompt": PROMPT, "stream": is_stream}
        error = http.refusal(COMPLETIONS, body, 500, "InternalServerError")
        assert "boom" in error["message"]
        http.ask(COMPLETIONS, prompt=PROMPT)


def test_failed_step_in_stream_is_event():
    with server(break_at=8, delay_s=0.005) as http:
        *chunks, last = http.ask(COMPLETIONS, **ENDLESS, stream=True)
        assert chunks
        assert last["error"]["code"] == 500


def test_request_over_its_time_limit_fails():
    with server(max_request_s=1.0, delay_s=0.1) as http:
        error = http.refusal(COMPLETIONS, ENDLESS, 504, "Gateway Timeout")
        assert "1 s" in error["message"]
        *chunks, last = http.ask(COMPLETIONS, **ENDLESS, stream=True)
        assert chunks
        assert last["error"]["code"] == 504


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", TEXTS)
def test_token_origins_match_the_text(slow_http: Client, path: str, is_stream: bool):
    # The last tokens of a text may begin a stop string, and are held back.
    asked: dict[str, Any] = {"max_tokens": 30, "n": 2, "stop": letters(said(14)[11:])}
    asked |= TEXTS[path] | {"stream": is_stream, "return_token_origins": True}
    for own in ({}, {"include_stop_str_in_output": True}):
        found = slow_http.ask(path, **asked, **own)
        whole: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in found if is_stream else [found]:
            for choice in chunk["choices"]:
                message = choice.get("delta") or choice.get("message")
                text = choice["text"] if message is None else message["content"]
                tokens = choice["token_origins"]
                assert "".join(one["text"] for one in tokens) == text
                whole[choice["index"]] += tokens
        for tokens in whole.values():
            assert [one["token_id"] for one in tokens] == said(14)
            origins = [one["origin"] for one in tokens]
            assert origins[0] == "target"
            assert set(origins[1:]) <= {"draft", "recovered", "bonus", "target"}
    found = slow_http.ask(path, **asked | {"n": 1, "num_speculative_tokens": 0})
    choices = [one["choices"][0] for one in (found if is_stream else [found])]
    origins = [one["origin"] for c in choices for one in c["token_origins"]]
    assert origins == ["target"] * 14
    unasked = slow_http.ask(path, **TEXTS[path], max_tokens=3)
    assert "token_origins" not in unasked["choices"][0]


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_has_no_origins(http: Client, is_stream: bool):
    asked = {"prompt": PROMPT, "echo": True, "return_token_origins": True}
    for max_tokens in (0, 3):
        asked |= {"max_tokens": max_tokens, "stream": is_stream}
        found = http.ask(COMPLETIONS, **asked)
        chunks = found if is_stream else [found]
        choices = [chunk["choices"][0] for chunk in chunks]
        tokens = [one for choice in choices for one in choice["token_origins"]]
        assert [one["token_id"] for one in tokens] == said(max_tokens)
        text = "".join(choice["text"] for choice in choices)
        assert text == PROMPT + letters(said(max_tokens))
        assert choices[-1]["finish_reason"] == "length"
        assert max_tokens or len(chunks) == 1
        assert is_stream or found["usage"]["completion_tokens"] == max_tokens


GRAMMAR = {"structured_outputs": {"regex": "[%-0]{2,90}"}}


def failing_after(
    monkeypatch: pytest.MonkeyPatch, count: int, reason: str = "too many items"
) -> None:
    """Make the grammar of every text fail after `count` tokens."""

    def failure_in(_: GrammarState, text: list[int]) -> Failure | None:
        is_there = len(text) > count
        return Failure(text[:count], "limit", reason) if is_there else None

    monkeypatch.setattr(GrammarState, "failure_in", failure_in)


def test_immediate_grammar_failure_is_error(monkeypatch):
    failing_after(monkeypatch, 0)
    with server() as http:
        for number, (path, given) in enumerate(REQUESTS.items(), 1):
            for stream in (False, True):
                body = given | GRAMMAR | {"stream": stream}
                error = http.refusal(path, body, 500, "InternalServerError")
                assert "too many items" in error["message"]
                assert_no_load(http)
            metrics, count = http.get("/metrics").text, 2 * number
            name = r'grammar_failures_total\{.*kind="limit".*\}'
            assert re.search(f"{name} {count}", metrics)
            assert re.search(rf'finished_reason="error".*\}} {count}', metrics)
            http.ask(path, **given)  # requests without the failed grammar continue


@pytest.mark.parametrize("path", TEXTS)
def test_later_grammar_failure_ends_stream_with_error(slow_http, path, monkeypatch):
    failing_after(monkeypatch, 5)
    *chunks, last = slow_http.ask(path, **TEXTS[path], **GRAMMAR, stream=True)
    parts = [one["choices"][0] for one in chunks]
    written = [one.get("text") or one.get("delta", {}).get("content") for one in parts]
    assert letters(said(5)).startswith("".join(filter(None, written)))
    assert any(written)
    assert all(one["finish_reason"] is None for one in parts)
    assert last["error"]["code"] == 500
    assert "too many items" in last["error"]["message"]


class PanicException(BaseException):
    """The exception of a panic in Rust."""


def panic(*_: object, **__: object) -> Any:
    raise PanicException("no luck")


@pytest.mark.parametrize("path", REQUESTS)
def test_panic_fails_one_request(http: Client, path, monkeypatch):
    grammar = REQUESTS[path] | {"structured_outputs": {"grammar": "start: start"}}
    for stream in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(llguidance, "LLMatcher", panic)
            patch.setattr(llguidance, "grammar_from", panic)
            error = http.refusal(path, grammar | {"stream": stream})
        assert "no luck" in error["message"]
        assert error["param"] == "structured_outputs"
        with monkeypatch.context() as patch:
            patch.setattr(InputProcessor, "prepare", panic)
            body = REQUESTS[path] | {"stream": stream}
            http.refusal(path, body, 500, "InternalServerError")
    assert_no_load(http)
    http.ask(path, **REQUESTS[path])


@pytest.mark.parametrize("fault", ["panic", "grammar", "launch"])
@pytest.mark.parametrize("stream", [False, True])
def test_background_response_stores_its_error(fault, stream, monkeypatch):
    asked = REQUESTS[RESPONSES] | {"background": True, "stream": stream}
    asked |= {"request_id": "x"}
    if fault == "grammar":
        failing_after(monkeypatch, 3)
        asked |= GRAMMAR
    if fault == "panic":
        monkeypatch.setattr(InputProcessor, "prepare", panic)
    break_at = 8 if fault == "launch" else None
    with server(break_at=break_at, delay_s=0.005) as http:
        answer = http.post(RESPONSES, json=asked).raise_for_status()
        found: dict[str, Any] = {"status": "queued"}
        while found["status"] in ("queued", "in_progress"):
            found = http.get(f"{RESPONSES}/resp_x").json()
            time.sleep(0.005)
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert fault != "launch" or "boom" in found["error"]["message"]
        assert_no_load(http)
    if stream:
        *_, last, _ = answer.text.split("\n\n")
        assert last.startswith("event: response.failed\n")
        assert json.loads(last.partition("data: ")[2])["response"] == found


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
def test_failed_request_cannot_forge_log_lines(http, path, caplog, monkeypatch):
    """Error, request id and the grammar's reason may contain the client's text."""
    forged = "x\nINFO forged"
    failing_after(monkeypatch, 3, forged)
    caplog.set_level("INFO")

    def lines() -> list[str]:
        wanted = "ended with an error|ended early|background response failed"
        return [one for one in caplog.messages if re.search(wanted, one)]

    body: dict[str, Any] = REQUESTS[path] | GRAMMAR | {"request_id": forged}
    body["background" if path == RESPONSES else "stream"] = True
    http.post(path, json=body).raise_for_status()
    deadline = time.monotonic() + 30
    while len(lines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert all("x\\nINFO forged" in one and one.isprintable() for one in lines())


@pytest.mark.parametrize("is_stream", [False, True])
def test_refuses_too_large_responses(http: Client, is_stream: bool, monkeypatch):
    monkeypatch.setattr(response_writers, "MAX_ENTRIES", 400)
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 2}
    body |= {"stream": is_stream, "max_tokens": 4}
    # The 3 prompt tokens and 4 generated tokens have 3 entries each. In a stream,
    # generated tokens are sent one by one, so only those of the prompt count.
    allowed, refused = (44, 50) if is_stream else (19, 20)
    error = http.refusal(COMPLETIONS, body | {"n": refused})
    assert error["param"] == "logprobs"
    assert "n times tokens" in error["message"]
    assert "at most 400" in error["message"].lower()
    http.ask(COMPLETIONS, **body, n=allowed)
    # Without logprobs, no entries are made.
    http.ask(COMPLETIONS, **body | {"n": 100, "logprobs": None})


def test_large_response_is_serialized_in_thread(http: Client, monkeypatch):
    threads: list[str] = []
    whole = CompletionWriter.whole

    def written(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return whole(*arguments)

    monkeypatch.setattr(CompletionWriter, "whole", written)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 3, "seed": 1}
    small = http.ask(COMPLETIONS, **body)
    monkeypatch.setattr(generation, "SHORT_ANSWER", 0)
    assert http.ask(COMPLETIONS, **body)["choices"] == small["choices"]
    assert threads == ["", "jaxspec-long-work"]


def test_prompt_logprobs_are_written_once(http: Client, monkeypatch):
    counts: list[int] = []
    write = LogprobWriter.for_completion

    def counted(self: Any, token_ids: Any, *arguments: Any) -> Any:
        counts.append(len(token_ids))
        return write(self, token_ids, *arguments)

    monkeypatch.setattr(LogprobWriter, "for_completion", counted)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 3, "max_tokens": 2}
    for choice in http.ask(COMPLETIONS, **body)["choices"]:
        assert {len(one) for one in choice["logprobs"].values()} == {5}
        assert choice["logprobs"]["text_offset"] == list(range(5))
    assert sorted(counts) == [2, 2, 2, 3]


def test_short_work_does_not_wait_for_long_work():
    """Slow grammar compilations do not delay plain requests."""
    plain = TEXTS | {"/tokenize": {"prompt": PROMPT}}

    async def ask(client: httpx.AsyncClient) -> None:
        transport: Any = client._transport
        work = transport.app.state.serving.engine.run_in_thread
        is_over = threading.Event()
        begin = asyncio.ensure_future
        long = [begin(work(is_over.wait, is_long=True)) for _ in range(40)]
        schema = {"structured_outputs": {"regex": "[%-*]{2}"}}
        shaped = [
            begin(client.post(path, json=body | schema)) for path, body in TEXTS.items()
        ]
        await asyncio.sleep(0.05)
        for path, body in plain.items():
            response = await asyncio.wait_for(client.post(path, json=body), 20)
            assert response.status_code == 200
        assert not any(one.done() for one in shaped)
        is_over.set()
        await asyncio.gather(*long, *shaped)

    serve_http(ask)


def test_batch_has_a_choice_for_each_conversation(http: Client):
    chats = [MESSAGES, [{"role": "user", "content": letters([5, 6])}]]
    alone = [http.ask(CHAT, messages=chat, max_tokens=5) for chat in chats]
    answer = http.ask(f"{CHAT}/batch", messages=chats, max_tokens=5)
    assert answer["object"] == "chat.completion"
    for index, (choice, one) in enumerate(zip(answer["choices"], alone, strict=True)):
        assert choice == one["choices"][0] | {"index": index}
    for name, count in answer["usage"].items():
        if name != "prompt_tokens_details":
            assert count == sum(one["usage"][name] for one in alone), name
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for name, value in (
        *(("stream", True), ("n", 2), ("tools", [tool])),
        *(("use_beam_search", True), ("prompt_logprobs", 1)),
    ):
        refused = http.refusal(f"{CHAT}/batch", {"messages": chats, name: value})
        assert refused["param"] == name
    for messages in ([], [[]], MESSAGES):
        refused = http.refusal(f"{CHAT}/batch", {"messages": messages})
        assert refused["param"].startswith("messages")


def test_invocations_answer_chats_and_completions(http: Client):
    for path, body in TEXTS.items():
        expected = http.ask(path, **body, max_tokens=5)
        found = http.ask("/invocations", **body, max_tokens=5)
        assert found["choices"] == expected["choices"]
        assert found["object"] == expected["object"]
        events = http.ask("/invocations", **body, max_tokens=5, stream=True)
        assert len(events) > 1
    for body in ({"messages": 7}, {"prompt": PROMPT, "top_p": "x"}):
        assert http.refusal("/invocations", body)["param"] == list(body)[-1]
    response = http.post("/invocations", content=b"x", headers={"content-type": "a/b"})
    assert response.status_code == 415

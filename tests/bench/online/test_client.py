"""Streams of events as servers write them, and the times read from them."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from jaxspec.bench.data import Prompt
from jaxspec.bench.online import client as module
from jaxspec.bench.online.client import Answer, Client
from jaxspec.bench.online.connection import Address
from tests.bench.online.test_connection import CHUNKED, saying

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}


def client_of(endpoint: str = "/v1/completions", **fields: Any) -> Client:
    address = Address(host="127.0.0.1", port=1)
    return Client(address=address, endpoint=endpoint, fields=fields, headers={})


def events(*told: Any) -> bytes:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in told]
    return "".join(f"data: {line}\r\n\r\n" for line in lines).encode()


def text(said: str) -> dict[str, Any]:
    return {"choices": [{"text": said}]}


def delta(said: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": said}}]}


def answered(*pieces: bytes, status: str = "200 OK") -> Answer:
    """What a client makes of these pieces of a body."""

    async def ask() -> Answer:
        head = CHUNKED.replace(b"200 OK", status.encode())
        chunks = [f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in pieces]
        async with saying([head, *chunks, b"0\r\n\r\n"]) as address:
            made = Client(
                address=address, endpoint="/v1/completions", fields={}, headers={}
            )
            return await made.ask(Prompt(text="hi"))

    return asyncio.run(ask())


def test_requests_are_streams_that_count_their_tokens():
    body = client_of(model="m", max_tokens=4).body(Prompt(text="hi"))
    assert body == {
        "prompt": "hi",
        "model": "m",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = client_of("/v1/chat/completions").body(Prompt(text="hi"))
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert "prompt" not in chat


@pytest.mark.parametrize("form", [text, delta])
def test_an_answer_has_its_text_and_times(form, monkeypatch):
    ticks = itertools.count(100.0)
    monkeypatch.setattr(module, "now", lambda: next(ticks))
    # A role before the text is no token; nor is a comment.
    told = [form(""), form("ab"), form("cd"), form("ef"), USAGE, "[DONE]"]
    found = answered(events(*told[:2]) + b": ping\r\n\r\n", events(*told[2:]))
    assert (found.error, found.text) == ("", "abcdef")
    assert (found.num_prompt_tokens, found.num_output_tokens) == (3, 6)
    # Asked at 100; the events come at 101 to 106, those with text at 102, 103, 104.
    assert (found.ttft_s, found.inter_token_s, found.latency_s) == (2, [1, 1], 4)
    assert found.tpot_s == (4 - 2) / 5
    assert found.times() == [102, 103, 104]


def test_events_may_be_cut_anywhere():
    whole = events(text("aä"), text("€b"), USAGE, "[DONE]")
    for cut in range(1, len(whole)):
        if cut % 7 == 0:
            assert answered(whole[:cut], whole[cut:]).text == "aä€b"


def test_a_separator_of_lines_within_a_text_is_text():
    said = json.dumps(text("a\u2028b\u0085c"), ensure_ascii=False)
    assert answered(events(said, USAGE, "[DONE]")).text == "a\u2028b\u0085c"


def test_a_server_that_counts_nothing_has_its_pieces_counted():
    found = answered(events(text("a"), text("b"), "[DONE]"))
    assert (found.error, found.num_output_tokens) == ("", 2)
    one = answered(events(text("a"), "[DONE]"))
    assert (one.num_output_tokens, one.tpot_s) == (1, None)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([events(text("a"))], "broke off"),
        ([events(text("a"), {"error": {"message": "boom"}})], "boom"),
        ([events(USAGE, "[DONE]")], "no text"),
        ([events("{")], "JSONDecodeError"),
        ([events("[1]")], "not an answer"),
    ],
)
def test_failures_are_in_the_answer(pieces, said):
    assert said in answered(*pieces).error


def test_a_refusal_has_its_status():
    found = answered(b'{"error": "no such model"}', status="404 Not Found")
    assert found.status == 404
    assert found.error == 'status 404: {"error": "no such model"}'


def test_no_server_is_in_the_answer():
    found = asyncio.run(client_of().ask(Prompt(text="x")))
    assert "127.0.0.1:1/v1/completions" in found.error

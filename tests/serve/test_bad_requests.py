"""Hundreds of bad requests are refused quickly, while other clients stream.

Every body has one mistake. A fake device generates the texts: the time of a refusal is
then the server's own, and the texts of the streams are known in advance.
"""

import asyncio
import dataclasses
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from jaxspec.serve.middleware import MAX_MARKS
from jaxspec.serve.requests.protocol import MAX_ENTRIES, MAX_FIELDS
from jaxspec.serve.settings import DEFAULT_MAX_BODY_BYTES
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.fake_engines import letters, said
from tests.support.loops import MODEL
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Site,
    events_of,
    site_of,
)

# The limit is in CPU seconds, because wall time depends on other processes.
LIMIT_S = 0.1
TRIES = 4
LONG = 2**12  # bytes of a long body
RESPONSES = "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
NUM_STREAMS = 2

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
NUMBERS += ("presence_penalty", "frequency_penalty")
NO_NUMBERS = ('"x"', "[1]", "{}", "NaN", "1e999", "-Infinity", "-9", "1" + "0" * 400)
INTEGERS = ("max_tokens", "n", "min_tokens", "logprobs", "prompt_logprobs")
INTEGERS += ("truncate_prompt_tokens", "num_speculative_tokens")
NO_INTEGERS = ('"x"', "1.5", "[1]", "NaN", "-9", "1" + "0" * 40, "1" + "0" * 400)

WRONG = {
    "n": ("0", "1000000000"),
    "num_speculative_tokens": ("9",),
    "seed": ('"x"', "1.5", "[1]", "NaN", "1" + "0" * 40, "-1" + "0" * 40),
    "top_k": ('"x"', "1.5", "[1]", "NaN", "-9"),
    "priority": ('"x"', "1.5", "[1]", "NaN", "1" + "0" * 40),
    "prompt": (
        *("7", "{}", "[]", '""', "true", "[[]]", "[1.5]", '["#", 2]', "[null]"),
        *('[["a"]]', "[-1]"),
    ),
    "stop": ("7", "{}", '""', '[""]', "[7]", '["\\ud800"]', '["#"%s]' % (', "#"' * 64)),
    "stop_token_ids": ('"x"', "[16]", "[-1]", "[1.5]", '["x"]', "7", "[[2]]"),
    "allowed_token_ids": ('"x"', "[16]", "[-1]", "[]", "[NaN]", "{}"),
    "bad_words": ('"x"', '[""]', "[7]", '["%s"]' % ("#" * 99), '["%s"]' % ("#" * 9999)),
    "logit_bias": (
        *('"x"', '{"16": 1}', '{"x": 1}', '{"2": NaN}', '{"2": "x"}', "[1]"),
        '{"\\ud800": 1}',
    ),
    "stream": ('"maybe"', "[]", "7"),
    "stream_options": ("{}", "7", '{"include_usage": 7}'),
    "response_format": ("7", '{"type": "xml"}', '{"type": "json_schema"}', "{}"),
    "structured_outputs": ("{}", "7", '{"x": 1}', '{"regex": "("}', '{"choice": []}'),
    "guided_regex": ('"("', "7", '"%s"' % ("#" * 100_000)),
    "guided_json": ('"{"', '{"type": "nothing"}', "7"),
    "guided_grammar": ('"start: x"', "7"),
    "model": ("7", '"other"', '""', '"%s"' % ("m" * 100_000)),
    "request_id": ("7", '"%s"' % ("x" * 257)),
    "cache_salt": ("7", '""'),
    "suffix": ('"#"',),
    "vllm_xargs": ("7", '{"x": 1}'),
    "kv_transfer_params": ("7", '{"x": "%s"}' % ("#" * 100_000)),
    "truncation_side": ('"up"', "7"),
    "use_beam_search": ("7", '"maybe"'),
    "stream_interval": ("4",),
    "logprob_token_ids": ("[2]", "[]", "[16]", "[-1]", '["x"]', "7"),
}
WRONG_CHATS: tuple[dict[str, Any], ...] = (
    *({}, {"messages": []}, {"messages": "#"}, {"messages": [7]}, {"messages": [[]]}),
    {"messages": [{}] * (MAX_ENTRIES + 1)},
    {"messages": [{"role": "user", "content": "#" * 4_000_000}]},
    *(
        {"messages": MESSAGES} | wrong
        for wrong in (
            *({"tools": []}, {"tools": [{}]}, {"documents": [{}]}, {"model": "other"}),
            *({"top_logprobs": 1}, {"top_logprobs": -2}, {"chat_template": "{{ 1 }}"}),
            {"logprobs": True, "top_logprobs": 99},
            *({"max_completion_tokens": 0}, {"max_completion_tokens": 94}),
            {"add_generation_prompt": True, "continue_final_message": True},
        )
    ),
)
WRONG_RESPONSES: tuple[dict[str, Any], ...] = (
    *({}, {"input": []}, {"input": ""}, {"input": 7}, {"input": [{"role": "user"}]}),
    {"input": [{"type": "function_call"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    *(
        {"input": PROMPT} | wrong
        for wrong in (
            *({"max_output_tokens": 94}, {"max_output_tokens": 0}),
            {"previous_response_id": "resp_unknown"},
            {"background": True, "store": False},
            *({"conversation": "x"}, {"truncation": "some"}),
            {"text": {"format": {"type": "xml"}}},
        )
    ),
)
NO_JSON = (
    *(b"", b" ", b"{", b"[]", b"null", b"7", b'"x"', b"NaN", b"{'prompt': 1}"),
    *(b'{"prompt": "#"', b'{"prompt": "#"}}', b'{"prompt": "#",}', b'\xef\xbb\xbf{"'),
    *(b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\xc3"}', b'{"\x80": 1}'),
    *(b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xf4\x90\x80\x80"}'),
    *('{"prompt": "\u00e9"}'.encode("latin-1"), '{"prompt": "#"'.encode("utf-16")),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "\\udfff#"}', b'{"\\ud800": "#"}'),
    *(b'{"prompt": "\\x"}', b'{"prompt": "\x00"}', b"\x00" * 1000, b"[" * 100_000),
    *(
        b'{"prompt": "#", "x": ' + b"[" * depth + b"]" * depth + b"}"
        for depth in (200, 100_000)
    ),
)
MB = 2**20
NEAR = DEFAULT_MAX_BODY_BYTES - 1000


def of_prompt(value: bytes) -> bytes:
    return b'{"prompt": ' + value + b"}"


def many(entry: bytes, num_bytes: int = NEAR) -> bytes:
    """Return a JSON list that repeats one entry up to a size in bytes."""
    return b"[" + b",".join([entry] * (num_bytes // (len(entry) + 1))) + b"]"


def large_bodies() -> tuple[bytes, ...]:
    return (
        # Bodies longer than the limit.
        *(b" " * (10 * MB), of_prompt(b'"' + b"#" * (10 * MB) + b'"')),
        *(of_prompt(many(b"2", 10 * MB)), b"{" * (10 * MB), b"\xff" * (10 * MB)),
        # Bodies just below the limit.
        *(b" " * NEAR, b"1" * NEAR, b"[" * NEAR, b"\xff" * NEAR),
        of_prompt(b'"' + b"#" * NEAR + b'"'),
        of_prompt(b'"' + b"\\u0023" * (NEAR // 6) + b'"'),
        *(of_prompt(many(one)) for one in (b"2", b"[]", b"{}", b"[2]", b'"#"', b"NaN")),
        # Bodies with the maximum number of values.
        *(of_prompt(many(one, 2 * MAX_MARKS - 99)) for one in (b"2", b"1.5", b"[]")),
        b'{"prompt": "#", "x": ' + many(b"[2]", MAX_MARKS) + b"}",
        b'{"prompt": "#", "logit_bias": {'
        + b",".join(b'"%d":"x"' % number for number in range(MAX_FIELDS))
        + b"}}",
    )


REQUIRED = ("messages", "input", "tokens", "prompt")
HEADERS = {"content-type": "application/json"}


class Bad(NamedTuple):
    """A bad request, and what its error must contain."""

    path: str
    body: bytes | None
    method: str = "POST"
    is_chunked: bool = False
    field: str | None = None  # the field that the error must name, if one is at fault

    def __str__(self) -> str:
        start = (self.body or b"")[:80]
        return f"{self.method} {self.path} {start!r} {len(self.body or b'')} bytes"


def bad_requests() -> Iterator[Bad]:
    """Yield bodies with wrong types, NaN, huge or empty values, unknown ids."""
    wrong = [(name, value) for name in NUMBERS for value in NO_NUMBERS]
    wrong += [(name, value) for name in INTEGERS for value in NO_INTEGERS]
    wrong += [(name, value) for name, values in WRONG.items() for value in values]
    for name, value in wrong:
        given = "" if name == "prompt" else '"prompt": "#", '
        body = f'{{{given}"{name}": {value}}}'.encode()
        yield Bad(COMPLETIONS, body, field=name)
    for path, wrong in ((CHAT, WRONG_CHATS), (RESPONSES, WRONG_RESPONSES)):
        for body in wrong:
            yield Bad(path, json.dumps(body).encode())
    for body in (*NO_JSON, *large_bodies()):
        yield Bad(COMPLETIONS, body)
    yield Bad(COMPLETIONS, b" " * (10 * MB), is_chunked=True)
    for path in (CHAT, RESPONSES, TOKENIZE, DETOKENIZE):
        for body in (b"", b"{", b"\xff", b"{}", of_prompt(many(b"{}")), b" " * NEAR):
            yield Bad(path, body)
    for prompt, count in ([2] * 96, 1), ([2] * 95, 2), (PROMPT, 94), ("#" * 96, 1):
        yield Bad(
            COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": count}).encode()
        )
    for prompt in ([16], [-1], [2, 10**30], [[2], [16]]):
        yield Bad(COMPLETIONS, json.dumps({"prompt": prompt}).encode())
    for tokens in ([16], [-1], ["x"], [1.5], "x"):
        yield Bad(DETOKENIZE, json.dumps({"tokens": tokens}).encode())
    yield Bad("/v1/responses/resp_unknown", None, "GET")
    yield Bad("/v1/responses/resp_unknown/cancel", b"")
    for path in ("/v1/models/other", "/v1/models/%ff", "/nowhere", COMPLETIONS):
        yield Bad(path, None, "GET")
    for method in ("PUT", "DELETE", "PATCH"):
        yield Bad(COMPLETIONS, b"{}", method)


def named(param: str) -> str:
    """Return the first field of a path like "logit_bias[2]" or "messages.0.role"."""
    return re.split(r"\W", param, maxsplit=1)[0]


async def pieces(body: bytes) -> Any:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


class Requester:
    """A client that expects only refusals.

    Attributes:
        waited_s: Wall time of each request.
    """

    def __init__(self, client: httpx.AsyncClient, site: Site):
        assert site.thread.ident is not None
        self._client = client
        self._server = time.pthread_getcpuclockid(site.thread.ident)
        self.waited_s = list[float]()

    async def ask(self, bad: Bad) -> None:
        """Check that a request is refused in time; repeat it if it was slow.

        A busy machine is slow at times, a slow server every time.
        """
        took = [await self._refused(bad)]
        while min(took) > LIMIT_S and len(took) < TRIES:
            took.append(await self._refused(bad))
        assert min(took) <= LIMIT_S, took

    async def _refused(self, bad: Bad) -> float:
        """Check the format of the refusal; return its CPU seconds.

        Those of all threads of this process, or for a long body of the server's thread
        only, as sending megabytes takes time.
        """
        content: Any = pieces(bad.body or b"") if bad.is_chunked else bad.body
        is_long = len(bad.body or b"") > LONG
        clock = self._server if is_long else time.CLOCK_PROCESS_CPUTIME_ID
        start, worked = time.monotonic(), time.clock_gettime(clock)
        response = await self._client.request(
            bad.method, bad.path, content=content, headers=HEADERS
        )
        self.waited_s.append(time.monotonic() - start)
        worked_s = time.clock_gettime(clock) - worked
        assert response.status_code in (400, 404, 405, 413), response.text[:200]
        assert len(response.text) < 5000, "the error quotes the whole body"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"] == response.status_code
        if response.status_code == 400:
            assert error["type"] == "BadRequestError"
            if error["param"] is not None:
                fields = {*json.loads(bad.body or b"{}"), *REQUIRED}
                assert named(error["param"]) in fields, error
        if bad.field is not None and "surrogate" not in error["message"]:
            assert named(error["param"] or "") == bad.field, error
        return worked_s


async def keep_streaming(client: httpx.AsyncClient, counts: list[int]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "stream": True}
    while True:
        response = await client.post(COMPLETIONS, json=body)
        chunks = events_of(response.text)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == letters(said(90))
        counts.append(len(chunks))


def test_refuses_bad_requests_quickly_without_disturbing_streams():
    bad = list(bad_requests())
    assert len(bad) >= 200
    faults: list[str] = []

    async def ask(site: Site) -> Requester:
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
            asking, counts = Requester(client, site), list[int]()
            streams = [
                asyncio.ensure_future(keep_streaming(client, counts))
                for _ in range(NUM_STREAMS)
            ]
            for one in bad:
                try:
                    await asking.ask(one)
                except (AssertionError, httpx.HTTPError) as fault:
                    faults.append(f"{one}: {fault!r}")
            num_before = len(counts)
            while len(counts) < num_before + NUM_STREAMS:
                await asyncio.sleep(0.01)
                assert not any(stream.done() for stream in streams), streams
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return asking

    with site_of() as site:
        site.delay_s = 0.005
        asked = asyncio.run(ask(site))
    assert not faults, "\n".join(faults)
    # Most refusals are also fast by wall time, however busy the machine is.
    assert statistics.median(asked.waited_s) <= 5 * LIMIT_S


# Deterministic: every run generates the same requests.
GIVEN: dict[str, Any] = dict(
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list[Any](HealthCheck),
)
# A generated body usually has some field out of range, so each field is also sent
# alone.
ALONE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once"},
    CHAT: {"messages": [{"role": "user", "content": "Once"}]},
    "/v1/responses": {"input": "Once"},
}


class Sender:
    """Sends generated requests, and counts the statuses of their responses.

    Attributes:
        statuses: Counts of statuses by endpoint.
        faults: Requests that were answered with a 5xx status.
    """

    def __init__(self, client: httpx.Client):
        self._client = client
        self.statuses: dict[str, Counter[int]] = {}
        self.faults: list[str] = []

    def ask(self, case: Any) -> None:
        self._record(case, case.call(timeout=30).status_code, case.as_curl_command())
        path = case.operation.path
        if path in ALONE and isinstance(case.body, dict):
            for name, value in case.body.items():
                body = json.dumps(ALONE[path] | {"max_tokens": 4, name: value})
                headers = {"content-type": "application/json"}
                response = self._client.post(path, content=body, headers=headers)
                self._record(case, response.status_code, f"{path} {body}")

    def _record(self, case: Any, status: int, request: str) -> None:
        self.statuses.setdefault(case.operation.label, Counter())[status] += 1
        if status >= 500:
            self.faults.append(f"{status}: {request}")


# Hypothesis warns when the global state of `random` has changed while a strategy drew.
# The server's threads run in this process and may have changed it.
@pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies"
    ":hypothesis.errors.HypothesisDeprecationWarning"
)
# Number of generated requests per endpoint and mode.
@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_no_request_gets_5xx(count: int):
    tokenizer = Tokenizer.from_folder(bundled_target())
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size)
    changes = {"model_config": model, "draft_model_config": model}
    with (
        site_of(changes, tokenizer=tokenizer) as site,
        httpx.Client(base_url=site.url, timeout=30) as client,
    ):
        asking = Sender(client)
        schema = schemathesis.openapi.from_url(f"{site.url}openapi.json")
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # pyright: ignore[reportAttributeAccessIssue]
            # A request without a body cannot be invalid.
            has_body = "requestBody" in operation.definition.raw
            modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
            for mode in modes if has_body else modes[:1]:
                cases = operation.as_strategy(generation_mode=mode)
                settings(max_examples=count, **GIVEN)(given(cases)(asking.ask))()
    assert not asking.faults, "\n".join(asking.faults)
    for path in ALONE:
        found = asking.statuses[f"POST {path}"]
        assert min(found[200], found[400]) > 0, asking.statuses

"""HTTP client of a server with OpenAI's API: streamed answers and their times.

Each request has its own connection, no proxy, no compression and no time limit.
"""

import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter as now
from typing import Any
from urllib.parse import urlsplit

import httpx

from jaxspec.bench.data import Prompt
from jaxspec.errors import ConfigError, wrong_argument

CHAT_ENDING = "/chat/completions"
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}


class HttpError(Exception):
    """Raised for no response, a response that is not HTTP, or an error status.

    Attributes:
        status: HTTP status of an error response.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def server_url(url: str) -> str:
    """Check and normalize the URL of a server.

    Raises:
        ConfigError: `url` is not an HTTP URL.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = None, None
    if parts is None or parts.scheme not in ("http", "https") or not host:
        allowed = "a URL like http://127.0.0.1:8000"
        raise wrong_argument(ConfigError, "--base-url", allowed, url)
    return url.rstrip("/")


@contextlib.asynccontextmanager
async def request(
    url: str,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[httpx.Response]:
    """Send a request (POST with a body, else GET); yield the response as it begins.

    Raises:
        HttpError: The connection failed, or the response is not HTTP.
    """
    method = "GET" if body is None else "POST"
    headers = {**_HEADERS, **(headers or {})}
    try:
        async with (
            httpx.AsyncClient(verify=_trusted(), trust_env=False, timeout=None) as one,
            one.stream(method, url, json=body, headers=headers) as answer,
        ):
            yield answer
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise HttpError(f"{url}: {error!r}") from error


async def fetch(url: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the text at a URL.

    Raises:
        HttpError: No response, or a status other than 200.
    """
    async with request(url, headers=headers) as answer:
        text = (await answer.aread()).decode(errors="replace")
    status = answer.status_code
    if status != 200:
        raise HttpError(f"{url}: status {status}: {text[:200].strip()}", status)
    return text


class Events:
    """Incremental parser of server-sent events.

    Lines end at line feeds only: a text may contain other line separators.
    """

    def __init__(self):
        self._rest = b""

    def read(self, piece: bytes) -> Iterator[str]:
        """Add bytes; yield the data of every complete line."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, data = line.decode(errors="replace").strip().partition(":")
            if name == "data":
                yield data.strip()


def data_of(response: httpx.Response) -> Iterator[str]:
    """Yield the data of a stream's events as they arrive."""
    events = Events()
    for piece in response.iter_bytes():
        yield from events.read(piece)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return a TLS context; cached, as reading the certificates takes a while."""
    return httpx.create_ssl_context()


@dataclass(kw_only=True)
class Answer:
    """The answer to one request, and its times.

    Attributes:
        ttft_s: Seconds from the request to the first chunk of text.
        inter_token_s: Seconds between chunks, each of which may have several tokens.
        latency_s: Seconds from the request to the last chunk.
        num_output_tokens: The server's count, or else the number of chunks.
        error: Error message; "" for success.
        status: HTTP status of an error response.
    """

    start_s: float = 0.0
    ttft_s: float = 0.0
    inter_token_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""
    status: int | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for one token."""
        gaps = self.num_output_tokens - 1
        return (self.latency_s - self.ttft_s) / gaps if gaps > 0 else None

    def times(self) -> list[float]:
        """Return the arrival time of each chunk."""
        found = [self.start_s + self.ttft_s]
        for gap in self.inter_token_s:
            found.append(found[-1] + gap)
        return found


@dataclass(frozen=True, kw_only=True)
class Client:
    """Sends prompts to one endpoint of one server.

    Attributes:
        url: URL of the server, without the endpoint.
        fields: Common fields of all requests: model and sampling.
    """

    url: str
    endpoint: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the request body for a prompt; it requests usage, to count tokens."""
        content: dict[str, Any] = {"prompt": prompt.text}
        if self.endpoint.endswith(CHAT_ENDING):
            content = {"messages": [{"role": "user", "content": prompt.text}]}
        own = {"stream": True, "stream_options": {"include_usage": True}}
        return {**content, **own, **self.fields}

    async def ask(self, prompt: Prompt) -> Answer:
        """Send one request and read the whole answer; failures are in its `error`."""
        answer = Answer(start_s=now())
        url = f"{self.url}{self.endpoint}"
        try:
            async with request(
                url, body=self.body(prompt), headers=self.headers
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.status = response.status_code
                    answer.error = f"status {answer.status}: {text}"
                else:
                    await _read(response, answer)
        except HttpError as error:
            answer.error = str(error)
        return answer


async def _data_of_raw(response: httpx.Response) -> AsyncIterator[str]:
    events = Events()
    async for piece in response.aiter_raw():
        for data in events.read(piece):
            yield data


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Read a stream of events into `answer`."""
    num_pieces, is_done, last_s = 0, False, answer.start_s
    async for data in _data_of_raw(response):
        now_s = now()
        if data == "[DONE]":
            is_done = True
            break
        event = json.loads(data)
        if not isinstance(event, dict):
            raise HttpError(f"not a response of OpenAI's API: {data[:200]!r}")
        if "error" in event:
            answer.error = json.dumps(event["error"])
            return
        usage = event.get("usage") or {}
        answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
        answer.num_output_tokens = usage.get(
            "completion_tokens", answer.num_output_tokens
        )
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if not text:
                continue
            answer.text += text
            num_pieces += 1
            if num_pieces == 1:
                answer.ttft_s = now_s - answer.start_s
            else:
                answer.inter_token_s.append(now_s - last_s)
            last_s = now_s
    answer.latency_s = last_s - answer.start_s
    answer.num_output_tokens = answer.num_output_tokens or num_pieces
    if not is_done:
        answer.error = "the stream broke off"
    elif not num_pieces:
        answer.error = "the answer has no text"

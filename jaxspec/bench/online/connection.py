"""Owns HTTP as a benchmark needs it: one request on one connection, read as it comes.

Many answers arrive in one thread, and each is timed when its bytes are there. No
proxies, no redirects, no compression, no limit of time.
"""

import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from jaxspec.errors import ConfigError, wrong_argument

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}


class HttpError(Exception):
    """There was no answer, or one that is none of HTTP's, or an error.

    Attributes:
        status: Of an answer that is an error.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is.

    Attributes:
        path: Before the path of every request; "" mostly.
    """

    host: str
    port: int
    is_secure: bool = False
    path: str = ""

    @classmethod
    def from_url(cls, url: str) -> "Address":
        """Read a URL.

        Raises:
            ConfigError: It is none of HTTP.
        """
        allowed = "a URL like http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise wrong_argument(ConfigError, "--base-url", allowed, url) from error
        if parts.scheme not in ("http", "https") or not host:
            raise wrong_argument(ConfigError, "--base-url", allowed, url)
        is_secure = parts.scheme == "https"
        return cls(
            host=host,
            port=port or (443 if is_secure else 80),
            is_secure=is_secure,
            path=parts.path.rstrip("/"),
        )

    @property
    def netloc(self) -> str:
        """As the header Host has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http{'s' if self.is_secure else ''}://{self.netloc}{self.path}"


@contextlib.asynccontextmanager
async def request(
    address: Address,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[httpx.Response]:
    """Ask; gives the answer as soon as it begins.

    Args:
        body: Sent as JSON with POST; without one it is GET.

    Raises:
        HttpError: No connection, or no answer of HTTP's.
    """
    method = "GET" if body is None else "POST"
    headers = {**_HEADERS, **(headers or {})}
    try:
        async with (
            httpx.AsyncClient(verify=_trusted(), trust_env=False, timeout=None) as one,
            one.stream(
                method, f"{address.url}{path}", json=body, headers=headers
            ) as answer,
        ):
            yield answer
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise HttpError(f"{address.netloc}{path}: {error!r}") from error


async def fetch(
    address: Address, path: str, headers: Mapping[str, str] | None = None
) -> str:
    """The text that GET answers.

    Raises:
        HttpError: There is none, or the status is not 200.
    """
    async with request(address, path, headers=headers) as answer:
        text = (await answer.aread()).decode(errors="replace")
    status = answer.status_code
    if status != 200:
        said = text[:200].strip()
        raise HttpError(f"{address.netloc}{path}: status {status}: {said}", status)
    return text


class Events:
    """Server-sent events, however they are cut into pieces.

    Lines end at line feeds alone: a text may hold other separators of lines.
    """

    def __init__(self):
        self._rest = b""

    def read(self, piece: bytes) -> Iterator[str]:
        """Take in what came; the data of the lines that are whole."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, data = line.decode(errors="replace").strip().partition(":")
            if name == "data":
                yield data.strip()


def data_of(response: httpx.Response) -> Iterator[str]:
    """Data of the events of a stream, as they come."""
    events = Events()
    for piece in response.iter_bytes():
        yield from events.read(piece)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """TLS context, cached: reading the certificates takes a while."""
    return httpx.create_ssl_context()

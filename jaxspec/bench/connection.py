"""Owns HTTP as a benchmark needs it: one request on one connection, read as it comes.

On asyncio's streams, so that many answers arrive in one thread and each is timed when
its bytes are there. No proxies, no redirects, no compression.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxspec.errors import ConfigError, wrong_argument

MAX_LINE_BYTES = 16 * 2**20


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


@contextlib.asynccontextmanager
async def request(
    address: Address,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Ask; gives the status and the pieces of the body as they come.

    Args:
        body: Sent as JSON with POST; without one it is GET.

    Raises:
        HttpError: No connection, or no answer of HTTP's.
    """
    writer = None
    try:
        context = ssl.create_default_context() if address.is_secure else None
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=context, limit=MAX_LINE_BYTES
        )
        writer.write(_head(address, path, body, headers or {}))
        await writer.drain()
        status, told = await _read_head(reader)
        yield status, _pieces(reader, told)
    except (OSError, EOFError, ValueError) as error:
        # A body that ends early is an `EOFError`, a line that does not a `ValueError`.
        raise HttpError(f"{address.netloc}{path}: {error!r}") from error
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def fetch(
    address: Address, path: str, headers: Mapping[str, str] | None = None
) -> str:
    """The text that GET answers.

    Raises:
        HttpError: There is none, or the status is not 200.
    """
    async with request(address, path, headers=headers) as (status, pieces):
        text = (b"".join([piece async for piece in pieces])).decode(errors="replace")
    if status != 200:
        said = text[:200].strip()
        raise HttpError(f"{address.netloc}{path}: status {status}: {said}", status)
    return text


def _head(
    address: Address,
    path: str,
    body: Mapping[str, Any] | None,
    headers: Mapping[str, str],
) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Connection: close",
        "Accept: */*",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).decode("latin-1").split(" ", 2)
    if len(first) < 2 or not first[0].startswith("HTTP/1."):
        raise ValueError(f"no answer of HTTP/1.1: {' '.join(first)!r}")
    told: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        told[name.strip().lower()] = value.strip()
    return int(first[1]), told


async def _pieces(
    reader: asyncio.StreamReader, told: Mapping[str, str]
) -> AsyncIterator[bytes]:
    if told.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)  # CR LF
        return
    if "content-length" in told:
        yield await reader.readexactly(int(told["content-length"]))
        return
    while piece := await reader.read(2**16):
        yield piece

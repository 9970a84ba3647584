"""Owns what a request must pass before any endpoint sees it."""

import asyncio
import contextlib
import hashlib
import hmac
import uuid

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.errors import error_body, respond

GUARDED = "/v1"
MAX_ID = 256
# Of a body that has been refused.
MAX_DRAINED_BYTES, MAX_DRAIN_S = 64 * 2**20, 5.0
# What separates values in JSON, counted in texts as well: a few megabytes can hold more
# than a million values, and nothing else is done while they are read.
MAX_MARKS = 300_000
_MARKS = (b"{", b"[", b":", b",")
_TOO_MANY = (
    f"The body may have at most {MAX_MARKS} commas, colons and opening brackets. Send "
    "it in parts."
)


class ApiKeys:
    """Middleware that refuses requests under /v1 without a valid key."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS"
        if not is_open:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            is_open = not path.startswith(GUARDED)
        if is_open or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        await respond(401, {"error": "Unauthorized"}, headers)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Every key is compared, and digests have one length: time tells nothing.
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Middleware that reads no body beyond a length, or of too many parts."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_bytes = num_marks = 0

        async def count() -> Message:
            nonlocal num_bytes, num_marks
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            num_marks += sum(map(body.count, _MARKS))
            problem = None
            if num_bytes > self._max_bytes:
                problem = self._message()
            elif num_marks > MAX_MARKS:
                problem = _TOO_MANY
            if problem is not None:
                await _drain(receive)
                raise HTTPException(413, problem, {"Connection": "close"})
            return message

        await self._app(scope, count, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer before the body comes: who waits for a word to send it need not."""

        async def keep_open(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "more_body": True}
            await send(message)

        body = error_body(413, self._message())
        answer = respond(413, body, {"Connection": "close"})
        await answer(scope, receive, keep_open)
        await _drain(receive)
        await send({"type": "http.response.body", "body": b""})

    def _message(self) -> str:
        return (
            f"The body may have at most {self._max_bytes} bytes (--max-body-bytes). "
            "Send a shorter one."
        )


async def _drain(receive: Receive) -> None:
    """Read some of what the client still sends, and forget it.

    A connection that is closed under a client that writes is reset, and the client may
    never see what it was answered.
    """
    left = MAX_DRAINED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_DRAIN_S):
            while left > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message["body"])


class RootPath:
    """Middleware that takes the root path off where a proxy has left it.

    A server adds it to every path, as if a proxy always took it off.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope["type"] == "http" and root:
            path = scope["path"].removeprefix(root)
            if path.startswith(f"{root}/"):
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class RequestIds:
    """Middleware that gives every answer the id of its request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.get("x-request-id", "")[:MAX_ID] or uuid.uuid4().hex
        # In place: the endpoint makes the answer's id of the same.
        headers["x-request-id"] = request_id

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, add)

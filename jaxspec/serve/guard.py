"""Owns what a request must pass before any endpoint sees it."""

import hashlib
import hmac
import uuid

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.refusals import error_body, respond

GUARDED = "/v1"
MAX_ID = 256


class ApiKeys:
    """Middleware that lets nobody under /v1 without a key."""

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
    """Middleware that reads no body beyond a length."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > self._max_bytes:
            body = error_body(413, self._message())
            await respond(413, body, {"Connection": "close"})(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._message(), {"Connection": "close"})
            return message

        await self._app(scope, count, send)

    def _message(self) -> str:
        return (
            f"The body may have at most {self._max_bytes} bytes (--max-body-bytes). "
            "Send a shorter one."
        )


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

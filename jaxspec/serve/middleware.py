"""Owns the checks that every request passes before it reaches an endpoint."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import uuid

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.admission import Admission
from jaxspec.serve.errors import anthropic_error, error_body, respond

GUARDED = ("/v1", "/invocations")
GUARDED += ("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora")
ANTHROPIC = "/v1/messages"
MAX_ID = 256
# Maximum number of bytes of an unused body that are read and dropped; a connection with
# a longer body may be reset.
MAX_DRAINED_BYTES = 2**30
# Maximum number of JSON separators in a body, counting those inside strings. A few
# megabytes can hold more than a million values, and parsing them blocks the event loop.
MAX_MARKS = 300_000
_MARKS = (b"{", b"[", b":", b",")
_TOO_MANY = (
    f"The body may have at most {MAX_MARKS} commas, colons and opening brackets. Send "
    "it in parts."
)


class ApiKeys:
    """Middleware that refuses requests that generate without a valid key.

    Sets `owner`, a digest of the key, in the request's state.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS"
        if not is_open:
            is_open = not _path(scope).startswith(GUARDED)
        owner = "" if is_open else self._owner(Headers(scope=scope))
        if owner is not None:
            scope.setdefault("state", {})["owner"] = owner
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        await respond(401, {"error": "Unauthorized"}, headers)(scope, receive, send)

    def _owner(self, headers: Headers) -> str | None:
        """Return the request's owner; None without a valid key.

        The key is a bearer token, or in the header that Anthropic's clients send.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:
            scheme, key = "bearer", headers["x-api-key"]
        given = _digest(key.strip())
        # Compares every key, in digests of one length, so the time reveals nothing.
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if any(found) and scheme.lower() == "bearer" else None


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


class AnthropicErrors:
    """Middleware that writes errors of Anthropic's endpoints in Anthropic's form.

    Converts the JSON of all other code, also of other middleware.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _path(scope).startswith(ANTHROPIC):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def convert(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            status, headers = start["status"], MutableHeaders(raw=start["headers"])
            if headers.get("content-type") == "application/json":
                body = json.dumps(anthropic_error(status, json.loads(body))).encode()
                headers["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, convert)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Middleware that refuses bodies with too many bytes or JSON values."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            # Respond before the body arrives, so that a client that waits for "100
            # Continue" need not send it.
            body = error_body(413, self._message())
            response = respond(413, body, {"Connection": "close"})
            await response(scope, receive, send)
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
                raise HTTPException(413, problem, {"Connection": "close"})
            return message

        await self._app(scope, count, send)

    def _message(self) -> str:
        return (
            f"The body may have at most {self._max_bytes} bytes (--max-body-bytes). "
            "Send a shorter one."
        )


class BodyTimeout:
    """Middleware that reads every body to its end, within a time limit.

    A connection that is closed while the client still sends is reset, and the client
    may never receive the response. The last part of a response to a request whose body
    was not used therefore waits until the body has been read and dropped.
    """

    def __init__(self, app: ASGIApp, timeout_s: float, admission: Admission):
        """Wrap an application.

        Args:
            timeout_s: Seconds within which a body must arrive.
            admission: Counts timeouts.
        """
        self._app, self._timeout_s, self._admission = app, timeout_s, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._timeout_s
        is_over = False

        async def read() -> Message:
            nonlocal is_over
            if is_over:  # only the client's disconnection follows
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                is_over = True
                self._admission.num_timeouts["body"] += 1
                raise HTTPException(
                    408,
                    f"The body was not received within {self._timeout_s:g} s "
                    "(--timeout-read-body).",
                    {"Connection": "close"},
                ) from error
            is_over = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            if is_body and not message.get("more_body", False) and not is_over:
                await send({**message, "more_body": True})
                with contextlib.suppress(HTTPException):  # the response has been sent
                    await _drain(read)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, read, answer)


def _has_body(headers: Headers) -> bool:
    length = headers.get("content-length", "0")
    return length != "0" or "transfer-encoding" in headers


async def _drain(receive: Receive) -> None:
    """Read and drop the rest of a body, up to `MAX_DRAINED_BYTES`."""
    left = MAX_DRAINED_BYTES
    while left > 0:
        message = await receive()
        if not message.get("more_body", False):
            return
        left -= len(message["body"])


class RootPath:
    """Middleware that removes the root path if a proxy has left it in the URL path.

    uvicorn adds the root path to every URL path, assuming that the proxy has removed
    it.
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
    """Middleware that sets X-Request-Id on every response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.get("x-request-id", "")[:MAX_ID] or uuid.uuid4().hex
        # Change the request's headers in place: the endpoint reads this header to make
        # the response's id.
        headers["x-request-id"] = request_id

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, add)

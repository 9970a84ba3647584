"""Owns the limits on connections: their number, and the time for a request to arrive.

uvicorn has neither a limit on the time in which a request must arrive, nor one on
connections that a client can understand.
"""

import asyncio
import errno
import functools
import json
import logging
import os
import resource
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.serve.admission import Admission
from jaxspec.serve.errors import error_body, respond
from jaxspec.serve.middleware import RequestBodies

_log = logging.getLogger(__name__)

# More than the default queue and batch hold together, with room for idle ones.
MAX_CONNECTIONS = 4096
# Connections over the limit that get a whole answer; further ones are closed.
NUM_REFUSING = 64
# Descriptors for files and sockets of the process itself.
NUM_OWN_DESCRIPTORS = 64
# Soft limit of descriptors at the start, where the hard limit permits; as in vLLM.
NUM_DESCRIPTORS = 65_535
# A full server still answers what watches it, so that it is not restarted.
WATCHED_PATHS = ("/health", "/ping", "/metrics")
RETRY_AFTER_S = 1
LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits that hold for each connection of a server.

    Attributes:
        max_connections: Requests on further connections are refused.
        read_headers_s: Seconds for the headers of a request to arrive.
        read_body_s: Seconds for the body of a refused request to arrive.
    """

    max_connections: int
    read_headers_s: float
    read_body_s: float


def find_max_connections(given: int | None) -> int:
    """Return the limit on connections: the given one, or what descriptors permit.

    Raises:
        ConfigError: The process may not open enough file descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < NUM_DESCRIPTORS:
        is_bounded = hard != resource.RLIM_INFINITY
        soft = min(hard, NUM_DESCRIPTORS) if is_bounded else NUM_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return given or MAX_CONNECTIONS
    num_open = len(os.listdir("/dev/fd"))
    most = soft - num_open - NUM_REFUSING - NUM_OWN_DESCRIPTORS
    if most < 1 or (given or 0) > most:
        raise wrong_argument(
            ConfigError,
            "--limit-concurrency",
            f"at most {max(most, 0)} where a process may open {soft} files",
            given,
            "Raise that limit with `ulimit -n`.",
        )
    return given or min(most, MAX_CONNECTIONS)


def limited_http(limits: ConnectionLimits, admission: Admission) -> Any:
    """Return the protocol for `uvicorn.Config(http=...)`.

    Args:
        admission: Counts refused connections and timeouts.
    """
    return functools.partial(LimitedProtocol, limits=limits, admission=admission)


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 that limits connections, and the time for headers to arrive.

    The clock runs while a request is expected or arrives, except on an idle connection
    after an answer, which has uvicorn's keep-alive timeout. It stops when the headers
    are complete: `RequestBodies` limits the time of bodies, and answers take any time.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, admission: Admission, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._limits, self._admission = limits, admission
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock; refuse a connection over the limit."""
        super().connection_made(transport)
        num_over = len(self.connections) - self._limits.max_connections
        if num_over > 0:
            self._admission.num_refused["connections"] += 1
            full = _Full(self.app, self._limits.max_connections)
            if num_over > NUM_REFUSING:
                self._refuse(503, full.message, ("Retry-After", str(RETRY_AFTER_S)))
                return
            # An unread body is read, for the client to see the answer.
            whole = RequestBodies(full, self._limits.read_body_s, self._admission)
            self.app = cast(Any, whole)
        self._set_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop_clock()

    def data_received(self, data: bytes) -> None:
        """Stop the clock if a request is complete, else start it if it stands."""
        super().data_received(data)
        self._set_clock()

    def on_response_complete(self) -> None:
        """Start the clock if the next request is already arriving."""
        super().on_response_complete()
        self._set_clock()

    def _set_clock(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None
        if is_answering or is_idle or self.transport.is_closing():
            self._stop_clock()
        elif self._clock is None:
            seconds = self._limits.read_headers_s
            self._clock = self.loop.call_later(seconds, self._time_out)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _time_out(self) -> None:
        self._clock = None
        if self.transport.is_closing():
            return
        self._admission.num_timeouts["headers"] += 1
        received, _ = self.conn.trailing_data
        if self.conn.our_state is h11.IDLE and received:
            seconds = self._limits.read_headers_s
            self._refuse(
                408,
                f"The headers did not arrive within {seconds:g} s "
                "(--timeout-read-headers).",
            )
        else:
            # A client that has not begun a request expects no answer.
            self.transport.close()

    def _refuse(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        """Answer before the headers of a request are there, and close."""
        body = json.dumps(error_body(status, message)).encode()
        fields = [("Content-Type", "application/json"), ("Connection", "close")]
        fields += [("Content-Length", str(len(body))), *headers]
        head = h11.Response(
            status_code=status,
            headers=fields,
            reason=HTTPStatus(status).phrase.encode(),
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Full:
    """Answers 503 in place of an application, except at `WATCHED_PATHS`."""

    def __init__(self, app: Any, max_connections: int):
        self._app: ASGIApp = app
        self.message = (
            f"The server has {max_connections} connections, the most that it accepts "
            "(--limit-concurrency). Try again later."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in WATCHED_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        answer = respond(503, error_body(503, self.message), headers)
        await answer(scope, receive, send)


class DescriptorWatch:
    """Reports in log and metrics that no file descriptor is free.

    The event loop does not: uvloop closes the connections that it cannot accept.
    """

    def __init__(self, admission: Admission):
        self._admission = admission
        self._is_short = False
        self._logged_at: float | None = None

    def look(self) -> None:
        """Try to open a file, and report if that has changed since the last look."""
        is_short = False
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            is_short = True
        if is_short == self._is_short:
            return
        self._is_short = is_short
        if is_short:
            self._admission.num_descriptor_shortages += 1
        now = time.monotonic()
        if is_short and (
            self._logged_at is None or now - self._logged_at > LOG_INTERVAL_S
        ):
            self._logged_at = now
            _log.error(
                "No file descriptor is free: new connections are closed without an "
                "answer. Raise the limit with `ulimit -n`, or lower "
                "--limit-concurrency. Further shortages are logged once a minute, and "
                "counted as jaxspec:descriptor_shortages."
            )
        elif not is_short and self._logged_at is not None:
            _log.info("File descriptors are free again: connections are accepted")

"""Owns the limits on connections: their number, and the time for a request to arrive.

uvicorn has no time limit for a request to arrive, and its limit on connections gives
clients no error that they can parse.
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
from jaxspec.serve.middleware import BodyTimeout

_log = logging.getLogger(__name__)

# Default limit on connections: larger than the default queue and batch together, so
# that idle connections fit as well.
MAX_CONNECTIONS = 4096
# Number of connections over the limit whose request is still read before the 503
# response. Further connections get the 503 response at once and are closed.
NUM_REFUSING = 64
# File descriptors reserved for the process's own files and sockets.
NUM_OWN_DESCRIPTORS = 64
# Soft limit on file descriptors that startup sets if the hard limit permits it, as in
# vLLM.
NUM_DESCRIPTORS = 65_535
# Paths that a server at its limit still serves, so that monitoring does not restart it.
MONITORING_PATHS = ("/health", "/ping", "/metrics")
RETRY_AFTER_S = 1
LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of a server.

    Attributes:
        max_connections: Requests on connections over this number are refused.
        read_headers_s: Seconds for the headers of a request to arrive.
        read_body_s: Seconds for the body of a refused request to arrive.
    """

    max_connections: int
    read_headers_s: float
    read_body_s: float


def find_max_connections(given: int | None) -> int:
    """Return the limit on connections: `given`, else as file descriptors permit.

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
    num_free = soft - num_open - NUM_REFUSING - NUM_OWN_DESCRIPTORS
    if num_free < 1 or (given or 0) > num_free:
        raise wrong_argument(
            ConfigError,
            "--limit-concurrency",
            f"at most {max(num_free, 0)}, because this process may open only {soft} "
            "files",
            given,
            "Raise that limit with `ulimit -n`.",
        )
    return given or min(num_free, MAX_CONNECTIONS)


def limited_http(limits: ConnectionLimits, admission: Admission) -> Any:
    """Return the protocol for `uvicorn.Config(http=...)`.

    Args:
        admission: Counts refused connections and timeouts.
    """
    return functools.partial(LimitedProtocol, limits=limits, admission=admission)


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 that limits connections, and the time for headers to arrive.

    The timer runs from the opening of the connection, or from the first bytes of a
    further request, until the headers are complete. uvicorn's keep-alive timeout limits
    idle connections, and `BodyTimeout` limits bodies; responses have no time limit.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, admission: Admission, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._limits, self._admission = limits, admission
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer; refuse a connection over the limit."""
        super().connection_made(transport)
        num_over = len(self.connections) - self._limits.max_connections
        if num_over > 0:
            self._admission.num_refused["connections"] += 1
            full = _Full(self.app, self._limits.max_connections)
            if num_over > NUM_REFUSING:
                self._refuse(503, full.message, ("Retry-After", str(RETRY_AFTER_S)))
                return
            # Reads the unused body, so that the client receives the response.
            whole = BodyTimeout(full, self._limits.read_body_s, self._admission)
            self.app = cast(Any, whole)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Stop the timer if the headers are complete; otherwise let it run."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Start the timer if the next request is already arriving."""
        super().on_response_complete()
        self._update_timer()

    def _update_timer(self) -> None:
        is_responding = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None
        if is_responding or is_idle or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            seconds = self._limits.read_headers_s
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        self._admission.num_timeouts["headers"] += 1
        received, _ = self.conn.trailing_data
        if self.conn.our_state is h11.IDLE and received:
            seconds = self._limits.read_headers_s
            self._refuse(
                408,
                f"The headers were not received within {seconds:g} s "
                "(--timeout-read-headers).",
            )
        else:
            # A client that has sent nothing expects no response.
            self.transport.close()

    def _refuse(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        """Send an error before the request's headers are complete, and close."""
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
    """Application that returns 503, except at `MONITORING_PATHS`."""

    def __init__(self, app: Any, max_connections: int):
        self._app: ASGIApp = app
        self.message = (
            f"The server has its maximum of {max_connections} connections "
            "(--limit-concurrency). Try again later."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in MONITORING_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        response = respond(503, error_body(503, self.message), headers)
        await response(scope, receive, send)


class DescriptorWatch:
    """Reports in log and metrics that no file descriptor is free.

    The event loop does not report it: uvloop closes connections it cannot accept.
    """

    def __init__(self, admission: Admission):
        self._admission = admission
        self._is_short = False
        self._logged_at: float | None = None

    def update(self) -> None:
        """Try to open a file; report if the result differs from the last call's."""
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
                "No file descriptor is free: new connections are closed without a "
                "response. Raise the limit with `ulimit -n`, or lower "
                "--limit-concurrency. Further shortages are logged once a minute, and "
                "counted as jaxspec:descriptor_shortages."
            )
        elif not is_short and self._logged_at is not None:
            _log.info("File descriptors are free again: connections are accepted")

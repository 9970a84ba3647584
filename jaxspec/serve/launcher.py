"""Owns a server's life cycle: socket, engine, warm-up, signals, shutdown.

By default the server listens at once and compiles in the background; requests wait for
the first program.
"""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from tqdm.contrib.logging import logging_redirect_tqdm

from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.engine_group import make_engines
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.multihost.follower import Follower
from jaxspec.errors import ConfigError, escaped
from jaxspec.exit import interrupts_end
from jaxspec.progress import watch_compiles
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.app import make_app
from jaxspec.serve.connections import (
    MAX_CONNECTIONS,
    ConnectionLimits,
    DescriptorWatch,
    find_max_connections,
    limited_http,
)
from jaxspec.serve.flags import Options
from jaxspec.serve.serving import Serving
from jaxspec.text.tokenizer import NoTokenizer

_log = logging.getLogger(__name__)

# Exit status after the engine has died.
ENGINE_DEAD = 1
# Seconds to send the final chunks of requests aborted after the shutdown timeout.
FLUSH_TIMEOUT_S = 5
# Seconds between checks for a second signal.
POLL_S = 0.1
LOG_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


class Server(uvicorn.Server):
    """Shuts down on a signal, or when the engine has died.

    On a signal, running requests may finish. uvicorn's own server would then exit with
    the signal's status.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        serving: Serving,
        timeout_s: int,
        release: Callable[[], object],
        address: str,
    ):
        """Make a server.

        Args:
            timeout_s: Seconds that running requests have after a signal.
            release: Called before the exit at a second signal.
            address: Of the server, for the log.
        """
        super().__init__(config)
        self._release, self._signal = release, signal.SIGTERM
        self._address = address
        self._serving, self._timeout_s = serving, timeout_s
        self._warming = Warming(serving.engine)
        self._descriptors = DescriptorWatch(serving.admission)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the server runs."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self.handle_exit) for one in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; at the second signal, exit at once."""
        if self.should_exit:
            self._release()
            os._exit(128 + sig)
        self.should_exit, self._signal = True, signal.Signals(sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and only then log the address."""
        await super().startup(sockets)
        _log.info("Serving %s on %s", self._serving.settings.model_name, self._address)

    async def on_tick(self, counter: int) -> bool:
        """Check the engine, several times a second."""
        if self._serving.engine.errored and not self.should_exit:
            _log.error("The engine has died: the server shuts down.")
            self.should_exit = True
        self._warming.update()
        self._descriptors.update()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, and wait for the running ones."""
        count = self._serving.admission.num_requests
        if count:
            is_key = self._signal == signal.SIGINT
            again = "press Ctrl-C again" if is_key else "repeat it"
            _log.info(
                "%s: waiting up to %d s for %d running request%s; %s to stop now",
                self._signal.name,
                self._timeout_s,
                count,
                "" if count == 1 else "s",
                again,
            )
        loop = asyncio.get_running_loop()
        end = loop.call_later(self._timeout_s, lambda: loop.create_task(self._abort()))
        try:
            await super().shutdown(sockets)
            while not (self.force_exit or await self._serving.background.wait(POLL_S)):
                pass
        finally:
            end.cancel()

    async def _abort(self) -> None:
        """End running requests with the text generated so far."""
        await self._serving.engine.abort(self._serving.admission.request_ids)


class Warming:
    """Logs when the first program is compiled, and when warm-up is complete.

    The engine itself logs each compiled program.
    """

    def __init__(self, engine: AsyncLLMEngine):
        self._engine, self._start = engine, time.monotonic()
        self._is_ready = self._is_over = not engine.num_warming

    def update(self) -> None:
        """Log what has changed since the last call."""
        if self._is_over or not self._engine.is_ready:
            return
        seconds, left = time.monotonic() - self._start, self._engine.num_warming
        if not self._is_ready:
            self._is_ready = True
            _log.info(
                "The server is ready after %.1f s; %d more programs are being "
                "compiled in the background",
                seconds,
                left,
            )
        if not left:
            self._is_over = True
            _log.info("All programs were compiled after %.1f s", seconds)
            freeze_heap()


def run(options: Options) -> int:
    """Serve until a signal arrives or the engine dies; return the exit status.

    A follower of a multi-host engine accepts no requests, and exits with the leader.

    Raises:
        ConfigError: An argument is invalid, or the address is in use.
        NotImplementedError: An argument asks for an unsupported feature.
    """
    set_up_log(options.listening.uvicorn_log_level)
    hosts = options.engine.read_hosts()
    if hosts is not None and hosts.is_follower:
        return _follow(options)
    # Check arguments here, before minutes of compiling.
    _check_tls(options.listening)
    find_max_connections(options.listening.limit_concurrency)
    bound = _bind(options.listening)
    try:
        # Handle signals before the server's own handlers are installed, and after they
        # are removed.
        with interrupts_end(lambda: _release(bound, options.listening)):
            engines = make_engines(options.engine)
            warm_up(engines, options.warm_up)
            serving_engine = AsyncLLMEngine(*engines)
            try:
                return _serve(serving_engine, options, bound)
            finally:
                serving_engine.shutdown(FLUSH_TIMEOUT_S)
    finally:
        _release(bound, options.listening)


def _follow(options: Options) -> int:
    """Run the leader's launches on this host's devices."""
    with interrupts_end():
        follower = Follower.start(options.engine.create_engine_config())
    with _leader_decides():
        follower.run()
    return 0


@contextmanager
def _leader_decides() -> Iterator[None]:
    """Ignore the first signal, because this process exits with the leader.

    Stopping a group of hosts sends a signal to all of them at once, and the leader
    needs its followers to finish running requests.
    """
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        _log.warning(
            "This process exits when the leader does; a second signal ends it now"
        )

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, handle) for one in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _RecordFormatter(logging.Formatter):
    """Formats log records: indents all lines after the first, tracebacks too.

    An error may quote a request. Indented, no line of the quote can look like a log
    record.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return "\n    ".join(map(escaped, lines))


def set_up_log(level: str) -> None:
    """Log to stderr, for the whole program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RecordFormatter(LOG_FORMAT))
    logging.basicConfig(level=_level(level), handlers=[handler])
    if _level(level) == logging.INFO:
        # jax logs missing kinds of devices as information: "INTERNAL: Failed to open
        # libtpu.so" on every machine without a TPU. Failures are warnings.
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def _serve(engine: AsyncLLMEngine, options: Options, bound: socket.socket) -> int:
    app = make_app(engine, options.settings)
    given, timeout_s = options.listening, options.shutdown_timeout
    limits = ConnectionLimits(
        max_connections=find_max_connections(given.limit_concurrency),
        read_headers_s=given.timeout_read_headers,
        read_body_s=options.settings.timeout_read_body,
    )
    if given.limit_concurrency is None and limits.max_connections < MAX_CONNECTIONS:
        _log.warning(
            "The limit on open files permits %d connections, fewer than %d: raise it "
            "with `ulimit -n`",
            limits.max_connections,
            MAX_CONNECTIONS,
        )
    config = uvicorn.Config(
        app,
        http=limited_http(limits, app.state.serving.admission),
        ws="none",
        host=given.host,
        port=given.port,
        uds=given.uds,
        root_path=_root_path(given),
        log_config=None,  # uvicorn's records go to our handler
        log_level=given.uvicorn_log_level,
        access_log=not given.disable_uvicorn_access_log,
        # Annotated as int, but the event loop accepts fractions of a second.
        timeout_keep_alive=cast(int, given.timeout_keep_alive),
        timeout_graceful_shutdown=timeout_s + FLUSH_TIMEOUT_S,
        **_tls(given),
    )
    server = Server(
        config,
        app.state.serving,
        timeout_s,
        lambda: _release(bound, given),
        _address(bound, given),
    )
    freeze_heap()
    server.run(sockets=[bound])
    return ENGINE_DEAD if engine.errored else 0


def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collection.

    A full collection would visit the compiler's many objects, and stall all streams for
    0.1 s.
    """
    gc.collect()
    gc.freeze()


def warm_up(engines: Sequence[LLMEngine], extent: str) -> None:
    """Compile programs before requests need them.

    Args:
        extent: "none"; "plain" compiles the programs of plain requests in the
            background; "all" compiles every program before returning.
    """
    if extent == "none":
        return
    params = _unusual(engines[0]) if extent == "all" else ()
    for engine in engines:
        # Warm-up runs in a thread of its own, which does not delay an exit.
        engine.start_warm_up(params)
    if extent == "plain":
        return
    for engine in engines:
        with logging_redirect_tqdm(), watch_compiles(engine):
            engine.wait_for_programs()


def _unusual(engine: LLMEngine) -> list[SamplingParams]:
    """Return parameters of requests that need other programs than plain ones."""
    features: list[dict[str, Any]] = [
        {"logprobs": min(1, engine.config.num_logprobs)},
        {"presence_penalty": 1.0},
    ]
    has_text = not isinstance(engine.tokenizer, NoTokenizer)
    if has_text and not engine.config.is_synthetic:
        structured = StructuredOutputsParams(json_object=True)
        features.append({"structured_outputs": structured})
    return [SamplingParams(**feature) for feature in features]


def _bind(given: Namespace) -> socket.socket:
    """Bind the address; the socket does not listen yet."""
    bound = None
    try:
        if given.uds is not None:
            bound, address = socket.socket(socket.AF_UNIX), given.uds
        else:
            is_v6 = ":" in given.host
            bound = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            address = (given.host, given.port)
        bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        name, where = "port", f"{given.host}:{given.port}"
        advice = "Choose another --port."
        if given.uds is not None:
            name, where = "uds", given.uds
            advice = "Remove the file if no server uses it, or choose another --uds."
        elif _is_of_host(error):
            name, where = "host", given.host
            advice = "--host must be an address of this machine: 127.0.0.1 for local "
            advice += "clients only, 0.0.0.0 for all networks."
        raise ConfigError(
            f"The server cannot listen on {where}: {str(error).rstrip('.')}. {advice}",
            parameter=name,
            value=getattr(given, name),
        ) from error
    return bound


def _is_of_host(error: Exception) -> bool:
    """Return whether the host is invalid: unknown, remote, or of another family."""
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return True
    numbers = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
    return isinstance(error, OSError) and error.errno in numbers


def _release(bound: socket.socket, given: Namespace) -> None:
    """Close the socket; delete a Unix socket's file, which would block a restart."""
    bound.close()
    if given.uds is not None:
        Path(given.uds).unlink(missing_ok=True)


def _address(bound: socket.socket, given: Namespace) -> str:
    if given.uds is not None:
        return given.uds
    scheme = "https" if given.ssl_certfile else "http"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _root_path(given: Namespace) -> str:
    """Return the root path with a leading slash and without a trailing one."""
    path = given.root_path.strip("/")
    return f"/{path}" if path else ""


def _check_tls(given: Namespace) -> None:
    """Load the certificates as uvicorn will.

    Raises:
        ConfigError: A file is missing or cannot be used.
    """
    needs = [("ssl_keyfile", "ssl_certfile"), ("ssl_ca_certs", "ssl_certfile")]
    needs += [("ssl_cert_reqs", "ssl_certfile"), ("ssl_cert_reqs", "ssl_ca_certs")]
    for name, other in needs:
        if getattr(given, name) and not getattr(given, other):
            flag, needed = (f"--{one.replace('_', '-')}" for one in (name, other))
            raise ConfigError(
                f"{flag} needs {needed}: give both, or neither.",
                parameter=other,
                value=None,
            )
    if not given.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = [given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certs]
    try:
        # Without this callback OpenSSL would prompt for a password at the terminal.
        context.load_cert_chain(*files[:2], password=lambda: "")
        if given.ssl_ca_certs:
            context.load_verify_locations(given.ssl_ca_certs)
    except OSError as error:  # the base class of ssl's errors too
        names = ", ".join(repr(one) for one in files if one)
        raise ConfigError(
            f"HTTPS does not work with {names}: {error}. They must be PEM files; the "
            "key must belong to the certificate and have no password.",
            parameter="ssl_certfile",
            value=given.ssl_certfile,
        ) from error


def _tls(given: Namespace) -> dict[str, Any]:
    return {
        "ssl_keyfile": given.ssl_keyfile,
        "ssl_certfile": given.ssl_certfile,
        "ssl_ca_certs": given.ssl_ca_certs,
        "ssl_cert_reqs": ssl.VerifyMode(given.ssl_cert_reqs),
    }


def _level(name: str) -> int:
    return logging.DEBUG if name == "trace" else logging.getLevelName(name.upper())

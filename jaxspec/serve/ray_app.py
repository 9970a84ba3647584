"""Owns the Ray Serve application: replicas of the server, managed by Ray.

`serve run jaxspec.serve.ray_app:build model=... num_replicas=2`. Ray starts, restarts
and scales replicas, and routes requests to them. A replica consists of an engine and
the HTTP application that `python -m jaxspec.serve` serves. Ray is imported only when an
application is built.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, no_type_check

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.engine.arg_utils import AsyncEngineArgs
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.engine_group import make_engines
from jaxspec.engine.multihost.follower import Follower
from jaxspec.errors import (
    ConfigError,
    check_choice,
    check_flag,
    check_integer,
    check_strings,
    wrong_argument,
)
from jaxspec.extras import needs_extra
from jaxspec.serve.app import make_app
from jaxspec.serve.connections import ConnectionLimits, limited_http
from jaxspec.serve.flags import Options, listening_flags, read_values
from jaxspec.serve.launcher import FLUSH_TIMEOUT_S, freeze_heap, set_up_log, warm_up
from jaxspec.serve.serving import Serving
from jaxspec.serve.settings import DEFAULT_READ_HEADERS_S, ServerSettings

_log = logging.getLogger(__name__)

NAME = "jaxspec"
AFFINE_ROUTER = "ray.serve.experimental.consistent_hash_router"
# Concurrent requests of a replica without max_num_seqs. With Ray's default, 5, the
# batch would be nearly empty while requests wait in Ray's queue.
MAX_ONGOING_REQUESTS = 256
# Number of consecutive ports to try for a replica's metrics (replicas of one machine
# use neighboring ports), and the highest port number.
MAX_METRICS_PORTS, MAX_PORT = 64, 65535
# Maximum connections to the metrics address of one replica.
MAX_METRICS_CONNECTIONS = 64
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
MONITORING_PATHS = ("/metrics", "/health")
# Flags of multi-host processes, which a replica sets itself.
HOST_FLAGS = ("nnodes", "node_rank", "master_addr", "master_port", "headless")
HOST_FLAGS += ("hosts_secret_file",)
READY_POLL_S = 0.1
# Keys of ray_actor_options that a placement group's bundle can reserve, and keys that
# it cannot.
BUNDLED = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")
NOT_BUNDLED = ("runtime_env",)
_PLACE = "jaxspec.serve.ray_app:build"
_HINT = "See deploy/README.md for its arguments besides the server's flags."


# Exempt from jaxtyping's checks in the tests: the class checks its own fields, with
# better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number and resources of the replicas; names and meanings are Ray Serve's.

    `deployments` in a Serve config file overrides these. With several `hosts`,
    `ray_actor_options` must be given here: only these determine the placement group
    and the follower processes.

    Attributes:
        num_replicas: Fixed number; 1 by default, without `autoscaling_config`.
        autoscaling_config: `min_replicas`, `max_replicas`, `target_ongoing_requests`...
        ray_actor_options: Resources of a replica on each of its hosts, such as
            {"num_gpus": 1}: Ray hides GPUs from a replica that does not request them.
        hosts: Processes per replica, over which the target model is sharded; a
            placement group reserves resources for all of them at once.
        placement_group_strategy: "STRICT_SPREAD" for one process per machine; "PACK"
            for as few machines as possible.
        max_ongoing_requests: Concurrent requests per replica.
        session_affinity: Route requests with the same X-Session-Id to the same
            replica, which has their common prefix cached. Not behind HAProxy.
        metrics_host: Host of each replica's own /metrics and /health.
        metrics_port: First port to try; None: only through Ray's proxy, which forwards
            to any one replica.
    """

    num_replicas: int | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] | None = None
    hosts: int = 1
    placement_group_strategy: str = "STRICT_SPREAD"
    max_ongoing_requests: int = MAX_ONGOING_REQUESTS
    session_affinity: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def __post_init__(self):
        for name in ("num_replicas", "max_ongoing_requests"):
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), low=1)
        for name in ("autoscaling_config", "ray_actor_options"):
            if not isinstance(getattr(self, name), dict | None):
                allowed = "a mapping, or JSON of one"
                raise wrong_argument(ConfigError, name, allowed, getattr(self, name))
        if self.num_replicas is not None and self.autoscaling_config is not None:
            hint = "Its initial_replicas is the number at startup."
            allowed = "left out with autoscaling_config"
            name = "num_replicas"
            raise wrong_argument(ConfigError, name, allowed, self.num_replicas, hint)
        check_integer(ConfigError, "hosts", self.hosts, low=1)
        if self.hosts > 1:
            self._check_bundle()
        name = "placement_group_strategy"
        check_choice(ConfigError, name, getattr(self, name), STRATEGIES)
        check_flag(ConfigError, "session_affinity", self.session_affinity)
        check_strings(ConfigError, "metrics_host", (self.metrics_host,))
        if self.metrics_port is not None:
            high = 65535
            check_integer(
                ConfigError, "metrics_port", self.metrics_port, low=1, high=high
            )

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one process of a replica, as a placement group's bundle."""
        options = self.ray_actor_options or {}
        named = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0)}
        bundle = named | {"memory": options.get("memory", 0)}
        bundle |= options.get("resources") or {}
        if (kind := options.get("accelerator_type")) is not None:
            # Ray's own convention: a share so small that any number of processes fits.
            bundle[f"accelerator_type:{kind}"] = 0.001
        return {name: count for name, count in bundle.items() if count}

    def _check_bundle(self) -> None:
        name, options = "ray_actor_options", self.ray_actor_options or {}
        known = (*BUNDLED, *NOT_BUNDLED)
        if not options.keys() <= set(known):
            allowed = "with several hosts a mapping with keys among " + ", ".join(known)
            hint = "A placement group's bundle cannot reserve anything else."
            raise wrong_argument(ConfigError, name, allowed, options, hint)
        if not isinstance(options.get("resources"), dict | None):
            allowed = "a mapping, with a mapping of numbers as resources"
            raise wrong_argument(ConfigError, name, allowed, options)
        if not self.bundle:
            allowed = "with several hosts a mapping that requests some resource"
            hint = "Ray does not accept an empty bundle in a placement group."
            raise wrong_argument(ConfigError, name, allowed, options, hint)


def build(arguments: dict[str, Any]) -> Any:
    """Make the Ray Serve application, a `ray.serve.Application`.

    Args:
        arguments: Flags of `python -m jaxspec.serve` by name, except those of its
            socket, and the fields of `Placement`. Values may be text, as on a command
            line.

    Raises:
        ConfigError: A value is invalid, or Ray is not installed.
        UnsupportedError: An argument asks for an unsupported feature.
    """
    return make_application(*read_arguments(arguments))


def make_application(
    options: Options, placement: Placement, replica: type["Replica"] | None = None
) -> Any:
    """Make the Ray Serve application of parsed arguments; see `build`.

    Args:
        replica: Class of the replicas; Ray imports it on their machines.
    """
    serve = _ray_serve()
    chosen: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": placement.max_ongoing_requests,
        "graceful_shutdown_timeout_s": options.shutdown_timeout + FLUSH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": READY_POLL_S,
    }
    for name in ("num_replicas", "autoscaling_config", "ray_actor_options"):
        if (value := getattr(placement, name)) is not None:
            chosen[name] = value
    if placement.hosts > 1:
        chosen["placement_group_bundles"] = [placement.bundle] * placement.hosts
        chosen["placement_group_strategy"] = placement.placement_group_strategy
    if placement.session_affinity:
        chosen["request_router_config"] = _affine()
    made = serve.ingress()(replica or Replica)
    return serve.deployment(**chosen)(made).bind(options, placement)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[Options, Placement]:
    """Parse the arguments of `build`; does not need Ray.

    Raises:
        ConfigError: A value is invalid.
        UnsupportedError: An argument asks for an unsupported feature.
    """
    own = {item.name for item in fields(Placement)}
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    for name in sorted(listening_flags() & named.keys() - {"uvicorn_log_level"}):
        raise wrong_argument(
            ConfigError,
            name,
            "left out under Ray Serve, whose proxy listens",
            named[name],
            "Set it in http_options of Serve's config file.",
            described_as=f"{_PLACE}: {name}",
        )
    for name in HOST_FLAGS:
        if name in named:
            allowed, value = "left out under Ray Serve", named[name]
            hint = "Set hosts to the processes per replica: the replica starts them."
            raise wrong_argument(ConfigError, name, allowed, value, hint)
    flags = {name: value for name, value in named.items() if name not in own}
    placed = {name: _read(value) for name, value in named.items() if name in own}
    options = read_values(_PLACE, flags)
    if options.settings.enable_request_id_headers:
        hint = "Ray Serve itself adds X-Request-Id to every response."
        name = "enable_request_id_headers"
        raise wrong_argument(ConfigError, name, "off under Ray Serve", True, hint)
    if "max_ongoing_requests" not in placed and options.engine.max_num_seqs:
        placed["max_ongoing_requests"] = options.engine.max_num_seqs
    return options, Placement(**placed)


def _read(value: Any) -> Any:
    """Parse a text as JSON; return it unchanged if it is not JSON."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(value)
    return value


def _ray_serve() -> Any:
    hint = "All machines of the cluster need it. A single server does not need Ray: "
    with needs_extra("ray", _PLACE, hint=f"{hint}python -m jaxspec.serve."):
        return importlib.import_module("ray.serve")


def _affine() -> dict[str, Any]:
    """Return the deployment option that makes Ray route requests by session id."""
    try:
        importlib.import_module(AFFINE_ROUTER)
    except ImportError as error:
        raise ConfigError(
            f"session_affinity needs {AFFINE_ROUTER}, which this version of Ray does "
            "not have. Install ray[serve] 2.60, or leave it out.",
            parameter="session_affinity",
            value=True,
        ) from error
    return {"request_router_class": f"{AFFINE_ROUTER}.ConsistentHashRouter"}


class Replica:
    """The engine with the server's application, in an actor of Ray Serve.

    The constructor returns, and Ray routes requests here, once the first program is
    compiled. Ray stops a replica after its requests have finished.
    """

    def __init__(self, options: Options, placement: Placement):
        self._options, self._placement = options, placement
        set_up_log(options.listening.uvicorn_log_level)
        arguments = options.engine
        # References keep the actors alive: Ray ends unreferenced ones.
        self._followers: list[Any] = []
        with contextlib.ExitStack() as stack:
            if placement.hosts > 1:
                secret = secrets.token_hex()
                path = stack.enter_context(_secret_file(secret))
                hosts, self._followers, calls = _start_followers(
                    options, placement, secret
                )
                stack.enter_context(_with_follower_errors(calls))
                arguments = replace(arguments, **hosts, hosts_secret_file=path)
            engines = make_engines(arguments)
        warm_up(engines, options.warm_up)
        self.engine = AsyncLLMEngine(*engines)
        # If the constructor returned earlier, Ray's proxy would send this replica
        # requests that ready replicas could serve.
        while self.engine.num_warming and not self.engine.is_ready:
            time.sleep(READY_POLL_S)
        freeze_heap()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self.engine, self._options.settings, self._lifespan)

    async def check_health(self) -> None:
        """Raise if the engine has died: Ray then replaces the replica.

        A busy engine, as during a compile, is healthy.

        Raises:
            EngineDeadError: The engine has died.
        """
        if self.engine.errored:
            raise self.engine.dead_error

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Serve metrics until Ray exits the context, when no request is running."""
        serving: Serving = app.state.serving
        settings = self._options.settings
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._placement.metrics_port is not None:
                    await stack.enter_async_context(
                        _serve_metrics(app, self._placement, settings)
                    )
                yield
                # Ray does not wait for background responses, which have no connection.
                await serving.background.wait(self._options.shutdown_timeout)
        finally:
            await asyncio.to_thread(self.engine.shutdown, FLUSH_TIMEOUT_S)


class HostProcess:
    """Ray actor of a replica on each of its hosts except the first."""

    def follow(
        self, arguments: AsyncEngineArgs, secret: str, log_level: str, **hosts: Any
    ) -> None:
        """Run the replica's launches on this host until the replica ends.

        Args:
            hosts: Multi-host arguments to add to `arguments`.
        """
        set_up_log(log_level)
        with _secret_file(secret) as path:
            own = replace(arguments, **hosts, hosts_secret_file=path)
            follower = Follower.start(own.create_engine_config())
        follower.run()


def _start_followers(
    options: Options, placement: Placement, secret: str
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Start the follower processes of this replica, each in a bundle of its own.

    They connect to this process when its engine is constructed.

    Returns:
        The multi-host arguments common to all processes, the followers' actors, and
        Ray's references to their running calls.
    """
    ray: Any = importlib.import_module("ray")
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    common = {
        "nnodes": placement.hosts,
        "master_addr": ray.util.get_node_ip_address(),
        "master_port": _free_ports(),
    }
    resources = placement.ray_actor_options or {"num_cpus": 1}
    actors, calls = [], []
    group = ray.util.get_current_placement_group()
    for rank in range(1, placement.hosts):
        strategy = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        )
        actor_class = ray.remote(HostProcess).options(
            **resources, scheduling_strategy=strategy
        )
        actors.append(actor_class.remote())
        call = actors[-1].follow.remote(
            options.engine,
            secret,
            options.listening.uvicorn_log_level,
            **common,
            node_rank=rank,
            headless=True,
        )
        calls.append(call)
    return common, actors, calls


@contextlib.contextmanager
def _with_follower_errors(calls: list[Any]) -> Iterator[None]:
    """Add the errors of failed followers to an error raised here.

    The leader only notices that they did not connect; the reason would be in the log
    of a worker on another machine.
    """
    try:
        yield
    except Exception as error:
        ray: Any = importlib.import_module("ray")
        reasons = []
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in ended:
            try:
                ray.get(call)
            except Exception as failure:  # noqa: BLE001 - any error is reported
                # The text of Ray's own error is a whole traceback.
                reason = getattr(failure, "cause", None) or failure
                reasons.append(f"node_rank={calls.index(call) + 1}: {reason!r}")
        if not reasons:
            raise
        raise RuntimeError(
            f"{error} Processes on other hosts failed: {'; '.join(reasons)}."
        ) from error


@contextlib.contextmanager
def _secret_file(secret: str) -> Iterator[str]:
    """Write a secret to a temporary file that only this user can read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        path.write_text(secret)
        yield str(path)


def _free_ports() -> int:
    """Return the first of two consecutive free ports.

    If another process takes one before the engine does, the engine's construction
    fails, and Ray restarts the replica.
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


class _Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _serve_metrics(
    app: FastAPI, placement: Placement, settings: ServerSettings
) -> AsyncIterator[None]:
    """Serve this replica's metrics at an address that no other replica uses."""

    async def monitoring(scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["path"] in MONITORING_PATHS
        await (app if known else Response(status_code=404))(scope, receive, send)

    bound = _bind(placement)
    limits = ConnectionLimits(
        max_connections=MAX_METRICS_CONNECTIONS,
        read_headers_s=DEFAULT_READ_HEADERS_S,
        read_body_s=settings.timeout_read_body,
    )
    serving: Serving = app.state.serving
    config = uvicorn.Config(
        monitoring,
        http=limited_http(limits, serving.admission),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
    )
    server = _Listener(config)
    running = asyncio.create_task(server.serve([bound]))
    _log.info("This replica's metrics: http://%s:%d/metrics", *bound.getsockname()[:2])
    try:
        yield
    finally:
        server.should_exit = True
        await running


def _bind(placement: Placement) -> socket.socket:
    """Bind the first free port from `metrics_port` on."""
    host, first = placement.metrics_host, placement.metrics_port
    assert first is not None
    failed: OSError | None = None
    for port in range(first, min(first + MAX_METRICS_PORTS, MAX_PORT + 1)):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            bound.bind((host, port))
            bound.listen()
        except OSError as error:
            bound.close()
            failed = error
            continue
        return bound
    raise ConfigError(
        f"Metrics cannot be served on {host}: none of {MAX_METRICS_PORTS} ports from "
        f"{first} on can be bound: {failed}. Choose another metrics_port or "
        "metrics_host.",
        parameter="metrics_port",
        value=first,
    )

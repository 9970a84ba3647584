"""Owns the application of Ray Serve: replicas of the server, placed and kept by Ray.

`serve run jaxspec.serve.ray_app:build model=... num_replicas=2`. Ray starts replicas,
restarts what dies, scales and routes; a replica is the engine behind the application
that `python -m jaxspec.serve` serves. Ray is imported when an application is built.
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
from jaxspec.serve.app import make_app
from jaxspec.serve.connections import ConnectionLimits, limited_http
from jaxspec.serve.flags import Options, listening_flags, read_values
from jaxspec.serve.launcher import LAST_WORDS_S, freeze_heap, set_up_log, warm_up
from jaxspec.serve.serving import Serving
from jaxspec.serve.settings import DEFAULT_READ_HEADERS_S, ServerSettings

_log = logging.getLogger(__name__)

NAME = "jaxspec"
AFFINE_ROUTER = "ray.serve.experimental.consistent_hash_router"
# Requests of a replica that does not say how many sequences it holds. Ray's own default
# is 5, with which the batch would stay empty while requests wait in front of it.
MAX_ONGOING_REQUESTS = 256
# Replicas of one machine listen on neighbouring ports, if they tell metrics.
MAX_METRICS_PORTS, MAX_PORT = 64, 65535
# Connections to the address where one replica shows its metrics.
MAX_METRICS_CONNECTIONS = 64
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
TOLD_PATHS = ("/metrics", "/health")
# Processes of a replica over several hosts are started here, and told of each other.
OF_HOSTS = ("nnodes", "node_rank", "master_addr", "master_port", "headless")
OF_HOSTS += ("hosts_secret_file",)
READY_POLL_S = 0.1
# What a process asks for that a bundle of a placement group can have, and what else.
BUNDLED = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")
NOT_BUNDLED = ("runtime_env",)
_PLACE = "jaxspec.serve.ray_app:build"
_HINT = "See deploy/README.md for what it takes besides the server's flags."


# No checks by jaxtyping in the tests: the class has its own, with better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many replicas there are, and where; names and meanings are Ray Serve's.

    A Serve config file can say all of Ray's under `deployments` as well, which wins.
    But `ray_actor_options` of several `hosts` must be here: placement groups and the
    processes beside the first are made from these alone.

    Attributes:
        num_replicas: Always so many; one, unless `autoscaling_config` is given.
        autoscaling_config: `min_replicas`, `max_replicas`, `target_ongoing_requests`...
        ray_actor_options: What a replica needs, on each of its hosts, say
            {"num_gpus": 1}: Ray hides GPUs from a replica that does not ask for them.
        hosts: Processes of each replica, over which its target is spread; a placement
            group has them all or none.
        placement_group_strategy: "STRICT_SPREAD" for one on each machine; "PACK" for
            as few machines as can be.
        max_ongoing_requests: Requests that one replica is given at a time.
        session_affinity: Send requests with one X-Session-Id to one replica, which has
            their common prefix in its pages. Not behind HAProxy.
        metrics_host: Where each replica tells its own /metrics and /health.
        metrics_port: The first that is free from here on; None: only through Ray's
            proxy, which asks any one replica.
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
            hint = "Its initial_replicas says how many there are at first."
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
        """What one process of a replica needs, as placement groups have it."""
        asked = self.ray_actor_options or {}
        named = {"CPU": asked.get("num_cpus", 1), "GPU": asked.get("num_gpus", 0)}
        bundle = named | {"memory": asked.get("memory", 0)}
        bundle |= asked.get("resources") or {}
        if (kind := asked.get("accelerator_type")) is not None:
            # So little that any number of processes fits: Ray's own way to ask for it.
            bundle[f"accelerator_type:{kind}"] = 0.001
        return {name: count for name, count in bundle.items() if count}

    def _check_bundle(self) -> None:
        name, asked = "ray_actor_options", self.ray_actor_options or {}
        known = (*BUNDLED, *NOT_BUNDLED)
        if not asked.keys() <= set(known):
            allowed = "with several hosts a mapping of " + ", ".join(known)
            hint = "Bundles of a placement group cannot ask for anything else."
            raise wrong_argument(ConfigError, name, allowed, asked, hint)
        if not isinstance(asked.get("resources"), dict | None):
            allowed = "a mapping, with a mapping of numbers as resources"
            raise wrong_argument(ConfigError, name, allowed, asked)
        if not self.bundle:
            allowed = "with several hosts a mapping that asks for something"
            hint = "An empty bundle of a placement group has no place."
            raise wrong_argument(ConfigError, name, allowed, asked, hint)


def build(arguments: dict[str, Any]) -> Any:
    """Make the application of Ray Serve, a `ray.serve.Application`.

    Args:
        arguments: Flags of `python -m jaxspec.serve` by name, but those of its socket,
            and the fields of `Placement`. On a command line all values are text.

    Raises:
        ConfigError: A value cannot work, or Ray is not there.
        UnsupportedError: One asks for what the engine does not do.
    """
    return make_application(*read_arguments(arguments))


def make_application(
    options: Options, placement: Placement, replica: type["Replica"] | None = None
) -> Any:
    """Have Ray Serve run replicas; see `build`.

    Args:
        replica: The class of them, which Ray imports where they run.
    """
    serve = _ray_serve()
    chosen: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": placement.max_ongoing_requests,
        "graceful_shutdown_timeout_s": options.shutdown_timeout + LAST_WORDS_S,
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
    """Read what `build` is given; needs no Ray.

    Raises:
        ConfigError: A value cannot work.
        UnsupportedError: One asks for what the engine does not do.
    """
    own = {item.name for item in fields(Placement)}
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    for name in sorted(listening_flags() & named.keys() - {"uvicorn_log_level"}):
        raise wrong_argument(
            ConfigError,
            name,
            "left out under Ray Serve, which listens itself",
            named[name],
            "Say it in http_options of Serve's config file.",
            told_as=f"{_PLACE}: {name}",
        )
    for name in OF_HOSTS:
        if name in named:
            allowed, value = "left out under Ray Serve", named[name]
            hint = "Say with hosts over how many a replica is spread: it starts them."
            raise wrong_argument(ConfigError, name, allowed, value, hint)
    flags = {name: value for name, value in named.items() if name not in own}
    placed = {name: _read(value) for name, value in named.items() if name in own}
    options = read_values(_PLACE, flags)
    if options.settings.enable_request_id_headers:
        hint = "Ray Serve writes X-Request-Id into every answer, and would do it twice."
        name = "enable_request_id_headers"
        raise wrong_argument(ConfigError, name, "off under Ray Serve", True, hint)
    if "max_ongoing_requests" not in placed and options.engine.max_num_seqs:
        placed["max_ongoing_requests"] = options.engine.max_num_seqs
    return options, Placement(**placed)


def _read(value: Any) -> Any:
    """Read a value that is JSON; another text is itself."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(value)
    return value


def _ray_serve() -> Any:
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(
            f"{_PLACE} needs Ray Serve, which is not installed here ({error}). Install "
            "the extra `ray` on every machine of the cluster: from the checkout, "
            "pip install '.[ray]'. One server needs none of it: python -m "
            "jaxspec.serve."
        ) from error


def _affine() -> dict[str, Any]:
    """Ray's router by the hash of a session's name."""
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
    """The engine behind the server's application, as Ray Serve runs it.

    Ray makes it in an actor, asks it for its application, and ends it once its requests
    have. It is given requests when the first program is there.
    """

    def __init__(self, options: Options, placement: Placement):
        self._options, self._placement = options, placement
        set_up_log(options.listening.uvicorn_log_level)
        arguments = options.engine
        # Kept, as Ray ends actors that nobody knows any more.
        self._followers: list[Any] = []
        with contextlib.ExitStack() as stack:
            if placement.hosts > 1:
                secret = secrets.token_hex()
                path = stack.enter_context(_kept_secret(secret))
                hosts, self._followers, calls = _lead(options, placement, secret)
                stack.enter_context(_followers_failures(calls))
                arguments = replace(arguments, **hosts, hosts_secret_file=path)
            engines = make_engines(arguments)
        warm_up(engines, options.warm_up)
        self.engine = AsyncLLMEngine(*engines)
        # Behind a proxy it would be asked while others are ready.
        while self.engine.num_warming and not self.engine.is_ready:
            time.sleep(READY_POLL_S)
        freeze_heap()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self.engine, self._options.settings, self._life)

    async def check_health(self) -> None:
        """Return unless the engine has ended: Ray replaces the replica that raises.

        Whether the engine is busy does not matter, as when it compiles.

        Raises:
            EngineDeadError: It has.
        """
        if self.engine.errored:
            raise self.engine.dead_error

    @contextlib.asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        """Tell metrics meanwhile; Ray leaves when no request runs any more."""
        serving: Serving = app.state.serving
        settings = self._options.settings
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._placement.metrics_port is not None:
                    await stack.enter_async_context(
                        _listen(app, self._placement, settings)
                    )
                yield
                # Nobody is connected to these, so that Ray does not count them.
                await serving.background.wait(self._options.shutdown_timeout)
        finally:
            await asyncio.to_thread(self.engine.shutdown, LAST_WORDS_S)


class HostProcess:
    """What Ray runs on every host of a replica but the first."""

    def follow(
        self, arguments: AsyncEngineArgs, secret: str, log_level: str, **hosts: Any
    ) -> None:
        """Do as the replica does, until it ends.

        Args:
            hosts: What else `arguments` has to say of the processes.
        """
        set_up_log(log_level)
        with _kept_secret(secret) as path:
            own = replace(arguments, **hosts, hosts_secret_file=path)
            follower = Follower.start(own.create_engine_config())
        follower.run()


def _lead(
    options: Options, placement: Placement, secret: str
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Start the other processes of this replica, each in a bundle of its own.

    Returns:
        What the arguments of all processes have to say of them, the actors of the
        others, and Ray's references of what these do. They find this process once its
        engine is being made.
    """
    ray: Any = importlib.import_module("ray")
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    common = {
        "nnodes": placement.hosts,
        "master_addr": ray.util.get_node_ip_address(),
        "master_port": _free_ports(),
    }
    asked = placement.ray_actor_options or {"num_cpus": 1}
    actors, calls = [], []
    group = ray.util.get_current_placement_group()
    for rank in range(1, placement.hosts):
        strategy = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        )
        made = ray.remote(HostProcess).options(**asked, scheduling_strategy=strategy)
        actors.append(made.remote())
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
def _followers_failures(calls: list[Any]) -> Iterator[None]:
    """Add why followers have failed to what fails here.

    Here it is only known that they did not come; the reason would be in the log of a
    worker on another machine.
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
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is told
                # Ray's own has the text of a traceback.
                reason = getattr(failure, "cause", None) or failure
                reasons.append(f"node_rank={calls.index(call) + 1}: {reason!r}")
        if not reasons:
            raise
        raise RuntimeError(
            f"{error} Processes on other hosts had failed: {'; '.join(reasons)}."
        ) from error


@contextlib.contextmanager
def _kept_secret(secret: str) -> Iterator[str]:
    """A file of this user's alone, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        path.write_text(secret)
        yield str(path)


def _free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on.

    Another process may take one before the engine does: then the engine cannot be made,
    and Ray starts the replica again.
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


class _Listener(uvicorn.Server):
    """Leaves signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _listen(
    app: FastAPI, placement: Placement, settings: ServerSettings
) -> AsyncIterator[None]:
    """Tell one replica's metrics at an address of its own."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["path"] in TOLD_PATHS
        await (app if known else Response(status_code=404))(scope, receive, send)

    bound = _bind(placement)
    limits = ConnectionLimits(
        max_connections=MAX_METRICS_CONNECTIONS,
        read_headers_s=DEFAULT_READ_HEADERS_S,
        read_body_s=settings.timeout_read_body,
    )
    serving: Serving = app.state.serving
    config = uvicorn.Config(
        told,
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
    """Bind the first port that is free from `metrics_port` on."""
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
        f"Metrics cannot be told on {host}, at none of {MAX_METRICS_PORTS} ports from "
        f"{first} on: {failed}. Choose another metrics_port or metrics_host.",
        parameter="metrics_port",
        value=first,
    )

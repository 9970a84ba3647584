"""Tests of Ray Serve's arguments, of a replica without Ray, and of replicas in Ray."""

import asyncio
import contextlib
import importlib.util
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.serve import ray_app
from jaxspec.serve.flags import listening_flags
from jaxspec.serve.ray_app import Placement, Replica, build, read_arguments
from tests.support.fake_engines import letters, make_fake_engine, said
from tests.support.processes import environment
from tests.support.programs import ROOT
from tests.support.serving import COMPLETIONS, PROMPT, TurnsTokenizer, post


def test_default_is_one_replica_of_bundled_pair():
    options, placement = read_arguments({})
    engine = options.engine
    assert (engine.model, engine.speculative_model) == (BUNDLED_TARGET, BUNDLED_DRAFT)
    assert placement == Placement()


def test_command_line_equals_file():
    scaling = {"min_replicas": 1, "max_replicas": 4}
    named: dict[str, Any] = {
        "model": "m",
        "served_model_name": "gemma",
        "speculative_model": "d",
        "num_speculative_tokens": 3,
        "max_num_seqs": 12,
        "enable_prefix_caching": False,
        "enable_auto_tool_choice": True,
        "speculative_config": {"method": "ngram"},
        "allowed_origins": ["a", "b"],
        "shutdown_timeout": 9,
        "autoscaling_config": scaling,
        "session_affinity": True,
        "metrics_port": 8001,
    }
    text = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in named.items()
    }
    (options, placement), (of_text, placed) = map(read_arguments, (named, text))
    assert placed == placement
    assert (of_text.engine, of_text.settings) == (options.engine, options.settings)
    assert of_text.shutdown_timeout == options.shutdown_timeout == 9
    assert options.settings.served_model_names == ("gemma",)
    assert options.settings.allowed_origins == ("a", "b")
    assert options.settings.enable_auto_tool_choice
    assert options.engine.enable_prefix_caching is False
    assert options.engine.speculative_config == {"method": "ngram"}
    assert placement.autoscaling_config == scaling
    assert placement.session_affinity
    # By default it is max_num_seqs, if that is given.
    assert (placement.max_ongoing_requests, placement.metrics_port) == (12, 8001)
    named["max_ongoing_requests"] = 40
    assert read_arguments(named)[1].max_ongoing_requests == 40


def test_bundle_has_the_resources_of_processes():
    def bundle(hosts: Any, **needs: Any) -> dict[str, float]:
        given = {"ray_actor_options": needs} if needs else {}
        return read_arguments(given | {"hosts": hosts})[1].bundle

    needs: dict[str, Any] = {"num_cpus": 2, "resources": {"TPU": 4}}
    assert bundle(4, **needs) == {"CPU": 2, "TPU": 4}
    assert bundle("2") == {"CPU": 1}
    assert bundle(2, num_cpus=0, num_gpus=1) == {"GPU": 1}
    more = {"memory": 2**30, "accelerator_type": "TPU-V5E", "runtime_env": {}}
    kept = {"memory": 2**30, "accelerator_type:TPU-V5E": 0.001}
    assert bundle(4, **needs, **more) == {"CPU": 2, "TPU": 4} | kept


def _needs(**needs: Any) -> dict[str, Any]:
    return {"hosts": 2, "ray_actor_options": needs}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": "m"}, "'modle'"),
        ({"help": True}, "'help'"),
        ({"num_speculative_tokens": "many"}, "num-speculative-tokens"),
        ({"enable_auto_tool_choice": "perhaps"}, "enable-auto-tool-choice"),
        ({"enable_request_id_headers": "true"}, "itself adds X-Request-Id"),
        ({"num_replicas": 0}, "num_replicas must be"),
        ({"num_replicas": "two"}, "num_replicas must be"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "initial_replicas"),
        ({"autoscaling_config": "[1]"}, "autoscaling_config must be a mapping"),
        ({"ray_actor_options": "gpu"}, "ray_actor_options must be a mapping"),
        (_needs(label_selector={"a": "b"}), "cannot reserve anything else"),
        (_needs(resources="TPU"), "a mapping of numbers"),
        (_needs(num_cpus=0), "that requests some resource, got {'num_cpus': 0}"),
        ({"session_affinity": "perhaps"}, "session_affinity must be"),
        ({"metrics_port": 0}, "metrics_port must be"),
        ({"hosts": 0}, "hosts must be"),
        ({"placement_group_strategy": "ANY"}, "placement_group_strategy must be"),
        ({"nnodes": 2}, "Set hosts"),
        ({"hosts-secret-file": "x"}, "Set hosts"),
        *[
            ({name.replace("_", "-"): "x"}, "Ray Serve, whose proxy listens")
            for name in sorted(listening_flags() - {"uvicorn_log_level"})
        ],
    ],
)
def test_rejects_invalid_arguments(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        read_arguments(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_ray_error_names_extra(monkeypatch: pytest.MonkeyPatch):
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)  # makes `import ray` fail
    with pytest.raises(ConfigError, match=r"jaxspec-decoding\[ray\]") as caught:
        build({"model": "m"})
    assert "\n" not in str(caught.value)
    # Invalid arguments are reported before a missing Ray.
    with pytest.raises(ConfigError, match="modle"):
        build({"modle": "m"})


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """Make a replica as Ray does, on a fake device.

    The first port for its metrics is in use, as if by another replica on the machine.
    """
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    monkeypatch.setattr(ray_app, "make_engines", lambda arguments: [engine])
    monkeypatch.setattr(ray_app, "set_up_log", lambda level: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = {"warm_up": "none", "metrics_port": port, "served_model_name": "g"}
        made = Replica(*read_arguments(arguments))
        yield made
        made.engine.shutdown(10)


def metrics_port(caplog: pytest.LogCaptureFixture) -> int:
    """Return the port of a replica's metrics: the first free one, from its log."""
    (port,) = re.findall(r"metrics: http://127.0.0.1:(\d+)/", caplog.text)
    return int(port)


def test_replica_answers_until_it_is_shut_down(
    replica: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, ray_app.__name__)

    async def live() -> None:
        app = await replica.__serve_build_asgi_app__()
        await replica.check_health()
        background, has_ended = app.state.serving.background, []

        async def work() -> None:
            await asyncio.sleep(0.3)
            has_ended.append(True)

        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server"
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(app.router.lifespan_context(app))
            await stack.enter_async_context(client)
            port = metrics_port(caplog)
            assert port > replica._placement.metrics_port
            scraper = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
            await stack.enter_async_context(scraper)
            answer = await post(client, COMPLETIONS, prompt=PROMPT, max_tokens=9)
            assert answer["choices"][0]["text"] == letters(said(9))
            assert answer["model"] == "g"
            scrape = (await scraper.get("/metrics")).text
            assert 'vllm:request_success_total{engine="0"' in scrape
            assert (await scraper.get("/health")).status_code == 200
            # The address for metrics serves no requests.
            body = {"model": "g", "prompt": "a"}
            assert (await scraper.post(COMPLETIONS, json=body)).status_code == 404
            await background.start(("", "one"), work())
        # Ray has stopped the replica, which has waited for background responses. Its
        # engine has ended and the port is free.
        assert has_ended
        assert ("", "one") not in background
        assert not replica.engine.is_running
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(live())


def test_slow_metrics_clients_are_closed(
    replica: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ray_app, "DEFAULT_READ_HEADERS_S", 0.2)
    caplog.set_level(logging.INFO, ray_app.__name__)

    async def live() -> None:
        app = await replica.__serve_build_asgi_app__()
        async with app.router.lifespan_context(app), asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", metrics_port(caplog)
            )
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    asyncio.run(live())


def test_unhealthy_after_engine_death(replica: Replica):
    asyncio.run(replica.check_health())
    replica.engine._drivers[0].thread.dead_error = EngineDeadError("boom")
    with pytest.raises(EngineDeadError, match="boom"):
        asyncio.run(replica.check_health())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Replace Ray's modules; return other hosts' errors by rank, for tests to set."""
    failures: dict[str, Exception] = {}

    def wait(calls: list[str], num_returns: int, timeout: float) -> Any:
        assert (num_returns, timeout) == (len(calls), 0)
        return [one for one in calls if one in failures], []

    def get(call: str) -> None:
        raise failures[call]

    module = MagicMock(spec=["remote", "wait", "get", "util"], wait=wait, get=get)
    names = ["get_node_ip_address", "get_current_placement_group"]
    module.util = MagicMock(spec=names)
    module.util.get_node_ip_address.return_value = "127.0.0.1"
    actor = module.remote.return_value.options.return_value.remote.return_value
    actor.follow.remote = lambda *_, node_rank, **hosts: f"call {node_rank}"
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.util", module.util)
    strategies = MagicMock(spec=["PlacementGroupSchedulingStrategy"])
    strategies.PlacementGroupSchedulingStrategy = (
        lambda group, placement_group_bundle_index: ()
    )
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    return failures


def test_error_has_reason_of_failed_follower(
    ray: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
):
    def fail(arguments: Any) -> Any:
        assert arguments.nnodes == 3
        raise ConfigError("A process is missing.")

    monkeypatch.setattr(ray_app, "make_engines", fail)
    monkeypatch.setattr(ray_app, "set_up_log", lambda level: None)
    arguments = read_arguments({"hosts": 3})
    with pytest.raises(ConfigError, match=r"^A process is missing\.$"):
        Replica(*arguments)
    ray["call 2"] = OSError("traceback of Ray")
    ray["call 2"].cause = OSError("no such model")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"^A process is missing\. .*") as caught:
        Replica(*arguments)
    assert "node_rank=2: OSError('no such model')" in str(caught.value)
    assert "node_rank=1" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ConfigError)


# Ray runs in its own environment if there is one, else in this one.
RAYS = Path(sys.prefix) / "ray" / "bin" / "python"
LIMIT_S = 900
# A network namespace with only loopback. When its first process ends, all end.
_ALONE = "unshare --net --pid --fork --kill-child --mount-proc sh -c".split()
_UP = 'ip link set lo up && exec "$@"'


def isolated(words: list[str]) -> list[str]:
    """Wrap a command to run it in a network namespace of its own."""
    return [*_ALONE, _UP, "sh", *words]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of ray_calls.py for replicas."""
    return run_under_ray("replicas")


def run_under_ray(what: str) -> dict[str, Any]:
    """Run a part of ray_calls.py under Ray; return its results."""
    here = importlib.util.find_spec("ray")
    python = sys.executable if here else RAYS
    if not here and not RAYS.exists():
        pytest.skip("Ray is not installed: `make test-all` installs it into .venv/ray")
    # Ray listens on all interfaces, so it runs in a network namespace.
    allowed = subprocess.run(isolated(["true"]), capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"no network namespace for Ray: {allowed.stderr.strip()}")
    # Ray's socket files need short paths.
    folder = tempfile.mkdtemp(prefix="ray")
    try:
        done = subprocess.run(
            isolated([str(python), "-m", "tests.serve.ray_calls", folder, what]),
            cwd=ROOT,
            env=environment(num_devices=1)
            | {
                # Ray writes a key into this folder.
                "HOME": folder,
                "JAXSPEC_TEST_DELAY": f"{folder}/delay",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_replicas_have_texts_of_one_process(results: dict[str, Any]):
    assert results["models"] == ["gemma"]
    assert len(set(results["texts"])) >= 5
    for name in ("from_replicas", "after_replacement", "after_all"):
        assert results[name] == results["texts"], name
    assert results["masked_from_replicas"] == results["masked_texts"]
    assert all("hats and" in one for one in results["masked_texts"])
    # Both replicas have served some requests.
    assert len(results["answered"]) == 2
    assert min(results["answered"].values()) > 0
    assert sum(results["answered"].values()) == len(results["texts"])


@pytest.mark.slow
def test_ray_parses_manifest(results: dict[str, Any]):
    assert results["manifest"] == [f"{ray_app.__name__}:{build.__name__}"]


@pytest.mark.slow
def test_requests_of_a_session_reach_one_replica(results: dict[str, Any]):
    before, after = results["answered_before_session"], results["answered_with_session"]
    more = sorted(after[port] - before[port] for port in before)
    assert more == [0, 6]


@pytest.mark.slow
def test_killed_replica_loses_only_its_own_requests(results: dict[str, Any]):
    before, lost = results["running_before_kill"], results["ran_on_the_killed"]
    assert len(before) == 2
    assert sum(before.values()) == 4
    kept = {"same": 4 - lost, "cut": lost}
    assert results["after_kill"] == {kind: n for kind, n in kept.items() if n}


@pytest.mark.slow
def test_scale_down_finishes_requests(results: dict[str, Any]):
    assert sum(results["running_before_scaling"].values()) == 4
    assert results["states_while_draining"] == {"RUNNING": 1, "STOPPING": 1}
    # Both replicas still had running requests.
    assert min(results["running_while_draining"].values()) > 0
    assert results["unfinished_while_draining"] == 4
    assert results["after_scaling"] == {"same": 4}


@pytest.mark.slow
def test_replica_of_two_processes_has_texts_of_one_and_restarts():
    results = run_under_ray("hosts")
    assert results["from_two"] == results["texts"]
    for who in ("HostProcess", "ServeReplica"):
        # Both running requests break off: no process continues without the other.
        assert results[f"{who} cut"] == 2
        assert results[f"after {who}"] == results["texts"]
        assert results[f"{who} back_s"] < LIMIT_S / 4

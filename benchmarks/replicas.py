"""What Ray Serve adds to a request and to a token, against a server without it.

    .venv/ray/bin/python -m benchmarks.replicas

The bundled target without drafts, so that every token is an event of its own, at batch
1: a server, and one replica under Ray Serve, in turn and both running all the time,
behind Ray's own proxy and behind HAProxy. Ray listens on all interfaces, so that all of
it runs in a network that has only this machine in it (Linux, as root).
Writes benchmarks/results/replicas-cpu.json.
"""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.client import Chunks, read_stream
from benchmarks.server import is_ready, num_warming, read_totals, served
from jaxspec.bench.report import record, spread
from jaxspec.engine.model_folders import BUNDLED_TARGET
from jaxspec.serve.ray_app import NAME, build

RESULT = Path(__file__).with_name("results") / "replicas-cpu.json"
ROOT = Path(__file__).parents[1]
PORT, METRICS_PORT = 8000, 8100
PROXIES = {"python": "0", "haproxy": "1"}
ENGINE = {"model": BUNDLED_TARGET, "max_num_seqs": 4, "max_model_len": 512}
NUM_TOKENS = 100
# Of GET /version, which no engine has a part in.
NUM_VERSIONS = 100
LONGEST_S = 1800.0
# A network with nothing but loopback, and processes that end with the first of them.
_ALONE = "unshare --net --pid --fork --kill-child --mount-proc sh -c".split()
_UP = 'ip link set lo up && exec "$@"'


def alone(words: list[str]) -> list[str]:
    """A command as it runs in a network that has only this machine in it."""
    return [*_ALONE, _UP, "sh", *words]


@contextlib.contextmanager
def replica(folder: str) -> Iterator[httpx.Client]:
    """One replica under Ray Serve, all of whose programs are there."""
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")
    # The paths of Ray's sockets must be short.
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 2**20,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        arguments = ENGINE | {"metrics_port": METRICS_PORT, "num_replicas": 1}
        serve.run(build(arguments), name=NAME, route_prefix="/")
        url = f"http://127.0.0.1:{PORT}"
        with httpx.Client(base_url=url, timeout=60) as client:
            end = time.monotonic() + LONGEST_S
            while not is_ready(client) or num_warming(read_totals(client)):
                assert time.monotonic() < end, "it takes too long"
                time.sleep(0.2)
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(client: httpx.Client, requests: int) -> dict[str, list[float]]:
    """Milliseconds of /version, to first tokens, and of each token after that."""
    found: dict[str, list[float]] = {
        "version_ms": [],
        "first_token_ms": [],
        "token_ms": [],
    }
    for _ in range(NUM_VERSIONS):
        start = time.perf_counter()
        client.get("/version").raise_for_status()
        found["version_ms"].append(1e3 * (time.perf_counter() - start))
    for _ in range(requests):
        start = time.monotonic()
        chunks = read_stream(client, Chunks(), num_tokens=NUM_TOKENS)
        first, last = chunks.times[0], chunks.times[-1]
        tokens = chunks.totals[-1] - chunks.totals[0]
        assert chunks.totals[-1] == NUM_TOKENS
        found["first_token_ms"].append(1e3 * (first - start))
        found["token_ms"].append(1e3 * (last - first) / tokens)
    return found


def compare(rounds: int, requests: int) -> dict[str, Any]:
    """Ask a server and a replica in turn; all numbers of each, and what Ray adds.

    What it adds is the median, over rounds, of the difference of their medians: the two
    halves of a round are seconds apart.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    found: dict[str, list[dict[str, dict[str, float]]]] = {"server": [], "ray": []}
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,
        served(flags) as (_, server, _),
        replica(folder) as under_ray,
    ):
        clients = {"server": server, "ray": under_ray}
        for client in clients.values():
            ask(client, 2)  # what happens the first time only
        for number in range(rounds):
            order = list(clients) if number % 2 else list(clients)[::-1]
            for name in order:
                told = ask(clients[name], requests)
                found[name].append({one: spread(ms) for one, ms in told.items()})
    added = {
        one: spread(
            [
                of_ray[one]["median"] - of_server[one]["median"]
                for of_ray, of_server in zip(found["ray"], found["server"], strict=True)
            ]
        )
        for one in found["ray"][0]
    }
    return {"added": added, "rounds": found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare behind each proxy, each in a process and a network of its own."""
    found: dict[str, Any] = {}
    for proxy, is_haproxy in PROXIES.items():
        words = [sys.executable, "-m", "benchmarks.replicas", "--inside"]
        words += ["--rounds", str(options.rounds), "--requests", str(options.requests)]
        # Ray keeps a key at home, and Serve reads its variable when it is imported.
        with tempfile.TemporaryDirectory() as home:
            own = os.environ | {
                "HOME": home,
                "RAY_SERVE_ENABLE_HA_PROXY": is_haproxy,
                "RAY_USAGE_STATS_ENABLED": "0",
            }
            own.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
            done = subprocess.run(
                alone(words), cwd=ROOT, env=own, stdout=subprocess.PIPE, check=True
            )
        found[proxy] = json.loads(done.stdout.decode().splitlines()[-1])
        print(proxy, json.dumps(found[proxy]["added"]), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What Ray Serve adds.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=12, help="of each round")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(compare(options.rounds, options.requests)))
        return
    load = os.getloadavg()
    found = {
        "tokens": NUM_TOKENS,
        "requests_a_round": options.requests,
        "load_before": [round(one, 2) for one in load],
        "proxies": measure(options),
        "ray": importlib.import_module("ray").__version__,
    }
    command = ".venv/ray/bin/python -m benchmarks.replicas"
    print(json.dumps(record(found, options.out, command=command)))


if __name__ == "__main__":
    main()

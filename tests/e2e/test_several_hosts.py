"""A target over several processes, acting as hosts, returns the texts of one process.

The processes connect over loopback on a CPU, and each has two of XLA's host devices.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxspec.engine.multihost.channel import HEARTBEAT_S, HOST_LOST
from tests.checkpoints.models import write_tiny
from tests.support.processes import environment, free_port

ROOT = Path(__file__).parents[2]
DEVICES_EACH = 2
# The limit is long, because two processes share two cores with other tests.
PATIENCE_S = 540
DRAFTS, WINDOW = 3, 16
IN_SUITE = pytest.mark.long_suite(name="several_hosts")
JAX_ENDS = "Terminating process because the JAX distributed service detected fatal err"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target that is its own draft model, so that most drafts are accepted."""
    folder = tmp_path_factory.mktemp("hosts") / "target"
    write_tiny(folder, family="2b", vocab_size=8192, sliding_window=WINDOW)
    return folder


def arguments(model: Path, *, num_devices: int, **changes: Any) -> dict[str, Any]:
    """Return keyword arguments of `EngineArgs`."""
    return (
        dict(
            model=str(model),
            speculative_model=str(model),
            num_speculative_tokens=DRAFTS,
            tensor_parallel_size=num_devices,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            block_size=4,
            num_gpu_blocks_override=160,
        )
        | changes
    )


def flags(values: dict[str, Any]) -> list[str]:
    """Convert engine arguments to flags of the server."""
    found: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        found += [flag] if value is True else [f"{flag}={text}"]
    return found


class Hosts:
    """Starts the processes of one test, and stores their logs."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, dict[str, subprocess.Popen[bytes]]()
        secret = folder / "secret"
        secret.write_text("known to all that take part")
        self.shared: dict[str, Any] = dict(
            nnodes=2, master_port=free_port(), hosts_secret_file=str(secret)
        )

    def start(self, name: str, command: list[str], num_devices: int) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, *command],
                env=environment(num_devices),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def lead(
        self, given: dict[str, Any], num_devices: int, name: str = "leader"
    ) -> Path:
        """Start a process with an engine; return the path of its results."""
        path, result = self.folder / f"{name}.json", self.folder / f"{name}-result"
        path.write_text(json.dumps(given | {"result": str(result)}))
        self.start(name, ["-m", "tests.e2e.several_hosts", str(path)], num_devices)
        return result

    def follow(self, values: dict[str, Any]) -> None:
        more = self.shared | {"node_rank": 1, "headless": True}
        command = ["-m", "jaxspec.serve", *flags(values | more)]
        self.start("follower", command, DEVICES_EACH)

    def wait(self, name: str, timeout_s: float | int = PATIENCE_S) -> int:
        try:
            return self.started[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            logs = "\n".join(f"--- {one}\n{self.log(one)}" for one in self.started)
            pytest.fail(f"{name} has not ended after {timeout_s} s\n{logs}")

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has logged the given text."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log(name):
            assert self.started[name].poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        for process in made.started.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()


def result_of(hosts: Hosts, name: str, path: Path) -> dict[str, Any]:
    assert hosts.wait(name) == 0, hosts.log(name)
    return json.loads(path.read_text())


@IN_SUITE
@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
def test_two_processes_give_the_texts_of_one_process(
    hosts: Hosts, model: Path, controller: str
):
    values = arguments(
        model,
        num_devices=2 * DEVICES_EACH,
        speculative_config={"controller": controller},
    )
    work = dict(warms_up=True, sleeps=[1, 2])
    alone = hosts.lead(
        work | {"arguments": values}, num_devices=2 * DEVICES_EACH, name="alone"
    )
    expected = result_of(hosts, "alone", alone)
    path = hosts.lead(work | {"arguments": values | hosts.shared}, DEVICES_EACH)
    hosts.follow(values)
    found = result_of(hosts, "leader", path)
    assert hosts.wait("follower") == 0, hosts.log("follower")
    for name in ("texts", "after sleep 1", "after sleep 2"):
        assert found[name] == expected[name], name
    assert found["texts"][:2] == found["after sleep 2"]
    assert found["num_accepted"] > 0
    # The longest prompt has 58 tokens: its first local pages are freed.
    assert found["local_window"] == WINDOW
    # Only the leader computes masks.
    assert found["num_questions"] > 0
    end = f"The leader ended normally after {found['num_launches']} launches"
    assert end in hosts.log("follower")
    if controller == "adaptive":
        assert found["num_timed"] > 0 and len(found["ks"]) > 1


@contextlib.contextmanager
def serve(hosts: Hosts, model: Path) -> Iterator[httpx.Client]:
    """Start a server and a follower; yield a client when the server is ready."""
    values = arguments(model, num_devices=2 * DEVICES_EACH)
    port = free_port()
    command = ["-m", "jaxspec.serve", *flags(values | hosts.shared), f"--port={port}"]
    hosts.start("leader", command, DEVICES_EACH)
    hosts.follow(values)
    hosts.wait_for("leader", "The server is ready")
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        assert complete(client, 8).status_code == 200
        yield client


def complete(client: httpx.Client, num_tokens: int) -> httpx.Response:
    body: dict[str, Any] = dict(
        prompt=[2, 5, 9], max_tokens=num_tokens, ignore_eos=True
    )
    return client.post("/v1/completions", json=body)


@contextlib.contextmanager
def load(client: httpx.Client) -> Iterator[list[object]]:
    """Run four threads that send requests one by one; yield a list of results."""
    ends, over = list[object](), threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                ends.append(complete(client, 64).status_code)
            except httpx.TransportError as error:
                ends.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while len(ends) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        yield ends
    finally:
        over.set()
        for thread in threads:
            thread.join()


@IN_SUITE
@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("follower", signal.SIGKILL),
        ("leader", signal.SIGKILL),
        ("follower", signal.SIGSTOP),
    ],
)
def test_all_processes_end_if_one_ends(
    hosts: Hosts, model: Path, who: str, number: signal.Signals
):
    other = {"follower": "leader", "leader": "follower"}[who]
    with serve(hosts, model) as client, load(client) as ends:
        assert ends[:4] == [200] * 4
        hosts.started[who].send_signal(number)
        start = time.monotonic()
        status = hosts.wait(other)
        took_s = time.monotonic() - start
    assert took_s < 3 * HEARTBEAT_S, hosts.log(other)
    assert status != 0
    if number == signal.SIGKILL:
        # The remaining process reports at once that the connection was closed.
        assert took_s < HEARTBEAT_S, hosts.log(other)
    if status == -signal.SIGABRT and who == "leader":
        # Or jax noticed first that the process had ended.
        assert JAX_ENDS in hosts.log(other)
    elif number == signal.SIGKILL:
        assert status == HOST_LOST, hosts.log(other)
        called = "The process with node_rank=1" if who == "follower" else "The leader"
        assert called in hosts.log(other)
        assert "This process ends too: restart all processes." in hosts.log(other)
    print(f"{other} has ended {took_s:.1f} s after {number.name} to {who}: {status}")


@IN_SUITE
def test_group_shuts_down_cleanly_on_signal(hosts: Hosts, model: Path):
    """All processes get the signal at once; the follower lets requests finish."""
    with serve(hosts, model) as client:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(complete(client, 100)))
        asking.start()
        time.sleep(0.5)
        for process in hosts.started.values():
            process.send_signal(signal.SIGTERM)
        asking.join()
    assert hosts.wait("leader") == 0, hosts.log("leader")
    assert hosts.wait("follower") == 0, hosts.log("follower")
    assert answers[0].json()["usage"]["completion_tokens"] == 100


@IN_SUITE
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_num_seqs=5), "max_num_seqs: 5 there, and 4 at the leader"),
        (dict(block_size=8), "block_size: 8 there, and 4 at the leader"),
    ],
)
def test_different_command_lines_fail_at_start(
    hosts: Hosts, model: Path, changes: dict[str, Any], message: str
):
    values = arguments(model, num_devices=2 * DEVICES_EACH)
    hosts.lead({"arguments": values | hosts.shared}, DEVICES_EACH)
    hosts.follow(values | changes)
    assert hosts.wait("leader", 120) == 1
    assert hosts.wait("follower", 120) == 2
    for name in ("leader", "follower"):
        log = " ".join(hosts.log(name).split())
        assert f"differs from the leader in {message}" in log


@IN_SUITE
def test_unused_devices_are_reported(hosts: Hosts, model: Path):
    values = arguments(model, num_devices=2)
    hosts.lead({"arguments": values | hosts.shared}, DEVICES_EACH)
    hosts.follow(values)
    assert hosts.wait("leader", 120) != 0
    assert hosts.wait("follower", 120) != 0
    message = "tensor_parallel_size=2, but the 2 processes have 4 devices together"
    assert message in hosts.log("leader")

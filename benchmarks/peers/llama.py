"""llama.cpp's `llama-server`, one for every batch size; see `answer`.

The time includes HTTP, over new connections for every batch: the server closes
connections that are idle during other peers' turns.
"""

import http.client
import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from answer import answer

LONGEST_START_S = 120.0
# Names of one option in several versions of the server.
MOST_DRAFTS = ("--spec-draft-n-max", "--draft-max")
FEWEST_DRAFTS = ("--spec-draft-n-min", "--draft-min")
LEAST_PROBABILITY = ("--spec-draft-p-min", "--draft-p-min")
KIND_OF_DRAFT = "draft-simple"  # a draft model; older versions lack the option
DRAFT_THREADS = ("--spec-draft-threads", "--threads-draft")
DRAFT_KEY_TYPE = ("--spec-draft-type-k", "--cache-type-k-draft")
DRAFT_VALUE_TYPE = ("--spec-draft-type-v", "--cache-type-v-draft")


class Server:
    """One `llama-server` and a connection for each of its slots."""

    def __init__(self, command: list[str], batch_size: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # The server's log goes to the output of this process.
        self._process = subprocess.Popen([*command, "--port", str(port)])
        self._connections = [
            http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            for _ in range(batch_size)
        ]
        self._pool = ThreadPoolExecutor(batch_size)
        end = time.monotonic() + LONGEST_START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("llama-server did not become ready")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            self._connections[0].request("GET", "/health")
            response = self._connections[0].getresponse()
            response.read()
        except OSError:
            self._connections[0].close()
            return False
        return response.status == http.client.OK

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send requests at once, each over a connection of its own."""
        for connection in self._connections:
            connection.close()  # the next request opens it again
        return list(self._pool.map(self._ask, self._connections, requests))

    def _ask(
        self, connection: http.client.HTTPConnection, body: dict[str, Any]
    ) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        response = connection.getresponse()
        found = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"llama-server: {response.status} {found.decode()}")
        return json.loads(found)

    def stop(self) -> None:
        self._process.terminate()
        self._pool.shutdown()


class LlamaCpp:
    """One server per batch size, started at its first request."""

    def __init__(self, task: dict[str, Any]):
        self._task, self._servers = task, dict[int, Server]()
        about = subprocess.run(
            [task["server"], "--help"], capture_output=True, text=True, check=True
        ).stdout
        threads = str(task["threads"])
        self._flags = ["--threads", threads, "--threads-batch", threads]
        self._flags += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        if task["mode"] == "draft":
            wanted = {
                MOST_DRAFTS: str(task["num_drafts"]),
                FEWEST_DRAFTS: "0",
                # K drafts in every round, whatever the draft's confidence.
                LEAST_PROBABILITY: "0",
                DRAFT_THREADS: threads,
                DRAFT_KEY_TYPE: "f32",
                DRAFT_VALUE_TYPE: "f32",
            }
            for names, value in wanted.items():
                self._flags += [option(about, names), value]
            if KIND_OF_DRAFT in about:
                self._flags += ["--spec-type", KIND_OF_DRAFT]
        self._counts = {"rounds": 0, "drafted": 0, "accepted": 0}
        self.version = version_of(task["server"])
        self.settings = {"flags": " ".join(self._flags)}

    def _server(self, batch_size: int) -> Server:
        if batch_size not in self._servers:
            task = self._task
            command = [task["server"], "--model", task["target"], "--offline"]
            if task["mode"] == "draft":
                command += ["--model-draft", task["draft"]]
            room = batch_size * task["max_model_len"]
            command += ["--parallel", str(batch_size), "--ctx-size", str(room)]
            command += ["--host", "127.0.0.1", *self._flags]
            self._servers[batch_size] = Server(command, batch_size)
        return self._servers[batch_size]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        requests = [completion(prompt, num_tokens) for prompt in prompts]
        answers = self._server(len(prompts)).ask(requests)
        for one in answers:
            drafted = one["timings"].get("draft_n", 0)
            accepted = one["timings"].get("draft_n_accepted", 0)
            self._counts["drafted"] += drafted
            self._counts["accepted"] += accepted
            # The first token comes from prefill. Every other token is an accepted draft
            # or the one token that the target adds in each round.
            self._counts["rounds"] += num_tokens - 1 - accepted if drafted else 0
        if self._task["mode"] == "draft" and not self._counts["drafted"]:
            raise RuntimeError("llama-server proposed no drafts")
        return [one["tokens"] for one in answers]

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


def completion(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Return the request for a greedy text of exactly this many tokens."""
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def option(about: str, names: tuple[str, ...]) -> str:
    """Return the first of some option names that the server's help lists."""
    for name in names:
        if re.search(rf"(?<![\w-]){name}(?![\w-])", about):
            return name
    raise ValueError(f"llama-server supports none of the options {', '.join(names)}")


def version_of(server: str) -> str:
    done = subprocess.run(
        [server, "--version"], capture_output=True, text=True, check=True
    )
    found = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return found.group(1) if found else "unknown"


if __name__ == "__main__":
    engines: list[LlamaCpp] = []

    def load(task: dict[str, Any]) -> LlamaCpp:
        engines.append(LlamaCpp(task))
        return engines[0]

    try:
        answer(load)
    finally:
        for engine in engines:
            engine.stop()

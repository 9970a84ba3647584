"""The child process that runs llama.cpp's server, here with a fake server."""

import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.peers.found import HERE, Child, PeerError
from benchmarks.peers.turns import usable_cores

OPTIONS = (
    "-t, --threads N\n--spec-draft-n-max N\n--spec-draft-n-min N\n--spec-draft-p-min P"
    "\n--spec-draft-threads N\n--spec-draft-type-k T\n--spec-draft-type-v T"
    "\n--spec-type none,draft-simple\n--draft-max, --draft N  has been removed"
)
# A fake server: counts up from a prompt's last token, and logs its command line.
SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--help" in sys.argv:
    sys.exit(print({OPTIONS!r}))
if "--version" in sys.argv:
    sys.exit(print("version: 9 (abc)", file=sys.stderr))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 0.2  # of a connection that nothing comes over

    def do_GET(self):
        self.say(200, {{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["ignore_eos"] and body["temperature"] == 0
        assert not body["cache_prompt"]
        first = body["prompt"][-1]
        if first < 0:
            return self.say(500, {{"error": "negative"}})
        tokens = [first + place + 1 for place in range(body["n_predict"])]
        timings = {{}}
        if "draft-simple" in sys.argv:
            timings = {{"draft_n": 4, "draft_n_accepted": 2}}
        self.say(200, {{"tokens": tokens, "timings": timings}})

    def say(self, status, found):
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

port = int(sys.argv[sys.argv.index("--port") + 1])
with open(__file__ + ".log", "a") as log:
    print(*sys.argv[1:], file=log)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("benchmarks.peers.llama")


def start(folder: Path, mode: str, server: str = SERVER) -> Child:
    program = folder / "llama-server"
    program.write_text(server)
    program.chmod(0o755)
    task = {"server": str(program), "target": "t.gguf", "draft": "d.gguf"}
    task |= {"mode": mode, "threads": 2, "num_drafts": 5, "max_model_len": 100}
    return Child(
        [sys.executable, str(HERE / "llama.py")],
        task,
        cores=usable_cores(),
        environment=os.environ,
        limit_s=60.0,
    )


def ask(child: Child, size: int, first: int = 7) -> dict[str, Any]:
    prompts = [[2, first + place] for place in range(size)]
    request = {"prompts": prompts, "batch_size": size, "num_tokens": 4}
    return child.ask(request, 60.0)


def test_servers_run_two_batch_sizes(tmp_path):
    child = start(tmp_path, "draft")
    try:
        assert child.about["version"] == "9 (abc)"
        for size in (1, 3, 1):
            found = ask(child, size)
            texts = [[first + place for place in range(4)] for first in range(8, 11)]
            assert found["token_ids"] == texts[:size]
            # Of the 4 tokens, the first is sampled after the prompt, and 2 are accepted
            # drafts.
            counts = {"drafted": 4 * size, "accepted": 2 * size, "rounds": size}
            assert found["counts"] == counts
            time.sleep(0.3)  # meanwhile other engines would run
    finally:
        child.close()
    one, three = (tmp_path / "llama-server.log").read_text().splitlines()
    assert "--model t.gguf" in one
    assert "--model-draft d.gguf --parallel 1 --ctx-size 100 " in one
    assert "--parallel 3 --ctx-size 300 " in three
    wanted = "--spec-draft-n-max 5 --spec-draft-n-min 0 --spec-draft-p-min 0 "
    assert wanted in one
    assert one.split()[-4:-2] == ["--spec-type", "draft-simple"]


def test_plain_server_makes_no_drafts(tmp_path):
    child = start(tmp_path, "plain")
    try:
        counts = {"drafted": 0, "accepted": 0, "rounds": 0}
        assert ask(child, 2)["counts"] == counts
        with pytest.raises(PeerError, match="llama-server: 500 .*negative"):
            ask(child, 2, first=-5)
    finally:
        child.close()
    assert "draft" not in (tmp_path / "llama-server.log").read_text()


ENDS = "import json, sys; '--port' in sys.argv and exit(1)"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("timings = {}", "timings = {}; sys.argv = []", "proposed no drafts"),
        ("import json, sys", ENDS, "llama-server did not become ready"),
    ],
)
def test_faulty_servers_are_reported(tmp_path, before, after, message):
    child = start(tmp_path, "draft", SERVER.replace(before, after, 1))
    try:
        with pytest.raises(PeerError, match=message):
            ask(child, 1)
    finally:
        child.close()


def test_options_of_several_versions(llama):
    old, new = "--draft-max, --draft N", "--spec-draft-n-max N"
    assert llama.option(old, llama.MOST_DRAFTS) == "--draft-max"
    assert llama.option(new, llama.MOST_DRAFTS) == "--spec-draft-n-max"
    assert llama.option(f"{old}\n{new}", llama.MOST_DRAFTS) == "--spec-draft-n-max"
    with pytest.raises(
        ValueError, match="supports none of the options --spec-draft-n-max, --draft-max"
    ):
        llama.option("--no-draft-max --draft-max-x", llama.MOST_DRAFTS)


# The package `xllamacpp`: a server that answers when all requests of a batch are there.
PACKAGE = """
import threading

class Namespace:
    def __getattr__(self, name):
        setattr(self, name, Namespace())
        return getattr(self, name)

CommonParams = Namespace

class Server:
    def __init__(self, params):
        assert params.model.path == "t.gguf"
        threads = params.cpuparams.n_threads, params.cpuparams_batch.n_threads
        assert threads == (2, 2)
        assert (params.n_parallel, params.n_ctx) == (3, 300)
        self.barrier = threading.Barrier(3)

    def handle_completions(self, body):
        self.barrier.wait(10)
        assert body["ignore_eos"] and not body["cache_prompt"]
        return {"usage": {"completion_tokens": body["n_predict"]}}
"""


def test_package_runs_requests_at_once(tmp_path):
    (tmp_path / "xllamacpp.py").write_text(PACKAGE)
    about = tmp_path / "xllamacpp-9.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 9\n")
    task = {"target": "t.gguf", "threads": 2, "max_batch_size": 3}
    child = Child(
        [sys.executable, str(HERE / "xllama.py")],
        task | {"max_model_len": 100},
        cores=usable_cores(),
        environment=os.environ | {"PYTHONPATH": str(tmp_path)},
        limit_s=60.0,
    )
    try:
        assert child.about == {"version": "9", "settings": {}}
        assert ask(child, 3)["token_ids"] == [[0] * 4] * 3
    finally:
        child.close()

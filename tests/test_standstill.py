"""The benchmark of standstills, against a server that stands still when told to."""

import json
import signal
from pathlib import Path

import pytest

from benchmarks import client, server, standstill
from benchmarks.client import Chunks
from benchmarks.server import num_warming, totals

# It listens at once, tells for a while that a program compiles, and keeps streams
# waiting while another request is answered.
SERVER = """
import argparse, json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--compilation-cache-dir")
options = parser.parse_args()
import pathlib
programs = pathlib.Path(options.compilation_cache_dir)
is_cold = not programs.exists()
programs.mkdir(exist_ok=True)
start = time.monotonic()
still = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        left = float(is_cold and time.monotonic() < start + 0.3)
        told = f"jaxspec:warming {left}\\n# TYPE jaxspec:num_compiles counter\\n"
        told += f"jaxspec:num_compiles_total {3.0 - left}\\nvllm:other 7.0\\n"
        self.answer(200, told if self.path == "/metrics" else "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for number in range(1, body["max_tokens"] + 1):
                time.sleep(0.005)
                with still:
                    told = json.dumps({"usage": {"completion_tokens": number}})
                try:
                    self.wfile.write(f"data: {told}\\n\\n".encode())
                except OSError:
                    return
            self.wfile.write(b"data: [DONE]\\n\\n")
            return
        if "logprobs" in body:
            with still:
                time.sleep(0.15)
        self.answer(200, json.dumps({"choices": [{"text": " is"}]}))


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
"""


def test_gaps_and_rates_are_those_of_the_given_time():
    chunks = Chunks()
    for then, num_tokens in ((0.0, 2), (1.0, 4), (1.5, 4), (4.5, 1), (5.0, 9)):
        chunks.add(then, num_tokens)
    assert chunks.largest_gap(0.0, 5.0) == 3.0
    assert chunks.largest_gap(0.0, 1.2) == 1.0
    # A gap that began before counts whole: so long nothing came.
    assert chunks.largest_gap(4.0, 4.2) == 3.0
    assert chunks.largest_gap(6.0, 8.0) == 2.0
    assert chunks.rate(0.0, 2.0) == 4.0
    assert chunks.rate(2.0, 4.0) == 0.0
    assert chunks.whole() == {"tokens": 20, "tokens_per_s": 4, "gap_s": 3.0}


def test_programs_are_summed_over_engines():
    name = "jaxspec:num_compiles"
    told = f'# TYPE {name} counter\n{name}_total{{engine="0"}} 3\n'
    told += f'{name}_total{{engine="1"}} 4\nvllm:num_requests_running 5\n'
    assert totals(told) == {"jaxspec:num_compiles_total": 7}
    assert num_warming(totals(told)) is None
    assert num_warming(totals('jaxspec:num_warming{engine="0"} 2\n')) == 2


def test_a_server_is_measured_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    package = tmp_path / "jaxspec" / "serve"
    package.mkdir(parents=True)
    # Without these, Python would go on to look for the package elsewhere.
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(SERVER)
    for module, name, value in (
        (server, "LONGEST_START_S", 20.0),
        (server, "POLL_S", 0.01),
        (client, "POLL_S", 0.01),
        (standstill, "ALONE_S", 0.05),
        (standstill, "STREAM_TOKENS", 20),
        (standstill, "CONCURRENCIES", (1,)),
        (standstill, "INTERRUPT_S", (0.2,)),
    ):
        monkeypatch.setattr(module, name, value)
    flags = ["--checkout", str(tmp_path), "--interrupts", "1"]
    only = ["cold", "beside", "warm", "kinds", "interrupt"]
    out = tmp_path / "result.json"
    standstill.main([*flags, "--only", *only, "--json", str(out)])
    assert "first: 1 x JSON schema" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert list(result)[:5] == list(only)
    cold, warm = result["cold"], result["warm"]
    assert cold["listens_s"] <= cold["first_answer_s"] < cold["all_compiled_s"]
    assert cold["all_compiled_s"] >= 0.3
    assert warm["programs"] == {"jaxspec:warming": 0, "jaxspec:num_compiles_total": 3}
    assert cold["end"]["status"] == -signal.SIGTERM
    assert result["beside"]["alone"]["tokens"] == 20
    controls, again, grammar, _ = result["kinds"]["requests"]
    assert controls["gap_s"] >= 0.14
    assert again["time"] == "again"
    assert grammar["gap_s"] < controls["gap_s"]
    # Nobody handles the signal there: Python ends by it.
    (interrupted,) = result["interrupt"]
    assert interrupted["in_time"]

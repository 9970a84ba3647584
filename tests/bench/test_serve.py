"""A server over a fake device and one of a peer's kind, asked as `serve` asks."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxspec.bench import serve
from jaxspec.bench.figures import form
from jaxspec.bench.figures.picture import picture
from jaxspec.bench.report import BenchError
from tests.bench.workloads import flags
from tests.support.serving import PROMPT, Site, site_of


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of({"max_model_len": 96}) as made:
        yield made


@pytest.fixture
def asked_for(tmp_path) -> Callable[..., Any]:
    """Flags for a URL, with prompts that the fake tokenizer knows."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    small = ("--num-prompts", 6, "--output-len", 9, "--dataset-path", path)
    return lambda url, *more: flags("serve", "--base-url", url, *small, *more)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_our_server_is_measured_with_drafts_and_without(
    endpoint, site, asked_for, tmp_path, capsys
):
    saved = ("--save-result", "--save-detailed", "--result-dir", tmp_path)
    named = ("--result-filename", "out.json", "--metadata", "gpu=none")
    (entry,) = serve.run(asked_for(site.url, "--endpoint", endpoint, *saved, *named))
    printed = capsys.readouterr().out
    assert '{"benchmark"' not in printed
    assert "No drafts were made" not in printed
    assert json.loads((tmp_path / "out.json").read_text()) == entry
    assert (entry["model_id"], entry["gpu"]) == ("model", "none")
    assert (entry["completed"], entry["failed"]) == (6, 0)
    assert (entry["request_rate"], entry["max_concurrency"]) == ("inf", None)
    assert entry["total_output_tokens"] == 6 * 9
    assert entry["output_lens"] == [9] * 6
    assert entry["output_throughput"] == pytest.approx(54 / entry["duration"])
    assert 0 < entry["median_ttft_ms"] < 1e3 * entry["duration"]
    assert entry["p99_tpot_ms"] > 0
    # Drafts are those of this run alone, and of the plain one there are none.
    drafts = entry["spec_decode_num_drafts"]
    assert 0 < drafts <= 54
    assert len(entry["spec_decode_per_position_acceptance_rates"]) == 3
    length = 1 + entry["spec_decode_accepted_tokens"] / drafts
    assert entry["spec_decode_acceptance_length"] == pytest.approx(length)
    assert entry["plain"]["completed"] == 6
    assert "spec_decode_num_drafts" not in entry["plain"]
    assert entry["generated_texts"] == entry["plain"]["generated_texts"]
    assert printed.count("Serving Benchmark Result") == 2
    assert printed.count("Speculative Decoding") == 1


def test_a_sweep_ends_with_a_table_and_a_picture(site, asked_for, tmp_path, capsys):
    points = ("--max-concurrency", 1, 3, "--no-compare-plain", "--num-warmups", 1)
    drawn = tmp_path / "out.svg"
    first, second = serve.run(asked_for(site.url, *points, "--plot", drawn))
    printed = capsys.readouterr().out
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 3)
    assert first["max_concurrent_requests"] >= 1
    assert "plain" not in first
    table = printed.splitlines()[-3:]
    assert table[0].split()[:3] == ["load", "mode", "tokens/s"]
    assert table[2].startswith("inf requests/s, concurrency 3")
    told = form.described(picture([first, second]))
    assert told in drawn.read_text(encoding="utf-8")
    assert first["median_e2el_ms"] > 0


def test_runs_in_which_the_server_compiles_do_not_count(
    site, asked_for, capsys, monkeypatch
):
    runner: Any = site.engine.engine.runner
    launch, begin = runner.launch, runner.num_launches
    until = [begin + 12]

    def compiling(*arguments: Any) -> Any:
        runner.compiler.num_made += runner.num_launches < until[0]
        return launch(*arguments)

    monkeypatch.setattr(runner, "launch", compiling)
    (entry,) = serve.run(asked_for(site.url, "--no-compare-plain"))
    assert "this run does not count" in capsys.readouterr().err
    assert entry["completed"] == 6
    until[0] = 1 << 40
    with pytest.raises(BenchError, match="compiled programs in 4 runs"):
        serve.run(asked_for(site.url, "--no-compare-plain"))


def test_a_refusal_ends_at_once(site, asked_for):
    with pytest.raises(BenchError, match="status 404.*does not exist"):
        serve.run(asked_for(site.url, "--model", "another"))


class Peer(BaseHTTPRequestHandler):
    """A server of another make: no metrics, no counts of tokens."""

    asked: list[dict[str, Any]] = []

    def log_message(self, format: str, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say(b'{"data": [{"id": "peer"}]}')
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if len(self.asked) % 4 == 0:
            self.send_error(500)
            return
        event = json.dumps({"choices": [{"text": "x"}]})
        self._say(f"data: {event}\n\ndata: {event}\n\ndata: [DONE]\n\n".encode())

    def _say(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def peer() -> Iterator[str]:
    Peer.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_peer_is_asked_for_nothing_of_ours(peer, asked_for):
    asked = asked_for(peer, "--no-ignore-eos", "--extra-body", '{"x": 1}')
    (entry,) = serve.run(asked)
    assert entry["model_id"] == "peer"
    # The fourth request failed: the first was to see whether it answers at all.
    assert (entry["completed"], entry["failed"]) == (5, 1)
    assert entry["total_output_tokens"] == 10
    assert "plain" not in entry
    assert "spec_decode_num_drafts" not in entry
    names = {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert all(set(body) == names | {"stream_options", "x"} for body in Peer.asked)


def test_plain_runs_ask_for_no_drafts_and_share_no_prompts(peer, asked_for, capsys):
    (entry,) = serve.run(asked_for(peer, "--compare-plain"))
    assert "No drafts were made at this load." in capsys.readouterr().out
    assert entry["completed"] + entry["plain"]["completed"] >= 8
    first, *bodies = Peer.asked
    assert not {"cache_salt", "num_speculative_tokens"} & first.keys()
    by_salt: dict[str, list[Any]] = {}
    for body in bodies:
        wanted = body.get("num_speculative_tokens", "as served")
        by_salt.setdefault(body["cache_salt"], []).append(wanted)
    assert list(by_salt.values()) == [["as served"] * 6, [0] * 6]


def test_a_server_that_never_comes_is_an_error(asked_for, monkeypatch, capsys):
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", nap)
    options = asked_for("http://127.0.0.1:1", "--ready-check-timeout-sec", 0.2)
    with pytest.raises(BenchError, match="answers no request: 127.0.0.1:1/v1/models"):
        serve.run(options)
    assert serve.POLL_S in naps
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("Waiting up to 0.2 s for the server: 127.0.0.1:1/v1/models")


def test_a_server_that_fails_every_request_has_no_result(peer, asked_for, monkeypatch):
    monkeypatch.setattr(Peer, "do_POST", lambda self: self.send_error(503))
    options = asked_for(peer, "--ready-check-timeout-sec", 0)
    with pytest.raises(BenchError, match="answers no request: status 503"):
        serve.run(options)

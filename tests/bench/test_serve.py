"""`serve` with our server and another one: metrics, scrapes and arrival times."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from jaxspec.bench import serve
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.client import Answer
from jaxspec.bench.data import Prompt
from jaxspec.bench.report import BenchError
from jaxspec.bench.scrape import Scrape, read_scrape
from jaxspec.bench.serve import Task, read_task
from jaxspec.bench.serve_report import Wanted, block, details, figures
from jaxspec.bench.traffic import Load, send
from tests.bench.workloads import flags
from tests.support.fake_engines import make_fake_engine
from tests.support.serving import PROMPT, Site, site_of


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of({"max_model_len": 96}) as made:
        yield made


@pytest.fixture
def options_for(tmp_path) -> Callable[..., Any]:
    """Make flags for a URL, with prompts for the fake tokenizer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    small = ("--num-prompts", 6, "--output-len", 9, "--dataset-path", path)
    return lambda url, *more: flags("serve", "--base-url", url, *small, *more)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_jaxspec_server_is_measured_with_and_without_drafts(
    endpoint, site, options_for, tmp_path, capsys
):
    saved = ("--save-result", "--save-detailed", "--result-dir", tmp_path)
    named = ("--result-filename", "out.json")
    (entry,) = serve.run(options_for(site.url, "--endpoint", endpoint, *saved, *named))
    printed = capsys.readouterr().out
    assert '{"benchmark"' not in printed
    assert "No drafts were made" not in printed
    assert json.loads((tmp_path / "out.json").read_text()) == entry
    assert entry["model_id"] == "model"
    assert (entry["completed"], entry["failed"]) == (6, 0)
    assert (entry["request_rate"], entry["max_concurrency"]) == ("inf", None)
    assert entry["total_output_tokens"] == 6 * 9
    assert entry["output_lens"] == [9] * 6
    assert entry["output_throughput"] == pytest.approx(54 / entry["duration"])
    assert 0 < entry["median_ttft_ms"] < 1e3 * entry["duration"]
    assert entry["p99_tpot_ms"] > 0
    # The counts are those of this run only; the plain run has none.
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


def test_sweep_ends_with_table(site, options_for, capsys):
    points = ("--max-concurrency", 1, 3, "--no-compare-plain", "--num-warmups", 1)
    first, second = serve.run(options_for(site.url, *points))
    printed = capsys.readouterr().out
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 3)
    assert first["max_concurrent_requests"] >= 1
    assert "plain" not in first
    table = printed.splitlines()[-3:]
    assert table[0].split()[:3] == ["load", "mode", "tokens/s"]
    assert table[2].startswith("inf requests/s, concurrency 3")
    assert first["median_e2el_ms"] > 0
    with pytest.raises(BenchError, match="status 404.*does not exist"):
        serve.run(options_for(site.url, "--model", "another"))


def test_runs_with_compiles_are_repeated(site, options_for, capsys, monkeypatch):
    runner: Any = site.engine.engine.runner
    launch, begin = runner.launch, runner.num_launches
    until = [begin + 12]

    def compiling(*arguments: Any) -> Any:
        runner.compiler.num_made += runner.num_launches < until[0]
        return launch(*arguments)

    monkeypatch.setattr(runner, "launch", compiling)
    (entry,) = serve.run(options_for(site.url, "--no-compare-plain"))
    assert "this run is repeated" in capsys.readouterr().err
    assert entry["completed"] == 6
    until[0] = 1 << 40
    with pytest.raises(BenchError, match="compiled programs in 4 runs"):
        serve.run(options_for(site.url, "--no-compare-plain"))


class Peer(BaseHTTPRequestHandler):
    """Another server, which returns neither metrics nor token counts."""

    asked: list[dict[str, Any]] = []

    def log_message(self, format: str, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(b'{"data": [{"id": "peer"}]}')
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if len(self.asked) % 4 == 0:
            self.send_error(500)
            return
        event = json.dumps({"choices": [{"text": "x"}]})
        self._send(f"data: {event}\n\ndata: {event}\n\ndata: [DONE]\n\n".encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def peer() -> Iterator[str]:
    Peer.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_other_server_gets_no_jaxspec_fields(peer, options_for):
    asked = options_for(peer, "--no-ignore-eos", "--extra-body", '{"x": 1}')
    (entry,) = serve.run(asked)
    assert entry["model_id"] == "peer"
    # The fourth request failed; the request before the first was the readiness check.
    assert (entry["completed"], entry["failed"]) == (5, 1)
    assert entry["total_output_tokens"] == 10
    assert "plain" not in entry
    assert "spec_decode_num_drafts" not in entry
    names = {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert all(set(body) == names | {"stream_options", "x"} for body in Peer.asked)


def test_plain_runs_have_no_drafts_and_other_salt(peer, options_for, capsys):
    (entry,) = serve.run(options_for(peer, "--compare-plain"))
    assert "No drafts were made at this load." in capsys.readouterr().out
    assert entry["completed"] + entry["plain"]["completed"] >= 8
    first, *others = Peer.asked
    assert not {"cache_salt", "num_speculative_tokens"} & first.keys()
    by_salt: dict[str, list[Any]] = {}
    for body in others:
        wanted = body.get("num_speculative_tokens", "as served")
        by_salt.setdefault(body["cache_salt"], []).append(wanted)
    assert list(by_salt.values()) == [["as served"] * 6, [0] * 6]


def test_missing_server_is_an_error(options_for, monkeypatch, capsys):
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", nap)
    options = options_for("http://127.0.0.1:1", "--ready-check-timeout-sec", 0.2)
    with pytest.raises(
        BenchError, match="No request succeeded: http://127.0.0.1:1/v1/models"
    ):
        serve.run(options)
    assert serve.POLL_S in naps
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Waiting up to 0.2 s for the server: http://127.0.0.1")


def test_failing_server_has_no_result(peer, options_for, monkeypatch):
    monkeypatch.setattr(Peer, "do_POST", lambda self: self.send_error(503))
    options = options_for(peer, "--ready-check-timeout-sec", 0)
    with pytest.raises(BenchError, match="No request succeeded: status 503"):
        serve.run(options)


def task_of(*arguments: Any) -> Task:
    return read_task(flags("serve", *arguments))


def test_task_follows_the_flags():
    """A sweep has all pairs of loads; the address is a URL, or a host and a port."""
    task = task_of("--request-rate", 1, "inf", "--max-concurrency", 2, 4)
    pairs = [(load.request_rate, load.max_concurrency) for load in task.loads]
    assert pairs == [(1, 2), (1, 4), (float("inf"), 2), (float("inf"), 4)]
    alone = task_of()
    assert [load.max_concurrency for load in alone.loads] == [None]
    assert len(alone.prompts) == 100
    assert alone.url == "http://127.0.0.1:8000"
    assert task_of("--host", "::1", "--port", 9).url == "http://[::1]:9"
    assert task_of("--base-url", "https://h/v/", "--port", 9).url == "https://h/v"
    wanted = task_of(
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"),
        *("--goodput", "ttft:200", "tpot:50.5"),
    ).wanted
    assert list(wanted.metrics) == ["ttft", "e2el"]
    assert list(wanted.percentiles) == [50, 99.9]
    assert wanted.goodput_ms == {"ttft": 200, "tpot": 50.5}


def test_results_are_saved_on_request(tmp_path):
    """A sweep into one file is a line per load."""
    saved = ("--result-dir", tmp_path, "--result-filename", "x.json")
    task = task_of("--max-concurrency", 1, 2, "--save-result", *saved)
    for _ in range(2):  # the second sweep overwrites the results of the first
        for number, load in enumerate(task.loads):
            task.save({"number": number}, load)
    path = tmp_path / "x.json"
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"number": 0}, {"number": 1}]
    path.unlink()
    task = task_of("--result-dir", tmp_path)
    task.save({}, task.loads[0])
    assert not list(tmp_path.iterdir())
    task = task_of("--result-dir", tmp_path, "--save-detailed")
    task.save({}, task.loads[0])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("serve-infqps-concurrencyany-")


DRAFTS = Acceptance(
    num_drafts=10, num_draft_tokens=30, num_accepted=15, per_position=(9, 5, 1)
)
ANSWERS = [
    # One request: 4 tokens in 2 chunks, at 0.1 and 0.4 s. The other: 1 token at 1.2 s,
    # requested at 1 s.
    Answer(
        start_s=50.0,
        ttft_s=0.1,
        inter_token_s=[0.3],
        latency_s=0.4,
        num_prompt_tokens=10,
        num_output_tokens=4,
        text="abcd",
    ),
    Answer(
        start_s=51.0,
        ttft_s=0.2,
        latency_s=0.2,
        num_prompt_tokens=20,
        num_output_tokens=1,
        text="e",
    ),
    Answer(start_s=50.5, error="boom"),
]
ALL = Wanted(metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50.0, 99.9))


def test_only_successful_answers_are_measured():
    found = figures(ANSWERS, 2.0, ALL, DRAFTS)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_throughput"] == 1
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 17.5
    assert found["mean_ttft_ms"] == pytest.approx(150)
    assert found["std_ttft_ms"] == pytest.approx(50)
    assert found["p99.9_ttft_ms"] == pytest.approx(199.9)
    # A request with one token has no TPOT. The other takes 300 ms for the three tokens
    # after the first.
    assert found["median_tpot_ms"] == found["p50_tpot_ms"] == pytest.approx(100)
    assert found["mean_itl_ms"] == pytest.approx(300)
    assert found["mean_e2el_ms"] == pytest.approx(300)
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 1
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_per_position_acceptance_rates"] == [0.9, 0.5, 0.1]
    assert "request_goodput" not in found
    requests = details(ANSWERS)
    assert requests["output_lens"] == [4, 1, 0]
    assert requests["itls"] == [[0.3], [], []]
    assert requests["errors"] == ["", "", "boom"]
    found = figures([ANSWERS[0], ANSWERS[0], ANSWERS[1]], 2.0, ALL, None)
    assert found["max_output_tokens_per_s"] == 8
    assert found["max_concurrent_requests"] == 2
    assert not any(name.startswith("spec_decode") for name in found)


def test_goodput_counts_requests_within_all_limits():
    for limits, count in (
        ({"ttft": 200.1}, 2),
        ({"ttft": 150.0}, 1),
        ({"tpot": 99.0}, 1),
        ({"ttft": 150.0, "tpot": 99.0}, 0),
        ({"e2el": 300.5}, 1),
    ):
        found = figures(ANSWERS, 2.0, Wanted(goodput_ms=limits), None)
        assert found["request_goodput"] == count / 2, limits


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.50
Benchmark duration (s):                  2.00
Total input tokens:                      30
Total generated tokens:                  5
Request throughput (req/s):              1.00
Output token throughput (tok/s):         2.50
Peak output token throughput (tok/s):    4.00
Peak concurrent requests:                1
Total token throughput (tok/s):          17.50
---------------Time to First Token----------------
Mean TTFT (ms):                          150.00
Median TTFT (ms):                        150.00
P99 TTFT (ms):                           199.00
---------------Speculative Decoding---------------
Acceptance rate (%):                     50.00
Acceptance length:                       2.50
Drafts:                                  10
Draft tokens:                            30
Accepted tokens:                         15
Per-position acceptance (%):
  Position 0:                            90.00
  Position 1:                            50.00
  Position 2:                            10.00
=================================================="""


def test_block_equals_vllm():
    wanted = Wanted(metrics=("ttft",))
    found = figures(ANSWERS, 2.0, wanted, DRAFTS)
    load = Load(request_rate=2.5, max_concurrency=4)
    printed = block(found, load, wanted)
    assert [line.rstrip() for line in printed.splitlines()] == BLOCK.splitlines()
    bare = block(figures(ANSWERS, 2.0, wanted, None), Load(), wanted)
    assert "Speculative" not in bare
    assert "Maximum" not in bare
    assert "configured" not in bare
    forced = block(found | {"forced_acceptance": [0.8, 0.5]}, load, wanted)
    assert "ACCEPTANCE IS FORCED (synthetic)" in forced


@pytest.mark.parametrize("burstiness", [0.25, 1.0])
def test_times_between_requests_follow_the_distribution(burstiness):
    assert Load().starts(3) == [0, 0, 0]
    load = Load(request_rate=20.0, burstiness=burstiness, seed=3)
    starts = load.starts(20_000)
    assert starts == load.starts(20_000)
    gaps = np.diff(starts)
    assert starts[-1] == pytest.approx(1000)
    # A gamma distribution with this shape has standard deviation mean / sqrt(shape).
    assert gaps.std() * 20 == pytest.approx(burstiness**-0.5, rel=0.05)
    assert Load(request_rate=20.0, seed=4).starts(9) != starts[:9]


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_concurrent_requests_are_limited(limit):
    running: list[int] = [0]

    async def ask(prompt: Prompt) -> Answer:
        running.append(running[-1] + 1)
        await asyncio.sleep(0.001)
        running.append(running[-1] - 1)
        return Answer(text=prompt.text)

    prompts = [Prompt(text=str(i)) for i in range(8)]
    done: list[int] = []
    load = Load(max_concurrency=limit)
    answers, seconds = asyncio.run(send(prompts, load, ask, lambda: done.append(1)))
    assert [answer.text for answer in answers] == [str(i) for i in range(8)]
    assert max(running) == (limit or 8)
    assert seconds >= 0.001 * 8 / max(running)
    assert len(done) == 8


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
"""


def test_scrape_adds_up_engines():
    found = read_scrape(VLLM)
    assert found.acceptance == Acceptance(
        num_drafts=15, num_draft_tokens=30, num_accepted=12, per_position=(8, 4)
    )
    assert (found.num_compiles, found.num_warming) == (None, 0)
    other = "# TYPE http_requests_total counter\nhttp_requests_total 3.0\n"
    assert read_scrape(other) == read_scrape("") == Scrape()
    text = '# TYPE jaxspec:warming gauge\njaxspec:warming{engine="0"} 3.0\n'
    assert read_scrape(text).num_warming == 3


def test_scraped_metrics_are_those_of_engine():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    names = {metric.name for metric in engine.get_metrics()}
    typed = [line.split()[2] for line in VLLM.splitlines() if "# TYPE" in line]
    read = {name.removesuffix("_total") for name in typed if "created" not in name}
    assert read <= names
    assert {"jaxspec:num_compiles", "jaxspec:warming"} <= names
    assert "jaxspec:synthetic_acceptance_info" not in names
    assert read_scrape(VLLM).forced_acceptance is None
    engine, _ = make_fake_engine(num_draft_tokens=3, forced_acceptance=0.8)
    (info,) = [one for one in engine.get_metrics() if "synthetic" in one.name]
    labels = ",".join(f'{name}="{value}"' for name, value in info.labels.items())
    text = f"# TYPE {info.name} gauge\n{info.name}{{{labels}}} 1.0\n"
    assert read_scrape(text).forced_acceptance == (0.8, 0.8, 0.8)

"""The comparison with other engines, which here are fake processes and servers."""

import importlib
import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import found, real
from benchmarks.peers.answer import run
from benchmarks.peers.cells import CHOSEN, OURS, Cell, peers_table, rows
from benchmarks.peers.found import HERE, Child, Peer, PeerError
from benchmarks.peers.turns import usable_cores
from benchmarks.readme_table import REAL_CELLS
from jaxspec_checkpoints import open_checkpoint
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import tiny_config

ROOT = HERE.parents[1]
# A fake engine whose text counts up from the first token of its prompt.
FAKE = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(HERE)!r})
from answer import answer

class Fake:
    version, settings = "1.0", {{}}

    def __init__(self, task):
        self.task, self.num_runs, self.drafted = task, 0, 0
        print('{{"seconds": 1}}')  # as libraries do
        SETUP

    def generate(self, prompts, num_tokens, num_drafts=None):
        self.num_runs += 1
        RUN
        self.drafted += 4 * len(prompts)
        return [[one[0] + place for place in range(num_tokens)] for one in prompts]

    def counts(self):
        counts = {{"compiles": min(self.num_runs, COMPILES)}}
        if self.task.get("mode") != "plain":
            counts |= {{"drafted": self.drafted, "accepted": self.drafted // 2}}
            counts["rounds"] = self.drafted // 4
        return counts

answer(Fake)
"""
BRIEF = ("--num-prompts", "3", "--single-prompts", "2", "--num-tokens", "4")
BRIEF += ("--batch-sizes", "1", "3", "--threads", "1", "--repeats", "2")

AROUND: dict[str, Any] = {"cores": usable_cores()[:1], "environment": {}}


def fake(folder: Path, name: str, **changes: Any) -> Peer:
    """Return a peer whose child process runs the given lines of Python."""
    lines = {"setup": "", "run": "", "compiles": 0}
    lines |= {key: changes.pop(key) for key in list(lines) if key in changes}
    text = FAKE
    for key, value in lines.items():
        text = text.replace(key.upper(), str(value) or "pass")
    script = folder / f"{name}.py"
    script.write_text(text)
    return Peer(name=name, script=str(script), **changes)


def run_fakes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, peers: list[Peer], *more: str
) -> dict[str, Any]:
    monkeypatch.setattr(command, "find_peers", lambda _: peers)
    output = folder / "result.json"
    command.main([*BRIEF, "--output", str(output), *more])
    return json.loads(output.read_text())


def cell(peer: str, seconds: list[float], **changes: Any) -> Cell:
    texts = changes.pop("texts", [[5, 6], [7, 8]])
    counts = changes.pop("counts", {})
    answers = [{"seconds": s, "token_ids": texts, "counts": counts} for s in seconds]
    values = {"mode": "plain", "dtype": "float32", "batch_size": 1, "threads": 1}
    return Cell(peer=peer, answers=answers, **(values | changes))


def test_rows_compare_medians_and_texts():
    ours = cell("jaxspec", [0.5, 0.1, 0.4])
    theirs = cell("other", [1.0, 0.8], texts=[[5, 6], [7, 9]])
    drafts = {"drafted": 10, "accepted": 4, "rounds": 2}
    drafting = cell("other", [0.2], mode="draft", counts=drafts)
    first, second, third = rows([ours, theirs, drafting])
    # The 4 tokens took 0.5, 0.1 and 0.4 s.
    assert first["tokens_per_s"] == [8.0, 40.0, 10.0]
    assert first["median_tokens_per_s"] == 10.0
    assert (first["least_tokens_per_s"], first["most_tokens_per_s"]) == (8.0, 40.0)
    assert "ours_over_theirs" not in first
    assert second["ours_over_theirs"] == round(10 / 4.5, 3)
    assert (second["num_equal"], second["num_texts"]) == (1, 2)
    assert "acceptance_rate" not in second
    # We have no row with the same mode, so there is no ratio.
    assert "ours_over_theirs" not in third
    assert third["acceptance_rate"] == 0.4
    assert third["mean_acceptance_length"] == 3.0
    assert (third["num_equal"], third["num_texts"]) == (2, 2)


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"batch_size": 8}, {"threads": 2}]
)
def test_ratios_are_of_the_same_kind(change):
    row = rows([cell("jaxspec", [1.0]), cell("other", [1.0], **change)])[1]
    assert "ours_over_theirs" not in row
    assert ("num_texts" in row) == ("dtype" not in change)


def test_ours_has_rows_with_fixed_and_adaptive_k():
    options = command.make_parser().parse_args([])
    held, chosen = found.find_peers(options)[:2]
    assert (held.name, held.task) == (OURS, {"controller": "fixed"})
    assert (chosen.name, chosen.task) == (CHOSEN, {"controller": "adaptive"})
    assert held.script == chosen.script
    assert "plain" in held.modes and "plain" not in chosen.modes


def test_texts_without_an_end_are_compared_up_to_it():
    ours = cell("jaxspec", [1.0], texts=[[5, 107, 6], [5, 6, 7]])
    theirs = cell("other", [1.0], texts=[[5, 9, 9], [5, 6, 8]])
    assert rows([ours, theirs])[1]["num_equal"] == 0
    theirs.bans_end = True
    assert rows([ours, theirs])[1]["num_equal"] == 1
    theirs.answers[0]["token_ids"] = [[4, 9, 9], [5, 6, 7]]
    assert rows([ours, theirs])[1]["num_equal"] == 1


def test_full_run_reports_every_peer(tmp_path, monkeypatch, capsys):
    dying = 'if len(prompts) > 1: sys.exit(f"no room in {__file__}")'
    peers = [
        fake(tmp_path, "jaxspec"),
        fake(tmp_path, "single", modes={"plain": 1}, note="alone"),
        fake(tmp_path, "dying", modes={"plain": 9}, run=dying),
        fake(tmp_path, "absent", missing="not installed"),
    ]
    result = run_fakes(monkeypatch, tmp_path, peers)
    by_kind = {
        (row["peer"], row["mode"], row["batch_size"]): row for row in result["rows"]
    }
    measured = {kind for kind, row in by_kind.items() if "tokens_per_s" in row}
    assert measured == {
        *(("jaxspec", mode, size) for mode in found.MODES for size in (1, 3)),
        ("single", "plain", 1),
        ("dying", "plain", 1),
    }
    for kind in measured:
        row = by_kind[kind]
        assert len(row["tokens_per_s"]) == 2
        assert row["num_equal"] == row["num_texts"] == {1: 2, 3: 3}[kind[2]]
        assert ("ours_over_theirs" in row) == (kind[0] != "jaxspec")
        assert row.get("acceptance_rate") == (None if kind[1] == "plain" else 0.5)
        assert row.get("mean_acceptance_length") == (None if kind[1] == "plain" else 3)
    failed = {
        kind[::2]: row["failed"] for kind, row in by_kind.items() if "failed" in row
    }
    assert failed == {
        ("single", 3): "limited to batch 1",
        ("dying", 3): "ended with code 1: no room in dying.py",
    }
    assert result["peers"]["absent"] == {"skipped": "not installed"}
    assert result["peers"]["single"]["version"] == "1.0"
    assert result["peers"]["single"]["note"] == "alone"
    assert str(tmp_path) not in json.dumps(result), "no paths of this machine"
    assert "| single | plain |" in capsys.readouterr().out


def test_runs_alternate_and_are_kept_when_stopped(tmp_path, monkeypatch):
    order = tmp_path / "order"
    write = f"print(self.task['mode'], file=open({str(order)!r}, 'a'))"
    output = tmp_path / "result.json"
    seen: list[int] = []

    def stop(*_: Any) -> None:
        seen.append(
            sum("tokens_per_s" in row for row in json.loads(output.read_text())["rows"])
        )
        if len(seen) == 4:
            raise KeyboardInterrupt

    peer = fake(tmp_path, "jaxspec", run=write, modes={"plain": 9, "n-gram": 9})
    monkeypatch.setattr(command.Turns, "_fill", _before(command.Turns._fill, stop))
    with pytest.raises(KeyboardInterrupt):
        run_fakes(monkeypatch, tmp_path, [peer], "--batch-sizes", "3")
    assert seen == [0, 1, 2, 2]
    # Each mode runs twice at first (a short warm-up, then measured): plain, then
    # n-gram. The second repeat is in reverse order, so n-gram comes next.
    assert order.read_text().split() == ["plain"] * 2 + ["n-gram"] * 3


def _before(method: Any, action: Any) -> Any:
    def both(*arguments: Any) -> Any:
        action()
        return method(*arguments)

    return both


def test_runs_that_compile_do_not_count(tmp_path, monkeypatch):
    order = tmp_path / "order"
    write = f"print(len(prompts), file=open({str(order)!r}, 'a'))"
    peer = fake(tmp_path, "jaxspec", run=write, modes={"plain": 9}, compiles=3)
    more = ("--batch-sizes", "3", "--repeats", "1")
    result = run_fakes(monkeypatch, tmp_path, [peer], *more)
    assert len(result["rows"][0]["tokens_per_s"]) == 1
    assert order.read_text().split() == ["3"] * 5, "3 that compile, a warm-up, a run"


def test_late_peer_is_killed_with_its_children(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    start = (
        f"pipe = open({str(pipe)!r}, 'w'); "
        "subprocess.Popen('sleep 20; echo late', shell=True, stdout=pipe); "
        "print('started', file=pipe, flush=True); time.sleep(60)"
    )
    peer = fake(tmp_path, "jaxspec", run=start)
    made = Child(peer.command(), {"mode": "plain"}, **AROUND, limit_s=30.0)
    with closing(made), pytest.raises(PeerError, match="took longer than 1 s"):
        made.ask({"prompts": [[1]], "batch_size": 1, "num_tokens": 4}, 1.0)
    os.set_blocking(end, True)
    with open(end) as lines:  # ends with the last process that can write
        assert lines.read() == "started\n"


def test_text_of_wrong_length_is_an_error(tmp_path):
    peer = fake(tmp_path, "jaxspec", run="num_tokens -= 1")
    made = Child(peer.command(), {"mode": "plain"}, **AROUND, limit_s=30.0)
    with closing(made) as child:
        with pytest.raises(PeerError, match="got 2 texts of .3. tokens"):
            child.ask({"prompts": [[1], [2]], "batch_size": 2, "num_tokens": 4}, 30.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-tokens", "0"], "--num-tokens must be at least 1"),
        (["--real", "--num-tokens", "1"], "must be at least 2 with --real, got 1"),
        (["--batch-sizes", "1", "0"], "--batch-sizes must be at least 1"),
        (["--num-prompts", "4"], "4 must be at least 8, the largest batch size"),
        (["--threads", "9999"], "this process may use"),
        (["--output", "nowhere/a.json"], "in an existing folder; there is no nowhere"),
        (
            ["--peers", "vllm"],
            "--peers must be some of jaxspec, .*HuggingFace.*got vllm",
        ),
    ],
)
def test_invalid_options_are_rejected(arguments, message):
    with pytest.raises(SystemExit, match=message):
        command.main(arguments)


def test_peers_report_missing_requirements(tmp_path):
    options = command.make_parser().parse_args(
        ["--vllm-python", str(tmp_path / "python"), "--llama-server", "llama-server"]
    )
    reasons = {peer.name: peer.missing for peer in found.find_peers(options)}
    assert reasons["jaxspec"] is None
    assert reasons["openvino-genai"] == "no --openvino-python"
    assert reasons["llama.cpp"] == "no --llama-convert"
    assert reasons["vLLM"] == "not found: python"


def run_real(folder: Path, *more: str) -> dict[str, Any]:
    output = folder / "result.json"
    command.main(
        [
            *("--real", "--num-tokens", "3", "--threads", "1", "--repeats", "2"),
            *("--models", str(folder / "models"), "--output", str(output), *more),
        ]
    )
    return json.loads(output.read_text())


@pytest.fixture
def real_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace engines and models of `--real`; return the log of both engines' runs."""
    log = tmp_path / "log"
    write = f"print(json.dumps(self.task), num_tokens, file=open({str(log)!r}, 'a'))"
    # The engine's own clock: a new token takes 0.01 s, of all prompts at once.
    setup = (
        "self.settings = {'weight_bytes': 10, 'copy_bytes_per_s': 100}; "
        "self.clock = 0.0; self.perf_counter = lambda: self.clock; "
        "sys.modules['answer'].time = self"
    )
    run = f"import json; {write}; self.clock += 0.01 * num_tokens"
    for name in (OURS, real.LLAMA):
        peer = fake(tmp_path, name, setup=setup, run=run)
        monkeypatch.setitem(real.PEERS, name, peer)
    source = tmp_path / "source.gguf"
    config = tiny_config("2b", hidden_size=256, intermediate_size=512, vocab_size=8192)
    write_gguf(source, config)
    monkeypatch.setattr(real, "packaged_gemma3", lambda: source)
    monkeypatch.setattr(real, "published_config", lambda _: config)
    monkeypatch.setattr(real, "PACKAGES", {})
    return log


def test_real_sizes_are_compared_on_the_same_files(tmp_path, real_fakes, capsys):
    result = run_real(tmp_path)
    kinds = [(row["section"], row["model"], row["cell"]) for row in result["cells"]]
    models = ("270M Q4_K_M", "270M Q8_0", "270M F16", "2B Q4_0", "2B Q8_0")
    speculation = "2B shapes with a 270M draft,"
    assert kinds == [
        *(("compared", name, cell) for name in models for cell in REAL_CELLS),
        *(("forms", name, cell) for name in real.FORMS for cell in REAL_CELLS),
        ("speculation", f"{speculation} bfloat16", "batch 1"),
        ("speculation", f"{speculation} int8", "batch 1"),
        ("speculation", "270M with suffix drafts", "copy"),
        ("speculation", "270M with suffix drafts", "prose"),
    ]
    for row in result["cells"]:
        speeds = row["tokens_per_s"]
        pairs = {"compared": {OURS, real.LLAMA}, "forms": {OURS}}
        assert speeds.keys() == pairs.get(row["section"], {"drafts", "plain"})
        assert all(len(own) == 2 for own in speeds.values())
        size = {"batch": 8 if row["model"].startswith("270M") else 4}.get(
            row["cell"], 1
        )
        expected = 512 / 0.01 if row["cell"] == "prompt" else size / 0.01
        assert {one for own in speeds.values() for one in own} == {expected}
    lines = real_fakes.read_text().splitlines()
    tasks = [json.loads(line[: line.rindex(" ")]) for line in lines]
    files = [one["target"] for one in tasks if "target" in one]
    ours = [one["engine"]["model"] for one in tasks if "engine" in one]
    assert set(files) <= set(ours) and len(set(files)) == 5
    assert "| 270M Q4_K_M | " in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(result), "no paths of this machine"
    check_models(tmp_path / "models", tmp_path / "source.gguf")


def check_models(folder: Path, source: Path) -> None:
    """Check that the files hold the given numbers and the config's shapes."""
    values = {
        name: dict(open_checkpoint(path).tensors)
        for name, path in {
            "source": source,
            **{path.stem: path for path in folder.glob("*.gguf")},
        }.items()
    }
    expected = values.pop("source")
    assert values.keys() == {"270m-Q8_0", "270m-F16", "2b-Q4_0", "2b-Q8_0"}
    for name, tensors in values.items():
        assert tensors.keys() == expected.keys(), name
        for key, tensor in tensors.items():
            assert tensor.shape == expected[key].shape
            found = np.asarray(tensor.read(0, tensor.shape[0]), np.float32)
            assert np.isfinite(found).all()
            if name.startswith("270m"):
                whole = np.asarray(expected[key].read(0, tensor.shape[0]), np.float32)
                assert np.abs(found - whole).max() <= 0.01 * np.abs(whole).max()
            elif found.ndim == 2:
                assert 0.01 < found.std() < 0.03


@pytest.mark.slow
def test_real_sizes_continue_where_they_stopped(tmp_path, real_fakes, monkeypatch):
    run_real(tmp_path)
    whole = (tmp_path / "result.json").read_text()
    result = json.loads(whole)
    num_cells = len(result["cells"])
    result["cells"] = result["cells"][1:]
    result["cells"][0] = {**result["cells"][0], "failed": "it fell over"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    real_fakes.unlink()
    again = run_real(tmp_path)
    assert [row["cell"] for row in again["cells"][:2]] == ["batch 1", "batch"]
    assert len(again["cells"]) == num_cells
    assert not any("failed" in row for row in again["cells"])
    # Two engines ran two cells twice, each with 1 and 3 new tokens.
    assert len(real_fakes.read_text().splitlines()) == 2 * 2 * 2 * 2
    # An engine that fails ends its group; the other groups are measured.
    broken = fake(tmp_path, "broken", run="sys.exit('no room')")
    monkeypatch.setitem(real.PEERS, real.LLAMA, broken)
    (tmp_path / "result.json").unlink()
    failed = run_real(tmp_path)["cells"]
    assert [row["failed"] for row in failed if row["section"] == "compared"] == [
        "ended with code 1: no room"
    ] * 5
    assert len(failed) == num_cells - 15 + 5


class Lengths:
    """A fake engine that repeats the first token of each prompt."""

    def __init__(self):
        self.batches: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        self.batches.append(prompts)
        return [prompt[:1] * num_tokens for prompt in prompts]

    def counts(self) -> dict[str, int]:
        return {"rounds": 3 * len(self.batches)}


def test_equal_length_prompts_share_a_batch_in_order():
    engine: Any = Lengths()
    prompts = [[1, 1, 1], [2], [3, 3], [4]]
    found = run(engine, prompts, batch_size=2, num_tokens=2)
    assert engine.batches == [[[2], [4]], [[3, 3], [1, 1, 1]]]
    assert found["token_ids"] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert found["counts"] == {"rounds": 6}
    assert found["seconds"] > 0


def table_row(peer: str, speed: float | None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"peer": peer, "mode": "plain", "dtype": "float32"}
    values |= {"batch_size": 1, "threads": 1}
    if speed is not None:
        values |= {"median_tokens_per_s": speed, "num_texts": 5, "num_equal": 4}
    return values | changes


def table_of(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return the committed result with other rows and a peer that is not installed."""
    path = ROOT / "benchmarks" / "results" / "peers-cpu.json"
    result = json.loads(path.read_text())
    peers = result["peers"] | {"gone": {"skipped": "not installed"}}
    return result | {"rows": list(rows), "peers": peers}


def test_table_lists_missing_runs_and_where_others_are_ahead():
    """The rest of the table is that of the committed result, in benchmarks/README."""
    ended = {"failed": "it fell over"}
    found = [
        table_row("odd", 9.0, **ended),
        table_row("odd", 9.0, **ended, mode="n-gram"),
        table_row("odd", 9.0, **ended, threads=2),
        table_row("slow", None, mode="draft", failed="did not start"),
        table_row("fast", 400.0, ours_over_theirs=0.99),
        table_row("fast", 400.0, ours_over_theirs=1.0, batch_size=8),
        table_row("fast", 500.0, ours_over_theirs=0.5, threads=2),
        table_row("fast", 500.0, ours_over_theirs=0.25, mode="draft"),
    ]
    table = peers_table(table_of(*found), {"fast plain": "it reads less"})
    assert "| odd | n-gram | 9 | - | - | 4/5 |" in table
    assert "| slow |" not in table
    left_out = "slow (draft at batch 1): did not start"
    assert f"Not measured: gone: not installed; {left_out}." in table
    early = "odd (plain at batch 1, n-gram at batch 1): it fell over"
    assert f"Ended early, so measured with fewer runs: {early}." in table
    assert table.splitlines()[-2:] == [
        "- fast is faster with plain decoding in 2 of 3 columns (up to 2.0 times as "
        "fast): it reads less.",
        "- fast is faster with a draft model in 1 of 1 columns (up to 4.0 times as "
        "fast): not explained yet.",
    ]
    table = peers_table(table_of(*found), {"fast": "for all"})
    assert table.splitlines()[-1] == (
        "- fast is faster with plain decoding in 2 of 3 columns (up to 2.0 times as "
        "fast) and with a draft model in 1 of 1 columns (up to 4.0 times as fast): for "
        "all."
    )


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
    task |= {"mode": mode, "threads": 2, "num_drafts": 5}
    return run_script("llama.py", task, os.environ)


def run_script(name: str, task: dict[str, Any], environment: Any) -> Child:
    return Child(
        [sys.executable, str(HERE / name)],
        task | {"max_model_len": 100},
        cores=usable_cores(),
        environment=environment,
        limit_s=60.0,
    )


def ask(child: Child, size: int, first: int = 7) -> dict[str, Any]:
    prompts = [[2, first + place] for place in range(size)]
    request = {"prompts": prompts, "batch_size": size, "num_tokens": 4}
    return child.ask(request, 60.0)


def test_servers_run_two_batch_sizes(tmp_path):
    with closing(start(tmp_path, "draft")) as child:
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
    one, three = (tmp_path / "llama-server.log").read_text().splitlines()
    assert "--model t.gguf" in one
    assert "--model-draft d.gguf --parallel 1 --ctx-size 100 " in one
    assert "--parallel 3 --ctx-size 300 " in three
    wanted = "--spec-draft-n-max 5 --spec-draft-n-min 0 --spec-draft-p-min 0 "
    assert wanted in one
    assert one.split()[-4:-2] == ["--spec-type", "draft-simple"]


def test_plain_server_makes_no_drafts(tmp_path):
    with closing(start(tmp_path, "plain")) as child:
        counts = {"drafted": 0, "accepted": 0, "rounds": 0}
        assert ask(child, 2)["counts"] == counts
        with pytest.raises(PeerError, match="llama-server: 500 .*negative"):
            ask(child, 2, first=-5)
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
    with closing(start(tmp_path, "draft", SERVER.replace(before, after, 1))) as child:
        with pytest.raises(PeerError, match=message):
            ask(child, 1)


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
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with closing(run_script("xllama.py", task, environment)) as child:
        assert child.about == {"version": "9", "settings": {}}
        assert ask(child, 3)["token_ids"] == [[0] * 4] * 3

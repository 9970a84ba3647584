"""The run beside other engines, with children that only pretend to be engines."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import found, turns
from benchmarks.peers.answer import run
from benchmarks.peers.cells import CHOSEN, OURS, Cell, rows
from benchmarks.peers.found import Child, Peer, PeerError, on_cores, shorten
from benchmarks.peers.turns import usable_cores

FOLDER = Path(found.HERE)
ROOT = FOLDER.parents[1]
# An engine whose text is its prompt's first token and what follows it.
FAKE = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(FOLDER)!r})
from answer import answer

class Fake:
    version, settings = "1.0", {{}}

    def __init__(self, task):
        self.task, self.num_runs, self.drafted = task, 0, 0
        print('{{"seconds": 1}}')  # as libraries do
        SETUP

    def generate(self, prompts, num_tokens):
        self.num_runs += 1
        RUN
        self.drafted += 4 * len(prompts)
        return [[one[0] + place for place in range(num_tokens)] for one in prompts]

    def counts(self):
        counts = {{"compiles": min(self.num_runs, COMPILES)}}
        if self.task["mode"] != "plain":
            counts |= {{"drafted": self.drafted, "accepted": self.drafted // 2}}
            counts["rounds"] = self.drafted // 4
        return counts

answer(Fake)
"""
BRIEF = ("--num-prompts", "3", "--single-prompts", "2", "--num-tokens", "4")
BRIEF += ("--batch-sizes", "1", "3", "--threads", "1", "--repeats", "2")

AROUND: dict[str, Any] = {"cores": usable_cores()[:1], "environment": {}}


def fake(folder: Path, name: str, **changes: Any) -> Peer:
    """A peer whose child does what the given lines say."""
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
    # 4 tokens in 0.5, 0.1 and 0.4 s.
    assert first["tokens_per_s"] == [8.0, 40.0, 10.0]
    assert first["median_tokens_per_s"] == 10.0
    assert (first["least_tokens_per_s"], first["most_tokens_per_s"]) == (8.0, 40.0)
    assert "ours_over_theirs" not in first
    assert second["ours_over_theirs"] == round(10 / 4.5, 3)
    assert (second["num_equal"], second["num_texts"]) == (1, 2)
    assert "acceptance_rate" not in second
    # Nothing of ours to compare with: not the same mode.
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


def test_ours_is_not_compared_with_itself():
    assert "ours_over_theirs" in rows([cell(OURS, [1.0]), cell("other", [1.0])])[1]
    chosen = rows([cell(OURS, [1.0]), cell(CHOSEN, [1.0])])[1]
    assert "ours_over_theirs" not in chosen
    assert chosen["num_equal"] == chosen["num_texts"] > 0


def test_ours_holds_k_where_others_do_and_chooses_it_in_rows_of_its_own():
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


def test_texts_are_compared_with_the_longest_run_of_ours():
    single = cell("jaxspec", [1.0], texts=[[5, 6]])
    batch = cell("jaxspec", [1.0], batch_size=2)
    assert [row["num_texts"] for row in rows([single, batch])] == [1, 2]


def test_a_run_of_all(tmp_path, monkeypatch, capsys):
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
        ("single", 3): "does at most 1 at once",
        ("dying", 3): "ended with code 1: no room in dying.py",
    }
    assert result["peers"]["absent"] == {"skipped": "not installed"}
    assert result["peers"]["single"]["version"] == "1.0"
    assert result["peers"]["single"]["note"] == "alone"
    assert str(tmp_path) not in json.dumps(result), "no paths of this machine"
    assert "| single | plain |" in capsys.readouterr().out


def test_runs_alternate_and_are_kept_when_it_is_stopped(tmp_path, monkeypatch):
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
    # A short one first, to warm up; then in turn, the second time from the end.
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


def test_what_compiling_takes_is_not_of_the_time(tmp_path, monkeypatch):
    clock = [0.0]

    class Timed:
        """Loads in 5 s, compiles for 100 s in its first run; other runs take 10 s."""

        def __init__(self, *_: Any, **__: Any):
            clock[0] += 5
            self.about: dict[str, Any] = {"version": "1.0", "settings": {}}
            self.num_runs = 0

        def ask(self, request: dict[str, Any], _: float) -> dict[str, Any]:
            self.num_runs += 1
            clock[0] += 100 if self.num_runs == 1 else 10
            counts = {"compiles": int(self.num_runs == 1)}
            return {"seconds": 10.0, "token_ids": request["prompts"], "counts": counts}

        def close(self) -> None:
            pass

    monkeypatch.setattr(turns, "Child", Timed)
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    peer = fake(tmp_path, "jaxspec", modes={"plain": 9, "n-gram": 9})
    # 45 s are enough for 5 + 10 + 10 + 5 + 10 + 10, as the last begins in time.
    more = ("--batch-sizes", "3", "--minutes", "0.75")
    result = run_fakes(monkeypatch, tmp_path, [peer], *more)
    assert [len(row["tokens_per_s"]) for row in result["rows"]] == [1, 1]
    assert clock[0] == 250


def test_without_end_to_compiling(tmp_path, monkeypatch):
    peer = fake(tmp_path, "jaxspec", modes={"plain": 9}, compiles=99)
    result = run_fakes(monkeypatch, tmp_path, [peer], "--batch-sizes", "3")
    assert result["rows"][0]["failed"] == "compiled something in 16 runs in a row"


def test_no_time(tmp_path, monkeypatch):
    peer = fake(tmp_path, "jaxspec")
    result = run_fakes(monkeypatch, tmp_path, [peer], "--minutes", "0")
    assert [row["failed"] for row in result["rows"]] == ["no time was left"] * 6


def test_who_is_late_is_ended_with_all_it_started(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    later = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    start = f"subprocess.Popen([sys.executable, '-c', {later!r}]); time.sleep(60)"
    peer = fake(tmp_path, "jaxspec", setup=start)
    begin = time.monotonic()
    with pytest.raises(PeerError, match="took longer than 2 s"):
        Child(peer.command(), {}, **AROUND, limit_s=2.0)
    assert time.monotonic() - begin < 4
    time.sleep(max(begin + 4 - time.monotonic(), 0))
    assert not mark.exists()


def test_children_are_started_on_their_cores(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7}, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: calls.append(cores), raising=False
    )
    with pytest.raises(ValueError, match="inside"), on_cores([7]):
        assert calls == [[7]]
        raise ValueError("inside")
    assert calls == [[7], {3, 7}]
    assert usable_cores() == [3, 7]


def test_a_new_child_is_warmed_up_again(tmp_path, monkeypatch):
    order = tmp_path / "order"
    lines = f"print(len(prompts), file=open({str(order)!r}, 'a'))"
    lines += "; len(prompts) > 1 and sys.exit(1)"
    peer = fake(tmp_path, "jaxspec", run=lines, modes={"plain": 9})
    run_fakes(monkeypatch, tmp_path, [peer])
    # One prompt to warm up, two that count, and the batch that ends it: then all again.
    assert order.read_text().split() == ["1"] * 3 + ["3"] + ["1"] * 3


def test_a_text_of_another_length_is_an_error(tmp_path):
    peer = fake(tmp_path, "jaxspec", run="num_tokens -= 1")
    child = Child(peer.command(), {"mode": "plain"}, **AROUND, limit_s=30.0)
    try:
        with pytest.raises(PeerError, match="2 texts of 4 tokens .* came 2 of .3."):
            child.ask({"prompts": [[1], [2]], "batch_size": 2, "num_tokens": 4}, 30.0)
    finally:
        child.close()


def test_reasons_tell_nothing_of_this_machine():
    assert shorten("no file '/some/where/a b.txt', 1/2") == "no file 'a b.txt', 1/2"
    assert shorten("x" * 300) == "x" * 200 + "…"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-tokens", "0"], "--num-tokens must be at least 1"),
        (["--batch-sizes", "1", "0"], "--batch-sizes must be at least 1"),
        (["--num-prompts", "4"], "do not fill 8 rows"),
        (["--threads", "9999"], "this process may use"),
        (["--output", "nowhere/a.json"], "there is no folder nowhere"),
        (["--peers", "vllm"], "--peers are of jaxspec, .*HuggingFace.*got vllm"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        command.main(arguments)


def test_peers_say_what_they_lack(tmp_path):
    options = command.make_parser().parse_args(
        ["--vllm-python", str(tmp_path / "python"), "--llama-server", "llama-server"]
    )
    reasons = {peer.name: peer.missing for peer in found.find_peers(options)}
    assert reasons["jaxspec"] is None
    assert reasons["openvino-genai"] == "no --openvino-python"
    assert reasons["llama.cpp"] == "no --llama-convert"
    assert reasons["vLLM"] == "there is no python"


def test_scripts_of_the_peers_exist():
    options = command.make_parser().parse_args(
        ["--vllm-python", "a/b", "--llama-server", "a", "--llama-convert", "b"]
    )
    for peer in found.find_peers(options):
        assert (FOLDER / peer.script).exists(), peer.name


def test_models_are_made_once_in_float32(tmp_path, monkeypatch):
    small = {name: found.MODELS["draft"] for name in found.MODELS}
    monkeypatch.setattr(found, "MODELS", small)
    copy = "import shutil, sys; shutil.copytree(*sys.argv[1:])"
    export = (sys.executable, "-c", copy, found.SOURCE, found.MADE)
    peer = Peer(name="other", script="other.py", export=export, suffix=".x")
    made = peer.models(tmp_path)
    assert made == {
        name: str(tmp_path / f"{name}-other.x") for name in ("target", "draft")
    }
    size = (small["draft"] / "model.safetensors").stat().st_size
    (weights,) = Path(made["draft"]).glob("*.safetensors")
    assert 1.9 < weights.stat().st_size / size < 2.1
    failing = (sys.executable, "-c", "import sys; sys.exit('cannot read /a/b/c')")
    again = Peer(name="other", script="other.py", export=failing, suffix=".x")
    assert again.models(tmp_path) == made
    peer = Peer(name="new", script="new.py", export=failing)
    with pytest.raises(PeerError, match="^export failed: cannot read c$"):
        peer.models(tmp_path)


def test_threads_and_foreign_interpreters(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "here")
    ours = Peer(name="a", script="a.py").environment_of([3])
    assert (ours["OMP_NUM_THREADS"], ours["PYTHONPATH"]) == ("1", "here")
    bound = {"BIND": "{cores}"}
    other = Peer(name="b", script="b.py", python="other", environment=bound)
    environment = other.environment_of([0, 5])
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["BIND"] == "0,5"
    assert "PYTHONPATH" not in environment


class Lengths:
    """An engine that gives as many of each prompt's first token as are wanted."""

    def __init__(self):
        self.batches: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        self.batches.append(prompts)
        return [prompt[:1] * num_tokens for prompt in prompts]

    def counts(self) -> dict[str, int]:
        return {"rounds": 3 * len(self.batches)}


def test_prompts_of_one_length_are_in_one_batch_and_texts_in_their_order():
    engine: Any = Lengths()
    prompts = [[1, 1, 1], [2], [3, 3], [4]]
    found = run(engine, prompts, batch_size=2, num_tokens=2)
    assert engine.batches == [[[2], [4]], [[3, 3], [1, 1, 1]]]
    assert found["token_ids"] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert found["counts"] == {"rounds": 6}
    assert found["seconds"] > 0


def test_who_has_a_queue_gets_all_prompts_at_the_largest_batch(tmp_path):
    arguments = ["--num-prompts", "6", "--batch-sizes", "1", "2", "--num-tokens", "3"]
    arguments += ["--single-prompts", "2", "--output", str(tmp_path / "out.json")]
    options = command.make_parser().parse_args(arguments)
    peers = {
        name: Peer(name=name, script="none.py", has_queue=name == "queue")
        for name in ("queue", "batches")
    }
    run_of = turns.Turns(options, peers, [[n] for n in range(6)], {})
    asked: list[tuple[int, int]] = []

    class Asked:
        def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
            asked.append((len(request["prompts"]), request["batch_size"]))
            return {"counts": {}}

    for name in peers:
        for size in (1, 2):
            cell = Cell(
                peer=name, mode="plain", dtype="float32", batch_size=size, threads=1
            )
            run_of._children[name, "plain", "float32"] = Asked()  # pyright: ignore
            run_of._ask(cell)
    run_of._children.clear()
    assert asked == [(2, 1), (6, 6), (2, 1), (6, 2)]

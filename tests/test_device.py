"""The checks and measurements of a device run, here with tiny models on a CPU."""

import argparse
import json
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import device, device_checks, device_steps
from benchmarks.kernels import clock
from benchmarks.kernels.clock import Spread
from benchmarks.step_times import Launch, Models, Program, Setting, TargetPass, Timed
from jaxspec.models.families import config_from_hf
from jaxspec.sharding import make_mesh

IN_SUITE = pytest.mark.long_suite(name="device_run")
slow = partial(pytest.param, marks=pytest.mark.slow)

QUICK = ["--dry-run", "--batches", "1", "--num-drafts", "1", "--acceptances", "0"]


def options_of(*more: str) -> argparse.Namespace:
    return device.make_parser().parse_args([*QUICK, *more])


class FakeProgram(Program):
    """A program that is not compiled; a launch takes 1 ms for each level of drafts."""

    def __init__(self, models: Models, **changes: Any):
        self.models, self.launch = models, Launch(**changes)
        self.shape = self.launch.shape
        self.lower_s = self.compile_s = 1.0

    def run(self, acceptance: Any = None, *, repeats: int | None = None) -> Timed:
        del repeats
        accepted = sum(np.cumprod(acceptance or self.launch.acceptance or ()))
        seconds = 1e-3 * (1 + self.launch.num_drafts)
        return Timed(step_s=Spread.of([seconds]), tokens=1 + accepted)


class FakePass(FakeProgram):
    def run(self, *_: Any, **__: Any) -> Any:
        return super().run().step_s


class FakeLLM:
    """Generates the same texts for every setting, one logprob for each token."""

    def __init__(self, model: str, **_: Any):
        params = {"weights": np.zeros(500, np.float32)}
        self.model = model
        self.llm_engine = SimpleNamespace(runner=SimpleNamespace(params=params))

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for_programs(self) -> None:
        pass

    def generate(self, texts: list[str], params: Any, **_: Any) -> list[Any]:
        tokens = list(range(params.max_tokens))
        metrics = SimpleNamespace(
            num_proposed_per_position=[4], num_accepted_draft_tokens=3
        )
        text = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
            spec_decode_metrics=metrics,
        )
        return [SimpleNamespace(outputs=[text])] * len(texts)


@pytest.fixture
def instant(monkeypatch):
    """Replace everything that computes; sizes and rows are those of a real run."""
    monkeypatch.setattr(device_steps, "Program", FakeProgram)
    monkeypatch.setattr(device_steps, "TargetPass", FakePass)

    def without_values(target: Any, draft: Any, setting: Any) -> Models:
        return Models.abstract(target, draft, setting, make_mesh(1))

    monkeypatch.setattr(Models, "random", without_values)
    monkeypatch.setattr(device_steps, "profile", lambda run: {"device_s": 1.0})
    for module in (device_steps, device_checks):
        monkeypatch.setattr(module, "measure_copy", lambda options: 100.0)
    monkeypatch.setattr(device_checks, "LLM", FakeLLM)
    monkeypatch.setattr(device_checks, "packaged_gemma3", lambda: None)
    monkeypatch.setattr(
        device.bench, "plan", lambda options, _: [KERNEL] * (1 if options.quick else 2)
    )
    monkeypatch.setattr(device.bench, "measure_case", lambda *_: [{}])


KERNEL = SimpleNamespace(name="decode", is_goal=True)
# Numbers of rows of a run with default options, but compiled programs.
PAIR = {"plain": 4, "verify": 2, "round": 8 * 2 + 1, "profile": 1, "tree": 2}
ROWS = {
    "device": {"copy": 1},
    "kernels": {"kernel": 3},
    "batch_invariant": {"bits": 8, "speed": 8},
    "lossless": {"speed": 18, "lossless": 32},
    "real": {"speed": 3},
    "prompts": {"prompt": 8},
    "sampling": {"sampling": 8},
    "launches": {"launch": 6},
    "layers": {"layers": 4},
    **dict.fromkeys(("4b-270m", "9b-2b", "27b-2b"), PAIR),
}


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("part", device.DEFAULT_PARTS)
def test_part_measures_all_that_a_run_promises(part):
    options = device.make_parser().parse_args([])
    rows = list(device.run_part(part, options))
    found = Counter(row["what"] for row in rows)
    found.pop("compile", None)
    assert found == ROWS[part]
    if part == "4b-270m":
        forced = [
            (row["num_drafts"], row["forced_acceptance"])
            for row in rows
            if "forced_acceptance" in row
        ]
        assert forced == [(k, rate) for k in range(1, 9) for rate in (0.6, 0.8)]
    if part == "real":
        # One prompt of 96 tokens each time: tokens/s times 2,000 bytes, over 100 GB/s.
        share = rows[0]["one_tokens_per_s"] * 2000 / 1e9 / 100
        assert rows[0]["share_of_bandwidth"] == pytest.approx(share)


@pytest.mark.usefixtures("instant")
def test_pair_that_does_not_fit_is_skipped(monkeypatch):
    small = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30})
    mesh = make_mesh(1)
    monkeypatch.setattr(device_steps, "make_mesh", lambda count: mesh)
    monkeypatch.setattr(device_steps.jax, "devices", lambda: [small])
    options = device.make_parser().parse_args([])
    (row,) = device.run_part("9b-2b", options)
    assert row == {"what": "skipped", "why": row["why"]}
    assert "weights take 23.7 GB, more than 85% of 1.1 GB" in row["why"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--scan-layers"]], ids=["each", "scanned"])
def test_pair_is_measured_in_all_parts(form):
    rows = list(device.run_part("9b-2b", options_of("--context", "16", *form)))
    by_kind = {}
    for row in rows:
        json.dumps(row)
        by_kind.setdefault(row["what"], []).append(row)
    kinds = ["compile", "plain", "verify", "round", "profile", "tree"]
    assert list(by_kind) == kinds
    plain = {row["model"]: row for row in by_kind["plain"]}
    assert plain.keys() == {"9b", "2b"}
    assert plain["9b"]["bytes_read"] == plain["2b"]["bytes_read"] > 64 * 512 * 2
    assert all(row["share_of_bandwidth"] > 0 for row in plain.values())
    (verify,) = by_kind["verify"]
    assert verify["verify_over_plain"] > 0
    forced, real = by_kind["round"]
    assert (forced["acceptance"], real["acceptance"]) == ("synthetic", "standard")
    # Three steps with one draft each run twice: 6 drafts. Random models with tied
    # embeddings repeat their last token, so a real rule accepts their drafts; a forced
    # rate of 0 accepts none.
    assert (forced["drafted"], forced["accepted"]) == (6, 0)
    assert forced["tokens_per_round"] == 1
    assert forced["ceiling"] < 1
    assert real["tokens_per_round"] > 1.5
    (profile,) = by_kind["profile"]
    assert profile["num_rounds"] == 6
    assert profile["device_s"] > 0
    assert sum(one["share"] for one in profile["kernels"]) <= 1.001
    trees = {row["tree"]: row["num_nodes"] for row in by_kind["tree"]}
    assert trees == {"leaves": 6, "tree": 8}
    # The shapes of all programs, as the engine names them.
    names = {row["program"] for row in by_kind["compile"]}
    assert names == {"1x0_sampled", "1x1_sampled", "1x3t6_sampled", "1x3t8_sampled"}


@pytest.mark.parametrize(
    ("part", "what", "count"),
    [
        # Small cases of two operations, and a CPU's one of page writes.
        slow("kernels", "kernel", 1),
        pytest.param("batch_invariant", "bits", 4, marks=IN_SUITE),
        pytest.param("lossless", "lossless", 2, marks=IN_SUITE),
        pytest.param("real", "speed", 3, marks=IN_SUITE),
        slow("prompts", "prompt", 4),
        slow("sampling", "sampling", 4),
        slow("launches", "launch", 4),
        slow("layers", "layers", 4),
    ],
)
def test_dry_run_measures_every_part(part, what, count, tmp_path):
    output = tmp_path / "result.json"
    device.main([*QUICK, "--context", "32", "--parts", part, "--output", str(output)])
    result = json.loads(output.read_text())
    assert result["parts"][part]["state"] == "done", result["rows"]
    assert len([row for row in result["rows"] if row["what"] == what]) == count
    text = output.with_suffix(".md").read_text()
    assert f"## {device.TABLES[what][0]}" in text
    for row in result["rows"]:
        if row["what"] == "lossless":
            assert (row["num_equal"], row["num_texts"]) == (2, 2)
            assert row["acceptance_rate"] == 1  # the target is its own draft


def test_full_runs_have_the_published_sizes():
    options = device.make_parser().parse_args([])
    assert device_steps.config_of("27b", options)["hidden_size"] == 4608
    assert device_steps.setting_of(options).context == 1024
    assert device_steps.config_of("27b", options_of())["hidden_size"] == 64
    for form in ([], ["--scan-layers"]):
        pair = device_steps.configs_of("27b-2b", device.make_parser().parse_args(form))
        assert [one.scan_layers for one in pair] == [bool(form)] * 2
    pool = Setting(context=100, steps=10).pool(8, 512, 5)
    # The pages hold the context, five tokens per step, and five more for one further
    # step.
    assert pool.max_model_len >= 100 + 11 * 5
    assert pool.num_pages == 8 * pool.table_len


CARD = {"what": "copy", "device": "Card 1", "gb_per_s": 1.0}
PLAIN = {
    "what": "plain",
    "model": "9b",
    "batch": 1,
    "speeds": "published",
    "step_us": {"median": 300.0, "least": 299.0, "most": 301.0},
    "expected_us": 100.0,
    "share_of_bandwidth": 0.25,
}


@pytest.fixture
def parts(monkeypatch) -> dict[str, list[dict]]:
    """Replace the children: parts yield these rows, in place of measurements."""
    rows = {"device": [CARD], "27b-2b": [{"what": "first"}], "9b-2b": [PLAIN]}

    def child(name, seconds, arguments):
        del seconds, arguments
        yield from rows[name]

    monkeypatch.setattr(device, "run_child", child)
    return rows


def run(output: Path, *words: str) -> dict:
    device.main([*QUICK, "--output", str(output), *words])
    return json.loads(output.read_text())


def test_measurements_are_kept_if_a_part_fails(tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    seen = []

    def child(name, seconds, arguments):
        del arguments
        if name == "device":
            yield CARD
            return
        yield {"what": "first"}
        seen.append((name, seconds, len(json.loads(output.read_text())["rows"])))
        yield {"what": "ended early", "code": 1}

    monkeypatch.setattr(device, "run_child", child)
    result = run(output, "--parts", "27b-2b", "hf-2b", "--seconds", "100")
    found = [(row["part"], row["what"]) for row in result["rows"]]
    assert found == [
        ("device", "copy"),
        ("27b-2b", "first"),
        ("27b-2b", "ended early"),
        ("hf-2b", "first"),
        ("hf-2b", "ended early"),
    ]
    assert [name for name, _, _ in seen] == ["27b-2b", "hf-2b"]
    assert [count for _, _, count in seen] == [2, 4]
    assert all(0 < seconds <= 100 for _, seconds, _ in seen)
    assert {name: one["state"] for name, one in result["parts"].items()} == {
        "device": "done", "27b-2b": "ended early", "hf-2b": "ended early"
    }  # fmt: skip
    assert result["is_dry_run"] is True
    assert "--parts 27b-2b" in result["command"]


def test_run_continues_with_the_parts_that_are_not_done(tmp_path, parts):
    output = tmp_path / "result.json"
    words = "--parts", "27b-2b", "9b-2b"
    parts["9b-2b"] = [{"what": "ended early", "code": 1}]
    assert run(output, *words)["parts"]["9b-2b"]["state"] == "ended early"
    # The part that is done is not measured again; the other one is, from its start.
    parts |= {"27b-2b": [{"what": "second"}], "9b-2b": [PLAIN]}
    result = run(output, *words)
    found = [(row["part"], row["what"]) for row in result["rows"]]
    assert sorted(found) == [
        ("27b-2b", "first"),
        ("9b-2b", "plain"),
        ("device", "copy"),
    ]
    assert {one["state"] for one in result["parts"].values()} == {"done"}
    again = run(output, *words, "--again")
    assert "second" in [row["what"] for row in again["rows"]]


def test_results_of_another_device_or_other_settings_are_not_continued(tmp_path, parts):
    output = tmp_path / "result.json"
    run(output, "--parts", "27b-2b")
    before = output.read_text()
    with pytest.raises(SystemExit, match="other settings.*--again"):
        run(output, "--parts", "27b-2b", "--context", "8")
    parts["device"] = [CARD | {"device": "Card 2"}]
    with pytest.raises(SystemExit, match="other device: Card 1, not Card 2"):
        run(output, "--parts", "27b-2b")
    assert output.read_text() == before


def test_time_limit_and_missing_device_end_the_run(tmp_path, parts):
    output = tmp_path / "result.json"
    with pytest.raises(SystemExit, match="no device"):
        run(output, "--seconds", "0")
    assert not output.exists()
    del parts


def test_page_lists_what_the_cost_model_expects(tmp_path, parts):
    near = PLAIN | {"batch": 8, "expected_us": 290.0}
    parts["9b-2b"] = [near, PLAIN]
    result = run(tmp_path / "result.json", "--parts", "9b-2b")
    found = device.compared(result)
    assert [one["off_by"] for one in found] == [3, pytest.approx(300 / 290)]
    text = (tmp_path / "result.md").read_text()
    assert "1 of 2 differ by more than a factor of 1.5" in text
    assert "| plain model=9b batch=1 | published | 100 | 300 | 3 |" in text
    # The goal is the smallest share: 0.75.
    assert "| plain_share_of_bandwidth | 0.75 | 0.25 | NO |" in text
    assert "| Card 1 |" in text and "# Card 1" in text


def test_device_without_published_speeds_is_compared_with_a_copy():
    speeds, source = device_steps.find_speeds(bandwidth=20.0)
    assert (speeds.memory, source) == (20e9, "copy")
    assert jax.devices()[0].platform == "cpu"


@pytest.fixture
def child(monkeypatch, tmp_path: Path):
    """Return a function that makes a part run shell lines (pids in `$0.pids`)."""
    path = tmp_path / "python"
    monkeypatch.setattr(device.sys, "executable", str(path))

    def make(*lines: str) -> Path:
        path.write_text("\n".join(["#!/bin/sh", "echo $$ >> $0.pids", *lines, ""]))
        path.chmod(0o755)
        return path.with_name("python.pids")

    return make


def have_ended(pids: Path) -> bool:
    """Return whether all processes end soon.

    Processes whose parent has ended take a moment to be reaped.
    """
    for _ in range(100):
        states = [Path("/proc", pid, "stat") for pid in pids.read_text().split()]
        if not any(path.exists() and " Z " not in path.read_text() for path in states):
            return True
        time.sleep(0.1)
    return False


def test_slow_process_is_killed_with_its_children(child):
    """A child holds the output pipe too, so it stays open until the child ends."""
    more = "sleep 60 &", "echo $! >> $0.pids", "exec sleep 60"
    pids = child("echo '{\"what\": 1}'", "echo not json", *more)
    first, last = device.run_child("9b-2b", 1.0, [])
    assert first == {"what": 1}
    assert last["what"] == "ended early"
    assert last["code"] < 0
    assert last["after_s"] < 30
    assert len(pids.read_text().split()) == 2
    assert have_ended(pids)


def test_part_ends_when_its_reader_closes_the_pipe(child):
    pids = child("echo '{\"what\": 1}'", "exec sleep 60")
    rows = device.rows_of("9b-2b", time.monotonic() + 60, [])
    assert next(rows) == {"what": 1}
    rows.close()
    assert have_ended(pids)


@pytest.mark.parametrize("given", [None, 0.5])
def test_part_preallocates_memory_unless_configured(child, monkeypatch, given):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, str(given))
    # A killed process may leave an incomplete last line, which is ignored.
    child(f'echo "{{\\"what\\": ${name}}}"', "printf '{\"half'")
    expected = device.MEMORY_FRACTION if given is None else given
    assert list(device.run_child("9b-2b", 60, [])) == [{"what": expected}]


@pytest.fixture
def heeds_interrupts():
    """Enable SIGINT, which a process started in the background ignores."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_to_the_run_also_ends_the_part(monkeypatch, tmp_path, number):
    output, ended = tmp_path / "result.json", []

    def child(name, *_):
        if name == "device":
            yield CARD
            return
        try:
            yield {"what": "first"}
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append(True)

    monkeypatch.setattr(device, "run_child", child)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        device.main([*QUICK, "--output", str(output)])
    assert ended == [True]
    assert len(json.loads(output.read_text())["rows"]) == 2
    assert signal.getsignal(number) is before


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_pass_computes_all_that_a_round_needs(num_drafts):
    """XLA must compute the tokens of a pass, even if no later pass reads them."""
    setting = device_steps.setting_of(options_of("--context", "16"))
    config = config_from_hf(device_steps.config_of("9b", options_of()))
    models = Models.random(config, config, setting)
    one = TargetPass(models, seqs=2, num_drafts=num_drafts)
    state, tokens = one.compiled.out_info
    assert tokens.shape == (2, num_drafts + 1)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(t)] for t in (state, one.forms)]
    assert shapes[0] == shapes[1]
    assert one.run().least_s > 0


@pytest.mark.slow
def test_abstract_weights_compile_the_same_program():
    config = config_from_hf(device_steps.config_of("9b", options_of()))
    setting = device_steps.setting_of(options_of("--context", "16"))
    models = Models.random(config, config, setting)
    shapes = Models.abstract(config, config, setting, models.mesh)
    assert shapes.weight_bytes == models.weight_bytes
    for make in (Program, TargetPass):
        made, abstract = (
            make(which, seqs=1, num_drafts=1).compiled for which in (models, shapes)
        )
        assert jax.tree.flatten(made.args_info) == jax.tree.flatten(abstract.args_info)
        one, other = made.input_shardings, abstract.input_shardings
        assert jax.tree.flatten(one) == jax.tree.flatten(other)
        assert str(made.memory_analysis()) == str(abstract.memory_analysis())


def test_kernel_times_are_summed():
    found = clock.summarise([("a", 1.0), ("b", 2.5), ("a", 0.5)])
    assert found["device_s"] == 4.0
    assert found["kernels"] == [
        {"name": "b", "calls": 1, "seconds": 2.5, "share": 0.625},
        {"name": "a", "calls": 2, "seconds": 1.5, "share": 0.375},
    ]


@pytest.mark.slow
def test_speed_of_huggingface_is_measured():
    rows = list(device.run_part("hf-2b", options_of("--context", "16")))
    assert [row["is_compiled"] for row in rows] == [False, True]
    # The step time is calculated from the difference between the times of a long and a
    # short text, which for tiny models is within timing noise.
    for row in rows:
        assert row["step_us"]["least"] <= row["step_us"]["median"] < 1e6


def test_first_difference_is_the_position_of_the_first_other_token():
    assert device_checks.first_difference([1, 2, 3], [1, 5, 4]) == 1
    assert device_checks.first_difference([1, 2], [1, 2]) is None


def test_equal_texts_with_other_logprobs_have_no_equal_bits():
    one = [[(7, -0.5), (8, -1.0)], [(7, -0.5)]]
    other = [[(7, -0.5), (8, -1.25)], [(9, -0.5)]]
    assert device_checks._equal_bits(one, other) == {
        "num_texts": 2,
        "num_equal": 1,
        "num_equal_bits": 0,
        "largest_difference": 0.25,
    }

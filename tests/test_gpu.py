"""The benchmark of full-size models runs, here with tiny models."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import jax
import pytest

from benchmarks import gpu
from benchmarks.kernels import clock
from benchmarks.step_times import Models, Program, Setting, TargetPass
from jaxspec.models.families import config_from_hf

QUICK = ["--dry-run", "--batches", "1", "--num-drafts", "1", "--acceptances", "0"]


def options_of(*more: str) -> argparse.Namespace:
    return gpu.make_parser().parse_args([*QUICK, *more])


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--scan-layers"]], ids=["each", "scanned"])
def test_pair_is_measured_in_all_parts(form):
    rows = list(gpu.run_part("9b-2b", options_of("--context", "16", *form)))
    by_kind = {}
    for row in rows:
        json.dumps(row)
        by_kind.setdefault(row["what"], []).append(row)
    assert list(by_kind) == ["copy", "plain", "verify", "round", "profile"]
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


def test_full_runs_have_the_published_sizes():
    options = gpu.make_parser().parse_args([])
    assert gpu.config_of("27b", options)["hidden_size"] == 4608
    assert gpu.setting_of(options).context == 1024
    assert gpu.config_of("27b", options_of())["hidden_size"] == 64
    for form in ([], ["--scan-layers"]):
        pair = gpu.configs_of("27b-2b", gpu.make_parser().parse_args(form))
        assert [one.scan_layers for one in pair] == [bool(form)] * 2
    pool = Setting(context=100, steps=10).pool(8, 512, 4)
    # The pages hold the context, five tokens per step, and five more for one further
    # step.
    assert pool.max_model_len >= 100 + 11 * 5
    assert pool.num_pages == 8 * pool.table_len


def test_measurements_are_kept_if_a_part_fails(tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    seen = []

    def child(name, seconds, arguments):
        del arguments
        yield {"what": "first"}
        seen.append((name, seconds, len(json.loads(output.read_text())["rows"])))
        yield {"what": "ended early", "code": 1}

    monkeypatch.setattr(gpu, "run_child", child)
    more = ["--parts", "27b-2b", "hf-2b", "--seconds", "100", "--output", str(output)]
    gpu.main([*QUICK, *more])
    result = json.loads(output.read_text())
    found = [(row["part"], row["what"]) for row in result["rows"]]
    assert found == [
        ("27b-2b", "first"),
        ("27b-2b", "ended early"),
        ("hf-2b", "first"),
        ("hf-2b", "ended early"),
    ]
    assert [name for name, _, _ in seen] == ["27b-2b", "hf-2b"]
    assert [count for _, _, count in seen] == [1, 3]
    assert all(0 < seconds <= 100 for _, seconds, _ in seen)
    assert result["is_dry_run"] is True
    assert "--parts 27b-2b" in result["command"]
    gpu.main([*QUICK, *more[:-4], "--seconds", "0", "--output", str(output)])
    left = [row["what"] for row in json.loads(output.read_text())["rows"]]
    assert left == ["skipped: the time limit was reached"] * 2


@pytest.fixture
def child(monkeypatch, tmp_path: Path):
    """Return a function that makes a part run shell lines (pids in `$0.pids`)."""
    path = tmp_path / "python"
    monkeypatch.setattr(gpu.sys, "executable", str(path))

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
    first, last = gpu.run_child("9b-2b", 1.0, [])
    assert first == {"what": 1}
    assert last["what"] == "ended early"
    assert last["code"] < 0
    assert last["after_s"] < 30
    assert len(pids.read_text().split()) == 2
    assert have_ended(pids)


def test_part_ends_when_its_reader_closes_the_pipe(child):
    pids = child("echo '{\"what\": 1}'", "exec sleep 60")
    rows = gpu.rows_of("9b-2b", time.monotonic() + 60, [])
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
    expected = gpu.MEMORY_FRACTION if given is None else given
    assert list(gpu.run_child("9b-2b", 60, [])) == [{"what": expected}]


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

    def child(*_):
        try:
            yield {"what": "first"}
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append(True)

    monkeypatch.setattr(gpu, "run_child", child)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*QUICK, "--output", str(output)])
    assert ended == [True]
    assert len(json.loads(output.read_text())["rows"]) == 1
    assert signal.getsignal(number) is before


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_pass_computes_all_that_a_round_needs(num_drafts):
    """XLA must compute the tokens of a pass, even if no later pass reads them."""
    setting = gpu.setting_of(options_of("--context", "16"))
    config = config_from_hf(gpu.config_of("9b", options_of()))
    models = Models.random(config, config, setting)
    one = TargetPass(models, seqs=2, num_drafts=num_drafts)
    state, tokens = one.compiled.out_info
    assert tokens.shape == (2, num_drafts + 1)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(t)] for t in (state, one.forms)]
    assert shapes[0] == shapes[1]
    assert one.run().least_s > 0


@pytest.mark.slow
def test_abstract_weights_compile_the_same_program():
    config = config_from_hf(gpu.config_of("9b", options_of()))
    setting = gpu.setting_of(options_of("--context", "16"))
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
    rows = list(gpu.run_part("hf-2b", options_of("--context", "16")))
    assert [row["is_compiled"] for row in rows] == [False, True]
    # The step time is calculated from the difference between the times of a long and a
    # short text, which for tiny models is within timing noise.
    for row in rows:
        assert row["step_us"]["least"] <= row["step_us"]["median"] < 1e6

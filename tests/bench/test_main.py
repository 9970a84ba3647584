"""How failures are shown, and that help needs no jax."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.bench import __main__ as command_line
from jaxspec.bench import whole
from jaxspec.bench.report import BenchError
from tests.bench.workloads import use_fake_engine

ROOT = Path(__file__).parents[2]


def test_help_lists_the_subcommands_without_importing_jax():
    code = (
        "import sys, jaxspec.bench.__main__ as command_line\n"
        "assert command_line.main([]) == 0\n"
        "assert not {'jax', 'matplotlib'} & sys.modules.keys()\n"
        # Nor does a client of a server.
        "import jaxspec.bench.serve\n"
        "assert not {'jax', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    commands = done.stdout.partition("subcommands:")[2]
    found = re.findall(r"^    (\w+)", commands, re.MULTILINE)
    assert found == ["latency", "throughput", "serve", "spec"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be an integer of at"),
        (["latency", "--num-iters", "0"], "--num-iters must be"),
        (["latency", "--model", "/none"], "model must be"),
        (["throughput", "--num_prompts=0"], "--num-prompts must be"),
        (["throughput", "--temperature", "9"], "temperature must be a number in"),
        (["latency", "--max-num-seqs", "4"], "--max-num-seqs must be at least 8"),
        (["latency", "--output-len", "9000"], "--output-len 9000 are more than"),
        (["latency", "--output-json", "none/x"], "--output-json must be a file"),
        (["latency", "--plot", "x.jpg"], "--plot must be a file that ends in one"),
        (["throughput", "--plot", "none/x.svg"], "--plot must be a file in a folder"),
        (["spec", "--plot", "x"], "--plot must be a file that ends in one of"),
        (["spec", "--batch-sizes", "0"], "--batch-sizes must be"),
        (["spec", "--temperatures", "-1"], "--temperatures must be a number in"),
        (["spec", "--output-len", "1"], "--output-len must be"),
        (["serve", "--base-url", "x"], "--base-url must be a URL"),
    ],
)
def test_a_wrong_value_is_one_line_and_code_2(arguments, said, capsys):
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"python -m jaxspec.bench {arguments[0]}: error: ")
    assert said in line


def test_json_is_alone_on_standard_output(monkeypatch, capsys):
    use_fake_engine(monkeypatch)
    sizes = ["--batch-size", "1", "--output-len", "4", "--num-iters", "1"]
    assert command_line.main(["latency", *sizes, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["speculative"]["num_output_tokens"] == 4
    assert "json" not in found["arguments"]
    assert "Avg latency: " in shown.err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (BenchError("boom"), 1, "python -m jaxspec.bench latency: error: boom\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
    ],
)
def test_failures_are_told(raised, code, said, monkeypatch, capsys):
    def fail(_: argparse.Namespace) -> None:
        raise raised

    monkeypatch.setattr(whole, "run", fail)
    assert command_line.main(["latency"]) == code
    assert capsys.readouterr().err == said

"""The command line `python -m jaxspec`: its subcommands, errors and output."""

import argparse
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jaxspec as jaxspec_package
from jaxspec import __main__ as command_line
from jaxspec.cli import chat, generate
from jaxspec.engine.model_folders import model_folder
from tests.support.processes import run_python
from tests.support.programs import quick_environment

ROOT = Path(__file__).parents[1]


def jaxspec(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line as users do, but with the tests' program cache."""
    return run_python("-m", "jaxspec", *arguments, input=lines)


def test_bundled_pair_generates():
    done = jaxspec(
        *("generate", "Tell me a short story about a dragon."),
        *("--max-tokens", "8", "--num-speculative-tokens", "1", "--ignore-eos"),
    )
    assert done.returncode == 0, done.stderr
    text, _, table = done.stdout.partition("\n\njaxspec/tiny-gemma2, ")
    assert text.strip()
    assert re.match(r"(bfloat16|float32) on cpu, K = 1, greedy\n", table)
    assert re.search(r"^tokens +8 +8$", table, re.MULTILINE)
    assert re.search(r"^texts +equal$", table, re.MULTILINE)
    assert "\x1b" not in done.stdout, "colours belong on terminals only"
    assert "Traceback" not in done.stderr


def test_version_and_usage_are_printed(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jaxspec {jaxspec_package.__version__}\n"
    assert command_line.main(["bench"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m jaxspec bench [-h]")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_commands_without_importing_jax(arguments):
    code = (
        "import sys, jaxspec.__main__ as command_line\n"
        "try: command_line.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = run_python("-c", code, *arguments, check=True)
    commands = done.stdout.partition("subcommands:")[2]
    named = re.findall(r"^    ([\w-]+)", commands, re.MULTILINE)
    assert named == [
        *("generate", "chat", "serve", "run-batch", "plan", "compile"),
        *("quality", "bench", "collect-env"),
    ]


def parsed(monkeypatch: pytest.MonkeyPatch, command: Any, *given: str) -> Any:
    """Return the options that a command line gives to a command's `run`."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(command, "run", seen.append)
    name = command.__name__.rpartition(".")[2]
    prompt = ["hi"] if command is generate else []
    assert command_line.main([name, *prompt, *given]) == 0
    (options,) = seen
    return options


def test_defaults_are_the_bundled_pair(monkeypatch):
    options = parsed(monkeypatch, generate)
    assert options.model == "jaxspec/tiny-gemma2"
    assert options.speculative_model == "jaxspec/tiny-gemma2-draft"
    assert options.num_speculative_tokens == 5, "as in the API"
    assert (options.max_tokens, options.temperature) == (128, 0.0)
    assert options.is_chat is None, "the model decides"
    assert options.is_compared
    raw = parsed(monkeypatch, generate, "--raw", "--no-compare")
    assert (raw.is_chat, raw.is_compared) == (False, False)
    own = parsed(monkeypatch, chat)
    assert own.model == "jaxspec/tiny-gemma2"
    assert own.speculative_model == "jaxspec/tiny-gemma2-draft"
    assert (own.num_speculative_tokens, own.url) == (5, None)
    remote = parsed(monkeypatch, chat, "--url", "http://x", "--temperature", "1")
    assert (remote.url, remote.model) == ("http://x", None)
    assert remote.temperature == 1.0


CONFIG = "--speculative-config"
FOLDER = str(model_folder("jaxspec/tiny-gemma2", "--model"))


@pytest.mark.parametrize(
    ("given", "draft", "num_draft_tokens"),
    [
        (["--model", "x"], None, None),
        (["--model", "x", "--speculative-model", "y"], "y", 5),
        ([CONFIG, '{"draft_vocab_size": 2048}'], "jaxspec/tiny-gemma2-draft", 5),
        ([CONFIG, '{"method": "suffix", "num_speculative_tokens": 9}'], None, None),
        (["--model", FOLDER, CONFIG, '{"model": "x"}'], None, 5),
    ],
)
def test_draft_model_of_a_command_line(monkeypatch, given, draft, num_draft_tokens):
    found = parsed(monkeypatch, generate, *given)
    assert (found.speculative_model, found.num_speculative_tokens) == (
        draft,
        num_draft_tokens,
    )
    if "2048" in given[-1]:
        assert found.speculative_config == {"draft_vocab_size": 2048}


@pytest.mark.slow
def test_bundled_pair_chats(tmp_path):
    flags = ("--max-tokens", "8", "--num-speculative-tokens", "1", "--ignore-eos")
    # Every round has drafts, because timings are meaningless here.
    flags = (*flags, "--speculative-config", '{"controller": "fixed"}')
    answers, end = tmp_path / "answers", time.monotonic() + 300
    with (
        answers.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "jaxspec", "chat", *flags],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=quick_environment(),
        ) as chatting,
    ):
        assert chatting.stdin is not None
        assert chatting.stderr is not None

        def speed_after(line: str) -> str:
            print(line, file=chatting.stdin, flush=True)
            return next(one for one in chatting.stderr or () if "tokens/s" in one)

        # The first answers end before the program with drafts is compiled.
        drafts = r"tokens/s, \d+% of the drafts accepted"
        while not re.search(drafts, speed_after("/clear\nTell me a story.")):
            assert time.monotonic() < end
        assert "drafts" not in speed_after("/k 0\nAnd then?")
        chatting.stdin.close()
        assert chatting.wait(60) == 0
    text = answers.read_text()
    assert len(text.strip()) > 10
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("bench latency --batch-size 0".split(), "--batch-size must"),
        ("serve m --quantization int3".split(), "quantization"),
        (["--temperature", "9"], r"temperature must be a number in \[0, 2\], got 9"),
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0"),
        (["--num-speculative-tokens", "9"], "from 1 to 8, got 9"),
        (["--speculative-config", '{"draft_vocab_size": 9000}'], "to 8192, got 9000"),
        (["--speculative-config", '{"draft_vocab": 9}'], "no key 'draft_vocab'"),
        (["--speculative-config", "[]"], "speculative_config must be a dict"),
        (["--dtype", "int8"], "dtype must be one of .* got 'int8'"),
        (["--speculative-model", "none"], "speculative_model must be .* got 'none'"),
        (["--speculative-model", "[ngram]"], "requires ngram_prompt_lookup_max"),
        (["--model", "./nosuch"], "model must be .* got './nosuch'.*No such folder"),
        (
            ["--model", "jaxspec/tiny-gemma2", "--num-speculative-tokens", "3"],
            "num_speculative_tokens=3 was given without a draft model",
        ),
        (
            ["--speculative-model", "[medusa]"],
            "\\[medusa\\].*not supported.*\\[ngram\\]",
        ),
        (["--model", "none", "--speculative-model", "none"], "model must be .* 'none'"),
    ],
)
def test_wrong_value_prints_one_line_and_exits_with_2(arguments, said, capsys):
    if arguments[0].startswith("--"):
        arguments = ["generate", "hi", *arguments]
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    command = "bench latency" if arguments[0] == "bench" else arguments[0]
    assert re.search(f"^python -m jaxspec {command}: error: .*{said}", line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "invalid choice: 'serv'"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--max-tokens", "ten"], "invalid int value: 'ten'"),
        (["generate", "hi", CONFIG, "{"], "argument --speculative-config: "),
        (["generate", "hi", "--chat", "--raw"], "not allowed with"),
        (["generate", "hi", "--typo"], "unrecognized arguments: --typo"),
        (["generate", "hi", "--modle", "x"], "unrecognized arguments: --modle"),
        (["serve", "--modle=x"], "unrecognized arguments: --modle"),
        (["compile", "--modle", "x"], "unrecognized arguments: --modle"),
        (["bench", "spec", "--modle", "x"], "unrecognized arguments: --modle"),
        (["chat", "hi"], "unrecognized arguments: hi"),
    ],
)
def test_wrong_usage_prints_two_lines_and_exits_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(arguments)
    assert end.value.code == 2
    wrong, hint = capsys.readouterr().err.splitlines()
    command = "" if arguments == ["serv"] else f" {arguments[0]}"
    command += " spec" * ("spec" in arguments)
    assert wrong.startswith(f"python -m jaxspec{command}: error: ")
    assert said in wrong
    expected = f"See python -m jaxspec{command} --help."
    assert hint == ("Did you mean --model?" if "modle" in said else expected)


def test_installed_program_reports_errors(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jaxspec": "jaxspec.__main__:script"}
    monkeypatch.setattr(sys, "argv", ["jaxspec", "generate", "hi", "--dtype", "int8"])
    with pytest.raises(SystemExit) as end:
        command_line.script()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("jaxspec generate: error: dtype must be")

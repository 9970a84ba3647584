"""The command line `python -m jaxspec`: arguments, errors and output."""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxspec as jaxspec_package
from jaxspec import __main__ as command_line
from jaxspec.cli import chat, generate
from jaxspec.engine.model_folders import model_folder
from tests.support.programs import quick_environment

ROOT = Path(__file__).parents[1]


def jaxspec(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line as users do, but with the tests' program cache."""
    return subprocess.run(
        [sys.executable, "-m", "jaxspec", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=quick_environment(),
        check=False,
    )


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


@pytest.mark.slow
def test_generate_with_ngram_drafts():
    done = jaxspec(
        *("generate", "one two three one two three one two", "--raw", "--ignore-eos"),
        *("--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "2"),
        *("--max-tokens", "8", "--num-speculative-tokens", "1", "--dtype", "float32"),
        *("--speculative-config", '{"controller": "fixed"}'),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^acceptance rate ", done.stdout, re.MULTILINE)
    assert re.search(r"^texts +equal$", done.stdout, re.MULTILINE)


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jaxspec {jaxspec_package.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_commands_without_importing_jax(arguments):
    code = (
        "import sys, jaxspec.__main__ as command_line\n"
        "try: command_line.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    commands = done.stdout.partition("subcommands:")[2]
    named = re.findall(r"^    (\w+)", commands, re.MULTILINE)
    assert named == [
        *("generate", "chat", "serve", "plan", "compile"),
        *("quality", "bench"),
    ]


def test_defaults_are_the_bundled_pair(monkeypatch):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(generate, "run", seen.append)
    assert command_line.main(["generate", "hi"]) == 0
    assert command_line.main(["generate", "hi", "--raw", "--no-compare"]) == 0
    options = vars(seen[0])
    assert options["model"] == "jaxspec/tiny-gemma2"
    assert options["speculative_model"] == "jaxspec/tiny-gemma2-draft"
    assert options["num_speculative_tokens"] == 5, "as in the API"
    assert (options["max_tokens"], options["temperature"]) == (128, 0.0)
    assert options["is_chat"] is None, "the model decides"
    assert options["is_compared"]
    assert seen[1].is_chat is False
    assert not seen[1].is_compared


def test_chat_uses_the_default_models_or_a_server(monkeypatch):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(chat, "run", seen.append)
    assert command_line.main(["chat"]) == 0
    assert command_line.main(["chat", "--url", "http://x", "--temperature", "1"]) == 0
    own, servers = seen
    assert own.model == "jaxspec/tiny-gemma2"
    assert own.speculative_model == "jaxspec/tiny-gemma2-draft"
    assert (own.num_speculative_tokens, own.url) == (5, None)
    assert (servers.url, servers.model) == ("http://x", None)
    assert servers.temperature == 1.0


def test_named_model_runs_without_drafts(monkeypatch):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(generate, "run", seen.append)
    for arguments in ([], ["--speculative-model", "y"]):
        assert command_line.main(["generate", "hi", "--model", "x", *arguments]) == 0
    alone, pair = seen
    assert (alone.speculative_model, alone.num_speculative_tokens) == (None, None)
    assert (pair.speculative_model, pair.num_speculative_tokens) == ("y", 5)


def test_drafts_can_be_set_in_a_config(monkeypatch):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(generate, "run", seen.append)
    folder = str(model_folder("jaxspec/tiny-gemma2", "--model"))
    for arguments in (
        ["--speculative-config", '{"draft_vocab_size": 2048}'],
        ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 9}'],
        ["--model", folder, "--speculative-config", '{"model": "x"}'],
    ):
        assert command_line.main(["generate", "hi", *arguments]) == 0
    found = [(one.speculative_model, one.num_speculative_tokens) for one in seen]
    assert found == [("jaxspec/tiny-gemma2-draft", 5), (None, None), (None, 5)]
    assert seen[0].speculative_config == {"draft_vocab_size": 2048}
    flag = ["--speculative-config", "{"]
    with pytest.raises(SystemExit):
        command_line.main(["generate", "hi", *flag])


@pytest.mark.slow
def test_bundled_pair_chats():
    flags = ("--max-tokens", "8", "--num-speculative-tokens", "1", "--ignore-eos")
    # Every round has drafts, because timings are meaningless here.
    flags = (*flags, "--speculative-config", '{"controller": "fixed"}')
    # The first texts are so short that they may end before the program with drafts is
    # compiled.
    lines = "Tell me a story.\n" * 60 + "/k 0\nAnd then?\n"
    done = jaxspec("chat", *flags, lines=lines)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert "\x1b" not in done.stdout
    *drafting, plain = (one for one in done.stderr.splitlines() if "tokens/s" in one)
    assert len(drafting) == 60
    assert re.search(r"tokens/s, \d+% of the drafts accepted", drafting[-1])
    assert "drafts" not in plain


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "9"], r"temperature must be a number in \[0, 2\], got 9"),
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0"),
        (["--num-speculative-tokens", "9"], "from 1 to 8, got 9"),
        (["--speculative-config", '{"draft_vocab_size": 9000}'], "to 8191, got 9000"),
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
    assert command_line.main(["generate", "hi", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert re.search(f"^python -m jaxspec generate: error: .*{said}", line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "invalid choice: 'serv'"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--max-tokens", "ten"], "invalid int value: 'ten'"),
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


def test_interrupt_ends_cleanly(monkeypatch, capsys):
    def interrupted(_: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    assert command_line.main(["generate", "hi"]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_exceptions_propagate(monkeypatch):
    def broken(_: argparse.Namespace) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(generate, "run", broken)
    with pytest.raises(ValueError, match="a bug"):
        command_line.main(["generate", "hi"])


def test_bench_has_its_own_command_line(capsys):
    assert command_line.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m jaxspec bench [-h]")
    assert command_line.main(["bench", "latency", "--batch-size", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m jaxspec bench latency: error: --batch-size must")


def test_serve_has_its_own_command_line(capsys):
    assert command_line.main(["serve", "m", "--quantization", "int3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m jaxspec serve: error: quantization")


def test_installed_program(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jaxspec": "jaxspec.__main__:script"}
    monkeypatch.setattr(sys, "argv", ["jaxspec", "generate", "hi", "--dtype", "int8"])
    with pytest.raises(SystemExit) as end:
        command_line.script()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("jaxspec generate: error: dtype must be")

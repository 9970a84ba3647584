"""Command lines are parsed; errors have messages and exit codes."""

import argparse
import io
import sys
import warnings

import pytest

from jaxspec import command_line
from jaxspec.errors import ArgumentError, ConfigError, EngineGenerateError
from jaxspec_checkpoints import CheckpointError

WRONG = ConfigError("K must be positive, got 0.", parameter="k", value=0)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (WRONG, 2, "program: error: K must be positive, got 0.\n"),
        (CheckpointError("no such model"), 2, "program: error: no such model\n"),
        (command_line.CommandError("boom"), 1, "program: error: boom\n"),
        (EngineGenerateError("NaN"), 1, "program: error: NaN\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
    ],
)
def test_errors_take_one_line(error, status, said, capsys):
    assert command_line.run_command("program", lambda: fail(error)) == status
    assert capsys.readouterr().err == said


def test_warnings_take_one_line(capsys):
    before = warnings.formatwarning

    def warn() -> None:
        text = warnings.formatwarning("K is 5.", UserWarning, "file.py", 7, "x = 5")
        print(text, end="")

    assert command_line.run_command("program", warn) == 0
    assert capsys.readouterr().out == "program: warning: K is 5.\n"
    assert warnings.formatwarning is before


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_exit_status_is_the_commands(returned, status, capsys):
    assert command_line.run_command("program", lambda: returned) == status
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError):  # bugs are not hidden
        command_line.run_command("program", lambda: fail(ZeroDivisionError()))


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert command_line.run_command("program", lambda: print("Crème")) == 0
    screen.seek(0)
    assert screen.read() == "Cr?me\n"


def parser() -> command_line.CommandParser:
    made = command_line.CommandParser(prog="program", allow_abbrev=False)
    made.add_argument("--port", type=int)
    made.add_argument("--max-num-seqs")
    made.add_argument("--dtype")
    inner = made.add_subparsers(dest="command").add_parser("bench", allow_abbrev=False)
    inner.add_argument("--batch-size")
    return made


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--max-num-seq=3", "error: unrecognized|mean --max-num-seqs?"),
        ("--typo", "error: unrecognized arguments: --typo|See program --help."),
        ("--prot=3", "program: error: unrecognized arguments: --prot|mean --port?"),
        ("--zzz", "unrecognized arguments: --zzz|See program --help."),
        ("--port x", "argument --port: invalid int value: 'x'|See program --help."),
        ("bench --batch_size 3", "program bench: error: unrec|mean --batch-size?"),
        ("bench --port 3", "program bench: error: |See program bench --help."),
        ("--prot=3 bench", "program: error: unrecognized|mean --port?"),
    ],
)
def test_wrong_command_line_takes_two_lines(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(line.split())
    assert end.value.code == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    for part, words in zip(shown, said.split("|"), strict=True):
        assert words in part
    options = parser().parse_args(["--port", "3", "bench", "--batch-size", "4"])
    assert (options.port, options.command, options.batch_size) == (3, "bench", "4")


def test_secrets_are_not_quoted(capsys):
    made = command_line.CommandParser(prog="program", allow_abbrev=False)
    made.add_argument("model", nargs="?")
    with pytest.raises(SystemExit):
        made.parse_args(["--api-kye", "hush", "hush", "--api-kye=hush"])
    shown = capsys.readouterr().err
    assert "unrecognized arguments: --api-kye --api-kye\n" in shown
    assert "hush" not in shown
    assert command_line.bearer("k") == {"Authorization": "Bearer k"}
    with pytest.raises(ArgumentError, match="printable ASCII") as refused:
        command_line.bearer("hush\nX-Other: 1")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", 17),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("1.001m", 1_001_000),
        ("3M", 3 * 2**20),
        ("1g", 10**9),
        ("2G", 2**31),
        ("1T", 2**40),
    ],
)
def test_integers_with_units(text: str, number: int):
    assert command_line.flag_type(int)(text) == command_line.length_flag(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "8kk", "8 k", "auto", "1e3"])
def test_rejects_wrong_integers(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="got|without a fraction"):
        command_line.flag_type(int | None)(text)
    assert command_line.length_flag("Auto") == -1


@pytest.mark.parametrize(
    ("line", "joined"),
    [
        ("--a.b.c 1 x --a.b.d=y.z", 'x --a {"b":{"c":1,"d":"y.z"}}'),
        ("-c.n 2k -c.l+ 1,x -c.t true", '-c {"n":2000,"l":["1","x"],"t":true}'),
        ("--a.b 1 --a.b 2", '--a {"b":2}'),
        ("-sc.n 1 --speculative-config.m 2", '--speculative-config {"n":1,"m":2}'),
        ("--t -0.5 --u=a.b x.y -v 1.5", "--t -0.5 --u=a.b x.y -v 1.5"),
    ],
)
def test_joins_dotted_flags(line: str, joined: str):
    found = [one.replace(" ", "") for one in command_line.without_dots(line.split())]
    assert found == joined.split()


@pytest.mark.parametrize(
    "line",
    ["--a.b", "--a.b 1 --a {}", "--a={} --a.b 1", "--a.b 1 --a.b.c 2"]
    + ["--a.b --port 1", "-sc {} --speculative-config.a 1", "-sc={} -sc.a 1"],
)
def test_rejects_wrong_dotted_flags(line: str):
    with pytest.raises(ConfigError, match="--a|--speculative-config"):
        command_line.without_dots(line.split())

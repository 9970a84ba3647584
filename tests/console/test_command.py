"""How command lines are read, their exit codes, and what they say of an error."""

import io
import sys

import pytest

from jaxspec.console.command import CommandParser, run_command
from jaxspec.errors import ConfigError
from jaxspec_checkpoints import CheckpointError

WRONG = ConfigError("K must be positive, got 0.", parameter="k", value=0)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (WRONG, 2, "program: error: K must be positive, got 0.\n"),
        (CheckpointError("no such model"), 2, "program: error: no such model\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
    ],
)
def test_an_error_is_said_in_a_line(error, status, said, capsys):
    assert run_command("program", lambda: fail(error)) == status
    assert capsys.readouterr().err == said


def test_a_fault_of_the_program_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_command("program", lambda: fail(ZeroDivisionError()))


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_the_status_is_the_commands(returned, status, capsys):
    assert run_command("program", lambda: returned) == status
    assert capsys.readouterr() == ("", "")


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert run_command("program", lambda: print("Crème")) == 0
    screen.seek(0)
    assert screen.read() == "Cr?me\n"


def parser() -> CommandParser:
    made = CommandParser(prog="program", allow_abbrev=False)
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
        ("--prot=3", "program: error: unrecognized arguments: --prot=3|mean --port?"),
        ("--zzz", "unrecognized arguments: --zzz|See program --help."),
        ("--port x", "argument --port: invalid int value: 'x'|See program --help."),
        ("bench --batch_size 3", "program bench: error: unrec|mean --batch-size?"),
        ("bench --port 3", "program bench: error: |See program bench --help."),
        ("--prot=3 bench", "program: error: unrecognized|mean --port?"),
    ],
)
def test_a_wrong_command_line_is_told_in_two_lines(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(line.split())
    assert end.value.code == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    for part, words in zip(shown, said.split("|"), strict=True):
        assert words in part


def test_a_right_command_line_is_read():
    options = parser().parse_args(["--port", "3", "bench", "--batch-size", "4"])
    assert (options.port, options.command, options.batch_size) == (3, "bench", "4")

"""Exit codes of the command lines, and what they say of an error."""

import pytest

from jaxspec.command import run_command
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

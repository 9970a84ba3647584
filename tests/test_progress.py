"""The progress bar counts finished requests and names programs that are compiled."""

import sys
from collections.abc import Callable

import pytest

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.progress import Progress, watch_compiles


class Engine:
    announce: Callable[[str], None] | None = None

    def announce_compiles(self, announce: Callable[[str], None] | None) -> None:
        self.announce = announce


def output_of(num_input: int, num_output: int) -> RequestOutput:
    completion = CompletionOutput(index=0, text="", token_ids=[1] * num_output)
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[2] * num_input,
        outputs=[completion, completion],
        finished=True,
    )


def test_finished_requests_are_counted(capsys: pytest.CaptureFixture[str]):
    engine, progress = Engine(), Progress(2, True)
    with progress.watch(engine):
        progress.add(output_of(3, 5))
        assert engine.announce is not None
        engine.announce("Compiling 4 sequences")
        engine.announce("")
        progress.add(output_of(1, 0))
    assert engine.announce is None
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    assert "Compiling 4 sequences" in shown
    assert " toks/s, output: " in shown


def test_disabled_bar_shows_nothing(capsys: pytest.CaptureFixture[str]):
    engine, progress = Engine(), Progress(1, False)
    with progress.watch(engine):
        assert engine.announce is None
        progress.add(output_of(3, 5))
    assert capsys.readouterr().err == ""


def test_hidden_bar_keeps_another_threads_listener():
    engine = Engine()
    with Progress(1, True).watch(engine):
        listener = engine.announce
        with Progress(1, False).watch(engine):
            assert engine.announce == listener
        assert engine.announce == listener
    assert engine.announce is None


def test_speeds_are_tokens_per_second():
    class Bar:
        format_dict = {"elapsed": 2.0}
        postfix, count = "", 0

        def __init__(self, **arguments: object):
            self.total = arguments["total"]

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, count: int) -> None:
            self.count += count

    made: list[Bar] = []

    def make(**arguments: object) -> Bar:
        made.append(Bar(**arguments))
        return made[0]

    progress = Progress(7, make)
    with progress.watch(Engine()):
        progress.add(output_of(3, 5))
    [bar] = made
    assert (bar.total, bar.count) == (7, 1)
    assert bar.postfix == "est. speed input: 1.50 toks/s, output: 5.00 toks/s"


def test_programs_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    engine = Engine()
    with watch_compiles(engine):
        assert engine.announce is not None
        engine.announce("Compiling one")
    assert capsys.readouterr().err == "", "nothing is drawn into a file or a pipe"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt), watch_compiles(engine):
        assert engine.announce is not None
        engine.announce("Compiling one")
        engine.announce("")
        raise KeyboardInterrupt
    assert engine.announce is None
    shown = capsys.readouterr().err
    assert "Compiling one" in shown
    assert "1 programs" in shown

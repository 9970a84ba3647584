"""The progress bar counts finished requests and names programs that are compiled."""

import sys
from collections.abc import Callable

import pytest
from tqdm.auto import tqdm

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


def test_hidden_bar_keeps_another_threads_listener():
    engine = Engine()
    with Progress(1, True).watch(engine):
        listener = engine.announce
        with Progress(1, False).watch(engine):
            assert engine.announce == listener
        assert engine.announce == listener
    assert engine.announce is None


def test_bar_shows_requests_and_tokens_per_second(capsys: pytest.CaptureFixture[str]):
    class Bar(tqdm):
        @property
        def format_dict(self):
            return {**super().format_dict, "elapsed": 2.0}

    progress = Progress(2, Bar)
    with progress.watch(Engine()):
        progress.add(output_of(3, 5))
        progress.add(output_of(1, 0))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "est. speed input: 2.00 toks/s, output: 5.00 toks/s" in shown


def test_programs_are_counted(capsys, monkeypatch):
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

"""Progress bars: finished requests, speed, programs being compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from tqdm.auto import tqdm

from jaxspec.outputs import RequestOutput

_DONE = "Processed prompts"


@runtime_checkable
class Announcer(Protocol):
    """An engine that reports the programs it compiles."""

    def announce_compiles(self, announce: Callable[[str], None] | None) -> None: ...


class Progress:
    """A bar of finished requests.

    Args:
        total: Number of requests.
        use_tqdm: Whether to show the bar; or a function to use in place of `tqdm`.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]):
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        self._is_shown = bool(use_tqdm)
        self._num_input = self._num_output = 0
        self._bar = make_bar(
            total=total,
            desc=_DONE,
            dynamic_ncols=True,
            disable=not use_tqdm,
            postfix=_speed(0, 0, 1.0),
        )

    @contextmanager
    def watch(self, engine: Announcer) -> Iterator[None]:
        """Within the block, also show programs that the engine compiles."""
        with self._bar:
            if not self._is_shown:  # another thread's bar may show them
                yield
                return
            engine.announce_compiles(self._describe)
            try:
                yield
            finally:
                engine.announce_compiles(None)

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._num_input += len(output.prompt_token_ids or ())
        self._num_output += sum(len(text.token_ids) for text in output.outputs)
        if self._is_shown:
            seconds = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.postfix = _speed(self._num_input, self._num_output, seconds)
            self._bar.update(1)

    def _describe(self, program: str) -> None:
        self._bar.set_description(program or _DONE)


@contextmanager
def watch_compiles(engine: Announcer) -> Iterator[None]:
    """Show a bar of programs as they are compiled, if stderr is a terminal."""
    with tqdm(
        desc="Compiling", unit=" programs", dynamic_ncols=True, disable=None
    ) as bar:

        def show(program: str) -> None:
            if program:
                bar.set_description_str(program)
            else:
                bar.update(1)

        engine.announce_compiles(show)
        try:
            yield
        finally:
            engine.announce_compiles(None)


def _speed(num_input: int, num_output: int, seconds: float) -> str:
    return (
        f"est. speed input: {num_input / seconds:.2f} toks/s, "
        f"output: {num_output / seconds:.2f} toks/s"
    )

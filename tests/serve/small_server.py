"""Runs the server on a fake device, in its own process.

The arguments are the seconds per launch, the limit on open files (0: none), and those
of `python -m jaxspec.serve`. On SIGUSR1 the process opens files up to the limit; on
SIGUSR2 it closes them.
"""

import contextlib
import os
import resource
import signal
import sys
import time

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.serve import launcher
from jaxspec.serve.flags import read_flags
from tests.support.fake_engines import before_launches, make_fake_engine
from tests.support.stub_tokenizer import TurnsTokenizer


def main(delay_s: float, num_files: int, flags: list[str]) -> int:
    if num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    taken: list[int] = []

    def take(*_: object) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    def free(*_: object) -> None:
        while taken:
            os.close(taken.pop())

    signal.signal(signal.SIGUSR1, take)
    signal.signal(signal.SIGUSR2, free)
    engine, runner = make_fake_engine(num_draft_tokens=3, max_num_seqs=2)
    engine.tokenizer = TurnsTokenizer(16)
    before_launches(runner, lambda: time.sleep(delay_s))
    options = read_flags("small_server", ["m", "--port", "0", *flags])
    launcher.set_up_log("info")
    bound = launcher._bind(options.listening)
    serving = AsyncLLMEngine(engine)
    try:
        return launcher._serve(serving, options, bound)
    finally:
        serving.shutdown(5)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))

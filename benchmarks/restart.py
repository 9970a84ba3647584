"""Seconds until the server serves, with nothing compiled and after it was killed.

    python -m benchmarks.restart

The server is `python -m jaxspec.serve`, the bundled pair, in a folder of its own for
compiled programs. It is killed (SIGKILL) in the middle of a stream; the second process
must be ready with what the first one left, and say what it said.
Writes benchmarks/results/restart.json.
"""

import argparse
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.client import PROMPT, complete
from benchmarks.server import served
from jaxspec.bench.report import record

RESULT = Path(__file__).with_name("results") / "restart.json"
GOAL_S = 30.0
ASKED = {"max_tokens": 24, "temperature": 0}


def measure(flags: list[str]) -> dict[str, Any]:
    """Start, kill in the middle of a stream, start again.

    Args:
        flags: Of the server, beside where it listens and keeps its programs.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--compilation-cache-dir", folder, *flags]
        with served(arguments, is_quiet=False) as (process, client, cold_s):
            text = complete(client, **ASKED)
            body = ASKED | {"prompt": PROMPT, "stream": True, "max_tokens": 200}
            body |= {"ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
                process.send_signal(signal.SIGKILL)
                process.wait()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*"))
        with served(arguments, is_quiet=False) as (_, client, warm_s):
            again = complete(client, **ASKED)
    return {
        "cold_ready_s": round(cold_s, 1),
        "warm_ready_s": round(warm_s, 1),
        "cache_mb": round(size / 1e6),
        "same_text": text == again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds until the server serves.")
    parser.add_argument("--out", type=Path, default=RESULT)
    options, flags = parser.parse_known_args()
    result = measure(flags) | {"goal_s": GOAL_S, "flags": flags}
    command = "python -m benchmarks.restart"
    print(json.dumps(record(result, options.out, command=command)))


if __name__ == "__main__":
    main()

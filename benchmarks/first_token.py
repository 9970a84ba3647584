"""Measures the time from the start of a process to its first token, and peak memory.

Run as a script, this file is the measured process, which generates one text and exits.
Cold start: the cache folder of compiled programs is empty. Warm start: the folder has
the programs of the cold start.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jaxspec

BUNDLED_TARGET = "jaxspec/tiny-gemma2"


def measure_startup(
    num_drafts: int,
    dtype: str,
    num_tokens: int,
    *,
    model: str = BUNDLED_TARGET,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Start the process cold, then warm; return seconds and peak bytes of each.

    Args:
        num_drafts: Draft tokens per round from the bundled draft; 0 runs the target
            alone.
        environment: Environment variables of the process, which select the engine; by
            default those of this process.
    """
    with tempfile.TemporaryDirectory() as cache:
        arguments = ["--cache", cache, "--num-tokens", str(num_tokens)]
        arguments += ["--num-speculative-tokens", str(num_drafts), "--dtype", dtype]
        arguments += ["--model", model]
        environment = dict(os.environ if environment is None else environment)
        return {kind: _start(arguments, environment) for kind in ("cold", "warm")}


def _start(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    # Ignore a compilation cache of the user's, which would make the cold start warm.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline() or "{}")
        first_token_s = time.monotonic() - start
        end = json.loads(process.stdout.readline() or "{}")
    if process.returncode or first.get("event") != "first_token":
        raise RuntimeError(f"first_token.py ended with code {process.returncode}")
    return {
        "first_token_s": first_token_s,
        "process_s": time.monotonic() - start,
        "peak_resident_bytes": end["peak_resident_bytes"],
    }


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    On Linux this does not use `ru_maxrss`, which starts at the peak of the parent
    process: the parent is the benchmark, with an engine of its own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].removesuffix("kB")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` is in bytes on macOS, in KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", required=True, help="folder for compiled programs")
    parser.add_argument("--num-tokens", type=int, required=True)
    parser.add_argument("--num-speculative-tokens", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default=BUNDLED_TARGET)
    options = parser.parse_args()
    drafts: dict[str, Any] = dict(
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=options.num_speculative_tokens,
    )
    llm = jaxspec.LLM(
        model=options.model,
        **(drafts if options.num_speculative_tokens else {}),
        max_model_len=1024,
        dtype=options.dtype,
        max_num_seqs=1,
        compilation_cache_dir=options.cache,
    )
    params = jaxspec.SamplingParams(
        temperature=0, max_tokens=options.num_tokens, ignore_eos=True
    )
    engine = llm.llm_engine
    engine.add_request("0", "Once upon a time", params)
    is_first = True
    while engine.has_unfinished_requests():
        if engine.step() and is_first:
            print(json.dumps({"event": "first_token"}), flush=True)
            is_first = False
    end = {"event": "end", "peak_resident_bytes": peak_resident_bytes()}
    print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main()

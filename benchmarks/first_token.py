"""A process that generates one text and ends: what a cold or warm start costs.

`cpu_pair.py` starts it and takes the time until the first line comes out.
"""

import argparse
import json
import resource
import sys
from pathlib import Path

import jaxspec


def peak_resident_bytes() -> int:
    """Peak of this process.

    On Linux `ru_maxrss` will not do: a process starts with its parent's peak in it, and
    ours is the benchmark with an engine of its own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].removesuffix("kB")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", required=True, help="folder of compiled programs")
    parser.add_argument("--num-tokens", type=int, required=True)
    parser.add_argument("--num-speculative-tokens", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    llm = jaxspec.LLM(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=options.num_speculative_tokens,
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

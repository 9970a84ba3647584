"""A process that generates one text and ends: what a cold or warm start costs.

`cpu_pair.py` starts it and takes the time until the first line comes out.
"""

import argparse
import json
import resource
import sys

import jaxspec


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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB elsewhere.
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    print(json.dumps({"event": "end", "peak_bytes": peak_bytes}), flush=True)


if __name__ == "__main__":
    main()

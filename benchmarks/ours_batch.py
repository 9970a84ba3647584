"""All prompts of a throughput run by `LLM.generate`, in a process of its own.

Reads the task from stdin (see `throughput.py`), writes one JSON line to stdout. Its
argument is `plain` or `drafts`. No prefix is shared: the others do not share any.
"""

import hashlib
import json
import sys
import time

from jaxspec import LLM, SamplingParams


def main() -> None:
    task, mode = json.load(sys.stdin), sys.argv[1]
    drafts = {}
    if mode == "drafts":
        drafts = {
            "speculative_model": task["draft"],
            "num_speculative_tokens": task["num_drafts"],
        }
    llm = LLM(
        model=task["target"],
        dtype=task["dtype"],
        max_num_seqs=task["batch_size"],
        max_num_batched_tokens=2048,
        max_model_len=1024,
        enable_prefix_caching=False,
        **drafts,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=task["num_tokens"], ignore_eos=True
    )
    # The same prompts in fewer tokens: every program that the run needs is built.
    short = params.clone()
    short.max_tokens = 8
    num_compiles, runner = None, llm.llm_engine.runner
    while runner.num_compiles != num_compiles:
        num_compiles = runner.num_compiles
        llm.generate(task["texts"], short, use_tqdm=False)
        llm.llm_engine.wait_for_programs()
    start = time.monotonic()
    outputs = llm.generate(task["texts"], params, use_tqdm=False)
    seconds = time.monotonic() - start
    llm.llm_engine.wait_for_programs()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    stats = llm.llm_engine.stats
    result = {
        "seconds": seconds,
        "num_tokens": sum(map(len, tokens)),
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "num_compiles_while_timed": runner.num_compiles - num_compiles,
    }
    if mode == "drafts":
        result["acceptance_rate"] = round(stats.acceptance_rate, 4)
        result["mean_acceptance_length"] = round(stats.mean_acceptance_length, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

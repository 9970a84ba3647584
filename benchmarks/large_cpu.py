"""Plain decoding of a published size on a CPU, beside what its memory can do.

    python -m benchmarks.large_cpu

Random weights of 2B's shapes in bfloat16, batch 1, greedy: every token reads them all
once. A copy of memory is timed before and after; it moves each byte twice, and is the
fastest of several, as in `python -m jaxspec.bench spec`. Needs about 12 GB of memory.
Writes benchmarks/results/large-cpu.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
from tqdm.auto import tqdm

from benchmarks.cpu_pair import warn_unless_quiet
from jaxspec import LLM, SamplingParams
from jaxspec.bench.bandwidth import copy_bandwidth
from jaxspec.bench.report import record
from jaxspec_checkpoints.gemma.published import published_config
from jaxspec_kernels import native

RESULT = Path(__file__).with_name("results") / "large-cpu.json"
SIZE = "2b"
PROMPT = list(range(1000, 1032))


def make_llm() -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(published_config(SIZE)), encoding="utf-8")
        return LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=1,
        )


def token_seconds(llm: LLM, num_tokens: int) -> float:
    """Seconds of a token after the first."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    took = time.perf_counter() - start
    assert output.metrics is not None
    return (took - output.metrics.first_token_latency) / (num_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = warn_unless_quiet()
    copies = [copy_bandwidth(jax.devices()[0])]
    llm = make_llm()
    target, _ = llm.llm_engine.runner.params
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    token_seconds(llm, 2)  # its programs
    runs = [
        token_seconds(llm, options.num_tokens) for _ in tqdm(range(options.repeats))
    ]
    copies.append(copy_bandwidth(jax.devices()[0]))
    seconds = statistics.median(runs)
    result = {
        "size": SIZE,
        "weight_bytes": num_bytes,
        "is_native": native.is_available(),
        "token_s": runs,
        "tokens_per_s": 1 / seconds,
        "bytes_per_s": num_bytes / seconds,
        "copy_bytes_per_s": copies,
        "share": num_bytes / seconds / max(copies),
        "machine_before": device,
    }
    print(json.dumps(result))
    record(result, RESULT, command="python -m benchmarks.large_cpu")


if __name__ == "__main__":
    main()

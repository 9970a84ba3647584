"""Of how many tokens the log-probabilities have the same bits, whatever is beside them.

`python -m benchmarks.same_bits` asks the bundled pair for eight texts, one after the
other without drafts, and then with drafts, in batches, with prompts in chunks and with
sequences preempted. On a CPU all are equal; on a TPU or GPU `--batch-invariant` is what
should make them so, and this is what shows whether it does.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.prompts import bundled
from jaxspec import LLM, SamplingParams
from jaxspec.bench.report import record
from jaxspec_checkpoints import bundled_draft, bundled_target

NUM_PROMPTS, NUM_TOKENS = 8, 48
TOLD = SamplingParams(
    temperature=0,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=2,
)
# How the engine differs from one that has no drafts and takes one sequence at a time.
WAYS: list[dict[str, Any]] = [
    dict(max_num_seqs=8),
    dict(num_speculative_tokens=5),
    dict(num_speculative_tokens=5, max_num_seqs=8, max_num_batched_tokens=64),
    dict(num_speculative_tokens=1, max_num_seqs=4, num_gpu_blocks_override=20),
]

Told = list[list[tuple[int, float]]]


def prompts() -> list[str]:
    return [text for _, text in bundled("prompts.jsonl")][:NUM_PROMPTS]


def make_llm(**changes: Any) -> LLM:
    """The bundled pair, or its target alone."""
    arguments: dict[str, Any] = dict(
        model=str(bundled_target()), max_model_len=256, max_num_seqs=1
    )
    if "num_speculative_tokens" in changes:
        arguments["speculative_model"] = str(bundled_draft())
    return LLM(**(arguments | changes))


def told(outputs: Any) -> Told:
    """Every token, of prompts and texts, with what was told of it."""
    rows = []
    for output in outputs:
        for row in [*(output.prompt_logprobs or []), *output.outputs[0].logprobs]:
            pairs = (row or {}).items()
            rows.append(sorted((token, one.logprob) for token, one in pairs))
    return rows


def alone(llm: LLM) -> list[Any]:
    """Outputs of the prompts, one after the other."""
    return [llm.generate([one], TOLD, use_tqdm=False)[0] for one in prompts()]


def compare(expected: Told, found: Told) -> dict[str, Any]:
    """How many rows are equal in all bits, and by how much the others differ."""
    assert len(expected) == len(found)
    differ = [
        abs(dict(one)[token] - value)
        for one, other in zip(expected, found, strict=True)
        for token, value in other
        if token in dict(one)
    ]
    return {
        "num_tokens": len(expected),
        "num_equal": sum(a == b for a, b in zip(expected, found, strict=True)),
        "largest_difference": max(differ),
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    common: dict[str, Any] = {"dtype": options.dtype}
    if options.batch_invariant:
        common["batch_invariant"] = True
    expected = told(alone(make_llm(**common)))
    for way in tqdm(WAYS, unit="way"):
        llm = make_llm(**(common | way))
        outputs = llm.generate(prompts(), TOLD, use_tqdm=False)
        yield way | compare(expected, told(outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    rows = list(measure(options))
    for row in rows:
        print(row)
    found = {
        "device": jax.devices()[0].device_kind,
        "dtype": options.dtype,
        "batch_invariant": options.batch_invariant,
        "rows": rows,
    }
    if options.json is not None:
        record(found, options.json, command="python -m benchmarks.same_bits")


if __name__ == "__main__":
    main()

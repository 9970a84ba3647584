"""Count texts of four tokens, and compare the counts with the target's distribution.

The target is a Gemma 2 with 16 tokens and a window of 8; its draft model is often
wrong. Requests go through paging, batching and prefix hits, and also through
preemption: other, long requests run beside them, with too few pages for all. The
expected distribution has HuggingFace's probability of each of the 65,536 possible
texts.

`python -m tests.e2e.enumerated` counts two million texts and writes
`benchmarks/results/enumerated.json`; a test counts fewer.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from tqdm.auto import tqdm

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.distributions import check_counts, filtered_distribution
from tests.support.engines import (
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
    with_settings,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "enumerated.json"
VOCAB, LENGTH, DRAFTS = 16, 4, 3
# The prompt is longer than the window, and two of its pages are prefix hits.
PROMPT = [2, 7, 3, 11, 5, 14, 9, 4, 12, 6]
RULES = ("standard", "block", "coupled")
# One in this number of requests is long. Long requests cause preemption, and are not
# counted.
ONE_IN, NEIGHBOUR_TOKENS = 4, 40
PART = 16_384


@dataclass(frozen=True, kw_only=True)
class Count:
    """The result of counting the texts of one acceptance rule.

    Attributes:
        p_text: p-value of Pearson's test of all texts.
        p_last: p-value of the test of their last tokens.
    """

    rule: str
    num_texts: int
    p_text: float
    p_last: float
    acceptance_rate: float
    num_preemptions: int
    num_prefix_hits: int
    seconds: float


def distribution_of_texts(target: Any) -> np.ndarray:
    """Return the probability of every text at temperature 1, `[vocab^length]`."""
    distribution = np.ones(1)
    for level in range(LENGTH):
        every = np.indices((VOCAB,) * level).reshape(level, VOCAB**level).T
        prompts = np.tile(PROMPT, (len(every), 1))
        tokens = torch.tensor(np.concatenate([prompts, every], axis=1)).long()
        with torch.no_grad():
            logits = target(tokens, logits_to_keep=1).logits[:, -1].numpy()
        distribution = (
            distribution[:, None] * filtered_distribution(logits, np.float32(1.0))
        ).reshape(-1)
    return distribution


def make(target: Any, *, batch: int, num_pages: int) -> LLMEngine:
    """Return an engine that has too few pages for a full batch."""
    return make_engine(
        target,
        make_draft_of(target, num_layers=2),
        num_draft_tokens=DRAFTS,
        max_num_seqs=batch,
        max_num_batched_tokens=512,
        num_pages=num_pages,
        # Compile few program shapes, so that compiling takes less time than generating
        # the texts that are counted.
        has_one_shape=True,
        is_optimized=True,
        max_model_len=64,
    )


def requests_of(rule: str, first: int, count: int) -> list[SamplingParams]:
    """Return parameters of `count` requests; those of the coupled rule are seeded."""
    rest: dict[str, Any] = dict(
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    long = SamplingParams(max_tokens=NEIGHBOUR_TOKENS, **rest)
    short = SamplingParams(max_tokens=LENGTH, **rest)
    params = []
    for number in range(first, first + count):
        own = (long if number % ONE_IN == 0 else short).clone()
        own.seed = number if rule == "coupled" else None
        params.append(own)
    return params


def count(
    engine: LLMEngine, distribution: np.ndarray, rule: str, num_texts: int
) -> Count:
    """Count texts under one acceptance rule, and compare them with the distribution."""
    changes = {} if rule == "coupled" else {"rejection_sample_method": rule}
    engine = with_settings(engine, seed=5, **changes)
    counts = np.zeros(VOCAB**LENGTH, np.int64)
    start, first = time.monotonic(), 0
    places = VOCAB ** np.arange(LENGTH - 1, -1, -1)
    with tqdm(total=num_texts, desc=rule, unit=" texts") as bar:
        while counts.sum() < num_texts:
            params = requests_of(rule, first, min(PART, 2 * num_texts))
            outputs = generate(engine, [PROMPT] * len(params), params)
            texts = [text for text in tokens_of(outputs) if len(text) == LENGTH]
            counts += np.bincount(np.array(texts) @ places, minlength=len(counts))
            first += len(params)
            bar.update(len(texts))
    engine.scheduler.check_idle()
    last = counts.reshape(-1, VOCAB).sum(axis=0)
    return Count(
        rule=rule,
        num_texts=int(counts.sum()),
        p_text=check_counts(counts, distribution, rule),
        p_last=check_counts(
            last, distribution.reshape(-1, VOCAB).sum(axis=0), (rule, "last")
        ),
        acceptance_rate=round(engine.stats.acceptance_rate, 4),
        num_preemptions=engine.stats.num_preemptions,
        num_prefix_hits=engine.stats.num_prefix_hits,
        seconds=round(time.monotonic() - start, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Count texts of four tokens.")
    parser.add_argument("--texts", type=int, default=2_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    target = make_micro(seed=3)
    # There are pages for most rows of a batch: with fewer, counting takes twice as
    # long.
    engine = make(target, batch=64, num_pages=152)
    distribution = distribution_of_texts(target)
    counts, result = [], {}
    for rule in RULES:
        counts.append(
            count(engine, distribution, rule, -(-options.texts // len(RULES)))
        )
        result = {
            "command": "python -m tests.e2e.enumerated",
            "num_texts": sum(one.num_texts for one in counts),
            "num_kinds_of_text": len(distribution),
            "counts": [asdict(one) for one in counts],
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["counts"], indent=1))


if __name__ == "__main__":
    main()

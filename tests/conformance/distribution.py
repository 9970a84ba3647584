"""Compare counts of an engine's texts with HuggingFace's float32 probabilities.

Thousands of requests share one prompt, which is longer than the window. Each goes
through paging, batching and several rounds.
"""

import copy
import functools
import inspect
from typing import Any

import numpy as np
import torch

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.conformance import proposers
from tests.support.distributions import check_counts, filtered_distribution
from tests.support.engines import MICRO, generate, tokens_of, with_settings

VOCAB = int(MICRO["vocab_size"])
# Tokens of a text: one sampled from the prompt, and the tokens of one whole round.
LENGTH = 5
# The prompt is repetitive, so that a lookup has drafts from the first round on.
PROMPT = [2, 7, 3, 11, 5, 7, 3, 11, 9, 7, 3]
CONTROLS: list[dict[str, Any]] = [
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=9, top_p=0.85, min_p=0.02),
    dict(temperature=1.0),
]
RULES = ("standard", "block", "seeded")
# HuggingFace's name of the KV cache argument, which changed in transformers 5.24.
OLD_CACHE, NEW_CACHE = "past_key_values", "cache"


@functools.cache
def next_logits(length: int) -> list[np.ndarray]:
    """Return the logits after all texts of each length, `[vocab^l, vocab]` for l."""
    target = proposers.micro_target()
    known = inspect.signature(target.forward).parameters
    cache_name = NEW_CACHE if NEW_CACHE in known else OLD_CACHE
    levels = []
    with torch.no_grad():
        # The KV cache of the prompt is computed once, except for its last token, which
        # starts each text.
        first = target(torch.tensor([PROMPT[:-1]]), use_cache=True)
        start = getattr(first, cache_name)
        for level in range(length):
            every = np.indices((VOCAB,) * level).reshape(level, VOCAB**level).T
            lasts = np.full((len(every), 1), PROMPT[-1])
            tokens = torch.tensor(np.concatenate([lasts, every], axis=1)).long()
            parts = []
            for part in tokens.split(8192):
                cache = copy.deepcopy(start)
                cache.batch_repeat_interleave(len(part))
                after = target(part, **{cache_name: cache}, logits_to_keep=1)
                parts.append(after.logits[:, -1].numpy())
            levels.append(np.concatenate(parts))
    return levels


def distributions_of(
    levels: list[np.ndarray], controls: dict[str, Any]
) -> list[np.ndarray]:
    """Return the probability of every text of 1, 2, ... tokens, `[vocab^length]`."""
    found, joint = [], np.ones(1)
    exact: dict[str, Any] = {
        name: value if name == "top_k" else np.float32(value)
        for name, value in controls.items()
    }
    for level in levels:
        joint = (joint[:, None] * filtered_distribution(level, **exact)).reshape(-1)
        found.append(joint)
    return found


def sample(
    engine: LLMEngine,
    rule: str,
    count: int,
    *,
    length: int = LENGTH,
) -> list[np.ndarray]:
    """Return `count` texts for each of `CONTROLS`, generated in the same batches."""
    if rule == "seeded":
        engine = with_settings(engine)
    else:
        engine = with_settings(engine, seed=11, rejection_sample_method=rule)
    params = [
        SamplingParams(
            **own,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=number if rule == "seeded" else None,
        )
        for number in range(count)
        for own in CONTROLS
    ]
    tokens = np.array(tokens_of(generate(engine, [PROMPT] * len(params), params)))
    assert tokens.shape[1] == length
    assert engine.stats.num_accepted_tokens
    return [tokens[index :: len(CONTROLS)] for index in range(len(CONTROLS))]


def check_distribution(
    tokens: np.ndarray, joint: list[np.ndarray], what: object
) -> None:
    """Compare counts with a distribution at each position and pair of positions."""
    for position in range(len(joint)):
        probs = joint[position].reshape(-1, VOCAB).sum(axis=0)
        counts = np.bincount(tokens[:, position], minlength=VOCAB)
        check_counts(counts, probs, (what, position))
    for position in range(1, len(joint)):
        pair = joint[position].reshape(-1, VOCAB**2).sum(axis=0)
        cell = tokens[:, position - 1] * VOCAB + tokens[:, position]
        counts = np.bincount(cell, minlength=VOCAB**2)
        check_counts(counts, pair, (what, position, "pair"))


def acceptance_of(engine: LLMEngine, rule: str, temperature: float = 1.0) -> float:
    """Return the acceptance rate of 128 requests with different prompts."""
    if rule in ("standard", "block"):
        engine = with_settings(engine, rejection_sample_method=rule)
    else:
        engine = with_settings(engine)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB, 4 + i % 9).tolist() for i in range(128)]
    params = [
        SamplingParams(
            temperature=0.0 if rule == "greedy" else temperature,
            seed=number if rule == "seeded" else None,
            max_tokens=17,
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]
    generate(engine, prompts, params)
    assert engine.stats.num_draft_tokens > 1000
    return engine.stats.acceptance_rate

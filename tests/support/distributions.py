"""Compute filtered probabilities in float64, and compare counts with them."""

from collections import Counter

import numpy as np
from scipy import stats

from jaxspec.program.plan import TokenControls

# Each of a few hundred statistical tests may fail by chance once in a million runs, so
# that a whole test run fails by chance less than once in a thousand.
LEVEL = 1e-6
# Pearson's statistic is close to chi-square if the expected count of every cell is at
# least this.
MIN_EXPECTED = 8

Real = float | np.floating


def filtered_distribution(
    logits: np.ndarray,
    temperature: Real,
    top_k: int | np.integer = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
) -> np.ndarray:
    """Return the probabilities of rows after temperature, top-k, top-p and min-p.

    Tokens as probable as the last one that a filter keeps are also kept.
    """
    scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    if 0 < top_k < weights.shape[-1]:
        kth = np.sort(weights, axis=-1)[..., -top_k, None]
        weights = np.where(weights >= kth, weights, 0)
    if top_p < 1:
        ranked = np.sort(weights, axis=-1)[..., ::-1]
        wanted = top_p * weights.sum(axis=-1, keepdims=True)
        first = np.argmax(np.cumsum(ranked, axis=-1) >= wanted, axis=-1)
        last_kept = np.take_along_axis(ranked, first[..., None], axis=-1)
        weights = np.where(weights >= last_kept, weights, 0)
    weights = np.where(weights >= min_p, weights, 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def check_counts(
    counts: np.ndarray, distribution: np.ndarray, what: object = ""
) -> float:
    """Assert that counts fit a distribution; return the p-value of Pearson's test.

    Cells with small expectations are merged; cells of probability zero must be empty.
    """
    counts, distribution = np.ravel(counts), np.ravel(distribution)
    assert not counts[distribution == 0].any(), (
        what,
        "a token of probability zero was sampled",
    )
    expected = distribution * counts.sum()
    rare = expected < MIN_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:
        last = expected[-1], observed[-1]
        expected, observed = expected[:-1], observed[:-1]
        smallest = expected.argmin()
        expected[smallest] += last[0]
        observed[smallest] += last[1]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    p_value = float(stats.chi2.sf(statistic, len(expected) - 1))
    assert p_value >= LEVEL, (what, p_value)
    return p_value


def controlled(
    logits: np.ndarray, tokens: list[int], num_prompt: int, controls: TokenControls
) -> np.ndarray:
    """Return a row of logits after penalties, bias and masks, in float64.

    Args:
        tokens: All tokens before the position; the first `num_prompt` are the prompt.
    """
    made = np.array(logits, np.float64)
    output = tokens[num_prompt:]
    for token in set(tokens):
        repetition = controls.repetition_penalty
        made[token] *= 1 / repetition if made[token] > 0 else repetition
    for token, count in Counter(output).items():
        made[token] -= controls.frequency_penalty * count + controls.presence_penalty
    for token, value in controls.bias:
        made[token] += value
    if controls.allowed is not None:
        others = set(range(len(made))) - set(controls.allowed)
        made[list(others)] = -np.inf
    for *start, last in controls.bad_words:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            made[last] = -np.inf
    return made

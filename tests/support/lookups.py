"""Plain Python specifications of lookups, and sequences in pages to search."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.lookups import NUM_MATCHES
from jaxspec.program.propose import ngram
from tests.kernels.oracle import UNOPTIMISED
from tests.support.rows import make_active

DRAFTS = 4
PAGE_SIZE = 4
TABLE_LEN = 16
JUNK = 9
Limits = tuple[int, float]  # maximum tree depth, and number of drafts per matched token
TRUSTING: Limits = (24, 1.0)


def search_ngram(
    tokens: list[int], lookup: ngram.NGram, num_draft_tokens: int
) -> list[int]:
    """Return n-gram drafts by the specification: the longest match, then the latest.

    Only known tokens match. A continuation that reaches their end starts over at the
    match.
    """
    for length in range(lookup.longest, lookup.shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return (tokens[start + length :] * num_draft_tokens)[:num_draft_tokens]
    return []


def search_suffix(
    tokens: list[int],
    limits: Limits = TRUSTING,
    min_prob: Fraction = Fraction(0),
    *,
    shortest: int = 1,
    num_draft_tokens: int = DRAFTS,
) -> list[int]:
    """Return suffix drafts by the specification, which finds matches by brute force.

    Only continuations of the longest matches are counted.
    """
    depth, factor = limits
    found = []
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(depth - 1, end + 1) and (
            tokens[end - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        if length >= shortest:
            found.append((length, end))
    found = sorted(found, reverse=True)[:NUM_MATCHES]
    texts = [
        (tokens[end + 1 :] * num_draft_tokens)[:num_draft_tokens]
        for length, end in found
        if length == found[0][0]
    ]
    best, drafts = Fraction(0), []
    for text in texts:
        longest = found[0][0]
        limit = max(min(int(factor * m), depth - m) for m in range(1, longest + 1))
        shares = []
        for stop in range(1, min(limit, num_draft_tokens) + 1):
            agree = sum(other[:stop] == text[:stop] for other in texts)
            shares.append(Fraction(agree, len(texts)))
        kept = [share for share in shares if share >= min_prob]
        if sum(kept) > best:
            best, drafts = sum(kept, Fraction(0)), text[: len(kept)]
    return drafts


def in_pages(texts: list[list[int]], random: np.random.Generator):
    """Return the rows of a launch, with shuffled pages and junk in unused slots."""
    count = len(texts)
    order = random.permutation(count * TABLE_LEN)
    pages = np.full((len(order), PAGE_SIZE), JUNK, np.int32)
    # Junk past the end would continue each match if a lookup read it.
    tables = np.full((count, TABLE_LEN), len(order), np.int32)
    for row, text in enumerate(texts):
        used = -(-len(text) // PAGE_SIZE)
        tables[row, :used] = order[row * TABLE_LEN :][:used]
        padded = text + [text[-1]] * (used * PAGE_SIZE - len(text))
        pages[tables[row, :used]] = np.reshape(padded, (used, PAGE_SIZE))
    active = make_active(count, num_tokens=np.array([len(text) for text in texts]))
    return dataclasses.replace(active, page_table=jnp.asarray(tables)), pages


def drafts_of(
    texts: list[list[int]],
    propose: Callable[[Any, Any], Any],
    *,
    num_draft_tokens: int = DRAFTS,
    is_active: list[bool] | None = None,
) -> list[list[int]]:
    """Return the valid drafts of each text.

    Args:
        propose: Returns a proposal from the rows of a launch and the pages of tokens.
            It is a new function for every call: a cached trace would not contain a
            mutant.
    """
    active, pages = in_pages(texts, np.random.default_rng(0))
    if is_active is not None:
        active = dataclasses.replace(active, is_active=jnp.asarray(is_active))
    found = jax.jit(propose, compiler_options=UNOPTIMISED)(active, jnp.asarray(pages))
    assert found.tokens.shape == (len(texts), num_draft_tokens)
    assert found.probs is None
    rows = zip(found.tokens.tolist(), found.num_valid_drafts.tolist(), strict=True)
    return [row[:count] for row, count in rows]

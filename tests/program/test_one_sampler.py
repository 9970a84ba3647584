"""Plain decoding and verification draw the same tokens from the same logits.

Tested at the borders of the filters: ties, many equal logits, vocabularies of 256,000.
Given the same logits, verification must accept exactly the tokens that plain decoding
would draw one by one, and then draw the same next token. Both use the noise of the
request's seed at each position.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program.plan import COUPLED
from jaxspec.program.propose import Proposal
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
from tests.support.programs import USERS_COMPILER
from tests.support.rows import make_active

DRAFTS = 3
TEMPERATURES = (0.0, 0.01, 0.3, 0.8, 1.0, 1.7)
TOP_PS = (1.0, 0.999, 0.95, 0.6, 0.3, 0.01)
MIN_PS = (0.0, 0.02, 0.3, 1.0)


def make_logits(random: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Return rows of every kind that may lie on the border of a filter."""
    logits = random.normal(size=(rows, vocab)).astype(np.float32)
    logits *= random.choice([0.1, 1.0, 3.0, 20.0], (rows, 1)).astype(np.float32)
    kind = random.integers(0, 6, rows)
    ties = kind == 1
    logits[ties] = np.round(logits[ties] * 2) / 2
    logits[kind == 2] = 1.5  # all equal
    for row in np.flatnonzero(kind == 3):  # many equal ones at the top
        logits[row, random.random(vocab) < 0.3] = logits[row].max()
    for row in np.flatnonzero(kind == 4):
        logits[row, random.random(vocab) < 0.5] = -np.inf
    halved = kind == 5
    logits[halved] = logits[halved].astype(jnp.bfloat16).astype(np.float32)
    return logits


def controls(random: np.random.Generator, seqs: int, vocab: int) -> dict:
    """Return sampling parameters: each filter alone, and all together."""
    sizes = [0, 1, 2, 5, 40, vocab // 2, vocab - 1, vocab]
    return dict(
        temperature=random.choice(TEMPERATURES, seqs),
        top_k=random.choice(sizes, seqs),
        top_p=random.choice(TOP_PS, seqs),
        min_p=random.choice(MIN_PS, seqs),
    )


def put_on_borders(
    random: np.random.Generator, logits: np.ndarray, asked: dict
) -> None:
    """Set half of the sequences' top-p and min-p to the exact border of a token.

    All rows of such a sequence are equal, and its threshold is the float32 nearest to
    the probability of a token, or of all tokens down to it: rounding of sums and
    quotients decides which side the token is on.
    """
    seqs, width, _ = logits.shape
    for seq in np.flatnonzero(random.random(seqs) < 0.5):
        logits[seq] = logits[seq, :1]
        heat = asked["temperature"][seq] or 1.0
        row = logits[seq, 0].astype(np.float64)
        ranked = np.sort(np.exp((row - row.max()) / heat))[::-1]
        rank = min(int(random.geometric(0.05)), len(ranked)) - 1
        if random.random() < 0.5:
            asked["top_p"][seq] = (ranked.cumsum() / ranked.sum())[rank]
        elif ranked[rank] > 0:
            asked["min_p"][seq] = ranked[rank]


@functools.partial(jax.jit, compiler_options=USERS_COMPILER)
def play(active, logits):
    """Return the tokens of plain decoding, and the verdict on them as drafts."""
    seqs, width, vocab = logits.shape
    none = jnp.zeros(seqs, jnp.int32)

    def draw(given):
        index, here = given
        verdict = verify(
            None,
            here,
            none,
            dataclasses.replace(active, num_tokens=active.num_tokens + index),
            Backend(),
            tree=Tree.chain(0),
            adjust=None,
        )
        return verdict.next_token

    places = jnp.arange(width, dtype=jnp.int32)
    tokens = jax.lax.map(draw, (places, logits.swapaxes(0, 1))).T
    drafts = tokens[:, :-1]
    verdict = verify(
        Proposal(drafts, jnp.full(seqs, width - 1, jnp.int32)),
        logits.reshape(-1, vocab),
        jnp.full(seqs, width - 1, jnp.int32),
        active,
        Backend(),
        tree=Tree.chain(width - 1),
        adjust=None,
    )
    return tokens, verdict


def count_unequal(seqs: int, vocab: int, seed: int) -> int:
    """Return in how many of `seqs` sequences the two ways differ."""
    random = np.random.default_rng(seed)
    logits = make_logits(random, seqs * (DRAFTS + 1), vocab)
    logits = logits.reshape(seqs, DRAFTS + 1, vocab)
    asked = controls(random, seqs, vocab)
    put_on_borders(random, logits, asked)
    active = make_active(
        seqs,
        rule=COUPLED,
        seed=random.integers(0, 2**32, (seqs, 2), dtype=np.uint32),
        num_tokens=random.integers(1, 1000, seqs),
        **asked,
    )
    tokens, verdict = play(active, jnp.asarray(logits))
    is_equal = np.asarray(verdict.num_accepted) == DRAFTS
    is_equal &= np.asarray(verdict.next_token) == np.asarray(tokens)[:, -1]
    return int((~is_equal).sum())


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


# The full run has 11,520 tokens, with four rows per sequence. The first vocabulary is
# larger than a tile.
@pytest.mark.parametrize(
    ("vocab", "seqs"),
    [
        (5000, 100),
        slow(16, 1000),
        slow(1000, 800),
        slow(4096, 800),
        slow(256_000, 140),
    ],
)
def test_plain_decoding_and_verification_draw_the_same_tokens(vocab, seqs):
    batch = min(seqs, 100 if vocab < 100_000 else 10)
    unequal = [
        count_unequal(batch, vocab, seed=vocab + start)
        for start in range(0, seqs, batch)
    ]
    assert not any(unequal), f"{sum(unequal)} of {seqs} sequences: {unequal}"

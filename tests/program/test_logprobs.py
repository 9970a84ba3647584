"""Log-probabilities, ranks and the most probable tokens, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program.logprobs import token_logprobs
from jaxspec.program.plan import NO_TOKEN
from jaxspec.program.wire import TokenLogprobs, num_columns
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh

ROWS, VOCAB = 17, 64


def make_logits() -> np.ndarray:
    """Return random rows with ties, very low logits, and one certain token."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(ROWS, VOCAB)) * 4
    logits[1] = random.integers(0, 3, VOCAB)
    logits[2] = -1e4
    logits[3, 40] = 1e4
    logits[4] += 500
    return logits.astype(np.float32)


def logprobs_of(
    logits: np.ndarray,
    tokens: np.ndarray,
    num_top: int,
    shards: int = 1,
    chosen: np.ndarray | None = None,
) -> TokenLogprobs:
    backend = Backend(mesh=make_mesh(shards), mesh_axes=TARGET_MESH_AXES)
    chosen = np.zeros((ROWS, 0)) if chosen is None else chosen

    def run(logits: jax.Array, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        return token_logprobs(
            logits, tokens, num_top=num_top, backend=backend, chosen=chosen
        )

    found = jax.jit(run)(
        jnp.asarray(logits),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(chosen, jnp.int32),
    )
    assert found.shape == (ROWS, num_columns(num_top, chosen.shape[1]))
    return TokenLogprobs.read(np.asarray(found), chosen.shape[1])


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("num_top", [0, 1, 12])
def test_logprobs_equal_the_softmax(num_top, shards):
    logits = make_logits()
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, ROWS)
    tokens[8:] = logits[8:].argmax(axis=1)
    chosen = random.integers(0, VOCAB, (ROWS, 5))
    chosen[:, 0] = logits.argmax(axis=1)
    found = logprobs_of(logits, tokens, num_top, shards, chosen)
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    distribution = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    own = distribution[np.arange(ROWS), tokens]
    np.testing.assert_allclose(found.own, own, rtol=1e-5, atol=1e-4)
    above = logits > logits[np.arange(ROWS), tokens][:, None]
    np.testing.assert_array_equal(found.rank, 1 + above.sum(axis=1))
    # Ties are ordered by token id, for any split of the vocabulary.
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(found.top_ids, order)
    best = np.take_along_axis(distribution, order, axis=1)
    np.testing.assert_allclose(found.top, best, rtol=1e-5, atol=1e-4)
    others = np.take_along_axis(distribution, chosen, axis=1)
    np.testing.assert_allclose(found.chosen, others, rtol=1e-5, atol=1e-4)
    # A token's logprob has the same bits, whichever of the three ways computes it.
    if num_top:
        np.testing.assert_array_equal(found.chosen[:, 0], found.top[:, 0])
        np.testing.assert_array_equal(found.own[8:], found.top[8:, 0])


@pytest.mark.parametrize("shards", [1, 8])
def test_top_ids_past_the_vocabulary_are_pads(shards):
    found = logprobs_of(make_logits(), np.zeros(ROWS), VOCAB + 3, shards)
    assert (np.sort(found.top_ids[:, :VOCAB], axis=1) == np.arange(VOCAB)).all()
    assert (found.top_ids[:, VOCAB:] == NO_TOKEN).all()
    assert (found.top[:, VOCAB:] == -np.inf).all()


def test_unknown_token_affects_only_its_own_row():
    logits, tokens = make_logits(), np.arange(ROWS)
    known = logprobs_of(logits, tokens, 2)
    tokens[5] = NO_TOKEN
    chosen = np.full((ROWS, 3), NO_TOKEN)  # what a request without ids has
    found = logprobs_of(logits, tokens, 2, chosen=chosen)._replace(chosen=known.chosen)
    for mine, theirs in zip(found, known, strict=True):
        others = np.arange(ROWS) != 5
        np.testing.assert_array_equal(mine[others], theirs[others])
    np.testing.assert_array_equal(found.top_ids, known.top_ids)

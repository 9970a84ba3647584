"""Devices that hold slices of the vocabulary agree on the verdict, in a few numbers."""

from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.rejection_sampling import reference
from jaxspec_kernels.rejection_sampling.reference import Kernels
from tests.kernels.aot_tpu import no_compilation_cache
from tests.kernels.rejection_aot import collectives
from tests.kernels.rejection_rounds import (
    Round,
    by_force,
    by_loops,
    forced_counts,
    make_round,
    sliced,
)

# Seven columns per device; the last device holds one token and six pads.
VOCAB, COLUMNS = 50, 56


@pytest.fixture(autouse=True)
def _no_cache():
    """Never from the persistent cache.

    XLA:CPU lets independent collectives of an executable that it has loaded run at the
    same time, under one key, and crashes (jaxlib 0.10.2). It orders those it compiled.
    """
    with no_compilation_cache():
        yield


@cache
def on_mesh(shape: tuple[int, ...], *, has_probs: bool = True, tile: int = 3):
    """Return the reference on a mesh; the vocabulary is split over all its axes."""
    run = partial(reference.rejection_sampling, tile=tile)
    return sliced(run, shape, vocab_size=VOCAB, has_probs=has_probs)


@cache
def compiled(shape: tuple[int, ...] = (8,)):
    """Compile for the rounds of most tests, once; its text can be read."""
    return on_mesh(shape).lower(*padded(make_round())).compile()


def padded(one: Round) -> tuple:
    tokens, draft, logits, num_valid_drafts, sampling_values = one.arrays
    pads = ((0, 0), (0, 0), (0, COLUMNS - VOCAB))
    logits = jnp.pad(logits, pads, constant_values=jnp.nan)
    return (
        tokens,
        jnp.pad(draft, pads),
        logits,
        num_valid_drafts,
        sampling_values,
        one.numbers,
    )


@pytest.mark.parametrize("shape", [(8,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_verdicts_equal_those_of_loops(shape):
    run = compiled(shape)
    for seed in range(5):
        one = make_round(seed=seed)
        np.testing.assert_array_equal(run(*padded(one)), by_loops(one))


def test_point_mass_needs_no_array():
    random = np.random.default_rng(1)
    one = make_round(seed=7)
    tokens = random.integers(0, VOCAB, one.tokens.shape)
    certain = np.eye(VOCAB, dtype=np.float32)[tokens]
    one = Round(**{**vars(one), "tokens": tokens, "draft": certain})
    tokens, _, *rest = padded(one)
    found = on_mesh((8,), has_probs=False)(tokens, None, *rest)
    np.testing.assert_array_equal(found, by_loops(one))


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_rows_without_finite_logits_return_token_zero(bad):
    one = make_round(seed=2)
    one = Round(**{**vars(one), "logits": np.full_like(one.logits, bad)})
    accepted, token = compiled()(*padded(one))
    assert not np.asarray(token).any()
    # A greedy draft may be token 0, which is the argmax of a row without any logit.
    assert not np.asarray(accepted)[np.asarray(one.temperature) > 0].any()


def test_collectives_carry_a_few_numbers_per_row():
    seqs, drafts = make_round().tokens.shape
    hlo = compiled().as_text()
    assert hlo is not None
    found = collectives(hlo)
    assert found, "no collective: the pattern does not fit this HLO"
    assert max(found) == seqs * (drafts + 1) * (Kernels().fan - 1)
    # Only searches exchange more than single numbers per row, per draft or per device.
    few = max(seqs * (drafts + 1), seqs * 8)
    assert sum(size > few for size in found) == 2


def test_devices_agree_on_forced_drafts():
    one = make_round(seed=3)
    counts = forced_counts(one)
    *arrays, numbers = padded(one)
    found = on_mesh((8,))(*arrays, numbers | {"num_forced": jnp.asarray(counts)})
    np.testing.assert_array_equal(found, by_force(one, counts))

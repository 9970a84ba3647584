"""Verdicts for NaN, infinities, padding, zero probabilities and empty residuals."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    COUPLED,
    STANDARD,
    SamplingValues,
    rejection_sampling,
)
from jaxspec_kernels.rejection_sampling.passes import VocabShard
from tests.kernels import rejection_rounds
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    GREEDY,
    RULES,
    make_round,
    run,
    tiled,
)
from tests.support.enumeration import LARGEST_UNIFORM
from tests.support.programs import READERS_COMPILER

INF = np.inf
decide = jax.jit(
    rejection_sampling, static_argnames=("vocab_size",), compiler_options=UNOPTIMISED
)


verdict_of = partial(rejection_rounds.verdict_of, decide)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [-INF, np.nan])
def test_excluded_tokens_are_neither_accepted_nor_drawn(rule, bad):
    # With a uniform of 0, a draft is accepted unless the target excludes it.
    logits = [bad, bad, 1.0, bad]
    for v in (0.0, LARGEST_UNIFORM):
        assert verdict_of(logits, [0, 0], rule=rule, v=v) == (0, 2)
        assert verdict_of(logits, [2, 2], rule=rule, v=v) == (2, 2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [-INF, np.nan])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_row_without_finite_logits_accepts_nothing_and_returns_token_zero(
    rule, bad, top_p
):
    kept: Any = dict(top_p=top_p, top_k=2, min_p=0.1) if top_p < 1 else {}
    assert verdict_of([bad] * 4, [1], rule=rule, v=0.5, **kept) == (0, 0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_infinite_logit_is_always_drawn(rule):
    assert verdict_of([3.0, INF, 5.0], [1], rule=rule, u=LARGEST_UNIFORM) == (1, 1)
    assert verdict_of([3.0, INF, 5.0], [2], rule=rule) == (0, 1)
    # A quotient of these would overflow; differences of logits do not.
    if rule != GREEDY:
        assert verdict_of([3.0, 30.0, 5.0], [2], rule=rule, temperature=1e-38) == (0, 1)


def test_draft_is_rejected_if_the_products_are_equal():
    # draft and target are 1/2: a product equal to the target must not pass.
    draft = [1.0, 0.0, 0.0, 0.0]
    logits = [0.0, 0.0, -INF, -INF]
    assert verdict_of(logits, [0], u=0.5, draft=draft) == (0, 1)
    assert (
        verdict_of(logits, [0], u=np.nextafter(np.float32(0.5), 0), draft=draft)[0] == 1
    )


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_empty_residual_falls_back_to_the_target(rule):
    # The draft's probabilities exceed the target's everywhere, as rounding can cause.
    logits = [0.0, 0.0, -INF, 0.0]
    for v, token in ((0.0, 0), (0.4, 1), (LARGEST_UNIFORM, 3)):
        found = verdict_of(logits, [0], rule=rule, draft=[0.5] * 4, u=0.99, v=v)
        assert found == (0, token)


def test_residual_excludes_tokens_the_draft_prefers():
    logits = np.log([0.25, 0.25, 0.5])
    draft = [0.5, 0.25, 0.25]
    for v in (0.0, 0.5, LARGEST_UNIFORM):
        assert verdict_of(logits, [0], u=0.9, v=v, draft=draft) == (0, 2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_probability_that_underflows_is_zero(rule):
    logits = [0.0, -200.0, -300.0]
    assert verdict_of(logits, [1], rule=rule) == (0, 0)
    assert verdict_of(logits, [0], rule=rule, v=LARGEST_UNIFORM) == (1, 0)


def test_draft_that_underflows_is_accepted_by_the_target():
    assert verdict_of([0.0, 0.0], [1], u=0.99, draft=[1.0, 1e-45]) == (1, 0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_padding_of_the_vocabulary_may_hold_anything(rule):
    for pad in (np.nan, INF, 50.0):
        logits = [0.0, 1.0, pad, pad]
        found = verdict_of(logits, [2], rule=rule, vocab_size=2, v=LARGEST_UNIFORM)
        assert found[0] == 0 and found[1] < 2
        kept: Any = dict(top_k=1, top_p=0.9, min_p=0.1) if rule != GREEDY else {}
        assert verdict_of(logits, [1], rule=rule, vocab_size=2, **kept) == (1, 1)


def test_values_past_num_draft_are_not_used():
    one = make_round(seed=8)
    counted = np.arange(3) < one.num_valid_drafts[:, None]
    rows = np.arange(4) <= one.num_valid_drafts[:, None]
    numbers = one.numbers
    poisoned = replace(
        one,
        tokens=np.where(counted, one.tokens, 2**30),
        draft=np.where(counted[:, :, None], one.draft, np.nan).astype(np.float32),
        logits=np.where(rows[:, :, None], one.logits, np.nan).astype(np.float32),
    )
    uniform = jnp.where(jnp.asarray(counted), numbers["accept_uniform"], jnp.nan)
    np.testing.assert_array_equal(run(poisoned, accept_uniform=uniform), run(one))


@pytest.mark.parametrize("rule", [STANDARD, COUPLED, BLOCK])
@pytest.mark.parametrize(
    "kept", [dict(top_k=2), dict(top_p=0.4), dict(min_p=1.0), dict(top_k=2, top_p=0.9)]
)
def test_equal_logits_at_a_cutoff_are_all_kept(rule, kept):
    logits = [-1.5, 2.0, -3.0, 2.0, 2.0]
    for token in (1, 3, 4):
        assert verdict_of(logits, [token], rule=STANDARD, **kept)[0] == 1
    for token in (0, 2):
        assert verdict_of(logits, [token], rule=rule, **kept)[0] == 0
    tokens = {verdict_of(logits, [0], v=v, **kept)[1] for v in np.linspace(0, 0.99, 9)}
    assert tokens == {1, 3, 4}


def test_greedy_takes_the_lowest_of_equal_logits_in_other_tiles():
    logits = np.full(50, -1.0)
    logits[[18, 33, 49]] = 4.0
    assert rejection_rounds.verdict_of(tiled(), logits, [7], rule=GREEDY) == (0, 18)


visited: list[None] = []


@partial(jax.jit, compiler_options=UNOPTIMISED)
def counted(*args, **more):
    """Run the reference, and append to `visited` for every tile that it reads."""
    real = VocabShard.read

    def read(self, logits, number):
        jax.debug.callback(lambda: visited.append(None))
        return real(self, logits, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VocabShard, "read", read)
        return rejection_sampling(*args, **more, implementation="reference")


def count_tiles(one) -> int:
    """Return the number of tiles that passes over all rows read.

    Drawing, which reads one row, does not count.
    """
    visited.clear()
    jax.block_until_ready(counted(*one.arrays, **one.numbers))
    jax.effects_barrier()
    return len(visited)


@pytest.mark.parametrize(
    ("kind", "filters", "limit"),
    [
        (GREEDY, {}, 1),
        (STANDARD, {}, 1),
        (BLOCK, {}, 2),
        (COUPLED, {}, 2),
        # Tiles for the statistics, the search, and the sum of the kept weights.
        (STANDARD, dict(top_k=5), 1 + 8 + 1),
        (STANDARD, dict(top_p=0.5), 1 + 8 + 1),
        (STANDARD, dict(min_p=0.1), 1 + 1),
        (STANDARD, dict(top_k=5, top_p=0.5), 1 + 8 + 1 + 8 + 1),
    ],
)
def test_passes_over_the_logits_are_few(kind, filters, limit):
    one = make_round(6, seed=1, is_filtered=False)
    one = replace(
        one,
        kind=np.full(6, kind),
        temperature=np.full(6, 0.0 if kind == GREEDY else 1.0, np.float32),
        **{name: np.full(6, value) for name, value in filters.items()},
    )
    passes_made = count_tiles(one)
    assert passes_made == limit if limit <= 2 else 2 < passes_made <= limit


def test_equal_bfloat16_logits_are_searched_in_few_passes():
    """A threshold among equal logits is found to its last bit, with few passes."""
    one = make_round(6, seed=1, is_filtered=False)
    one = replace(
        one,
        kind=np.zeros(6, int),
        temperature=np.ones(6, np.float32),
        top_k=np.full(6, 5),
        logits=np.asarray(np.round(one.logits), jnp.bfloat16),
    )
    assert count_tiles(one) <= 1 + (1 + 6) + 1


def test_no_array_of_probabilities_is_made():
    seqs, drafts, vocab = 2, 4, 256_000
    floats, ints = jnp.float32, jnp.int32

    def array(dtype, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    compiled = (
        jax.jit(rejection_sampling)
        .lower(
            array(ints, seqs, drafts),
            array(floats, seqs, drafts, vocab),
            array(floats, seqs, drafts + 1, vocab),
            array(ints, seqs),
            SamplingValues(
                array(floats, seqs), array(ints, seqs), *[array(floats, seqs)] * 2
            ),
            rule=array(ints, seqs),
            accept_uniform=array(floats, seqs, drafts),
            sample_uniform=array(floats, seqs),
            noise_words=array(jnp.uint32, seqs, drafts + 1, 2),
        )
        .compile(READERS_COMPILER)
    )
    logits_bytes = seqs * (drafts + 1) * vocab * 4
    # The largest array is a tile times the fifteen thresholds of a search.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < logits_bytes / 4

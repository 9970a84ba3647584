"""Every backend's passes equal float64, and its verdicts those of float64 loops.

The kernels are interpreted; the CPU's are C++. `test_rejection_sampling.py` tests the
rules, with the reference.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec_kernels.rejection_sampling import cpu, gpu, passes, reference, tpu
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import Distribution, Draft, VocabShard
from jaxspec_kernels.rejection_sampling.reference import Kernels
from tests.kernels.aot_tpu import no_compilation_cache
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    by_force,
    by_loops,
    forced_counts,
    make_round,
    sliced,
)

# Three tiles; the last one is incomplete and has padding.
COLUMNS, VOCAB_SIZE, TILE = 300, 290, 128
ROWS = 12
INFINITY = float("inf")
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
LAUNCH: dict[str, Any] = dict(tile=TILE, interpret=True)
# Module of a backend, further arguments of its functions, and the error of its sums.
PASSES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "reference": (passes, {}, 1e-5),
    "cpu": (cpu, {}, 2e-6),
    "gpu": (gpu, LAUNCH, 1e-5),
}
VERDICTS: dict[str, Callable] = {
    "reference": partial(reference.rejection_sampling, tile=16),
    "cpu": cpu.rejection_sampling,
    "gpu": partial(gpu.rejection_sampling, **LAUNCH),
    "tpu": partial(tpu.rejection_sampling, **LAUNCH),
}


@pytest.fixture(autouse=True)
def _skip_without_library(request: pytest.FixtureRequest):
    if "cpu" in request.node.name:
        request.getfixturevalue("has_native")


def shard_of(backend: str) -> VocabShard:
    """Return the vocabulary as one tile for C++ and the GPU, else in several tiles."""
    tile = COLUMNS if backend in ("cpu", "gpu") else TILE
    return VocabShard(columns=COLUMNS, tile=tile, vocab_size=VOCAB_SIZE, axis_name=None)


def make_logits(rows: int) -> np.ndarray:
    random = np.random.default_rng(rows)
    logits = random.normal(size=(rows, COLUMNS)).astype(np.float32) * 4
    logits[0] = np.round(logits[0])  # equal logits in several tiles
    logits[1, ::3] = -np.inf
    logits[2, ::2] = np.nan
    logits[3, :128] = -np.inf  # a first tile without any weight
    logits[4] = np.nan
    logits[5, 200] = np.inf
    logits[6] *= 100  # most weights underflow
    logits[:, VOCAB_SIZE:] = np.array([np.nan, np.inf, 900])[np.arange(10) % 3]
    return logits


@cache
def exact_rows(
    dtype: Any = jnp.float32, rows: int = ROWS
) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Return logits, temperatures, and the logits in float64.

    Padding is -inf in the latter.
    """
    logits = jnp.asarray(make_logits(rows), dtype)
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    exact[:, VOCAB_SIZE:] = -np.inf
    exact = np.where(np.isnan(exact), -np.inf, exact)
    exact = np.minimum(exact, float(np.finfo(np.float32).max))
    temperature = (
        np.random.default_rng(1).choice([0.5, 1.0, 1.7], rows).astype(np.float32)
    )
    return logits, exact, temperature


def weights_of(exact: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    maximum = exact.max(axis=1)
    safe_max = np.where(np.isfinite(maximum), maximum, 0)[:, None]
    return np.exp((exact - safe_max) / temperature[:, None])


@cache
def exact_distribution() -> tuple[jax.Array, np.ndarray, Distribution, np.ndarray]:
    """Return rows with a threshold that keeps half of each, and their weights."""
    logits, exact, temperature = exact_rows()
    threshold = np.median(exact[:, :VOCAB_SIZE], axis=1).astype(np.float32)
    weights = weights_of(exact, temperature)
    weights = np.where(exact >= threshold[:, None], weights, 0.0)
    arrays = temperature, exact.max(axis=1), threshold, weights.sum(axis=1)
    distribution = Distribution(*(jnp.asarray(array, jnp.float32) for array in arrays))
    return logits, exact, distribution, weights


def probabilities_by(weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


@pytest.mark.parametrize(
    ("backend", "dtype", "rows"),
    [
        ("reference", "float32", ROWS),
        ("cpu", "float32", ROWS),
        *(("gpu", dtype, ROWS) for dtype in ("float32", "bfloat16")),
        # 40 rows do not fill the second block.
        *(
            ("tpu", dtype, rows)
            for dtype in ("float32", "bfloat16")
            for rows in (8, 40)
        ),
    ],
)
def test_statistics_equal_float64(backend, dtype, rows):
    logits, exact, temperature = exact_rows(dtype, rows)
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, rows).astype(np.int32)
    tokens[-3:] = -1, VOCAB_SIZE, 2**30
    module, own, limit = PASSES.get(backend, (tpu, dict(interpret=STRICT), 1e-5))
    given = shard_of(backend), logits, jnp.asarray(temperature), jnp.asarray(tokens)
    found = module.statistics(*given, jnp.arange(rows) == 1, **own)
    is_token = (tokens >= 0) & (tokens < VOCAB_SIZE)
    draft_logit = exact[np.arange(rows), np.where(is_token, tokens, 0)]
    draft_logit = np.where(is_token, draft_logit, -np.inf)
    total = weights_of(exact, temperature).sum(axis=1)
    np.testing.assert_array_equal(found.maximum, exact.max(axis=1).astype("f4"))
    np.testing.assert_array_equal(found.best, exact.argmax(axis=1))
    np.testing.assert_allclose(found.total, total, rtol=limit)
    np.testing.assert_array_equal(found.draft_logit, draft_logit.astype("f4"))
    if backend in ("reference", "cpu"):
        assert not np.asarray(module.statistics(*given, None).total).any()


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("backend", PASSES)
def test_mass_above_equals_float64(backend, counts):
    logits, exact, distribution, weights = exact_distribution()
    module, own, limit = PASSES[backend]
    limits = np.sort(exact[:, [3, 50, 200]], axis=1).clip(-1e30).astype(np.float32)
    given = shard_of(backend), logits, distribution, jnp.asarray(limits)
    found = module.mass_above(*given, counts=counts, **own)
    is_above = exact[:, None] >= limits[:, :, None]
    unit = np.ones_like(weights) if counts else weights
    expected = np.where(is_above, unit[:, None], 0.0).sum(axis=2)
    np.testing.assert_allclose(found, expected, rtol=limit)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_probabilities_equal_float64(backend):
    logits, _, distribution, weights = exact_distribution()
    found = PASSES[backend][0].probabilities(shard_of(backend), logits, distribution)
    # The weights have exponents down to -87, in 24 bits, which limits the precision.
    expected = probabilities_by(weights)
    np.testing.assert_allclose(found, expected, rtol=6e-6, atol=1e-37)
    assert not np.asarray(found)[:, VOCAB_SIZE:].any()


@pytest.mark.parametrize("backend", PASSES)
def test_gumbel_argmax_equals_float64(backend):
    logits, _, distribution, weights = exact_distribution()
    module, own, limit = PASSES[backend]
    for seed in range(20 if backend == "cpu" else 1):
        words = np.random.default_rng(seed).integers(0, 2**32, (ROWS, 2), np.uint32)
        words = jnp.asarray(words)
        ids = jnp.arange(COLUMNS, dtype=jnp.int32)[None]
        noise = exponential(words[:, :1], words[:, 1:], ids)
        scores = weights / np.asarray(noise, np.float64)
        score, best = module.gumbel_argmax(
            shard_of(backend), logits, distribution, words, **own
        )
        has_weight = scores.max(axis=1) > 0
        best = np.where(has_weight, best, 0)
        np.testing.assert_array_equal(best, scores.argmax(axis=1))
        np.testing.assert_allclose(score, scores.max(axis=1), rtol=limit)


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("backend", PASSES)
def test_residual_mass_equals_float64(backend, is_certain):
    seqs, inner = 3, 2
    logits, _, distribution, weights = exact_distribution()
    module, own, _ = PASSES[backend]
    random = np.random.default_rng(4)
    tokens = random.integers(0, VOCAB_SIZE, (seqs, inner + 1)).astype(np.int32)
    probs = random.dirichlet(np.full(COLUMNS, 0.1), tokens.shape)
    if is_certain:
        probs = np.eye(COLUMNS)[tokens]
    joint = random.uniform(0.3, 1, (seqs, inner)).astype(np.float32)
    draft = Draft(
        jnp.asarray(tokens), None if is_certain else jnp.asarray(probs, jnp.float32)
    )
    # Padding columns have no draft probabilities.
    given = shard_of(backend), logits, distribution, draft, jnp.asarray(joint)
    found = module.residual_mass(*given, **own)
    target = probabilities_by(weights).reshape(seqs, inner + 2, COLUMNS)[:, 1:-1]
    above = np.maximum(joint[:, :, None] * target - probs[:, 1:], 0)
    np.testing.assert_allclose(found, above.sum(axis=2), rtol=1e-5, atol=1e-7)


@cache
def decide(backend: str, vocab: int) -> Callable:
    run = partial(VERDICTS[backend], vocab_size=vocab, axis_name=None)
    return jax.jit(run, compiler_options=UNOPTIMISED)


@pytest.mark.parametrize(
    ("backend", "seqs", "vocab", "seeds"),
    [
        ("reference", 64, 50, 6),
        ("cpu", 64, 50, 6),
        ("cpu", 16, 2100, 1),
        ("gpu", 16, 290, 1),
        ("tpu", 16, 290, 1),
    ],
)
def test_verdicts_equal_those_of_loops(backend, seqs, vocab, seeds):
    """Batches mix all rules, filters and numbers of drafts."""
    run = decide(backend, vocab)
    for seed in range(seeds):
        one = make_round(seqs, vocab=vocab, seed=seed)
        found = run(*one.arrays, **one.numbers)
        np.testing.assert_array_equal(found, by_loops(one))


@pytest.mark.parametrize(
    ("backend", "seqs", "vocab", "seeds"),
    [("reference", 64, 50, 6), ("cpu", 64, 50, 2), ("tpu", 16, 290, 1)],
)
def test_forced_drafts_are_accepted_and_the_target_continues(
    backend, seqs, vocab, seeds
):
    """Any draft may be forced; the next token never comes from a residual."""
    run, is_other = decide(backend, vocab), []
    for seed in range(seeds):
        one = make_round(seqs, vocab=vocab, seed=seed)
        counts = forced_counts(one, seed)
        found = run(*one.arrays, **one.numbers, num_forced=jnp.asarray(counts))
        np.testing.assert_array_equal(found, by_force(one, counts))
        is_other.append(counts != run(*one.arrays, **one.numbers).num_accepted)
    assert np.mean(is_other) > 0.3, "the rules would have decided so anyway"


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_slices_of_the_vocabulary_agree_on_the_verdict(backend):
    """Two devices agree; `test_rejection_sampling_sharded.py` tests eight."""
    one = make_round(16, vocab=290, seed=1)
    run = sliced(VERDICTS[backend], check_vma=False)
    with no_compilation_cache():
        found = run(*one.arrays, one.numbers)
    np.testing.assert_array_equal(found, by_loops(one))


def distribution_of(logits: np.ndarray) -> tuple[Distribution, np.ndarray]:
    """Return the distribution of rows without filters, and their weights."""
    maximum = logits.max(axis=1)
    weights = np.exp(logits.astype(np.float64) - maximum[:, None])
    arrays = np.ones(len(logits)), maximum, np.full(len(logits), -INFINITY)
    arrays = *arrays, weights.sum(axis=1)
    return Distribution(*(jnp.asarray(array, jnp.float32) for array in arrays)), weights


# The fans of the reference and of the kernels; a fan of 2 is a bisection.
SEARCHES: dict[str, Callable] = {
    "cpu": cpu.search,
    **{f"fan {fan}": Kernels(fan=fan).search for fan in (2, 8, 16)},
}


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (name == "fan 2"))
        for name in SEARCHES
        for dtype in ("float32", "bfloat16")
        if name != "cpu" or dtype == "float32"
    ],
)
def test_thresholds_equal_those_of_sorting(name, dtype, counts):
    """Rows are sharp, flat, with ties, or sorted; one has no filter to search for."""
    random, (rows, columns, size) = np.random.default_rng(0), (12, 700, 697)
    tile = columns if name == "cpu" else 256
    shard = VocabShard(columns=columns, tile=tile, vocab_size=size, axis_name=None)
    scale = np.array([0.01, 3, 60])[np.arange(rows) % 3]
    exact = random.normal(size=(rows, columns)) * scale[:, None]
    exact[1::2] = np.round(exact[1::2])  # ties, and both zeros
    exact[3] -= 200
    exact[2], exact[4], exact[6] = np.sort(exact[2]), -np.sort(exact[4]), 1.0
    exact[:, size:] = -INFINITY
    logits = jnp.asarray(exact, dtype)
    exact = np.asarray(logits.astype(jnp.float32))
    distribution, weights = distribution_of(exact)
    unit = weights
    if counts:
        # C++ rounds numbers below the normal ones to 0.
        unit = 1.0 * (weights > (1e-37 if name == "cpu" else 2.0**-150))
    wanted = random.uniform(0.05, 0.95, rows) * unit.sum(axis=1)
    wanted = np.ceil(wanted) if counts else wanted
    is_searched = np.arange(rows) != 5
    find = partial(SEARCHES[name], shard, counts=counts)
    found, mass = jax.jit(find, compiler_options=UNOPTIMISED)(
        logits,
        distribution,
        jnp.asarray(wanted, jnp.float32),
        is_searched=jnp.asarray(is_searched),
    )
    for row in range(rows):
        order = np.argsort(-exact[row], kind="stable")
        reached = np.cumsum(unit[row][order]) >= wanted[row]
        expected = exact[row][order][np.argmax(reached)]
        if not is_searched[row]:
            expected = -INFINITY
        kept = exact[row] >= float(found[row])
        np.testing.assert_array_equal(kept, exact[row] >= expected)
        if name == "cpu":
            assert found[row] == expected
        if is_searched[row]:
            limit = 1e-6 if name == "cpu" else 1e-5
            np.testing.assert_allclose(mass[row], unit[row][kept].sum(), rtol=limit)
        elif name == "cpu":
            np.testing.assert_allclose(mass[row], distribution.total[row], rtol=1e-6)


@pytest.mark.parametrize("is_certain", [False, True])
def test_cpu_inverts_the_cumulative_sum(is_certain):
    """The token is drawn from the target after full acceptance or without drafts.

    After a rejection it is drawn from the residual.
    """
    random = np.random.default_rng(0)
    seqs, columns, size = 400, 600, 597
    shard = VocabShard(columns=columns, tile=columns, vocab_size=size, axis_name=None)
    logits = (random.normal(size=(seqs, columns)) * 3).astype(np.float32)
    logits[:, size:] = 90.0
    distribution, weights = distribution_of(
        np.where(np.arange(columns) < size, logits, -INFINITY)
    )
    target = probabilities_by(weights)
    probs = random.dirichlet(np.full(columns, 0.05), (seqs, 2)).astype(np.float32)
    index, joint = random.integers(0, 2, seqs), random.uniform(0.3, 1, seqs)
    is_rejected, uniform = random.random(seqs) < 0.7, random.random(seqs)
    tokens = random.integers(0, size, (seqs, 2))
    each = np.arange(seqs)
    own = np.eye(columns)[tokens[each, index]] if is_certain else probs[each, index]
    residual = np.maximum(joint[:, None] * target - own, 0)
    weights = np.where(is_rejected[:, None], residual, target)
    sums = np.cumsum(weights, axis=1)
    goal = uniform * sums[:, -1]
    at = np.asarray(
        cpu.draw(
            shard,
            jnp.asarray(logits),
            distribution,
            Draft(jnp.asarray(tokens), None if is_certain else jnp.asarray(probs)),
            row=jnp.arange(seqs),
            index=jnp.asarray(index),
            is_rejected=jnp.asarray(is_rejected),
            joint=jnp.asarray(joint, jnp.float32),
            uniform=jnp.asarray(uniform, jnp.float32),
        )
    )
    here, own = sums[each, at], weights[each, at]
    assert (own > 0).all()
    np.testing.assert_array_less(goal, here + 1e-6)
    np.testing.assert_array_less(here - own, goal + 1e-6)


def test_nan_is_no_token_on_cpu():
    one = make_round(16, vocab=50, seed=2, is_filtered=False)
    logits = one.logits.copy()
    logits[:, :, 7], logits[:, :, 9] = np.nan, -np.inf
    one = replace(one, logits=logits)
    found = decide("cpu", 50)(*one.arrays, **one.numbers)
    np.testing.assert_array_equal(found, by_loops(one))

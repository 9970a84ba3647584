"""Sampled tokens follow the distribution of float64 oracles, which sort."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.plan import BLOCK, COUPLED, STANDARD
from jaxspec.program.sampling import forbid_early_stop, sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
from jaxspec_kernels.rejection_sampling import SamplingValues, sample
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import coupled_noise
from tests.support.distributions import filtered_distribution
from tests.support.enumeration import LARGEST_UNIFORM
from tests.support.rows import make_active

SIZES = (16, 96, 300, 1000)
VOCAB = 16
RULES = np.array([STANDARD, BLOCK, COUPLED, STANDARD, COUPLED, STANDARD])
TEMPERATURE = np.array([1.0, 0.7, 1.0, 0.0, 0.5, 1.0])
TOP_K = np.array([0, 4, 0, 0, 3, 0])
LOGITS = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32) * 2


def distribution_of(logits: np.ndarray, rows: list[dict]) -> np.ndarray:
    """Return the distribution from which rows are sampled."""
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    full = [defaults | row for row in rows]

    def column(name: str, dtype) -> jax.Array:
        return jnp.array([row[name] for row in full], dtype)

    sampling_values = SamplingValues(
        column("temperature", jnp.float32),
        column("top_k", jnp.int32),
        column("top_p", jnp.float32),
        column("min_p", jnp.float32),
    )
    _, probs = draw(logits, sampling_values, np.zeros(len(logits)))
    return probs


# Each shape is traced once, and compiled with few optimizations.
quick_jit: Any = functools.partial(jax.jit, compiler_options=UNOPTIMISED)


@quick_jit
def inverted(logits, sampling_values, rule, uniform):
    return sample(logits, sampling_values, rule=rule, uniform=uniform)


@functools.partial(quick_jit, static_argnames="drafts_argmax")
def drafted(logits, index, active, *, drafts_argmax):
    return sample_draft(logits, index, active, Backend(), drafts_argmax=drafts_argmax)


@quick_jit
def verified(logits, active):
    none = jnp.zeros(len(logits), jnp.int32)
    tree = Tree.chain(0)
    return verify(None, logits, none, active, Backend(), tree=tree, adjust=None)


def draw(
    logits: np.ndarray, sampling_values: SamplingValues, uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens by inverting the cumulative sum, and the probabilities."""
    token, probs = inverted(
        jnp.asarray(logits, jnp.float32),
        sampling_values,
        jnp.zeros(len(logits), jnp.int32),
        jnp.asarray(uniform, jnp.float32),
    )
    return np.asarray(token), np.asarray(probs)


def at_one(rows: int) -> SamplingValues:
    """Return sampling values with temperature 1 and no filter."""
    ones = jnp.ones(rows, jnp.float32)
    return SamplingValues(ones, jnp.zeros(rows, jnp.int32), ones, 0 * ones)


def check_distribution(size: int, rows: list[dict], *, is_tied: bool = False) -> None:
    """Check random logits, flat to sharp; each row has its own values."""
    random = np.random.default_rng(size)
    scale = random.choice([0.2, 1.0, 4.0], (len(rows), 1))
    logits = random.normal(size=(len(rows), size)) * scale
    if is_tied:
        logits = np.round(logits * 2) / 2
        logits[random.random(logits.shape) < 0.1] = -np.inf  # masked tokens
    logits = logits.astype(np.float32)
    found = distribution_of(logits, rows)
    for index, row in enumerate(rows):
        if not row.get("temperature", 1.0):
            continue  # a greedy row's distribution is never used
        exact: dict[str, Any] = {"temperature": 1.0}
        exact |= {name: np.float32(value) for name, value in row.items()}
        exact["top_k"] = row.get("top_k", 0)
        expected = filtered_distribution(logits[index], **exact)
        np.testing.assert_allclose(found[index], expected, atol=1e-6, err_msg=str(row))
        # In float32, weights below 1e-30 may become 0.
        is_clear = (expected == 0) | (expected > 1e-30)
        is_kept = (found[index] > 0)[is_clear]
        np.testing.assert_array_equal(is_kept, expected[is_clear] > 0, str(row))


def random_rows(size: int, count: int = 48) -> list[dict]:
    """Return sampling values of every kind in one batch, with greedy rows."""
    random = np.random.default_rng(size)
    rows = []
    for _ in range(count):
        row = dict(temperature=float(random.choice([0.0, 0.3, 0.7, 1.0, 1.7])))
        if random.random() < 0.6:
            row["top_k"] = int(random.integers(1, size + 5))
        if random.random() < 0.6:
            row["top_p"] = float(random.choice([0.01, 0.3, 0.8, 0.95, 0.999]))
        if random.random() < 0.4:
            row["min_p"] = float(random.choice([0.01, 0.2, 0.9, 1.0]))
        rows.append(row)
    return rows


@pytest.mark.parametrize("is_tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("size", SIZES)
def test_mixed_rows_equal_the_oracle(size, is_tied):
    check_distribution(size, random_rows(size), is_tied=is_tied)


# Batches in which some passes over the logits are left out.
@pytest.mark.parametrize(
    "row",
    [
        dict(),
        dict(temperature=0.5),
        dict(top_k=3),
        dict(top_k=128),
        dict(top_k=299),
        dict(top_p=0.5),
        dict(min_p=0.3),
    ],
    ids=str,
)
def test_each_control_alone_gives_its_distribution(row):
    check_distribution(300, [row] * 4)


@pytest.mark.parametrize("size", SIZES)
def test_draw_inverts_the_cumulative_sum(size):
    """Uniforms are at the ends and in the middle of each token's interval."""
    random = np.random.default_rng(size)
    rows, uniforms, tokens = [], [], []
    for trial in range(6):
        weights = random.exponential(size=size).astype(np.float32)
        weights[random.random(size) < (0.0, 0.5, 0.95)[trial % 3]] = 0
        weights[random.integers(size)] = 1
        with np.errstate(divide="ignore"):
            logits = np.log(weights)
        exact = np.exp(logits.astype(np.float64))
        end = np.cumsum(exact) / exact.sum()
        start = np.concatenate([[0], end[:-1]])
        positive = np.flatnonzero(weights)
        for token in positive:
            low, high = start[token] + 1e-6, end[token] - 1e-6
            if low < high:
                uniforms += [low, (low + high) / 2, high]
                tokens += [token] * 3
        # Include the smallest and the largest possible uniform.
        uniforms += [0.0, LARGEST_UNIFORM]
        tokens += [positive[0], positive[-1]]
        rows += [logits] * (len(tokens) - len(rows))
    found, probs = draw(np.stack(rows), at_one(len(rows)), np.asarray(uniforms))
    chosen = np.take_along_axis(probs, found[:, None], 1)
    assert (chosen > 0).all(), "a token of weight zero was drawn"
    np.testing.assert_array_equal(found, tokens)


@pytest.mark.parametrize("size", SIZES)
def test_draw_never_takes_a_token_of_weight_zero(size):
    """This holds even if rounding makes the sums of blocks and of tokens disagree."""
    random = np.random.default_rng(size)
    logits = random.normal(size=(2000, size)).astype(np.float32) * 8
    logits[random.random(logits.shape) < 0.6] = -np.inf
    logits[:, size // 2] = -46
    uniform = random.choice([0.0, 2.0**-24, 0.5, LARGEST_UNIFORM], 2000)
    found, _ = draw(logits, at_one(2000), uniform)
    assert (np.take_along_axis(logits, found[:, None], 1) > -np.inf).all()


@pytest.mark.parametrize("size", (1, 7, *SIZES))
def test_argmax_takes_the_lowest_of_ties_and_never_nan(size):
    random = np.random.default_rng(size)
    values = np.round(random.normal(size=(64, size)), 1).astype(np.float32)
    values[random.random(values.shape) < 0.2] = np.nan
    values[0] = np.nan
    values[1] = -np.inf
    values[2] = 5.0
    expected = np.where(np.isnan(values), -np.inf, values).argmax(axis=1)
    token, probs = sample(jnp.asarray(values), None)
    np.testing.assert_array_equal(token, expected)
    assert probs is None


def draft_with(active, index, **given: Any) -> tuple[np.ndarray, Any]:
    given = dict(drafts_argmax=False) | given
    token, probs = drafted(jnp.asarray(LOGITS), jnp.int32(index), active, **given)
    return np.asarray(token), None if probs is None else np.asarray(probs)


def plain_with(active) -> np.ndarray:
    return np.asarray(verified(jnp.asarray(LOGITS), active).next_token)


def test_every_row_follows_its_own_rule():
    active = make_active(6, temperature=TEMPERATURE, rule=RULES, top_k=TOP_K)
    distributions = [
        filtered_distribution(logits, temperature, top_k)
        for logits, temperature, top_k in zip(LOGITS, TEMPERATURE, TOP_K, strict=True)
    ]
    token, probs = draft_with(active, 2)
    np.testing.assert_allclose(probs, distributions, atol=1e-6)
    for role, index, drawn in (
        (randomness.DRAFT, 2, token),
        (randomness.SAMPLE, 0, plain_with(active)),
    ):
        # The round starts at position 10: its uniform at the distance to this position.
        distance = jnp.full(6, index, jnp.int32)
        start = active.num_tokens
        uniform = randomness.uniform(active.seed, start, role, distance)
        # The coupled rule's noise depends on the position itself, for draft model and
        # target alike.
        noise = coupled_noise(active.seed, start + distance, VOCAB)
        inverted = [
            np.searchsorted(np.cumsum(distribution), float(u), side="right")
            for distribution, u in zip(distributions, uniform, strict=True)
        ]
        raced = (np.stack(distributions) / noise).argmax(axis=1)
        expected = np.where(RULES == COUPLED, raced, inverted)
        expected[TEMPERATURE == 0] = LOGITS[TEMPERATURE == 0].argmax(axis=1)
        np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("is_active", [True, False], ids=["greedy", "inactive"])
def test_batch_without_sampled_rows_takes_the_argmax(is_active):
    """Only padding rows have a temperature, and they do not make a batch sampled."""
    active = make_active(6, temperature=float(not is_active), is_active=is_active)
    token, probs = draft_with(active, 0)
    np.testing.assert_array_equal(token, LOGITS.argmax(axis=1))
    np.testing.assert_array_equal(plain_with(active), LOGITS.argmax(axis=1))
    assert not probs.any()


def test_point_mass_drafts_have_no_probabilities():
    token, probs = draft_with(make_active(6, temperature=1.0), 0, drafts_argmax=True)
    np.testing.assert_array_equal(token, LOGITS.argmax(axis=1))
    assert probs is None


@pytest.mark.parametrize("has_branch", [True, False])
def test_early_stop_is_forbidden_below_min_tokens_only(has_branch):
    active = make_active(
        4,
        min_total=[12, 12, 12, 12],
        stop_ids=[[1, 5], [1, 5], [1, 5], []],
        is_active=[True, True, False, True],
    )
    position = jnp.array([11, 12, 11, 11], jnp.int32)
    logits = jnp.asarray(LOGITS[:4])
    found = forbid_early_stop(logits, position, active, has_branch=has_branch)
    expected = LOGITS[:4].copy()
    expected[0, [1, 5]] = -np.inf
    np.testing.assert_array_equal(found, expected)

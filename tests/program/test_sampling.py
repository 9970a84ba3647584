"""Distributions and draws equal float64 oracles that sort the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program import sampling
from jaxspec.program.sampling import NUM_CANDIDATES, Controls
from tests.enumeration import LARGEST_UNIFORM
from tests.laws import filtered_law

SIZES = (16, 96, 300, 1000)


def distribution_of(logits: np.ndarray, rows: list[dict]) -> np.ndarray:
    """The real function on rows of controls."""
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    full = [defaults | row for row in rows]

    def column(name: str, dtype) -> jax.Array:
        return jnp.array([row[name] for row in full], dtype)

    controls = Controls(
        column("temperature", jnp.float32),
        column("top_k", jnp.int32),
        column("top_p", jnp.float32),
        column("min_p", jnp.float32),
    )
    compiled = jax.jit(lambda *args: sampling.distribution(*args))
    return np.asarray(compiled(jnp.asarray(logits, jnp.float32), controls))


def check_distribution(size: int, rows: list[dict], *, is_tied: bool = False) -> None:
    """Random logits, flat to sharp, one row per control."""
    random = np.random.default_rng(size)
    scale = random.choice([0.2, 1.0, 4.0], (len(rows), 1))
    logits = random.normal(size=(len(rows), size)) * scale
    if is_tied:
        logits = np.round(logits * 2) / 2
    logits = logits.astype(np.float32)
    found = distribution_of(logits, rows)
    for index, row in enumerate(rows):
        exact: dict[str, Any] = {"temperature": 1.0}
        exact |= {name: np.float32(value) for name, value in row.items()}
        exact["top_k"] = row.get("top_k", 0)
        expected = filtered_law(logits[index], **exact)
        np.testing.assert_allclose(found[index], expected, atol=1e-6, err_msg=str(row))
        # Below 1e-30 float32 may have nothing left.
        is_clear = (expected == 0) | (expected > 1e-30)
        is_kept = (found[index] > 0)[is_clear]
        np.testing.assert_array_equal(is_kept, expected[is_clear] > 0, str(row))


def random_rows(size: int, count: int = 48) -> list[dict]:
    """Controls of every kind side by side, greedy rows among them."""
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


@pytest.mark.parametrize(
    "row",
    [
        dict(),
        dict(temperature=0.5),
        dict(top_k=3),
        dict(top_k=NUM_CANDIDATES),
        dict(top_k=NUM_CANDIDATES + 1),
        dict(top_p=0.5),
        dict(min_p=0.3),
    ],
    ids=str,
)
def test_one_kind_of_control_alone(row):
    check_distribution(300, [row] * 4)


def test_wide_nucleus_and_large_top_k_are_found_by_search():
    """Both thresholds lie past the candidates; sorting finds the same ones."""
    rows = [
        dict(top_p=0.9),
        dict(top_k=700),
        dict(top_k=700, top_p=0.9),
        dict(top_k=700, top_p=0.9, min_p=0.5),
        dict(top_k=5, top_p=0.9),
    ]
    logits = np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32) * 0.1
    found = distribution_of(logits, rows)
    widths = (found > 0).sum(axis=1)
    assert (widths[:4] > NUM_CANDIDATES).all() and widths[4] == 5
    assert widths[1] == 700
    for row, own, probs in zip(rows, logits, found, strict=True):
        exact: dict[str, Any] = {
            name: np.float32(v) if name != "top_k" else v for name, v in row.items()
        }
        expected = filtered_law(own, 1.0, **exact)
        np.testing.assert_array_equal(probs > 0, expected > 0)
        np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_ties_at_the_border_stay():
    logits = np.array([[2.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    for row in (dict(top_k=2), dict(top_p=0.5), dict(min_p=float(np.exp(-1.0)) * 0.99)):
        found = distribution_of(logits, [row])[0]
        np.testing.assert_array_equal(found > 0, [True, True, True, True, False])


def test_masked_tokens_have_no_probability():
    logits = np.array([[-np.inf, 0.0, 1.0, -np.inf]], np.float32)
    found = distribution_of(logits, [dict(top_p=0.999, top_k=3)])[0]
    np.testing.assert_allclose(
        found, filtered_law(np.array([-99, 0, 1, -99]), 1.0), atol=1e-6
    )
    assert found[0] == found[3] == 0


def check_draw(size: int) -> None:
    """Edges and middles of every cell of the float64 cumulative sum."""
    random = np.random.default_rng(size)
    rows, uniforms, tokens = [], [], []
    for trial in range(6):
        weights = random.exponential(size=size).astype(np.float32)
        weights[random.random(size) < (0.0, 0.5, 0.95)[trial % 3]] = 0
        weights[random.integers(size)] = 1
        weights *= np.float32((1, 1e-3)[trial % 2])
        end = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
        start = np.concatenate([[0], end[:-1]])
        positive = np.flatnonzero(weights)
        for token in positive:
            low, high = start[token] + 1e-6, end[token] - 1e-6
            if low < high:
                uniforms += [low, (low + high) / 2, high]
                tokens += [token] * 3
        # The least and the largest uniform there can be.
        uniforms += [0.0, LARGEST_UNIFORM]
        tokens += [positive[0], positive[-1]]
        rows += [weights] * (len(tokens) - len(rows))
    compiled = jax.jit(lambda *args: sampling.draw(*args))
    found = compiled(jnp.asarray(np.stack(rows)), jnp.asarray(uniforms, jnp.float32))
    found = np.asarray(found)
    chosen = np.take_along_axis(np.stack(rows), found[:, None], 1)
    assert (chosen > 0).all(), "a token of weight zero was drawn"
    np.testing.assert_array_equal(found, tokens)


@pytest.mark.parametrize("size", SIZES)
def test_draw_inverts_the_cumulative_sum(size):
    check_draw(size)


@pytest.mark.parametrize("size", SIZES)
def test_draw_never_takes_a_token_of_weight_zero(size):
    """Also where rounding makes the sums disagree with each other."""
    random = np.random.default_rng(size)
    weights = np.exp(random.normal(size=(2000, size)) * 8).astype(np.float32)
    weights[random.random(weights.shape) < 0.6] = 0
    weights[:, size // 2] = 1e-20
    uniform = random.choice([0.0, 2.0**-24, 0.5, LARGEST_UNIFORM], 2000)
    found = np.asarray(
        jax.jit(sampling.draw)(jnp.asarray(weights), jnp.asarray(uniform, jnp.float32))
    )
    assert (np.take_along_axis(weights, found[:, None], 1) > 0).all()


@pytest.mark.parametrize("size", (1, 7, *SIZES))
def test_argmax_takes_the_lowest_of_ties_and_never_nan(size):
    random = np.random.default_rng(size)
    values = np.round(random.normal(size=(64, size)), 1).astype(np.float32)
    values[random.random(values.shape) < 0.2] = np.nan
    values[0] = np.nan
    values[1] = -np.inf
    values[2] = 5.0
    expected = np.where(np.isnan(values), -np.inf, values).argmax(axis=1)
    np.testing.assert_array_equal(sampling.argmax(jnp.asarray(values)), expected)


def test_race_never_takes_a_token_of_weight_zero():
    weights = jnp.array([[0.0, 1e-30, 0.0, 0.0]])
    noise = jnp.array([[1e-7, 16.0, 1e-7, 1e-7]])
    assert int(sampling.race(weights, noise)[0]) == 1


def test_mask_tokens_forbids_only_what_is_marked():
    logits = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    tokens = jnp.array([[1, -1, 9], [0, 2, -1], [0, 1, 2]], jnp.int32)
    found = sampling.mask_tokens(logits, tokens, jnp.array([True, True, False]))
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected[0, 1] = expected[1, 0] = expected[1, 2] = -np.inf
    np.testing.assert_array_equal(found, expected)
    none = sampling.mask_tokens(logits, tokens, jnp.zeros(3, bool))
    np.testing.assert_array_equal(none, logits)

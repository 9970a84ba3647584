"""One token per row, each by its own rule, with its own numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.program import choose, randomness, sampling
from jaxspec.program.plan import BLOCK, COUPLED, STANDARD
from tests.laws import check_counts, filtered_law
from tests.rows import make_active

VOCAB = 16
RULES = np.array([STANDARD, BLOCK, COUPLED, STANDARD, COUPLED, STANDARD])
TEMPERATURE = np.array([1.0, 0.7, 1.0, 0.0, 0.5, 1.0])
LOGITS = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32) * 2


def choose_with(active, position, role, logits=LOGITS):
    compiled = jax.jit(lambda *args: choose.choose_token(*args, role=role))
    token, probs = compiled(jnp.asarray(logits), jnp.asarray(position), active)
    return np.asarray(token), np.asarray(probs)


def test_every_row_follows_its_own_rule():
    active = make_active(
        6, temperature=TEMPERATURE, rule=RULES, top_k=[0, 4, 0, 0, 3, 0]
    )
    position = np.arange(10, 16, dtype=np.int32)
    for role in (randomness.DRAFT, randomness.SAMPLE):
        token, probs = choose_with(active, position, role)
        laws = [
            filtered_law(LOGITS[i], TEMPERATURE[i], [0, 4, 0, 0, 3, 0][i])
            for i in range(6)
        ]
        np.testing.assert_allclose(probs, laws, atol=1e-6)
        # The uniform of round start 10, at the distance to the position.
        uniform = randomness.uniform(
            active.seed, active.num_tokens, role, jnp.arange(6, dtype=jnp.int32)
        )
        noise = randomness.exponential(
            active.seed, jnp.asarray(position), randomness.SAMPLE, VOCAB
        )
        drawn = [
            np.searchsorted(np.cumsum(law), float(u), side="right")
            for law, u in zip(laws, uniform, strict=True)
        ]
        raced = (np.stack(laws) / np.asarray(noise)).argmax(axis=1)
        expected = np.where(RULES == COUPLED, raced, drawn)
        expected[TEMPERATURE == 0] = LOGITS[TEMPERATURE == 0].argmax(axis=1)
        np.testing.assert_array_equal(token, expected)


def test_batch_of_greedy_rows_takes_the_argmax():
    active = make_active(6)
    token, probs = choose_with(active, np.full(6, 10, np.int32), randomness.SAMPLE)
    np.testing.assert_array_equal(token, LOGITS.argmax(axis=1))
    assert not probs.any()


def test_inactive_rows_do_not_make_a_batch_sampled():
    active = make_active(6, temperature=1.0, is_active=False)
    token, probs = choose_with(active, np.full(6, 10, np.int32), randomness.SAMPLE)
    np.testing.assert_array_equal(token, LOGITS.argmax(axis=1))
    assert not probs.any()


def test_tokens_of_many_seeds_follow_the_law():
    count = 20_000
    seeds = np.random.default_rng(5).integers(0, 2**32, (count, 2), dtype=np.uint32)
    logits = np.tile(LOGITS[0], (count, 1))
    for rule in (STANDARD, COUPLED):
        active = make_active(
            count, temperature=0.7, top_p=0.9, rule=rule, seed=seeds, num_tokens=4
        )
        position = np.full(count, 6, np.int32)
        token, _ = choose_with(active, position, randomness.SAMPLE, logits)
        law = filtered_law(LOGITS[0], 0.7, top_p=0.9)
        check_counts(np.bincount(token, minlength=VOCAB), law, rule)


def test_race_agrees_more_the_closer_the_laws_are():
    """Coupling: the same noise, two laws; equal laws always agree."""
    count = 20_000
    seeds = np.random.default_rng(6).integers(0, 2**32, (count, 2), dtype=np.uint32)
    active = make_active(count, temperature=1.0, rule=COUPLED, seed=seeds)
    position = np.full(count, 11, np.int32)
    random = np.random.default_rng(8)
    target = random.dirichlet(np.ones(VOCAB))
    other = random.dirichlet(np.ones(VOCAB))
    tokens = {}
    for share in (0.0, 0.1, 1.0):
        draft = (1 - share) * target + share * other
        logits = np.tile(np.log(draft), (count, 1)).astype(np.float32)
        token, _ = choose_with(active, position, randomness.DRAFT, logits)
        tokens[share] = token, np.abs(draft - target).sum() / 2
    plain, _ = tokens[0.0]
    for token, distance in tokens.values():
        agreement = (token == plain).mean()
        # Daliri et al.: at least (1 - TV) / (1 + TV); five standard deviations.
        assert agreement >= (1 - distance) / (1 + distance) - 2.5 / count**0.5
        assert agreement <= 1 - distance + 2.5 / count**0.5


def test_early_stop_is_forbidden_below_min_tokens_only():
    active = make_active(
        4,
        min_total=[12, 12, 12, 12],
        stop_ids=[[1, 5], [1, 5], [1, 5], []],
        is_active=[True, True, False, True],
    )
    position = jnp.array([11, 12, 11, 11], jnp.int32)
    found = choose.forbid_early_stop(jnp.asarray(LOGITS[:4]), position, active)
    expected = LOGITS[:4].copy()
    expected[0, [1, 5]] = -np.inf
    np.testing.assert_array_equal(found, expected)


def test_race_takes_noise_of_the_sample_role():
    active = make_active(3, temperature=1.0, rule=COUPLED)
    position = jnp.array([10, 11, 12], jnp.int32)
    laws = np.random.default_rng(1).dirichlet(np.ones(VOCAB), 3).astype(np.float32)
    noise = randomness.exponential(active.seed, position, randomness.SAMPLE, VOCAB)
    expected = sampling.argmax(jnp.asarray(laws / np.asarray(noise)))
    found = choose.race(jnp.asarray(laws), position, active)
    np.testing.assert_array_equal(found, expected)

"""Losses equal their formulas, and minimizing them raises acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

from jaxspec.train.losses import LOSSES, compare, loss_of

RANDOM = np.random.default_rng(0)
TARGET, DRAFT = RANDOM.normal(0, 2, (2, 6, 9)).astype(np.float32)
LOG_SUM = np.log(np.exp(TARGET).sum(-1))
IDS = np.array([1, 2, 5, 8])
COUNTED = np.array([True, False, True, True, True, False])


def compared(draft, target=TARGET):
    given = draft, target, LOG_SUM, TARGET.max(-1)
    return compare(*map(jnp.asarray, given))


@pytest.mark.parametrize("ids", [np.arange(9), IDS])
def test_comparison_with_a_whole_or_trimmed_vocabulary(ids):
    found = compared(DRAFT[:, ids], TARGET[:, ids])
    p, q = softmax(TARGET, -1)[:, ids], softmax(DRAFT[:, ids], -1)
    np.testing.assert_allclose(found.acceptance, np.minimum(p, q).sum(-1), rtol=1e-5)
    wanted = entropy(p, q, axis=-1) * p.sum(-1)  # entropy() normalises p
    np.testing.assert_allclose(found.divergence, wanted, rtol=1e-4)
    right = ids[DRAFT[:, ids].argmax(-1)] == TARGET.argmax(-1)
    np.testing.assert_array_equal(found.agrees, right)
    assert 0 < found.agrees.sum() < len(TARGET)


def test_losses_average_over_tokens_that_count():
    found, counted = compared(DRAFT), jnp.asarray(COUNTED)
    divergence = np.asarray(found.divergence)[COUNTED]
    acceptance = np.asarray(found.acceptance)[COUNTED]
    share = np.exp(-3 * acceptance.mean())
    wanted = {
        "kl": divergence.mean(),
        "tv": 1 - acceptance.mean(),
        "nla": -np.log(acceptance).mean(),
        "lk": share * divergence.mean() + (1 - share) * (1 - acceptance.mean()),
    }
    assert wanted.keys() == set(LOSSES)
    for kind, value in wanted.items():
        np.testing.assert_allclose(loss_of(kind, found, counted), value, rtol=1e-5)
    assert loss_of("kl", found, jnp.zeros(6, bool)) == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_minimizing_a_loss_raises_acceptance(kind):
    @jax.jit
    @jax.grad
    def gradient(draft):
        return loss_of(kind, compared(draft), jnp.ones(6, bool))

    draft = jnp.asarray(DRAFT)
    for _ in range(60):
        draft -= 3.0 * gradient(draft)
    before, after = (compared(one).acceptance.mean() for one in (DRAFT, draft))
    assert after > before + 0.1
    if kind == "kl":
        far, near = (
            np.abs(log_softmax(one, -1) - log_softmax(TARGET, -1)).mean()
            for one in (DRAFT, draft)
        )
        assert near < 0.8 * far

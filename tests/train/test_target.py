"""The target's hidden states on disk equal those computed, to bfloat16's precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.trimmed import head_of
from jaxspec.train.target import StateFiles, logits_of
from tests.train import tiny

LAYERS = (1, 4)


def test_cached_states_are_read_in_any_order(tmp_path, monkeypatch):
    target, text = tiny.make_target(), tiny.make_text(5)
    files = StateFiles(tmp_path / "states", target, LAYERS)
    files.fill(text.tokens, batch_rows=2)  # the last batch has only one row
    numbers = np.array([4, 0, 3])
    found = files.read(numbers)
    tokens = jnp.asarray(text.tokens[numbers])
    wanted = target.reader(LAYERS)(tokens)
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), other, rtol=1e-2, atol=1e-4, err_msg=name
        )

    def fail(*_):
        raise AssertionError("cached states were computed again")

    monkeypatch.setattr(type(target), "reader", fail)
    again = StateFiles(tmp_path / "states", target, LAYERS)
    again.fill(text.tokens, batch_rows=2)
    np.testing.assert_array_equal(again.read(numbers).log_sum, found.log_sum)


@pytest.mark.parametrize("is_tied", [True, False])
def test_training_logits_equal_the_targets_head(is_tied):
    target, text = tiny.make_target(is_tied=is_tied), tiny.make_text(3)
    states = target.reader(())(jnp.asarray(text.tokens))
    rows = states.rows.reshape(-1, tiny.HIDDEN)
    found = logits_of(target.config, head_of(target.shared), rows, None)
    log_sum = jax.nn.logsumexp(found, axis=-1).reshape(states.log_sum.shape)
    np.testing.assert_allclose(log_sum, states.log_sum, atol=1e-4)
    ids = np.array([3, 50])
    some = logits_of(target.config, head_of(target.shared), rows, jnp.asarray(ids))
    np.testing.assert_allclose(some, found[:, ids], atol=1e-4)

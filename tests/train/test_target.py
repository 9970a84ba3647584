"""The target's hidden states on disk equal those computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.trimmed import head_of
from jaxspec.train.target import StateFiles, kept_rows, logits_of
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
    assert found.rows.dtype == target.dtype == jnp.float32
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)

    def fail(*_):
        raise AssertionError("cached states were computed again")

    monkeypatch.setattr(type(target), "reader", fail)
    again = StateFiles(tmp_path / "states", target, LAYERS[1:])
    again.fill(text.tokens, batch_rows=2)
    np.testing.assert_array_equal(again.read(numbers).log_sum, found.log_sum)
    np.testing.assert_array_equal(
        again.read(numbers).streams[:, :, 0], found[0][:, :, 1]
    )
    with pytest.raises(ConfigError, match="hidden states with source='', got 'other'"):
        StateFiles(tmp_path / "states", target, LAYERS, "other").fill(text.tokens, 2)


def test_interrupted_cache_is_continued(tmp_path, monkeypatch):
    target, text = tiny.make_target(), tiny.make_text(6)
    whole = StateFiles(tmp_path / "whole", target, LAYERS)
    whole.fill(text.tokens, batch_rows=2)
    read, calls = target.reader(LAYERS), []

    def interrupted(tokens):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(tokens)
        return read(tokens)

    monkeypatch.setattr("jaxspec.train.target._SAVE_EVERY", 1)
    monkeypatch.setattr(type(target), "reader", lambda self, layers: interrupted)
    parts = StateFiles(tmp_path / "parts", target, LAYERS)
    with pytest.raises(KeyboardInterrupt):
        parts.fill(text.tokens, batch_rows=2)
    calls.clear()
    parts.fill(text.tokens, batch_rows=2)
    assert len(calls) == 1, "only the last batch was missing"
    for one, other in zip(
        parts.read(np.arange(6)), whole.read(np.arange(6)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert not list((tmp_path / "parts").glob("*partial*"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_training_logits_equal_the_targets_head(is_tied):
    target, text = tiny.make_target(is_tied=is_tied), tiny.make_text(3)
    states = target.reader(())(jnp.asarray(text.tokens))
    rows = states.rows.reshape(-1, tiny.HIDDEN)
    head = head_of(target.shared)
    found = logits_of(target.config, head, rows)
    log_sum = jax.nn.logsumexp(found, axis=-1).reshape(states.log_sum.shape)
    np.testing.assert_allclose(log_sum, states.log_sum, atol=1e-4)
    ids = np.array([3, 50])
    some = logits_of(target.config, kept_rows(head, jnp.asarray(ids)), rows)
    np.testing.assert_allclose(some, found[:, ids], atol=1e-4)

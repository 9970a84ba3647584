"""States and attention of training rows equal HuggingFace's and an engine's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError
from jaxspec.models.heads import dflash, eagle3
from jaxspec.models.trimmed import head_of
from jaxspec.models.weights import tensors_of
from jaxspec.train import rows
from jaxspec.train.target import StateFiles, States, kept_rows, logits_of, target_states
from tests.models.heads import torch_heads as theirs
from tests.train import tiny

LAYERS = (1, 4)


def test_rows_of_the_target_equal_huggingface(monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 5)  # smaller than a row, and not a divisor of it
    # The model has two KV heads, so each has two copies on four devices.
    target, text = tiny.make_target(model=4), tiny.make_text(2)
    assert target.num_kv_heads == 4
    layers = (0, 1, 3)
    read = jax.jit(lambda params, tokens: target_states(target, params, tokens, layers))
    found = read(target.params, jnp.asarray(text.tokens))
    tokens = torch.tensor(text.tokens).long()
    with torch.no_grad():
        wanted = tiny.reference()(tokens, output_hidden_states=True)
    for number, layer in enumerate(layers):
        stream = found.streams[:, :, number]
        np.testing.assert_allclose(stream, wanted.hidden_states[layer], atol=1e-4)
    np.testing.assert_allclose(found.rows, wanted.hidden_states[-1], atol=1e-4)
    logits = wanted.logits
    np.testing.assert_allclose(found.log_sum, logits.logsumexp(-1), atol=1e-4)
    np.testing.assert_allclose(found.best, logits.max(-1).values, atol=1e-4)


def run_rows(method: Any, param_specs: Any) -> tuple[Any, ...]:
    """Run a head over one row of random states.

    Return the outputs of its passes, and torch's copies of its tensors, the target's
    embedding, the states of the row, and its tokens.
    """
    target, count = tiny.make_target(), tiny.LENGTH
    params = method.init(target, 1, tiny.IDS)
    random = np.random.default_rng(2)
    streams = random.normal(size=(1, count, 3, tiny.HIDDEN)).astype(np.float32)
    tokens = random.integers(0, tiny.VOCAB, (1, count)).astype(np.int32)
    nothing = jnp.zeros((1, count))
    hidden = jnp.zeros((1, count, tiny.HIDDEN))
    states = States(jnp.asarray(streams), hidden, nothing, nothing)
    run = jax.jit(method.hidden)
    found = run(params, target.embedding, jnp.asarray(tokens), states)
    arrays = tensors_of(param_specs(method.config), params)
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    embedding = torch.tensor(np.asarray(target.embedding.values))  # pyright: ignore[reportAttributeAccessIssue]
    context = torch.tensor(streams[0].reshape(count, -1))
    return found, tensors, embedding, context, tokens[0]


def test_passes_over_rows_equal_chains_from_every_token(monkeypatch):
    """Training at token t computes the same as a round that starts after token t."""
    monkeypatch.setattr(rows, "BLOCK", 4)
    for name, value in dict(Q_HEADS=4, KV_HEADS=2, HEAD_DIM=8, EPSILON=1e-5).items():
        assert getattr(theirs, name) == value
    method = tiny.eagle3_method()
    found, tensors, embedding, context, tokens = run_rows(method, eagle3.param_specs)
    fused = context @ tensors["fc.weight"].T
    ahead = torch.tensor(np.pad(tokens, (0, 4)))  # zeros follow the end
    for token in (0, 3, tiny.LENGTH - 1):
        hidden = fused[: token + 1]
        for number in range(method.num_passes):
            wanted = theirs.eagle3_rows(
                tensors,
                embedding[ahead[1 : token + 2 + number]],
                hidden,
                norm_before_residual=False,
            )
            np.testing.assert_allclose(found[number][token], wanted[-1], atol=1e-4)
            hidden = torch.cat([hidden, wanted[-1:]])


def test_blocks_over_rows_equal_blocks_after_every_token(monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 4)
    method = tiny.dflash_method()
    found, tensors, embedding, context, tokens = run_rows(method, dflash.param_specs)
    assert len(found) == method.num_passes
    for token in (0, 5, tiny.LENGTH - 2):
        block = [tokens[token + 1]] + [method.config.mask_token_id] * method.num_passes
        wanted = theirs.dflash_rows(
            tensors, context[: token + 1], embedding[block], method.config.windows
        )
        ours = np.stack([np.asarray(one)[token] for one in found])
        np.testing.assert_allclose(ours, wanted[1:], atol=1e-4)


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
    with pytest.raises(ConfigError, match="with source=', ', got 'other, '"):
        other = StateFiles(tmp_path / "states", target, LAYERS, model="other")
        other.fill(text.tokens, 2)


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
    assert not list((tmp_path / "parts").rglob("*partial*"))


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

"""Attention over training rows: pass 0 equals HuggingFace, later passes a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.models.heads import dflash, eagle3
from jaxspec.models.weights import tensors_of
from jaxspec.train import rows
from jaxspec.train.target import States, target_states
from tests.models.heads import torch_heads as theirs
from tests.train import tiny


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


def test_passes_over_rows_equal_chains_from_every_token(monkeypatch):
    """Training at token t computes the same as a round that starts after token t."""
    monkeypatch.setattr(rows, "BLOCK", 4)
    for name, value in dict(Q_HEADS=4, KV_HEADS=2, HEAD_DIM=8, EPSILON=1e-5).items():
        assert getattr(theirs, name) == value
    method, target = tiny.eagle3_method(), tiny.make_target()
    ids = np.arange(0, 2 * tiny.DRAFT_VOCAB, 2)
    params = method.init(target, 1, ids)
    count, random = tiny.LENGTH, np.random.default_rng(2)
    streams = random.normal(size=(1, count, 3, tiny.HIDDEN)).astype(np.float32)
    tokens = random.integers(0, tiny.VOCAB, (1, count)).astype(np.int32)
    nothing = jnp.zeros((1, count))
    states = States(
        jnp.asarray(streams), jnp.zeros((1, count, tiny.HIDDEN)), nothing, nothing
    )
    run = jax.jit(method.hidden)
    found = run(params, target.embedding, jnp.asarray(tokens), states)

    arrays = tensors_of(eagle3.param_specs(method.config), params)
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    embedding = torch.tensor(np.asarray(target.embedding.values))  # pyright: ignore[reportAttributeAccessIssue]
    fused = torch.tensor(streams[0].reshape(count, -1)) @ tensors["fc.weight"].T
    ahead = torch.tensor(np.pad(tokens[0], (0, 4)))  # zeros follow the end
    for token in (0, 3, count - 1):
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
    method, target = tiny.dflash_method(), tiny.make_target()
    config = method.config
    params = method.init(target, 1, np.arange(0, 2 * tiny.DRAFT_VOCAB, 2))
    count, random = tiny.LENGTH, np.random.default_rng(2)
    streams = random.normal(size=(1, count, 3, tiny.HIDDEN)).astype(np.float32)
    tokens = random.integers(0, tiny.VOCAB, (1, count)).astype(np.int32)
    nothing = jnp.zeros((1, count))
    states = States(
        jnp.asarray(streams), jnp.zeros((1, count, tiny.HIDDEN)), nothing, nothing
    )
    run = jax.jit(method.hidden)
    found = run(params, target.embedding, jnp.asarray(tokens), states)
    assert len(found) == method.num_passes

    arrays = tensors_of(dflash.param_specs(config), params)
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    embedding = torch.tensor(np.asarray(target.embedding.values))  # pyright: ignore[reportAttributeAccessIssue]
    context = torch.tensor(streams[0].reshape(count, -1))
    for token in (0, 5, count - 2):
        block = [tokens[0, token + 1]] + [config.mask_token_id] * method.num_passes
        wanted = theirs.dflash_rows(
            tensors, context[: token + 1], embedding[block], config.windows
        )
        ours = np.stack([np.asarray(one)[token] for one in found])
        np.testing.assert_allclose(ours, wanted[1:], atol=1e-4)


@pytest.mark.slow
def test_attention_over_rows_has_a_gradient():
    target = tiny.make_target()
    tokens = jnp.asarray(tiny.make_text(1).tokens)

    def total(params):
        return target_states(target, params, tokens, ()).rows.sum()

    gradient = jax.jit(jax.grad(total))(target.params)
    first = gradient["layers"]["0"]["attention"]["kv_proj"].values
    assert np.isfinite(first).all() and np.abs(first).max() > 0


def test_shifted_rows_end_with_zeros():
    found = rows.shifted(jnp.arange(1, 9).reshape(2, 4), 2)
    np.testing.assert_array_equal(found, [[3, 4, 0, 0], [7, 8, 0, 0]])
    assert rows.shifted(jnp.ones((2, 4, 3)), 5).sum() == 0

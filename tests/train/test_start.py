"""Heads start with a linear fit, so that their first logits are not arbitrary."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.heads.weights import load_head
from jaxspec.train.rows import shifted
from jaxspec.train.start import STREAM_SCALE, Examples, fit_next_states
from jaxspec.train.target import States, logits_of
from jaxspec.train.trainer import Trainer
from tests.train import tiny

pytestmark = pytest.mark.usefixtures("relaxed_promotion")
# Sizes like those of Gemma 3 270M: some dimensions of the stream are thousands of times
# larger than others, and the weights of the last norm are larger where hidden states
# are smaller. The logits of random hidden states have the standard deviation 40.
SCALES = np.where(np.arange(tiny.HIDDEN) % 8 == 0, 1e4, 1.0).astype(np.float32)
RANDOM_LOGITS, LOGITS = 40.0, 2.0


def make_trainer(method: Any) -> Trainer:
    """Return the trainer of a target whose last state depends on the last token."""
    target, random = tiny.make_target(), np.random.default_rng(0)
    table = np.asarray(target.embedding.values)  # pyright: ignore[reportAttributeAccessIssue]
    size = np.sqrt(np.mean(np.sum(table**2, axis=1)))
    norm = np.exp(random.normal(size=tiny.HIDDEN))
    norm *= RANDOM_LOGITS / size / np.sqrt(np.mean(norm**2))
    rows = random.normal(size=table.shape) * LOGITS / size
    config, rows = target.config, jnp.asarray(rows, jnp.float32)
    logits = logits_of(config, target.embedding, rows)
    target = dataclasses.replace(
        target,
        params={**target.params, "final_norm": jnp.asarray(norm - 1, jnp.float32)},
    )
    run = target.reader(method.layers)

    def read(numbers: np.ndarray, tokens: np.ndarray) -> States:
        found = run(tokens)
        return found._replace(
            streams=found.streams * SCALES[None, None, None],
            rows=rows[tokens],
            log_sum=jax.nn.logsumexp(logits, axis=-1)[tokens],
            best=jnp.max(logits, axis=-1)[tokens],
        )

    sizes: dict[str, Any] = dict(num_rows=40, num_held_out=8, steps=2, loss="kl")
    return tiny.make_trainer(method, target, read=read, **sizes)


@pytest.mark.parametrize(
    "kind", [pytest.param("eagle3", marks=pytest.mark.slow), "dflash"]
)
def test_first_loss_is_at_most_the_log_of_the_vocabulary(kind, tmp_path):
    method = getattr(tiny, f"{kind}_method")()
    trainer = make_trainer(method)
    _, loss = trainer._measure_held_out()
    assert loss < np.log(tiny.DRAFT_VOCAB)
    # Files have no scale: it is a part of their `fc`.
    scale = np.asarray(trainer.params[STREAM_SCALE])
    assert scale.shape == (3, tiny.HIDDEN)
    method.save(tmp_path / "head", trainer.params, trainer._target)
    _, loaded = load_head(
        tmp_path / "head",
        trainer._target.config,
        dtype=jnp.dtype(jnp.float32),
        mesh=trainer._target.mesh,
    )
    wanted = np.asarray(trainer.params["fc"].values) / scale.reshape(-1)
    np.testing.assert_allclose(loaded["fc"].values, wanted, rtol=2**-8)


def test_eagle3_head_starts_as_the_fit():
    """Attention of a token to itself adds what the fit predicts from its embedding."""
    method = tiny.eagle3_method()
    # Values have the rank of the whole embedding only if they are as wide.
    config = dataclasses.replace(method.config, head_dim=tiny.HIDDEN, num_kv_heads=1)
    method = dataclasses.replace(method, config=config, num_passes=1)
    trainer = make_trainer(method)
    examples = list(trainer._examples())
    table = np.asarray(trainer._target.embedding.values)  # pyright: ignore[reportAttributeAccessIssue]
    fit = fit_next_states(examples, table, reads_token=True)
    batch, states = trainer._given(trainer._text, trainer._read[0], np.arange(4))
    (found,) = method.hidden(
        trainer.params, trainer._target.embedding, batch[0], states
    )
    streams = np.asarray(states.streams) / fit.scale
    token = np.asarray(table[np.asarray(shifted(batch.tokens, 1))])
    token /= np.sqrt(np.mean(token**2, axis=-1, keepdims=True))
    shape = 4, tiny.LENGTH, -1
    wanted = streams.reshape(shape) @ fit.from_streams.T + token @ fit.from_token.T
    error = np.asarray(found).reshape(shape) - wanted
    # Other tokens have little weight.
    assert np.square(error).mean() < 0.05 * np.square(wanted).mean()


def test_fit_finds_a_linear_map():
    random = np.random.default_rng(0)
    streams = random.normal(size=(400, 2, 6)).astype(np.float32)
    streams[..., 0] *= 1e4
    table = random.normal(size=(30, 6)).astype(np.float32)
    table /= np.sqrt(np.mean(table**2, axis=1, keepdims=True))
    tokens = random.integers(30, size=400)
    maps = random.normal(size=(6, 12)), random.normal(size=(6, 6))
    scaled = streams / np.sqrt(np.mean(streams**2, axis=0))
    wanted = scaled.reshape(400, -1) @ maps[0].T + table[tokens] @ maps[1].T
    given = Examples(streams, tokens, wanted.astype(np.float32))
    fit = fit_next_states([given], table, reads_token=True)
    np.testing.assert_allclose(fit.from_streams, maps[0], atol=0.15)
    np.testing.assert_allclose(fit.from_token, maps[1], atol=0.15)
    np.testing.assert_allclose(fit.size, wanted.std(), rtol=0.05)

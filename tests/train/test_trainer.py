"""Runs end with the same parameters on any devices; losses equal their formulas."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

from jaxspec.errors import ConfigError
from jaxspec.train import trainer as trainer_module
from jaxspec.train.losses import LOSSES, compare, loss_of
from jaxspec.train.methods import DraftMethod
from jaxspec.train.target import logits_of
from jaxspec.train.trainer import Trainer
from tests.support.oracles import hf_tensors
from tests.train import tiny

pytestmark = pytest.mark.usefixtures("relaxed_promotion")
slow = pytest.mark.slow
STEPS, ROWS = 4, 4
RANDOM = np.random.default_rng(0)
TARGET, DRAFT = RANDOM.normal(0, 2, (2, 6, 9)).astype(np.float32)
LOG_SUM = np.log(np.exp(TARGET).sum(-1))
KEPT = np.array([1, 2, 5, 8])
COUNTED = np.array([True, False, True, True, True, False])


def make_trainer(method=None, target=None, **changes) -> Trainer:
    """Return a trainer, by default of a Medusa head, which compiles quickly."""
    method = method or tiny.medusa_method(lm_heads=1)
    options: dict[str, Any] = dict(steps=STEPS, eval_every=100, save_every=2) | changes
    return tiny.make_trainer(method, target or tiny.make_target(), **options)


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.params)]


def test_resumed_run_gives_the_same_parameters(tmp_path):
    whole = make_trainer(work=tmp_path / "whole")
    before = leaves(whole)
    whole.run(progress=False)
    assert whole.step == STEPS
    for one, other in zip(before, leaves(whole), strict=True):
        assert np.abs(one - other).max() > 1e-5, "every parameter is trained"
    # The first run ends after its second step, as if interrupted, and saves it.
    first = make_trainer(work=tmp_path / "parts")
    for _ in range(2):
        first._step(first._rows_of(first.step))
    first._save()
    second = make_trainer(work=tmp_path / "parts")
    assert second.step == 2
    second.run(progress=False)
    for one, other in zip(leaves(whole), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
    lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in log] == [0, STEPS]
    assert log == whole.log


@pytest.mark.parametrize(
    ("method", "matrix"),
    [
        (tiny.medusa_method(lm_heads=1), "lm_heads"),
        pytest.param(tiny.eagle3_method(), "lm_head", marks=slow),
    ],
)
def test_mesh_gives_the_same_parameters(method, matrix):
    one = make_trainer(method)
    many = make_trainer(method, tiny.make_target(data=2, model=2))
    (values,) = jax.tree.leaves(many.state.params[matrix])
    half = values.shape[0] // 2, values.shape[1]
    assert {shard.data.shape for shard in values.addressable_shards} == {half}
    for trainer in (one, many):
        trainer._step(trainer._rows_of(0))
    for here, there in zip(leaves(one), leaves(many), strict=True):
        # Adam's first step has the size of the learning rate for any gradient, so tiny
        # gradients may have either sign.
        close = np.isclose(here, there, atol=2e-5)
        assert close.mean() > 0.99
    for name, values in one.acceptance().items():
        np.testing.assert_allclose(many.acceptance()[name], values, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "max_loss", "min_rise"),
    [
        pytest.param("eagle3", 0.9, 0.03, marks=slow),
        ("medusa", 0.8, 0.06),
        pytest.param("eagle", 0.9, 0.03, marks=slow),
        pytest.param("dflash", 0.97, 0.01, marks=slow),
    ],
)
def test_training_improves_the_linear_fit(kind, max_loss, min_rise, monkeypatch):
    """The fit sees the text of one step, and training fifty times as much.

    On held-out text, the loss falls to `max_loss` of the fit's, and the acceptance of
    every draft rises by `min_rise`.
    """
    monkeypatch.setattr(trainer_module, "START_TOKENS", ROWS * tiny.LENGTH)
    method = getattr(tiny, f"{kind}_method")()
    numbers: dict[str, Any] = dict(num_rows=200, num_held_out=16)
    trainer = make_trainer(method, steps=40, learning_rate=1e-2, **numbers)
    before = leaves(trainer)
    trainer.run(progress=False)
    for one, other in zip(before, leaves(trainer), strict=True):
        assert np.abs(one - other).max() > 1e-3, "every parameter is trained"
    first, last = trainer.log[0], trainer.log[-1]
    assert last["held_out_loss"] < max_loss * first["held_out_loss"]
    assert len(first["sampled"]) == method.num_passes
    rises = np.subtract(last["sampled"], first["sampled"])
    assert rises.min() > min_rise, rises
    if kind in ("eagle3", "dflash"):
        np.testing.assert_array_equal(trainer.params["token_ids"], tiny.IDS)


class Oracle:
    """A method that returns the target's own logits at each position ahead."""

    offset, layers, num_passes = 1, (), 2

    def init(self, target, seed, token_ids):
        self.config = target.config
        return {"nothing": jnp.zeros(1)}

    def warm_start(self, params, target, batches):
        return params

    def hidden(self, params, embedding, tokens, states):
        width = states.rows.shape[-1]
        return [
            jnp.pad(states.rows, ((0, 0), (0, ahead), (0, 0)))[:, ahead:].reshape(
                -1, width
            )
            for ahead in (1, 2)
        ]

    def logits(self, params, head, number, hidden):
        return logits_of(self.config, head, hidden)

    def save(self, folder, params, target): ...


@pytest.mark.parametrize("is_tied", [True, False])
def test_targets_own_tokens_are_always_accepted(is_tied):
    """At token t, pass i is compared with the target's output after token t + 1 + i."""
    trainer = make_trainer(Oracle(), tiny.make_target(is_tied=is_tied))
    for values in trainer.acceptance().values():
        np.testing.assert_allclose(values, 1, atol=1e-5)
    text, params = trainer._held_out, trainer.state.params
    given = trainer._given(text, trainer._read[1], np.arange(ROWS))
    *_, counts = trainer._evaluate_batch(params, trainer._target.shared, *given)
    # Passes 0 and 1 propose the third and the fourth token first.
    wanted = [(text.sizes - np.maximum(text.starts, first)).sum() for first in (2, 3)]
    assert counts.tolist() == wanted


def test_draft_equal_to_the_target_is_always_accepted():
    target = tiny.make_target()
    tensors = hf_tensors(tiny.reference())
    draft = DraftMethod(config=target.config, hf_config={}, start=tensors)
    for values in make_trainer(draft).acceptance().values():
        np.testing.assert_allclose(values, 1, atol=1e-4)


def test_every_epoch_has_every_row_once():
    trainer = make_trainer()
    numbers = np.concatenate([trainer._rows_of(step) for step in range(5)])
    for start in (0, 10):
        assert sorted(numbers[start : start + 10]) == list(range(10))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(rows=11), "The text has 10 rows, but a step takes rows=11"),
        (dict(rows=5), "The held-out text has 4 rows"),
        (dict(loss="mse"), "loss must be one of 'lk', 'kl'"),
        (dict(learning_rate=0), "learning_rate must be a finite number above 0"),
        (dict(steps=0), "steps must be an integer of at least 1"),
        (
            dict(target=tiny.make_target(data=2, model=2), rows=3),
            "rows must be a multiple of 2.*got 3",
        ),
    ],
)
def test_wrong_schedules_are_named(change, named):
    with pytest.raises(ConfigError, match=named):
        make_trainer(**change)


def compared(draft, target=TARGET):
    given = draft, target, LOG_SUM, TARGET.max(-1)
    return compare(*map(jnp.asarray, given))


@pytest.mark.parametrize("ids", [np.arange(9), KEPT])
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

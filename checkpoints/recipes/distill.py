"""Trains the draft on the target's labelled distributions.

Reads shards (see `sample.py`) and trains the draft; the target itself is needed only
once, for the draft's first embedding.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import network
import numpy as np

from jaxspec.train.losses import Comparison, loss_of
from jaxspec.train.methods import main_directions

# Share of rows drawn from the target's own text; the rest is corpus text.
WRITTEN_SHARE = 0.6
SHARD_ARRAYS = ("tokens", "segments", "ids", "log_probs")

# Ids and log-probabilities of the target's likely next tokens, [row, token, label].
Labels = tuple[jax.Array, jax.Array]


class ShardRows:
    """Yields batches of labelled rows that mix the target's text and corpus text."""

    def __init__(self, folder: Path, *, seed: int):
        self.random = np.random.default_rng(seed)
        self.arrays: dict[str, list[np.ndarray]] = {}
        self.order: dict[str, list[int]] = {}
        for kind in ("written", "corpus"):
            shards = [np.load(path) for path in sorted(folder.glob(f"{kind}-*.npz"))]
            if not shards:
                raise FileNotFoundError(
                    f"{folder} holds no {kind}-*.npz: run the `sample` stage first"
                )
            self.arrays[kind] = [
                np.concatenate([shard[name] for shard in shards])
                for name in SHARD_ARRAYS
            ]
            self.order[kind] = []

    def _next(self, kind: str) -> int:
        if not self.order[kind]:
            count = len(self.arrays[kind][0])
            self.order[kind] = self.random.permutation(count).tolist()
        return self.order[kind].pop()

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return tokens, segment ids and labels."""
        is_written = self.random.random(rows) < WRITTEN_SHARE
        kinds = ["written" if written else "corpus" for written in is_written]
        picks = [(kind, self._next(kind)) for kind in kinds]
        tokens, segments, ids, log_probs = (
            np.stack([self.arrays[kind][part][row] for kind, row in picks])
            for part in range(len(SHARD_ARRAYS))
        )
        return (
            tokens.astype(np.int32),
            segments.astype(np.int32),
            (ids.astype(np.int32), log_probs.astype(np.float32)),
        )


def label_loss(
    params: network.Params,
    config: dict[str, Any],
    tokens: jax.Array,
    segments: jax.Array,
    labels: Labels,
    *,
    kind: str = "kl",
) -> jax.Array:
    """Return the mean loss over the labelled tokens.

    Args:
        kind: One of `jaxspec.train.losses.LOSSES`. They combine KL(target || draft),
            with all unlabelled tokens as one class, and the acceptance probability of
            labelled tokens: lower bounds of the values over all tokens.
    """
    logits = network.forward(params, config, tokens, segments)
    ids, likely = (part.reshape(len(logits), -1) for part in labels)
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    draft = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    target = jnp.exp(likely)
    # Labels are float16, so that the sum of their probabilities may round past 1. The
    # floor also keeps the gradient of the class of other tokens finite if either model
    # gives this class probability 0.
    rest = jnp.maximum(1.0 - jnp.sum(target, axis=-1), 1e-4)
    draft_rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(draft), axis=-1), 1e-4)
    divergence = jnp.sum(target * (likely - draft), axis=-1)
    divergence += rest * (jnp.log(rest) - jnp.log(draft_rest))
    found = Comparison(
        divergence=divergence,
        acceptance=jnp.sum(jnp.minimum(target, jnp.exp(draft)), axis=-1),
        agrees=jnp.argmax(logits, axis=-1) == ids[:, 0],
    )
    return loss_of(kind, found, segments.reshape(-1) > 0)


def init_draft(
    config: dict[str, Any], target: network.Params, seed: int
) -> network.Params:
    """Return random weights, with the target's embedding projected to fewer dimensions.

    The projection keeps its principal directions and has the scale of a random
    embedding.
    """
    params = network.init_params(config, seed)
    name = "model.embed_tokens.weight"
    table, size = np.asarray(target[name], np.float32), np.std(np.asarray(params[name]))
    projected = main_directions(table, config["hidden_size"], size=float(size))
    return params | {name: jnp.asarray(projected)}

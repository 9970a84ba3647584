"""Unlearns loops: makes repetitions in the target's own greedy text unlikely.

Sequence-level unlikelihood of Welleck et al., 2019 (arXiv:1908.04319, section 5.2):
three quarters of a step's rows are corpus with the usual next-token loss, and one
quarter is greedy text of the last saved target. There, the last token of every 4-gram
that the target has written before in the same text is made unlikely. Copying from the
prompt is not penalized.
"""

from pathlib import Path
from typing import Any

import corpus
import decode
import jax
import jax.numpy as jnp
import network
import numpy as np
import sample
import training

# One of every SHARE rows of a step, the last one, is greedy text.
SHARE = 4
# Number of texts that are generated at a time, and of new tokens in each.
NUM_WRITTEN, MAX_NEW = 48, 256
DOMAIN = "stories"


def last_of_repeated(
    tokens: np.ndarray, segments: np.ndarray, is_written: np.ndarray, size: int = 4
) -> np.ndarray:
    """Mark tokens that end `size` written tokens which occurred before in the document.

    All arrays are [row, position].
    """
    found = np.zeros(tokens.shape, bool)
    for row in range(len(tokens)):
        seen: set[tuple[int, ...]] = set()
        for end in range(size, tokens.shape[1] + 1):
            here = np.s_[row, end - size : end]
            if is_written[here].all() and len(set(segments[here].tolist())) == 1:
                # A phrase includes the document's number, so that phrases of other
                # documents do not count.
                phrase = (int(segments[row, end - 1]), *tokens[here].tolist())
                found[row, end - 1] = phrase in seen
                seen.add(phrase)
    return found


class MixedRows:
    """Corpus rows; every `SHARE`th row is greedy text of the target in `state`."""

    def __init__(
        self,
        rows: corpus.PackedRows,
        config: dict[str, Any],
        state: Path,
        *,
        length: int,
        seed: int,
    ):
        if not state.exists():
            raise FileNotFoundError(
                f"{state} does not exist: train the target without --unlikelihood first"
            )
        self.rows = rows
        self.state = state
        self.length = length
        self.random = np.random.default_rng(seed)
        mix = decode.Mix(greedy=NUM_WRITTEN, nucleus=0, full=0)
        self.write = sample.writer(config, mix=mix, length=length, max_new=MAX_NEW)
        self.saved_at = 0
        self.written: list[np.ndarray] = []

    def _write(self) -> None:
        """Let the target write new texts if it has been saved since the last time."""
        saved_at = self.state.stat().st_mtime_ns
        if saved_at == self.saved_at:
            return
        self.saved_at = saved_at
        params = decode.narrow(training.load_state(self.state)[0])
        prompts = sample.queue(
            self.rows.by_domain,
            [DOMAIN] * NUM_WRITTEN,
            length=self.length,
            random=self.random,
        )
        rows = self.write(params, prompts, jax.random.key(0))
        tokens, segments, is_written = (
            np.asarray(rows[name]).astype(np.int32)
            for name in ("tokens", "segments", "is_written")
        )
        is_repeated = last_of_repeated(tokens, segments, is_written > 0)
        # Training rows have one more token, because the last token is not an input.
        end = ((0, 0), (0, 1))
        self.written = [np.pad(array, end) for array in (tokens, segments, is_repeated)]

    def batch(self, rows: int) -> tuple[np.ndarray, ...]:
        """Return tokens, segments, tokens to unlearn, and which rows are corpus."""
        self._write()
        is_given = np.arange(rows) % SHARE < SHARE - 1
        given = self.rows.batch(int(is_given.sum()))
        chosen = self.random.integers(NUM_WRITTEN, size=rows - len(given[0]))
        shape = (rows, self.length + 1)
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        is_repeated = np.zeros(shape, bool)
        tokens[is_given], segments[is_given] = given
        for array, written in zip(
            (tokens, segments, is_repeated), self.written, strict=True
        ):
            array[~is_given] = written[chosen]
        return tokens, segments, is_repeated, is_given


def mixed_loss(
    params: network.Params,
    config: dict[str, Any],
    tokens: jax.Array,
    segments: jax.Array,
    is_repeated: jax.Array,
    is_given: jax.Array,
    *,
    weight: float,
) -> jax.Array:
    """Return cross-entropy of corpus rows + `weight` * unlikelihood of repeats.

    The unlikelihood, -log(1 - p), is a mean over all tokens of greedy rows, so that its
    weight falls as they repeat less.
    """
    mask = training.next_token_mask(segments).reshape(len(tokens), -1)
    losses = training.next_token_losses(params, config, tokens, segments)
    losses = losses.reshape(mask.shape)
    given, written = mask * is_given[:, None], mask * ~is_given[:, None]
    repeated = written * is_repeated[:, 1:]
    # log(1 - p), computed from the loss -log(p); bounded for tokens with p near 1.
    unlikelihood = -jnp.log(-jnp.expm1(-jnp.maximum(losses, 1e-6)))
    return jnp.sum(losses * given) / jnp.maximum(jnp.sum(given), 1) + weight * (
        jnp.sum(unlikelihood * repeated) / jnp.maximum(jnp.sum(written), 1)
    )

"""The target's hidden states for rows of text, which training needs.

States are recomputed for every batch, or cached in files. With cached states a head is
trained without running the target. Each number takes 2 bytes: 3 KB per token for three
layers and the final output at hidden size 384.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from tqdm.auto import tqdm

from jaxspec.config.model import ModelConfig
from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.network import build_network, functions_of
from jaxspec.models.params import Params
from jaxspec.models.trimmed import EMBEDDING, HEAD
from jaxspec.sharding import TARGET_MESH_AXES, kv_copies, num_parts
from jaxspec.train.rows import RowsBackend, no_keys, rows_batch

# Number of tokens per row whose logits are computed at a time.
_CHUNK = 64


class States(NamedTuple):
    """The target's hidden states and logit statistics for rows.

    Attributes:
        streams: The residual stream after the chosen layers.
        rows: The last hidden states, after the final norm.
        log_sum, best: Log of the logits' sum of exponentials, and the largest logit.
    """

    streams: Float[Array, "row token layer model"]
    rows: Float[Array, "row token model"]
    log_sum: Float[Array, "row token"]
    best: Float[Array, "row token"]


def logits_of(
    config: ModelConfig,
    head: Matrix,
    rows: Float[Array, "row model"],
    token_ids: Int[Array, " draft_vocab"] | None,
) -> Float[Array, "row draft_vocab"]:
    """Return the target's logits for final hidden states: of `token_ids`, or all."""
    if token_ids is not None:
        head = DenseMatrix(head.values[token_ids])  # pyright: ignore[reportAttributeAccessIssue]
    return functions_of(config).logits(config, {EMBEDDING: head, HEAD: head}, rows)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded target.

    Attributes:
        name: Name of the target, as the user gave it.
        folder: Where its files are.
        dtype: Type of its weights.
    """

    name: str
    folder: Path
    config: Any
    params: Params
    mesh: Mesh
    dtype: jnp.dtype

    @property
    def num_kv_heads(self) -> int:
        """Number of stored KV heads, including copies for several devices."""
        config, parts = self.config, num_parts(self.mesh, TARGET_MESH_AXES)
        count = config.num_kv_heads
        return count * kv_copies(config.num_q_heads, count, parts)

    @property
    def embedding(self) -> Matrix:
        return self.params[EMBEDDING]

    @property
    def shared(self) -> Params:
        """Parameters that drafts may share: the embedding, and the head if untied."""
        names = EMBEDDING, HEAD
        return {name: self.params[name] for name in names if name in self.params}

    def by_row(self) -> NamedSharding:
        """Return the placement of arrays of rows, split along the data axis."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def reader(self, layers: Sequence[int]) -> Any:
        """Return a compiled function `tokens [row, token] -> States`."""
        run = jax.jit(
            lambda params, tokens: target_states(self, params, tokens, layers),
            out_shardings=self.by_row(),
        )
        return lambda tokens: run(self.params, jax.device_put(tokens, self.by_row()))


def target_states(
    target: Target,
    params: Params,
    tokens: Int[Array, "row token"],
    layers: Sequence[int],
) -> States:
    """Run the target over rows.

    Args:
        params: The target's; an argument, so that a program does not contain them.
        layers: Numbers of layers after which the residual stream is returned.
    """
    config, (rows, length) = target.config, tokens.shape
    network = build_network(config, params, RowsBackend())
    empty = no_keys(tokens, target.num_kv_heads, config.head_dim, target.dtype)
    output, _ = network.forward(rows_batch(tokens), (empty,) * config.num_layers)
    last = output.hidden_states.reshape(rows, length, -1)
    chosen = [output.streams[layer].reshape(rows, length, -1) for layer in layers]
    width = last.shape[-1]
    streams = (
        jnp.stack(chosen, axis=2) if chosen else jnp.zeros((*last.shape[:2], 0, width))
    )

    def reduce(chunk: Array) -> tuple[Array, Array]:
        logits = network.logits(chunk.reshape(-1, width))
        found = jax.nn.logsumexp(logits, axis=-1), jnp.max(logits, axis=-1)
        return found[0].reshape(rows, -1), found[1].reshape(rows, -1)

    parts = jnp.split(last, list(range(_CHUNK, length, _CHUNK)), axis=1)
    log_sum, best = zip(*map(reduce, parts), strict=True)
    return States(
        streams, last, jnp.concatenate(log_sum, axis=1), jnp.concatenate(best, axis=1)
    )


class StateFiles:
    """States of all rows of a text on disk, in bfloat16.

    Indexed by the row's number. If an earlier run left incomplete files, they are
    computed again.
    """

    def __init__(self, folder: Path, target: Target, layers: Sequence[int]):
        self._folder, self._target, self._layers = folder, target, tuple(layers)
        self._files: list[np.ndarray] = []

    def fill(self, tokens: np.ndarray, batch_rows: int) -> None:
        """Compute the states of every row, unless an earlier run has stored them."""
        done = self._folder / "done"
        if not done.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(tokens, batch_rows)
            done.touch()
        self._files = [
            np.load(self._folder / f"{name}.npy", mmap_mode="r")
            for name in States._fields
        ]

    def _write(self, tokens: np.ndarray, batch_rows: int) -> None:
        count, length = tokens.shape
        width = self._target.config.hidden_size
        shapes = {
            "streams": ((count, length, len(self._layers), width), np.uint16),
            "rows": ((count, length, width), np.uint16),
            "log_sum": ((count, length), np.float32),
            "best": ((count, length), np.float32),
        }
        files = [
            np.lib.format.open_memmap(
                self._folder / f"{name}.npy",
                "w+",
                dtype=shapes[name][1],
                shape=shapes[name][0],
            )
            for name in States._fields
        ]
        read = self._target.reader(self._layers)
        bar = tqdm(
            total=tokens.size, desc="Target's states", unit="tok", unit_scale=True
        )
        with bar:
            for start in range(0, count, batch_rows):
                some = tokens[start : start + batch_rows]
                # The last batch is padded with its first row, so that all batches use
                # one program.
                missing = batch_rows - len(some)
                whole = np.concatenate([some, np.repeat(some[:1], missing, axis=0)])
                for file, values in zip(files, read(whole), strict=True):
                    host = np.asarray(values)[: len(some)]
                    if file.dtype == np.uint16:
                        host = host.astype(ml_dtypes.bfloat16).view(np.uint16)
                    file[start : start + len(some)] = host
                bar.update(some.size)
        for file in files:
            file.flush()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, numbers: np.ndarray) -> States:
        """Return the states of some rows."""
        order = np.argsort(numbers)  # read the memory map forwards
        back = np.argsort(order)
        found = [file[numbers[order]][back] for file in self._files]
        narrow = [
            part.view(ml_dtypes.bfloat16) if part.dtype == np.uint16 else part
            for part in found
        ]
        return States(*(jax.device_put(one, self._target.by_row()) for one in narrow))

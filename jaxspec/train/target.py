"""The target's hidden states for rows of text, which training needs.

States are recomputed for every batch, or cached in files. With cached states a head is
trained without running the target. They take 2 bytes per number if the target computes
in bfloat16, else 4: 10 KB per token for three layers and the final output of the 270M
in float32.
"""

import json
from collections.abc import Mapping, Sequence
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
from jaxspec.errors import ConfigError
from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.network import build_network, functions_of
from jaxspec.models.params import Params
from jaxspec.models.trimmed import EMBEDDING, HEAD
from jaxspec.sharding import TARGET_MESH_AXES, kv_copies, num_parts
from jaxspec.train.rows import RowsBackend, no_keys, rows_batch

# Number of tokens per row whose logits are computed at a time.
_CHUNK = 64
# Files of cached states: what they were computed from, and the rows done so far.
_ABOUT, _PROGRESS = "about.json", "progress.json"
# Batches between two savings of the progress.
_SAVE_EVERY = 8


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
    config: ModelConfig, head: Matrix, rows: Float[Array, "row model"]
) -> Float[Array, "row draft_vocab"]:
    """Return the target's logits for final hidden states, of the head's tokens."""
    return functions_of(config).logits(config, {EMBEDDING: head, HEAD: head}, rows)


def kept_rows(head: Matrix, token_ids: Int[Array, " draft_vocab"]) -> Matrix:
    """Return the rows of an output matrix that a trimmed vocabulary keeps."""
    return DenseMatrix(head.values[token_ids])  # pyright: ignore[reportAttributeAccessIssue]


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
    """States of all rows of a text on disk, in the types that the target computes.

    Indexed by the row's number. Each layer's residual stream is a file of its own, so
    that heads that read other layers share the remaining files. An interrupted run is
    continued at the row where it stopped.
    """

    def __init__(
        self, folder: Path, target: Target, layers: Sequence[int], source: str = ""
    ):
        """Open the folder; it need not exist yet.

        Args:
            source: Identifies the model and the text, for `fill`.
        """
        self._folder, self._target, self._layers = folder, target, tuple(layers)
        self._source = source
        self._files: dict[str, np.ndarray] = {}

    def fill(self, tokens: np.ndarray, batch_rows: int) -> None:
        """Compute the states of every row, except those that are on disk already.

        Raises:
            ConfigError: The folder holds states of another model, text or type.
        """
        about = {
            "source": self._source,
            "dtype": jnp.dtype(self._target.dtype).name,
            "shape": list(tokens.shape),
        }
        path = self._folder / _ABOUT
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            for name, value in about.items():
                if found.get(name) != value:
                    raise ConfigError(
                        f"{self._folder} holds hidden states with {name}="
                        f"{found.get(name)!r}, got {value!r}: delete the folder, or "
                        "use the model, text and type that they were computed with",
                        parameter=name,
                        value=value,
                    )
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(about, indent=2) + "\n")
        missing = [name for name in self._names() if not self._path(name).exists()]
        if missing:
            self._write(missing, tokens, batch_rows)
        self._files = {
            name: np.load(self._path(name), mmap_mode="r") for name in self._names()
        }

    def _names(self) -> list[str]:
        return [*(f"stream-{layer}" for layer in self._layers), *States._fields[1:]]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _write(self, names: list[str], tokens: np.ndarray, batch_rows: int) -> None:
        count, _ = tokens.shape
        partial = {name: self._folder / f"{name}.partial.npy" for name in names}
        progress = self._folder / _PROGRESS
        first, files = 0, {}
        if progress.exists():
            found = json.loads(progress.read_text(encoding="utf-8"))
            is_same = found["names"] == names
            if is_same and all(one.exists() for one in partial.values()):
                first = found["num_rows"]
                files = {name: np.load(one, "r+") for name, one in partial.items()}
        read = self._target.reader(self._layers)
        bar = tqdm(
            total=tokens.size,
            initial=first * tokens.shape[1],
            desc="Target's states",
            unit="tok",
            unit_scale=True,
        )
        with bar:
            for number, start in enumerate(range(first, count, batch_rows), start=1):
                some = tokens[start : start + batch_rows]
                # The last batch is padded with its first row, so that all batches use
                # one program.
                missing = batch_rows - len(some)
                whole = np.concatenate([some, np.repeat(some[:1], missing, axis=0)])
                found = self._by_name(read(whole))
                if not files:
                    files = {
                        name: np.lib.format.open_memmap(
                            path,
                            "w+",
                            dtype=found[name].dtype,
                            shape=(count, *found[name].shape[1:]),
                        )
                        for name, path in partial.items()
                    }
                for name, file in files.items():
                    file[start : start + len(some)] = found[name][: len(some)]
                if number % _SAVE_EVERY == 0:
                    self._save_progress(files, names, start + len(some))
                bar.update(some.size)
        self._save_progress(files, names, count)
        for name, path in partial.items():
            path.rename(self._path(name))
        progress.unlink()

    def _by_name(self, states: States) -> dict[str, np.ndarray]:
        """Return the arrays of `_names` as numpy stores them."""
        streams = [states.streams[:, :, number] for number in range(len(self._layers))]
        return {
            name: _stored(np.asarray(values))
            for name, values in zip(self._names(), [*streams, *states[1:]], strict=True)
        }

    def _save_progress(
        self, files: Mapping[str, np.ndarray], names: list[str], num_rows: int
    ) -> None:
        for file in files.values():
            file.flush()  # pyright: ignore[reportAttributeAccessIssue]
        content = json.dumps({"names": names, "num_rows": num_rows})
        replace_text(self._folder / _PROGRESS, content)

    def read(self, numbers: np.ndarray) -> States:
        """Return the states of some rows."""
        order = np.argsort(numbers)  # read the memory map forwards
        back = np.argsort(order)
        found = {
            name: _loaded(file[numbers[order]][back])
            for name, file in self._files.items()
        }
        parts = [found.pop(f"stream-{layer}") for layer in self._layers]
        rows = found["rows"]
        none = np.zeros((*rows.shape[:2], 0, rows.shape[2]), rows.dtype)
        streams = np.stack(parts, axis=2) if parts else none
        placement = self._target.by_row()
        return States(
            *(jax.device_put(one, placement) for one in (streams, *found.values()))
        )


def _stored(values: np.ndarray) -> np.ndarray:
    """Return the values as a type that numpy's files have: bfloat16 as its bits."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


def _loaded(values: np.ndarray) -> np.ndarray:
    return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


def replace_text(path: Path, content: str) -> None:
    """Write a small text file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)

"""Compare the likelihoods of texts under two quantizations of a model.

Both models read the same pieces of text with the same arithmetic. They differ in how
weights, or keys and values, are stored: unquantized or in fewer bits.
`jaxspec_checkpoints.quality` writes the result files.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from tqdm.auto import tqdm

from jaxspec.jax_settings import own_settings
from jaxspec.models.families import config_from_folder
from jaxspec.models.network import build_network
from jaxspec.models.weights import load_params
from jaxspec.train.rows import RowsBackend, no_keys, rows_batch
from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.quantization import named_scheme
from jaxspec_kernels.bits import ScaledPages, from_storage, to_storage

# Types that keys and values are rounded to if they are stored in eight bits.
KV_POOLS: dict[str, Any] = {
    "int8": ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0)),
    "fp8": jnp.zeros(0, jnp.float8_e4m3fn),
}


@dataclass(frozen=True, kw_only=True)
class RoundedRows(RowsBackend):
    """Rounds keys and values as quantized KV pages do, token by token.

    Attributes:
        kv_kind: A name of `KV_POOLS`; any other name leaves them unrounded.
    """

    kv_kind: str

    def write(
        self, kv_pages: Any, key: Any, value: Any, slot_mapping: Any, num_q_heads: int
    ) -> Any:
        """Round keys and values, then store them."""
        pool = KV_POOLS.get(self.kv_kind)
        if pool is not None:
            key, value = (from_storage(to_storage(one, pool)) for one in (key, value))
        return super().write(kv_pages, key, value, slot_mapping, num_q_heads)


class Reader:
    """A model with a given quantization, which reads rows of text.

    Attributes:
        config: Config of the model, with its quantization.
    """

    @own_settings()
    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        kind: str | None = None,
        has_embedding: bool = False,
        kv_kind: str = "auto",
        dtype: str = "float32",
    ):
        """Load the model of a folder.

        Args:
            kind: Quantization of its matrices; None keeps them as in the folder.
            has_embedding: Also quantize the embedding, to int8.
            kv_kind: A name of `KV_POOLS`, or "auto".
            dtype: Type of the computations.

        Raises:
            ConfigError: The family of the folder's model is unknown.
            CheckpointError: The model cannot be read.
        """
        config = config_from_folder(folder)
        if kind is not None:
            scheme = named_scheme(kind, has_embedding=has_embedding)
            config = dataclasses.replace(config, quantization=scheme)
        self.config = config
        tensors, computed = open_checkpoint(folder).resolved().tensors, jnp.dtype(dtype)
        self._params = load_params(config, tensors, dtype=computed, mesh=mesh)
        backend = RoundedRows(kv_kind=kv_kind)

        def log_probs(params: Any, tokens: jax.Array) -> jax.Array:
            network = build_network(config, params, backend)
            empty = no_keys(tokens, config.num_kv_heads, config.head_dim, computed)
            output, _ = network.forward(
                rows_batch(tokens), (empty,) * config.num_layers
            )
            logits = network.logits(output.hidden_states).astype(jnp.float32)
            return jax.nn.log_softmax(logits, axis=-1).reshape(*tokens.shape, -1)

        self._run = jax.jit(log_probs)

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))

    def log_probs(
        self, tokens: Int[np.ndarray, "row token"]
    ) -> Float[Array, "row token vocab"]:
        """Return log-probabilities of the next token at every token."""
        return self._run(self._params, jnp.asarray(tokens))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of a model compared with a reference model on the same tokens.

    Attributes:
        num_tokens: Number of predicted tokens.
        perplexity: exp of the model's mean loss.
        reference_perplexity: exp of the reference's mean loss.
        kl_nats_per_token: Mean of KL(reference || model).
        share_of_same_first: Share of tokens where both agree on the most likely token.
    """

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    kl_nats_per_token: float
    share_of_same_first: float


@own_settings()
def compare(
    reference: Reader,
    reader: Reader,
    pieces: Int[np.ndarray, "piece token"],
    *,
    num_rows: int,
    title: str,
) -> Comparison:
    """Compare a model with a reference model on the same text.

    Args:
        num_rows: Pieces that are read together; divides the number of pieces.
        title: Title of the progress bar.
    """
    assert len(pieces) % num_rows == 0
    sums = np.zeros(4)
    for start in tqdm(range(0, len(pieces), num_rows), desc=title):
        tokens = pieces[start : start + num_rows]
        each = _compared(
            reference.log_probs(tokens), reader.log_probs(tokens), jnp.asarray(tokens)
        )
        sums += np.asarray(each, np.float64).sum(axis=(1, 2))
    count = pieces.shape[0] * (pieces.shape[1] - 1)
    theirs, own, divergence, same = (float(one) / count for one in sums)
    return Comparison(
        num_tokens=count,
        perplexity=math.exp(own),
        reference_perplexity=math.exp(theirs),
        kl_nats_per_token=divergence,
        share_of_same_first=same,
    )


@jax.jit
def _compared(
    theirs: Float[Array, "row token vocab"],
    own: Float[Array, "row token vocab"],
    tokens: Int[Array, "row token"],
) -> Float[Array, "number row token-1"]:
    """Return per token: both losses, KL(theirs || own), and whether argmaxes agree."""
    theirs, own = theirs[:, :-1], own[:, :-1]
    losses = [
        -jnp.take_along_axis(one, tokens[:, 1:, None], axis=2)[..., 0]
        for one in (theirs, own)
    ]
    divergence = (jnp.exp(theirs) * (theirs - own)).sum(axis=2)
    same = theirs.argmax(axis=2) == own.argmax(axis=2)
    return jnp.stack([*losses, divergence, same.astype(jnp.float32)])


def cut(
    texts: Iterable[str],
    encode: Callable[[str], list[int]],
    *,
    length: int,
    num_rows: int,
) -> Int[np.ndarray, "piece token"]:
    """Cut texts into pieces of `length` tokens; drop the rest of each text.

    The number of pieces is a multiple of `num_rows`, 0 if there are too few.
    """
    pieces = []
    for text in texts:
        tokens = encode(text)
        for start in range(0, len(tokens) - length + 1, length):
            pieces.append(tokens[start : start + length])
    whole = len(pieces) // num_rows * num_rows
    return np.array(pieces[:whole], np.int32).reshape(whole, length)


def chosen(texts: Iterable[str], count: int) -> list[str]:
    """Return about `count` of the texts, at equal distances in the list."""
    every = list(texts)
    return every[:: max(len(every) // count, 1)]

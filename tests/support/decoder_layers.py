"""Layers and batches for the tests of the blocks in C++."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec_checkpoints.quantization import Scheme, quantize
from jaxspec_kernels.bits import ScaledPages, to_storage
from jaxspec_kernels.decoder_blocks import (
    GELU,
    Attention,
    FeedForward,
    Norm,
    Queries,
    attention_block,
)
from jaxspec_kernels.panel_matmul import QuantizedPanels, quantized_panels, to_panels
from tests.kernels.oracle import UNOPTIMISED

PAGE_SIZE, MODEL = 4, 24
POOLS: dict[str, Any] = {
    name: jnp.zeros(0, name) for name in ("float32", "bfloat16", "uint16", "uint8")
}
POOLS["int8"] = ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0))


@dataclass(frozen=True)
class Layer:
    """Sizes and settings of a layer, from which its random arguments are made."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 10  # fills neither registers nor panels
    dtype: str = "float32"  # type of the panels
    pages: str = "float32"
    window: int | None = 6
    model: int = MODEL
    scale: float = 0.3
    soft_cap: float | None = 2.0
    gain: float = 0.2  # standard deviation of matrices
    has_after: bool = True
    has_head_norms: bool = False
    scheme: Scheme | None = None  # quantization of the panels

    def matrix(self, seed: int, out: int, features: int) -> Any:
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(out, features)) * self.gain
        if self.scheme is not None:
            made = quantized_panels(*quantize(values, self.scheme))
            return QuantizedPanels(*map(jnp.asarray, made))
        return jnp.asarray(to_panels(values.astype(jnp.dtype(self.dtype))))

    def norm(self, seed: int, size: int | None = None) -> Norm:
        weight = np.random.default_rng(seed).normal(size=size or self.model) / 4
        return Norm(jnp.asarray(weight, self.dtype), 1e-6, 1.0)

    def attend(
        self, batch: "Batch", implementation: str | None = None, **changes: Any
    ) -> tuple[Any, Any]:
        """Call the operation; `changes` override its settings."""
        settings = self.settings(batch)._replace(**changes)

        def run(stream: jax.Array, pages: Any, **matrices: Any) -> Any:
            given = settings._replace(**matrices)
            return attention_block(stream, pages, given, implementation=implementation)

        if implementation == "reference":
            # Compiling its operations one by one would take 1 s.
            run = jax.jit(run, compiler_options=UNOPTIMISED)
        names = "q_proj", "kv_proj", "o_proj"
        matrices = {name: getattr(settings, name) for name in names}
        return run(batch.stream, self.held(batch), **matrices)

    def network(self, hidden: int, block: int, activation: str = GELU) -> FeedForward:
        """Return all arguments of the MLP block except the residual stream."""
        return FeedForward(
            before=self.norm(1),
            after=self.norm(2) if activation == GELU else None,
            gate_up_proj=self.matrix(3, 2 * hidden, self.model),
            down_proj=self.matrix(4, self.model, hidden),
            hidden_size=hidden,
            block=block,
            activation=activation,
            is_rounded=self.dtype == "bfloat16",
        )

    def held(self, batch: "Batch") -> Any:
        """Return pages with random keys and values."""
        shape = batch.table.size + 1, PAGE_SIZE, 2 * self.heads[1], self.head_dim
        pages = np.random.default_rng(9).normal(size=shape)
        return to_storage(jnp.asarray(pages, jnp.float32), POOLS[self.pages])

    def settings(self, batch: "Batch") -> Attention:
        """Return all arguments but the residual stream and the pages."""
        queries, keys = self.heads[0] * self.head_dim, self.heads[1] * self.head_dim
        angles = batch.positions[:, None] / 7 ** np.arange(self.head_dim // 2)[None]
        has_norms = self.has_head_norms
        return Attention(
            before=self.norm(1),
            after=self.norm(2) if self.has_after else None,
            q_norm=self.norm(6, self.head_dim) if has_norms else None,
            k_norm=self.norm(7, self.head_dim) if has_norms else None,
            q_proj=self.matrix(3, queries, self.model),
            kv_proj=self.matrix(4, 2 * keys, self.model),
            o_proj=self.matrix(5, self.model, queries),
            cosine=jnp.asarray(np.cos(angles), jnp.float32),
            sine=jnp.asarray(np.sin(angles), jnp.float32),
            slot_mapping=jnp.asarray(batch.slots, jnp.int32),
            regions=batch.regions,
            num_q_heads=self.heads[0],
            scale=self.scale,
            soft_cap=self.soft_cap,
            window=self.window,
            is_rounded=self.dtype == "bfloat16",
        )


@dataclass(frozen=True)
class Batch:
    """A batch: sequences with equally many queries, one prompt, and padding rows."""

    table: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    stream: jax.Array
    regions: tuple[Queries, ...]


def make_batch(
    masks: Any = None,
    model: int = MODEL,
    ends: Sequence[int] = (19, 4, 13),
    counts: Sequence[int] = (3, 3, 5),
) -> Batch:
    """Make a batch of three sequences and two padding rows.

    By default the first two have three queries each, and the third has a prompt of
    five.
    """
    pages_each = -(-max(ends) // PAGE_SIZE) + 3
    table = np.random.default_rng(0).permutation(3 * pages_each).reshape(3, -1)
    positions, slots = [], []
    for seq, (end, count) in enumerate(zip(ends, counts, strict=True)):
        for at in range(end - count, end):
            positions.append(at)
            slots.append(table[seq, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
    pads = [(table.size + 1) * PAGE_SIZE] * 2
    stream = np.random.default_rng(1).normal(size=(len(slots) + 2, model))
    pages, kv_len = jnp.asarray(table, jnp.int32), jnp.asarray(ends, jnp.int32)
    regions = (
        Queries(pages[:2], kv_len[:2], counts[0], masks),
        Queries(pages[2:], kv_len[2:], counts[2]),
    )
    return Batch(
        table,
        np.array([*positions, 0, 0]),
        np.array([*slots, *pads]),
        jnp.asarray(stream, jnp.float32),
        regions,
    )

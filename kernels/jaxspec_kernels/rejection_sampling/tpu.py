"""Rejection sampling for TPU: the first pass in Pallas (Mosaic), the others plain jnp.

Grid: blocks of rows, then tiles of the vocabulary, in order. The four results of a row
block remain in VMEM across its tiles; Pallas copies the next tile meanwhile. SMEM: the
first id of this device's slice (scalar prefetch). Only the first pass is worth a
kernel: it runs in every round and reads every row. In the other passes XLA fuses the
reads with the sums.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.rejection_sampling import passes, reference
from jaxspec_kernels.rejection_sampling.passes import Statistics, VocabShard
from jaxspec_kernels.rejection_sampling.reference import Kernels

# Rows and columns per block. Two buffers of 32 rows of TILE float32 columns are 4 MiB,
# a quarter of the VMEM that a kernel may use on v5e.
TILE = 16_384
BLOCK_ROWS = 32


def _kernel(*refs: Any, columns: int, vocab_size: int):
    (
        # Scalar prefetch
        offset,  # i32[1]
        # In
        logits,  # [row, tile]
        temperature,  # f32[row, 1]
        tokens,  # i32[row, 1]
        # Out
        maximum,  # f32[row, 1]
        best,  # i32[row, 1]
        total,  # f32[row, 1]
        draft_logit,  # f32[row, 1]
    ) = refs
    number = pl.program_id(1)
    rows, tile = logits.shape

    @pl.when(number == 0)
    def _():
        maximum[...] = jnp.full((rows, 1), -jnp.inf, jnp.float32)
        best[...] = jnp.full((rows, 1), offset[0], jnp.int32)
        total[...] = jnp.zeros((rows, 1), jnp.float32)
        draft_logit[...] = jnp.full((rows, 1), -jnp.inf, jnp.float32)

    column = number * tile + jax.lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
    ids = offset[0] + column
    values = logits[...].astype(jnp.float32)
    # The last tile reads past the slice. A NaN is not equal to itself.
    is_token = (column < columns) & (ids < vocab_size) & (values == values)
    values = jnp.where(is_token, jnp.minimum(values, passes.LARGEST), -jnp.inf)

    own = jnp.where(ids == tokens[...], values, -jnp.inf).max(axis=1, keepdims=True)
    draft_logit[...] = jnp.maximum(draft_logit[...], own)
    before = maximum[...]
    top = values.max(axis=1, keepdims=True)
    at = jnp.where((values == top) & is_token, ids, passes.NO_ID).min(
        axis=1, keepdims=True
    )
    best[...] = jnp.where(top > before, at, best[...])
    top = jnp.maximum(top, before)
    maximum[...] = top

    finite_top = passes.safe_max(top)
    rescaled = total[...] * jnp.exp((before - finite_top) / temperature[...])
    weights = jnp.exp((values - finite_top) / temperature[...])
    total[...] = rescaled + weights.sum(axis=1, keepdims=True)


def statistics(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
    is_sampled: Bool[Array, " row"] | None = None,
    *,
    interpret: Any = False,
) -> Statistics:
    """See `passes.statistics`; sums of all rows are computed."""
    del is_sampled
    rows, columns = logits.shape
    block_rows = min(rows, BLOCK_ROWS)
    tile = min(shard.tile, columns)

    def column_spec() -> pl.BlockSpec:
        return pl.BlockSpec((block_rows, 1), lambda row, tile, *_: (row, 0))

    kernel = functools.partial(_kernel, columns=columns, vocab_size=shard.vocab_size)
    result = functools.partial(jax.ShapeDtypeStruct, (rows, 1))
    outputs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, block_rows), pl.cdiv(columns, tile)),
            in_specs=[
                pl.BlockSpec((block_rows, tile), lambda row, tile, *_: (row, tile)),
                column_spec(),
                column_spec(),
            ],
            out_specs=[column_spec() for _ in range(4)],
        ),
        out_shape=[
            result(dtype)
            for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        ],
        interpret=interpret,
        name="rejection_sampling_statistics",
    )(
        jnp.asarray(shard.offset, jnp.int32).reshape(1),
        logits,
        temperature[:, None],
        tokens[:, None],
    )
    return Statistics(*(values[:, 0] for values in outputs))


def rejection_sampling(
    *arguments: Any, tile: int = TILE, interpret: Any = False, **settings: Any
) -> Any:
    """See `jaxspec_kernels.rejection_sampling`; `tile` is a multiple of 128.

    Under `shard_map`, with `check_vma=False`.
    """
    return reference.rejection_sampling(
        *arguments,
        tile=tile,
        kernels=Kernels(functools.partial(statistics, interpret=interpret), fan=16),
        **settings,
    )

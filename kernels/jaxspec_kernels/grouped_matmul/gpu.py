"""Products with a quantized matrix in Triton, through Pallas.

Grid: (outputs, row tile, split of the features). One program reads its values once,
widens them in registers, and adds up scaled products of the groups in registers. XLA
would write a bfloat16 copy of some 4-bit matrices, and the float32 products of all
groups: with groups of 32 and 8 rows, twice the bytes of 4-bit values.

A byte holds the 4-bit values of two adjacent outputs, the first in its low half, as XLA
packs them: reading an int4 array as bytes is free.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Num

from jaxspec_kernels.sums import row_sums

MIN_SIZE = 16  # smallest tensor-core product
MAX_SIZE = 128  # features that a program multiplies at once
MAX_ROWS = 64
# Programs that fill an H100 once, three on each multiprocessor. Another GPU runs them
# too.
NUM_PROGRAMS = 3 * 132


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One program: `rows` by `outputs`, `chunks` of features at a time.

    It reads one of `splits` equal shares of the chunks.
    """

    rows: int
    outputs: int
    chunks: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4


def chunk_size(size: int, itemsize: int) -> int:
    """Return the number of features in a chunk: a whole group, or an equal part of it.

    Args:
        size: Features of a group.
        itemsize: Bytes of one input. No tensor core multiplies float32: larger chunks
            would spill registers.
    """
    largest = 32 if itemsize > 2 else MAX_SIZE
    return size if size <= largest else math.gcd(size, largest)


def choose_tiles(
    inputs: Sequence[int], num_outputs: int, *, itemsize: int, is_packed: bool
) -> Tiles:
    """Return the sizes for a product of these shapes.

    Args:
        inputs: [row, chunk, feature of the chunk].
        itemsize: Bytes of one input.
        is_packed: Whether values have 4 bits.
    """
    num_rows, chunks, size = inputs
    is_wide = itemsize > 2
    rows = min(_power_of_two(num_rows), 16 if is_wide else MAX_ROWS)
    outputs = 64 if is_wide else 128
    programs = pl.cdiv(num_rows, rows) * pl.cdiv(num_outputs, outputs)
    # A split reads at least 256 features: its sums are written and read again.
    splits = min(NUM_PROGRAMS // programs, chunks * size // 256)
    return Tiles(
        rows=rows,
        outputs=outputs,
        # Several small groups with this many rows would spill registers.
        chunks=1 if rows == MAX_ROWS else max(1, MAX_SIZE // size),
        splits=max(1, splits),
        num_warps=8 if rows == MAX_ROWS else 4,
        # At most 82 kB of shared memory: an L4 has 99 kB for a thread block.
        num_stages=4 if rows < MAX_ROWS else 3 if is_packed else 2,
    )


def _power_of_two(size: int) -> int:
    return max(MIN_SIZE, 1 << (size - 1).bit_length())


def _multiply(*refs: Any, tiles: Tiles, is_packed: bool, is_signed: bool):
    (
        # In
        inputs_ref,  # [row, chunk, size]
        values_ref,  # [chunk, size, out], or two outputs in a byte
        scales_ref,  # f32[group, out]; or [2, group, out]: scales and minima
        sums_ref,  # f32[row, chunk], with minima only
        # Out
        outputs_ref,  # f32[split, row, out]
    ) = refs
    num_rows, chunks, size = inputs_ref.shape
    chunks_of_group = chunks // scales_ref.shape[-2]
    parts = 2 if is_packed else 1
    row = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    columns = tiles.outputs // parts
    column = pl.program_id(0) * columns + jnp.arange(columns, dtype=jnp.int32)
    feature = jnp.arange(_power_of_two(size), dtype=jnp.int32)
    row_live, live = row < num_rows, column < values_ref.shape[2]
    dot = functools.partial(
        plgpu.dot,
        precision=jax.lax.Precision.HIGHEST
        if inputs_ref.dtype == jnp.float32
        else None,
    )

    def add(chunk: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        is_there, group = chunk < chunks, chunk // chunks_of_group
        feature_live = is_there & (feature < size)
        inputs = plgpu.load(
            inputs_ref.at[row[:, None], chunk, feature[None, :]],
            mask=row_live[:, None] & feature_live[None, :],
            other=0.0,
        )
        values = plgpu.load(
            values_ref.at[chunk, feature[:, None], column[None, :]],
            mask=feature_live[:, None] & live[None, :],
            other=0,
        )
        if not is_packed:
            unpacked = (values,)
        elif is_signed:
            unpacked = (values << 4) >> 4, values >> 4
        else:
            unpacked = values & 15, (values >> 4) & 15
        scaled = []
        for part, (numbers, total) in enumerate(zip(unpacked, sums, strict=True)):
            at, mask = (group, parts * column + part), live & is_there
            place = scales_ref.at[at if sums_ref is None else (0, *at)]
            scale = plgpu.load(place, mask=mask, other=0.0)
            total = total + dot(inputs, numbers.astype(inputs.dtype)) * scale[None, :]
            if sums_ref is not None:
                minimum = plgpu.load(scales_ref.at[1, *at], mask=mask, other=0.0)
                mask = row_live & is_there
                of_row = plgpu.load(sums_ref.at[row, chunk], mask=mask, other=0.0)
                total = total + of_row[:, None] * minimum[None, :]
            scaled.append(total)
        return tuple(scaled)

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        for chunk in range(tiles.chunks):
            sums = add(number * tiles.chunks + chunk, sums)
        return sums

    steps, split = pl.cdiv(chunks, tiles.chunks), pl.program_id(2)
    zeros = jnp.zeros((tiles.rows, columns), jnp.float32)
    first, last = split * steps // tiles.splits, (split + 1) * steps // tiles.splits
    sums = jax.lax.fori_loop(first, last, step, (zeros,) * parts)
    for part, total in enumerate(sums):
        at = (split, row[:, None], parts * column[None, :] + part)
        plgpu.store(outputs_ref.at[at], total, mask=row_live[:, None] & live[None, :])


def grouped_matmul(
    inputs: Float[Array, "row features"],
    values: Num[Array, "group size out"],
    scales: Float[Array, "..."],
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.grouped_matmul`; `tiles` overrides `choose_tiles`.

    Raises:
        NotImplementedError: An odd number of outputs of 4-bit values, or values of
            another type than int8, int4 and uint4.
    """
    num_outputs = values.shape[2]
    rows, features = inputs.shape
    is_packed = values.dtype in (jnp.int4, jnp.uint4)
    is_signed = values.dtype != jnp.uint4
    if not is_packed and values.dtype != jnp.int8:
        raise NotImplementedError(
            f"values of {values.dtype}: on a GPU, they must be int8, int4 or uint4"
        )
    if is_packed and num_outputs % 2:
        raise NotImplementedError(
            f"a matrix of {num_outputs} outputs: on a GPU, their number must be even "
            "if values have 4 bits"
        )
    itemsize = inputs.dtype.itemsize
    size = chunk_size(values.shape[1], itemsize)
    split = inputs.reshape(rows, features // size, size)
    tiles = tiles or choose_tiles(
        split.shape, num_outputs, itemsize=itemsize, is_packed=is_packed
    )
    values = values.reshape(-1, size, num_outputs)
    if is_packed:
        pairs = values.reshape(*values.shape[:2], num_outputs // 2, 2)
        values = jax.lax.bitcast_convert_type(pairs, jnp.int8)
    sums = None
    if scales.ndim == 3:
        sums = row_sums(split.astype(jnp.float32))[:, :, 0]
    columns = tiles.outputs // (2 if is_packed else 1)
    outputs = pl.pallas_call(
        functools.partial(
            _multiply, tiles=tiles, is_packed=is_packed, is_signed=is_signed
        ),
        grid=(
            pl.cdiv(values.shape[2], columns),
            pl.cdiv(rows, tiles.rows),
            tiles.splits,
        ),
        out_shape=jax.ShapeDtypeStruct((tiles.splits, rows, num_outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(split, values, scales, sums)
    return outputs[0] if tiles.splits == 1 else outputs.sum(axis=0)

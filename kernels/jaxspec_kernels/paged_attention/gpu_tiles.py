"""Sizes of one GPU call, computed from shapes and the kind of device alone.

Kept apart from the kernel so that a tuner can replace the heuristic.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

MIN_ROWS = 16  # smallest tensor-core product
MAX_ROWS = 64  # prefill rows per program: 64 x 256 outputs fill half its registers
BLOCK_BYTES = 16 * 1024  # of keys, and the same of values
MIN_SPLIT_TOKENS = 128  # adding up a smaller share costs more than reading it


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Properties of a kind of GPU that the sizes depend on.

    Attributes:
        num_sms: Number of multiprocessors.
        shared_bytes: Shared memory of a multiprocessor.
        tree_stages: Stages of a program with `MAX_ROWS` rows and an ancestor mask.
    """

    num_sms: int
    shared_bytes: int = 228 * 1024
    tree_stages: int = 3


DEFAULT = Gpu(num_sms=132)
# By words of jax's kind of the device. A B200's program for a tree of 40 rows needs 255
# registers with three stages and writes 104 bytes per thread to memory; it needs 218
# with two, which also have two blocks of keys and values in shared memory, and only
# load the page ids later.
GPUS = {
    "A100": Gpu(num_sms=108, shared_bytes=164 * 1024),
    "L4": Gpu(num_sms=58, shared_bytes=100 * 1024),
    "H100 PCIe": Gpu(num_sms=114),
    "H100": DEFAULT,
    "H200": DEFAULT,
    "B200": Gpu(num_sms=148, tree_stages=2),
}


def gpu_of(device_kind: str | None) -> Gpu:
    """Return the properties of a kind of device; an H100's if it is not known.

    Args:
        device_kind: Such as "NVIDIA A100-SXM4-40GB".
    """
    for name, found in GPUS.items():
        if re.search(rf"\b{name}\b", device_kind or "", re.IGNORECASE):
            return found
    return DEFAULT


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One program: `rows` of queries by `keys` at a time, in `splits` equal shares."""

    rows: int
    keys: int
    splits: int
    num_warps: int = 4
    num_stages: int = 5


def power_of_two(size: int, *, least: int = MIN_ROWS) -> int:
    """Return the next power of two: Triton allows no other sizes."""
    return max(least, 1 << (size - 1).bit_length())


def product_dtype(query: jnp.dtype, kv_pages: jnp.dtype) -> jnp.dtype:
    """Return the type of both operands of a product: their own, or float32 if unequal.

    8-bit pages take the query's type, as every query type holds them exactly.
    """
    is_exact = query == kv_pages or jnp.dtype(kv_pages).itemsize == 1
    return query if is_exact else jnp.dtype(jnp.float32)


def choose_tiles(
    query: Sequence[int],
    kv_pages: Sequence[int],
    *,
    table: int,
    itemsize: int,
    window: int | None,
    is_tree: bool = False,
    gpu: Gpu = DEFAULT,
) -> Tiles:
    """Return the sizes for a query and pages of these shapes.

    Args:
        table: Pages of the longest context.
        itemsize: Bytes of one value in a product.
        is_tree: Whether there is an ancestor mask.
        gpu: The splits fill all its multiprocessors once.
    """
    seqs, queries, q_heads, head_dim = query
    page_size, kv_heads = kv_pages[1], kv_pages[2] // 2
    rows = queries * q_heads // kv_heads
    # No tensor core multiplies float32: larger tiles would spill registers.
    is_wide = itemsize > 2
    tile_rows = min(power_of_two(rows), MAX_ROWS // 2 if is_wide else MAX_ROWS)
    keys = BLOCK_BYTES // (power_of_two(head_dim) * itemsize)
    # The page lookup before a load takes every second stage: five stages keep two
    # blocks in flight. By registers, three such programs fit a multiprocessor, or two
    # with more rows. A prefill tile also holds its queries in shared memory: three
    # stages let two programs fit instead of one.
    num_stages = 5
    if tile_rows == MAX_ROWS:
        num_stages = gpu.tree_stages if is_tree else 3
    resident = 3 if tile_rows == MIN_ROWS and not is_wide else 2
    # Two blocks of keys and of values, the queries, and less than 4 kB of page ids,
    # weights and statistics.
    shared_bytes = 4 * BLOCK_BYTES + 4096
    shared_bytes += tile_rows * power_of_two(head_dim) * itemsize
    resident = max(1, min(resident, gpu.shared_bytes // shared_bytes))
    tokens = table * page_size
    if window is not None:
        tokens = min(tokens, window + queries - 1)
    programs = seqs * kv_heads * -(-rows // tile_rows)
    splits = min(resident * gpu.num_sms // programs, tokens // MIN_SPLIT_TOKENS)
    return Tiles(
        rows=tile_rows,
        keys=16 if is_wide else min(128, power_of_two(keys)),
        splits=max(1, splits),
        num_warps=8 if is_wide and tile_rows > MIN_ROWS else 4,
        num_stages=num_stages,
    )

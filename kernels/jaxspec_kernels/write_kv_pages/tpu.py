"""Page writes for TPU: XLA's scatter, and a Pallas kernel for scales in lanes.

The scales of a page are at least 128 lanes, of which a token writes a few: pages are
copied to VMEM, changed and copied back. XLA does the same for a scatter, but with 4 KiB
per number, one after the other; and if all scales fit in VMEM, it copies all of them
there and back, in every layer.

Grid: one step for up to 128 tokens, in order. A step copies in all pages that its
tokens write, each once, then puts the tokens into them one by one, then copies all
pages out. SMEM: page, offset and first token of the same page, for each token (scalar
prefetch). VMEM: the pages, and the tokens' scales, each in all lanes of its head.

Another kernel reads the scales of rows that are to be moved: a step copies in the pages
of up to 128 rows, one page per row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxspec_kernels.bits import KvPages, ScaledPages, check_scales, from_lanes
from jaxspec_kernels.write_kv_pages import reference

MAX_TOKENS = 128  # per step


def _write_kernel(
    # Scalar prefetch
    page: Any,  # i32[token]; the number of pages means padding
    offset: Any,  # i32[token]
    leader: Any,  # i32[token]: the step's first token in the same page
    # In
    new: Any,  # f32[token of the step, 1, lane]
    _: Any,  # the pool, which is the output
    # Out
    pool: Any,  # f32[page, 1, lane], in HBM
    # Scratch
    pages: Any,  # f32[token of the step, 1, lane]: page of a leader, at its place
    arrived: Any,  # DMA semaphore
    *,
    page_size: int,
) -> None:
    count, _, num_lanes = pages.shape
    first = pl.program_id(0) * count
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, num_lanes), 1)

    def each_page(is_read: bool, act: str) -> None:
        def one(at: Array, _: None) -> None:
            page_id = page[first + at]

            @pl.when((leader[first + at] == at) & (page_id < pool.shape[0]))
            def _():
                ends = pool.at[page_id], pages.at[at]
                source, target = ends if is_read else ends[::-1]
                copy = pltpu.make_async_copy(source, target, arrived)
                getattr(copy, act)()

        jax.lax.fori_loop(0, count, one, None)

    def put(at: Array, _: None) -> None:
        place, is_own = leader[first + at], lane & (page_size - 1) == offset[first + at]
        pages[place] = jnp.where(is_own, new[at], pages[place])

    each_page(True, "start")
    each_page(True, "wait")
    jax.lax.fori_loop(0, count, put, None)
    each_page(False, "start")
    each_page(False, "wait")


def _read_kernel(
    # Scalar prefetch
    page: Any,  # i32[slot]
    # In
    pool: Any,  # f32[page, 1, lane], in HBM
    # Out
    out: Any,  # f32[slot of the step, 1, lane]
    # Scratch
    arrived: Any,  # DMA semaphore
) -> None:
    count = out.shape[0]
    first = pl.program_id(0) * count

    def each_page(act: str) -> None:
        def one(at: Array, _: None) -> None:
            own = page[first + at]
            copy = pltpu.make_async_copy(pool.at[own], out.at[at], arrived)
            getattr(copy, act)()

        jax.lax.fori_loop(0, count, one, None)

    each_page("start")
    each_page("wait")


def write_kv_pages(
    kv_pages: KvPages,
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> KvPages:
    """See `jaxspec_kernels.write_kv_pages`; `interpret` as in Pallas."""
    if not isinstance(kv_pages, ScaledPages) or not kv_pages.is_in_lanes:
        return reference.write_kv_pages(kv_pages, key, value, slot_mapping)
    check_scales(kv_pages, in_lanes=True)
    rows, slots = reference.kept_rows(kv_pages, key, value, slot_mapping)
    return _put(kv_pages, rows, slots, interpret)


def copy_kv_rows(
    kv_pages: KvPages,
    source: Int[Array, " slot"],
    target: Int[Array, " slot"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> KvPages:
    """See `jaxspec_kernels.write_kv_pages`; `interpret` as in Pallas."""
    if not isinstance(kv_pages, ScaledPages) or not kv_pages.is_in_lanes:
        return reference.copy_kv_rows(kv_pages, source, target)
    check_scales(kv_pages, in_lanes=True)
    page, offset = jnp.divmod(source, kv_pages.shape[1])
    scales = from_lanes(_read_lanes(kv_pages.scales, page, interpret), kv_pages.shape)
    values = reference.read_rows(kv_pages.values, source)
    rows = ScaledPages(values, reference.take_slots(scales, offset))
    return _put(kv_pages, rows, target, interpret)


def _put(
    kv_pages: ScaledPages,
    rows: ScaledPages,
    slots: Int[Array, " token"],
    interpret: Any,
) -> ScaledPages:
    values = reference.put_rows(kv_pages.values, rows.values, slots)
    scales = _write_scales(kv_pages, rows.scales, slots, interpret)
    return ScaledPages(values, scales, is_in_lanes=True)


def _write_scales(
    kv_pages: ScaledPages,
    scales: Float[Array, "token two_kv_head"],
    slots: Int[Array, " token"],
    interpret: Any,
) -> Float[Array, "page 1 lane"]:
    pool = kv_pages.scales
    (num_pages, page_size), num_lanes = kv_pages.shape[:2], pool.shape[2]
    count = min(slots.shape[0], MAX_TOKENS)
    missing = -slots.shape[0] % count
    slots = jnp.pad(slots, (0, missing), constant_values=num_pages * page_size)
    page, offset = jnp.divmod(slots, page_size)
    page = jnp.minimum(page, num_pages)
    by_step = page.reshape(-1, count)
    leader = (by_step[:, :, None] == by_step[:, None]).argmax(axis=2)
    new = jnp.repeat(scales, page_size, axis=1)
    unused = num_lanes - new.shape[1]
    new = jnp.pad(new, ((0, missing), (0, unused)))[:, None]
    numbers = page, offset, leader.reshape(-1).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_write_kernel, page_size=page_size),
        # Otherwise XLA copies scales that fit in VMEM there for the kernel.
        out_shape=pltpu.HBM(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(by_step.shape[0],),
            in_specs=[
                pl.BlockSpec((count, 1, num_lanes), lambda step, *_: (step, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((count, 1, num_lanes), jnp.float32),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        input_output_aliases={len(numbers) + 1: 0},
        # A page may have tokens of several steps.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_scales",
    )(*numbers, new, pool)


def _read_lanes(
    pool: Float[Array, "page 1 lane"], page: Int[Array, " slot"], interpret: Any
) -> Float[Array, "slot lane"]:
    num_slots, num_lanes = page.shape[0], pool.shape[2]
    count = min(num_slots, MAX_TOKENS)
    page = jnp.clip(page, 0, pool.shape[0] - 1)
    page = jnp.pad(page, (0, -num_slots % count))
    if not interpret:
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    lanes = pl.pallas_call(
        _read_kernel,
        out_shape=jax.ShapeDtypeStruct((page.shape[0], 1, num_lanes), pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(page.shape[0] // count,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(
                (count, 1, num_lanes), lambda step, *_: (step, 0, 0)
            ),
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="read_scales",
    )(page, pool)
    return lanes[:num_slots, 0]

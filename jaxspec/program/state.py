"""The engine's state on the device between launches."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.engine import KV_FP8, KV_INT8, ModelConfig
from jaxspec.errors import UnsupportedError, wrong_argument
from jaxspec.models.heads.config import LayerConfig
from jaxspec.program.plan import PoolShape
from jaxspec.program.rows import Rows
from jaxspec.sharding import kv_copies, named_sharding, num_parts, put
from jaxspec_kernels import storage_dtype
from jaxspec_kernels.bits import FP8, KvPools, scaled_form

Kept = TypeVar("Kept")

# Minimum compute capability of GPUs with instructions that convert fp8: Ada and Hopper.
MIN_FP8_CAPABILITY = 8.9


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Rows, the target's pages and the proposers' states; donated to launches.

    Parts that a program does not take (`executable_args.used_arguments`) are None.
    """

    rows: Rows
    token_pages: Int[Array, "page page_size"]  # known tokens, prompt and output
    target_pages: KvPools
    proposers: tuple[Any, ...]
    # For benchmarks: `rejection_sample_method="synthetic"`; None otherwise. Probability
    # of each draft to be accepted if those before it are.
    forced_acceptance: Float[Array, " probability"] | None = None


def page_forms(
    config: ModelConfig,
    dtype: jnp.dtype,
    pool: PoolShape,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
) -> tuple[Any, ...]:
    """Return the shapes and placement of a model's pages.

    Each pool is an array, or `ScaledPages`.

    In a pool that scanned layers share, each layer's pages follow those of the layer
    before. `ModelConfig.kv_layout` has the other arrays that layers share.

    Args:
        dtype: The type of the model's weights.
    """
    arrays = config.kv_layout(pool.unit_pages).arrays
    forms = {
        array: layer_pages(
            config,
            array.num_turns * array.pages_per_unit * pool.num_units,
            dtype,
            pool,
            mesh,
            mesh_axes,
        )
        for array in set(arrays)
    }
    return tuple(forms[array] for array in arrays)


def layer_pages(
    config: ModelConfig | LayerConfig,
    num_pages: int,
    dtype: jnp.dtype,
    pool: PoolShape,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
) -> Any:
    """Return the shape and placement of one layer's pages, or of shared pages.

    Args:
        num_pages: Number of pages of all layers that share the array, together.
        dtype: The type of the weights.

    Returns:
        One array, or `ScaledPages` of two.
    """
    heads, parts = config.num_kv_heads, num_parts(mesh, mesh_axes)
    heads *= kv_copies(config.num_q_heads, heads, parts)
    shape = (num_pages, pool.page_size, 2 * heads, config.head_dim)
    names = ("page", None, "kv_head", None)

    device = mesh.devices.flat[0]
    stored_dtype = {KV_INT8: jnp.dtype(jnp.int8), KV_FP8: FP8}.get(
        pool.kv_cache_dtype, dtype
    )
    form = jax.ShapeDtypeStruct(
        shape,
        storage_dtype(stored_dtype, device.platform),
        sharding=named_sharding(mesh, names, shape, unit=2, mesh_axes=mesh_axes),
    )
    check_kv_cache_dtype(pool.kv_cache_dtype, device, form)
    if pool.kv_cache_dtype == KV_INT8:
        return scaled_form(form, device.platform)
    return form


def check_kv_cache_dtype(
    kv_cache_dtype: str, device: Any, form: jax.ShapeDtypeStruct
) -> None:
    """Reject a page type that the device's kernels cannot read in this placement.

    Args:
        kv_cache_dtype: A name of `KV_CACHE_DTYPES`.
        form: Shape and placement of the pages.

    Raises:
        UnsupportedError: The kernels cannot read pages of this type.
    """
    assert form.sharding is not None
    heads = form.sharding.shard_shape(form.shape)[2] // 2
    name, kind = "kv_cache_dtype", device.device_kind
    if device.platform == "tpu" and kv_cache_dtype in (KV_INT8, KV_FP8) and heads < 2:
        hint = (
            "Each device has one KV head of a model, and XLA would copy all pages in "
            "every layer: lower tensor_parallel_size, or that of the draft model."
        )
        raise wrong_argument(
            UnsupportedError, name, f"'auto' on these {kind}", kv_cache_dtype, hint
        )
    capability = getattr(device, "compute_capability", None)
    if (
        kv_cache_dtype == KV_FP8
        and capability
        and float(capability) < MIN_FP8_CAPABILITY
    ):
        hint = f"It has compute capability {capability}, and fp8 needs 8.9."
        allowed = f"'auto' or 'int8' on {kind}"
        raise wrong_argument(UnsupportedError, name, allowed, kv_cache_dtype, hint)


def run_if(
    is_wanted: Bool[Array, ""], function: Callable[[Kept], Kept], value: Kept
) -> Kept:
    """Return `function(value)` if wanted, else `value`: a loop that runs once or never.

    Not `cond`: on a GPU XLA copies arrays that both of its branches update in place
    (`tests/program/test_aot.py`). XLA may hoist computations that do not depend
    on `value` out of the loop, and always run them.
    """

    def run(carry: tuple[Array, Kept]) -> tuple[Array, Kept]:
        return jnp.zeros_like(is_wanted), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], run, (is_wanted, value))[1]


def init_zeros(forms: Any) -> Any:
    """Make zeroed arrays, each in its final placement.

    On a CPU, under Linux, they take memory only as they are written to.
    """
    return jax.tree.map(_zeros, forms)


def _zeros(form: jax.ShapeDtypeStruct) -> Array:
    assert form.sharding is not None
    if all(device.platform == "cpu" for device in form.sharding.device_set):
        # Needs no transfer and no compilation.
        array = put(np.zeros(form.shape, form.dtype), form.sharding)
        _release_zeros(array)
        return array
    return jnp.zeros(form.shape, form.dtype, device=form.sharding)


def _release_zeros(array: Array) -> None:
    """Give the memory of a zeroed array back to Linux, which maps zeros at a write.

    `jax.device_put` copies, and the copy is resident. For the bundled pair that is 224
    MB of pages, few of which a server with few requests writes to.
    """
    if sys.platform != "linux":
        return
    madvise, unit = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    for shard in array.addressable_shards:
        data = shard.data.block_until_ready()
        start = data.unsafe_buffer_pointer()
        first, end = -(-start // unit) * unit, (start + data.nbytes) // unit * unit
        if end > first:
            advice = ctypes.c_int(mmap.MADV_DONTNEED)
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def init_token_pages(pool: PoolShape) -> Int[np.ndarray, "page page_size"]:
    """Return pages without known tokens."""
    return np.zeros((pool.num_pages, pool.page_size), np.int32)

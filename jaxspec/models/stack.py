"""Runs a network's layers in one of two ways: separate, or scanned.

A separate layer has its own parameters, its own pages and its own operations in a
program. Scanned (`ModelConfig.scan_layers`), layers of the same kind share one array
for each parameter and one pool of pages, and the program has one loop over them: its
size does not depend on the depth, and it compiles faster. Layers after the last whole
period are separate in this case as well. Both ways compute the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.config.model import KvLayout, ModelConfig
from jaxspec.models.batch import TokenBatch
from jaxspec.models.cpu import NativeMatrix
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import ParamPath, Params
from jaxspec_kernels.bits import KvPages, KvPools

LAYERS = "layers"  # key of the layers' parameters in the tree
# (layer number, parameters, input, batch, pages) -> (output, pages)
Layer = Callable[[int, Params, Array, TokenBatch, KvPages], tuple[Array, KvPages]]


def run_layers(
    config: ModelConfig,
    params: Params,
    stream: Array,
    batch: TokenBatch,
    kv_pages: KvPools,
    layer: Layer,
) -> tuple[tuple[Array, ...], KvPools]:
    """Run all layers, one after the other.

    Args:
        params: Parameters of the whole network.
        layer: Computes one layer. For scanned layers it is called only for the first
            `config.period` layers.

    Returns:
        The input with the outputs of all layers, and the updated pages.
    """
    layer_params, layout = params[LAYERS], config.kv_layout(batch.unit_pages)
    assert len(kv_pages) == len(layout.arrays), (len(kv_pages), layout)
    streams, pools, places = (stream,), [*kv_pages], layout.layers
    if config.num_turns:
        scanned = layout.layers[: config.period]
        places = layout.layers[config.period :]
        count = max(place.array for place in scanned) + 1
        streams, pools[:count] = _scan(
            config, layer_params, stream, batch, tuple(pools[:count]), layer, layout
        )
    numbers = range(config.num_scanned, config.num_layers)
    for number, place in zip(numbers, places, strict=True):
        pages = pools[place.array]
        stream, pools[place.array] = layer(
            number,
            layer_params[str(number)],
            streams[-1],
            batch.of_layer(place, pages.shape[1]),
            pages,
        )
        streams = (*streams, stream)
    return streams, tuple(pools)


def _scan(
    config: ModelConfig,
    params: Params,
    stream: Array,
    batch: TokenBatch,
    kv_pages: KvPools,
    layer: Layer,
    layout: KvLayout,
) -> tuple[tuple[Array, ...], KvPools]:
    """Run the layers as a loop; pools are its state, so it writes them in place."""
    turns, period = config.num_turns, config.period

    def turn(
        carry: tuple[Array, KvPools], inputs: tuple[Array, Params]
    ) -> tuple[tuple[Array, KvPools], tuple[Array, ...]]:
        (stream, pools), (number, layer_params) = carry, inputs
        layer_params = _with_barriers(layer_params)
        streams, updated = [], [*pools]
        batches = dict[Any, TokenBatch]()
        for kind, place in enumerate(layout.layers[:period]):
            pool = updated[place.array]
            key = place._replace(array=0), pool.shape
            if key not in batches:
                of_layer = batch.of_layer(place, pool.shape[1])
                batches[key] = _batch_of(of_layer, number, turns, pool.shape)
            stream, updated[place.array] = layer(
                kind, layer_params[str(kind)], stream, batches[key], pool
            )
            streams.append(stream)
        return (stream, tuple(updated)), tuple(streams)

    numbers = jnp.arange(turns, dtype=jnp.int32)
    start = stream, kv_pages
    stacks = {str(kind): params[str(kind)] for kind in range(period)}
    (last, kv_pages), outputs = jax.lax.scan(turn, start, (numbers, stacks))
    # `last` is kept apart from these, so that XLA can drop all of these if no output of
    # a layer is read.
    between = (
        jax.lax.index_in_dim(outputs[number % period], number // period, keepdims=False)
        for number in range(config.num_scanned - 1)
    )
    return (stream, *between, last), kv_pages


@dataclasses.dataclass(frozen=True)
class _StackEntry:
    """One layer's matrix in a stack, with a barrier after its products.

    Without the barrier XLA moves a reshape of the products (to heads, or to blocks)
    into the product, reshapes the matrix for it, and on a TPU copies the matrix out of
    the stack to do so: 411 MB in every pair of the 9B's layers for `gate_up_proj` alone
    (`tests/program/test_aot.py`).
    """

    matrix: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.matrix.dtype

    def multiply(self, inputs: Array) -> Array:
        return jax.lax.optimization_barrier(self.matrix.multiply(inputs))


def _with_barriers(params: Params) -> Params:
    """Wrap the matrices that XLA multiplies, but not those multiplied in C++."""

    def entry(node: Any) -> Any:
        is_of_xla = isinstance(node, Matrix) and not isinstance(node, NativeMatrix)
        return _StackEntry(node) if is_of_xla else node

    return jax.tree.map(entry, params, is_leaf=lambda node: isinstance(node, Matrix))


def _batch_of(
    batch: TokenBatch, turn: Int[Array, ""], turns: int, pool: tuple[int, ...]
) -> TokenBatch:
    """Return the batch with the page ids and slots of one loop iteration's layers.

    A pool holds its layers' pages one layer after another: page i of the layer in
    iteration `turn` is page `turn * num_pages + i` of the pool. Pad slots remain past
    the pool's end.
    """
    num_pages = pool[0] // turns
    num_slots = num_pages * pool[1]
    slots = batch.slot_mapping
    slots = jnp.where(slots < num_slots, slots + turn * num_slots, turns * num_slots)
    # Entries past a sequence's last page may become invalid, as they are not read.
    regions = tuple(
        dataclasses.replace(one, page_table=one.page_table + turn * num_pages)
        for one in batch.regions
    )
    return dataclasses.replace(batch, slot_mapping=slots, regions=regions)


def stacked_place(config: ModelConfig, path: ParamPath) -> tuple[ParamPath, int] | None:
    """Return a parameter's stack in a scanned network, and its entry there.

    None if it is not stacked.
    """
    if path[0] != LAYERS or int(path[1]) >= config.num_scanned:
        return None
    turn, kind = divmod(int(path[1]), config.period)
    return (LAYERS, str(kind), *path[2:]), turn


def put(stack: Any, params: Any, entry: int, count: int) -> Any:
    """Write an entry of a stack of `count` entries, which the first call creates.

    The write is in place: no parameter ever has two whole stacks in memory.

    Args:
        stack, params: Trees of arrays, or of their shapes.
    """
    if stack is None:
        stack = jax.tree.map(lambda leaf: _room_for(leaf, count), params)
    return jax.tree.map(lambda leaf, param: _put(leaf, param, entry), stack, params)


def _room_for(leaf: Any, count: int) -> Any:
    placement = leaf.sharding
    spec = jax.sharding.PartitionSpec(None, *placement.spec)
    placement = jax.sharding.NamedSharding(placement.mesh, spec)
    shape = (count, *leaf.shape)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement)
    return jnp.zeros(shape, leaf.dtype, device=placement)


def _put(stack: Any, param: Any, entry: int) -> Any:
    if isinstance(param, jax.ShapeDtypeStruct):
        return stack
    # Compiled, because only a compiled function can write into a donated argument.
    write = jax.jit(_write, donate_argnums=0, out_shardings=stack.sharding)  # noqa: TID251
    return write(stack, param, np.int32(entry))


def _write(whole: Array, part: Array, entry: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(whole, part, entry, 0)

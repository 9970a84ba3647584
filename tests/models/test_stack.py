"""Scanned layers compute the same logits as separate ones, with stacked weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.cpu import NativeMatrix, PanelMatrix
from jaxspec.models.network import build_network
from jaxspec.models.stack import put
from jaxspec.models.weights import abstract_params, load_params, random_params
from jaxspec.sharding import make_mesh
from tests.support.oracles import (
    PagedModel,
    forms_of,
    hf_tensors,
    init_kv_pages,
    load_ours,
    make_gemma3,
    make_hf_model,
    model_config,
    sequence_batch,
)
from tests.support.programs import QUICK_COMPILER

PROMPT = np.random.default_rng(1).integers(0, 96, 50)
# Two periods of two different layers. All matrices but the embedding divide into panels
# (`jaxspec.models.cpu`).
SIZES: dict[str, Any] = dict(
    num_hidden_layers=4, num_attention_heads=8, head_dim=16, hidden_size=64
)
FEW_TOKENS = sequence_batch(PROMPT[:8], [0, 1])


@functools.cache
def reference() -> Any:
    return make_hf_model(**SIZES)


# Two whole periods; two periods of six and two more layers, like Gemma 3's 26, 34 or 62
# layers; five layers with a period of two; and fewer layers than one period.
MODELS = {
    "whole periods": reference,
    "gemma 3": functools.cache(lambda: make_gemma3(num_hidden_layers=14)),
    "gemma 2": lambda: make_hf_model(num_hidden_layers=5),
    "less than a period": lambda: make_gemma3(num_hidden_layers=4),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # `make test` has one type for each model.
        pytest.param(
            name,
            dtype,
            marks=[pytest.mark.slow] * ((name == "gemma 3") != (dtype == jnp.bfloat16)),
        )
        for dtype in (jnp.float32, jnp.bfloat16)
        for name in MODELS
    ],
)
def test_scanned_logits_equal_separate_layers_bit_for_bit(name, dtype):
    """Programs are not optimized: XLA:CPU would fuse operations differently in a loop.

    A fused product and sum is rounded only once. Unwritten slots are NaN.
    """
    reference, made = MODELS[name](), []
    for scan_layers in (False, True):
        config = model_config(reference, scan_layers=scan_layers)
        params = load_ours(reference, scan_layers=scan_layers, dtype=dtype)
        model = PagedModel(config, params, compiler_options=QUICK_COMPILER)
        pieces = np.split(PROMPT, [1, 8, 21, 37])
        made += [[model.run(one, pads=16 - len(one)) for one in pieces]]
    each, scanned = map(np.concatenate, made)
    assert np.isfinite(each).all()
    np.testing.assert_array_equal(scanned, each)


@pytest.mark.parametrize(
    "name", [pytest.param("whole periods", marks=pytest.mark.slow), "gemma 3"]
)
def test_every_layers_output_is_returned(name):
    """Proposers may read the outputs of the target's layers, in any order.

    The outputs of scanned layers come first, then those of separate layers.
    """
    model, streams = MODELS[name](), []
    for scan_layers in (False, True):
        config = model_config(model, scan_layers=scan_layers)
        network = build_network(config, load_ours(model, scan_layers=scan_layers))
        run = jax.jit(
            lambda batch, pages, network=network: network.forward(batch, pages)[0],
            compiler_options=QUICK_COMPILER,
        )
        pages = init_kv_pages(config, 4, 4, jnp.float32)
        streams.append(run(FEW_TOKENS, pages).streams)
    assert len(streams[0]) == config.num_layers + 1
    for one, other in zip(*streams, strict=True):
        np.testing.assert_array_equal(one, other)
    each = [np.asarray(one) for one in streams[0]]
    assert all((one != other).any() for one, other in zip(each, each[1:], strict=False))


def made(how: str, *, scan_layers: bool, shards: int, dtype: Any) -> Any:
    config = model_config(reference(), scan_layers=scan_layers)
    options: dict[str, Any] = dict(dtype=jnp.dtype(dtype), mesh=make_mesh(shards))
    if how == "random":
        return random_params(config, seed=3, **options)
    if how == "abstract":
        return abstract_params(config, **options)
    return load_params(config, hf_tensors(reference()), **options)


@pytest.mark.parametrize(
    ("how", "shards", "dtype"),
    [
        ("loaded", 1, jnp.float32),
        ("loaded", 8, jnp.float32),
        pytest.param("loaded", 1, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("random", 1, jnp.float32, marks=pytest.mark.slow),
        pytest.param("random", 8, jnp.float32, marks=pytest.mark.slow),
        ("random", 1, jnp.bfloat16),
    ],
)
def test_stack_holds_each_layers_parameters(how, shards, dtype):
    """Entry t of stack k is layer 2 t + k, with any storage type and sharding."""
    form: dict[str, Any] = dict(shards=shards, dtype=dtype)
    each = made(how, scan_layers=False, **form)
    scanned = made(how, scan_layers=True, **form)
    assert sorted(scanned["layers"]) == ["0", "1"]
    assert forms_of(made("abstract", scan_layers=True, **form)) == forms_of(scanned)
    # Scanned or not, parameters have the same random values.
    for name in ("embedding", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, scanned[name], each[name])
    for layer in range(4):
        turn, kind = divmod(layer, 2)
        entry = jax.tree.map(
            lambda leaf, at=turn: leaf[at], scanned["layers"][str(kind)]
        )
        jax.tree.map(np.testing.assert_array_equal, entry, each["layers"][str(layer)])

    def check(stack: jax.Array, one: jax.Array) -> None:
        assert stack.shape == (2, *one.shape)
        whole, part = (leaf.addressable_shards[0].data for leaf in (stack, one))
        assert whole.shape == (2, *part.shape)

    jax.tree.map(check, scanned["layers"]["0"], each["layers"]["0"])
    jax.tree.map(check, scanned["layers"]["1"], each["layers"]["1"])
    q_proj = scanned["layers"]["0"]["attention"]["q_proj"]
    assert isinstance(q_proj, NativeMatrix | PanelMatrix) == (shards == 1)


def test_stack_is_filled_in_place():
    """Filling a stack needs no second copy, because a 27B's largest has gigabytes."""
    placement = jax.sharding.NamedSharding(make_mesh(1), jax.sharding.PartitionSpec())
    values = [np.full((3, 2), number, np.float32) for number in (1, 2)]
    parts = [jax.device_put(one, placement) for one in values]
    first = put(None, parts[0], 0, 2)
    second = put(first, parts[1], 1, 2)
    assert first.is_deleted()
    np.testing.assert_array_equal(second, np.stack(values))


@pytest.mark.parametrize(
    ("scan_layers", "shards", "num_apart"), [(False, 2, 0), (True, 2, 10), (True, 1, 0)]
)
def test_products_in_the_loop_have_barriers(scan_layers, shards, num_apart):
    """In the loop, barriers keep the five products of each layer apart.

    A period has two layers. One CPU device needs no barriers, because C++ computes its
    products.
    """
    config = model_config(reference(), scan_layers=scan_layers)
    params = made("abstract", scan_layers=scan_layers, shards=shards, dtype=jnp.float32)
    pages = init_kv_pages(config, 4, 4, jnp.float32)
    lowered = jax.make_jaxpr(
        lambda params: build_network(config, params).forward(FEW_TOKENS, pages)[0]
    )(params)
    assert str(lowered).count("optimization_barrier") == num_apart


@pytest.mark.parametrize("unit_pages", [1, 2, 5])
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("num_layers", [3, 6, 14])
def test_layers_that_share_an_array_have_pages_of_their_own(
    num_layers, scan_layers, unit_pages
):
    made = make_gemma3(num_hidden_layers=num_layers)
    config = model_config(made, scan_layers=scan_layers)
    layout = config.kv_layout(unit_pages)
    # Page ids of two units, one with a global page for each id, one with a local page.
    global_ids, local_id = range(unit_pages), unit_pages
    numbers = [*range(config.period if config.num_turns else 0)]
    numbers += range(config.num_scanned, config.num_layers)
    used = list[tuple[int, int]]()
    for number, layer in zip(numbers, layout.layers, strict=True):
        assert layer.is_local == (config.window(number) is not None)
        ids = [local_id // layer.divisor + layer.offset]
        ids = ids if layer.is_local else global_ids
        limit = 2 * layout.arrays[layer.array].pages_per_unit
        assert all(0 <= one < limit for one in ids)
        used += [(layer.array, one) for one in ids]
    assert len(used) == len(set(used))
    num_turns = [layout.arrays[layer.array].num_turns for layer in layout.layers]
    expected = [config.num_turns if one < config.num_scanned else 1 for one in numbers]
    assert num_turns == expected


def test_gemma_3_wastes_no_page_of_a_whole_period():
    config = model_config(make_gemma3(num_hidden_layers=14), scan_layers=True)
    # The loop runs both whole periods; the two layers after them are separate.
    assert config.layers_of_pools == (2, 2, 2, 2, 2, 2, 1, 1)
    layout = dataclasses.replace(config, scan_layers=False).kv_layout(5)
    # Each of the two whole periods has one array, which its global layer shares with
    # its five local layers. Each of the two local layers after them has an array of its
    # own, with one page per unit.
    assert [array.pages_per_unit for array in layout.arrays] == [5, 5, 1, 1]

"""Canonical tensors are read to the right parameters; errors name a wrong one."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.engine import ModelConfig
from jaxspec.models import weights
from jaxspec.models.cpu import NativeMatrix, PanelMatrix
from jaxspec.models.families import config_from_hf
from jaxspec.models.gemma.network import param_specs
from jaxspec.models.matrices import Matrix
from jaxspec.models.network import build_network
from jaxspec.models.weights import abstract_params, load_params, random_params
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh
from jaxspec_checkpoints import CheckpointError, in_memory
from tests.support.oracles import TINY
from tests.support.programs import READERS_COMPILER

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def make_config(**changes: Any) -> Any:
    sizes = TINY | dict(num_hidden_layers=2, model_type="gemma2") | changes
    return config_from_hf(sizes)


def make_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return tensors with distinct values.

    Their names are written out here, so that the loader's are checked.
    """
    model, hidden = config.hidden_size, config.intermediate_size
    queries = config.num_q_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, model),
        "model.norm.weight": (model,),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (model,),
            prefix + "post_attention_layernorm.weight": (model,),
            prefix + "pre_feedforward_layernorm.weight": (model,),
            prefix + "post_feedforward_layernorm.weight": (model,),
            prefix + "self_attn.q_proj.weight": (queries, model),
            prefix + "self_attn.k_proj.weight": (keys, model),
            prefix + "self_attn.v_proj.weight": (keys, model),
            prefix + "self_attn.o_proj.weight": (model, queries),
            prefix + "mlp.gate_proj.weight": (hidden, model),
            prefix + "mlp.up_proj.weight": (hidden, model),
            prefix + "mlp.down_proj.weight": (model, hidden),
        }
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def load(config: ModelConfig, tensors: dict[str, np.ndarray], **options: Any) -> Any:
    settings: dict[str, Any] = dict(dtype=FLOAT32, mesh=make_mesh(1)) | options
    return values_of(load_params(config, in_memory(tensors), **settings))


def values_of(params: Any) -> Any:
    """Return the tree with a plain array (out, in) for every matrix."""
    return jax.tree.map(
        lambda leaf: getattr(leaf, "values", leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, Matrix),
    )


def make_random(config: ModelConfig, **options: Any) -> Any:
    return values_of(random_params(config, **options))


CONFIG = make_config()
TENSORS = make_tensors(CONFIG)


def test_every_tensor_is_read_to_its_parameter():
    params = load(CONFIG, TENSORS)
    assert sorted(params) == ["embedding", "final_norm", "layers"]
    assert sorted(params["layers"]) == ["0", "1"]
    placed = set()
    for path, spec in param_specs(CONFIG).items():
        found = params
        for key in path:
            found = found[key]
        placed |= set(spec.tensors)
        if path[-1] not in ("kv_proj", "gate_up_proj"):
            np.testing.assert_array_equal(found, TENSORS[spec.tensors[0]])
    assert placed == TENSORS.keys()


def test_key_and_value_rows_alternate_by_head():
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn."
        fused = load(CONFIG, TENSORS)["layers"][str(layer)]["attention"]["kv_proj"]
        heads = np.asarray(fused).reshape(2, 2, 8, 48)  # axes: head, key or value, row
        key = TENSORS[prefix + "k_proj.weight"].reshape(2, 8, 48)
        value = TENSORS[prefix + "v_proj.weight"].reshape(2, 8, 48)
        np.testing.assert_array_equal(heads[:, 0], key)
        np.testing.assert_array_equal(heads[:, 1], value)


@pytest.mark.parametrize(("hidden", "block"), [(64, 64), (320, 64), (384, 128)])
def test_gate_and_up_rows_alternate_by_block(hidden, block):
    config = make_config(intermediate_size=hidden)
    tensors = make_tensors(config)
    fused = load(config, tensors)["layers"]["1"]["feed_forward"]["gate_up_proj"]
    blocks = np.asarray(fused).reshape(-1, 2, block, 48)
    for place, name in enumerate(("gate_proj", "up_proj")):
        expected = tensors[f"model.layers.1.mlp.{name}.weight"]
        np.testing.assert_array_equal(blocks[:, place].reshape(-1, 48), expected)


def test_order_of_the_tensors_does_not_matter():
    backwards = dict(reversed(TENSORS.items()))
    jax.tree.map(
        np.testing.assert_array_equal, load(CONFIG, backwards), load(CONFIG, TENSORS)
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.down_proj",
        "model.layers.x.mlp.down_proj.weight",
        "vision.layers.0.mlp.down_proj.weight",
        "model.embed_tokens",
    ],
)
def test_error_names_an_unknown_tensor(name):
    with pytest.raises(CheckpointError, match=f"'{name}' is not part of Gemma 2"):
        load(CONFIG, TENSORS | {name: np.zeros((2, 2), np.float32)})


@pytest.mark.parametrize("name", TENSORS)
def test_error_names_a_missing_tensor(name):
    rest = {other: tensor for other, tensor in TENSORS.items() if other != name}
    with pytest.raises(CheckpointError, match=f"no tensor '{name}'$"):
        load(CONFIG, rest)


def test_several_missing_tensors_are_counted():
    with pytest.raises(CheckpointError, match="embed_tokens.weight' and 23 more"):
        load(CONFIG, {})


@pytest.mark.parametrize("name", TENSORS)
def test_error_names_a_tensor_of_wrong_shape(name):
    tensor = TENSORS[name]
    wrong = np.concatenate([tensor, tensor[:1]])
    with pytest.raises(CheckpointError) as error:
        load(CONFIG, TENSORS | {name: wrong})
    expected = (
        f"{name!r} has shape {wrong.shape}, but config.json requires {tensor.shape}"
    )
    assert expected in str(error.value)


def test_error_names_a_tensor_of_a_surplus_layer():
    tensors = make_tensors(make_config(num_hidden_layers=3))
    expected = r"'model.layers.2..* \(num_hidden_layers=2\) does not have"
    with pytest.raises(CheckpointError, match=expected):
        load(CONFIG, tensors)


UNTIED = make_config(tie_word_embeddings=False)


def test_head_is_required_exactly_if_untied():
    """Opening drops an `lm_head` that equals the embedding; loading one is an error."""
    head = {"lm_head.weight": TENSORS["model.embed_tokens.weight"][::-1].copy()}
    with pytest.raises(CheckpointError, match="'lm_head.weight' is not part of"):
        load(CONFIG, head | TENSORS)
    with pytest.raises(CheckpointError, match="no tensor 'lm_head.weight', and conf"):
        load(UNTIED, TENSORS)
    params = load(UNTIED, head | TENSORS)
    np.testing.assert_array_equal(params["head"], head["lm_head.weight"])
    np.testing.assert_array_equal(params["embedding"], head["lm_head.weight"][::-1])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_untied_model_has_one_more_matrix_in_every_tree(scan_layers):
    config = dataclasses.replace(UNTIED, scan_layers=scan_layers)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    head = {"lm_head.weight": TENSORS["model.embed_tokens.weight"][::-1].copy()}
    options: dict[str, Any] = dict(dtype=FLOAT32, mesh=make_mesh(2))
    made = [
        load_params(config, in_memory(head | TENSORS), **options),
        random_params(config, seed=3, **options),
        abstract_params(config, **options),
    ]
    forms = [
        [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]
        for tree in made
    ]
    assert forms[0] == forms[1] == forms[2]
    assert {tree["head"].shape for tree in made} == {(96, 48)}
    # Apart from the head, random values equal the tied model's.
    random, plain = values_of(made[1]), make_random(tied, seed=3, **options)
    assert not np.array_equal(random.pop("head"), random["embedding"])
    jax.tree.map(np.testing.assert_array_equal, random, plain)


def test_untied_tree_returns_its_tensors():
    head = {"lm_head.weight": TENSORS["model.embed_tokens.weight"][::-1].copy()}
    options: dict[str, Any] = dict(dtype=FLOAT32, mesh=make_mesh(1), is_trained=True)
    params = load_params(UNTIED, in_memory(head | TENSORS), **options)
    found = weights.tensors_of(param_specs(UNTIED), params)
    assert found.keys() == {*TENSORS, "lm_head.weight"}
    np.testing.assert_array_equal(found["lm_head.weight"], head["lm_head.weight"])


@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_tensors_are_cast(source, dtype):
    tensors = {name: tensor.astype(source) for name, tensor in TENSORS.items()}
    params = load(CONFIG, tensors, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {dtype}
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(params["embedding"], expected)


def shard_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    layer = params["layers"]["1"]
    named = layer["attention"] | layer["feed_forward"] | {"all": params["embedding"]}
    named["norm"] = layer["input_norm"]
    return {name: leaf.addressable_shards[0].data.shape for name, leaf in named.items()}


WIDE = dict(num_attention_heads=8, num_key_value_heads=8, intermediate_size=1024)


@pytest.mark.parametrize("make", ["load", "random"])
@pytest.mark.parametrize(
    ("changes", "axes", "expected"),
    [
        (
            WIDE,
            {},
            dict(
                all=(12, 48),
                norm=(48,),
                q_proj=(8, 48),
                kv_proj=(16, 48),
                o_proj=(48, 8),
                gate_up_proj=(256, 48),
                down_proj=(48, 128),
            ),
        ),
        # Two KV heads cannot be split over eight devices: each device has the one that
        # its query heads read.
        (
            WIDE | dict(num_key_value_heads=2),
            {},
            dict(q_proj=(8, 48), kv_proj=(16, 48), o_proj=(48, 8)),
        ),
        # Three KV heads cannot be divided among eight devices: each device has all of
        # them.
        (
            WIDE | dict(num_attention_heads=24, num_key_value_heads=3),
            {},
            dict(q_proj=(24, 48), kv_proj=(48, 48), o_proj=(48, 24)),
        ),
        # A block of gate and up columns is never cut: with a single block, each device
        # has all of it.
        (
            WIDE | dict(intermediate_size=64),
            {},
            dict(q_proj=(8, 48), kv_proj=(16, 48), gate_up_proj=(128, 48)),
        ),
        # A draft model is split over two of eight devices, so each part has four
        # copies.
        (
            WIDE | dict(num_key_value_heads=2),
            dict(mesh_axes=DRAFT_MESH_AXES),
            dict(all=(48, 48), q_proj=(32, 48), kv_proj=(16, 48), down_proj=(48, 512)),
        ),
    ],
)
def test_parameters_are_split_over_eight_devices(make, changes, axes, expected):
    config = make_config(**changes)
    options = dict(mesh=make_mesh(8, 2)) | axes
    if make == "load":
        params = load(config, make_tensors(config), **options)
    else:
        params = make_random(config, seed=0, dtype=FLOAT32, **options)
    found = shard_shapes(params)
    assert {name: found[name] for name in expected} == expected
    for leaf in jax.tree.leaves(params):
        assert len(leaf.sharding.device_set) == 8
        whole = np.asarray(leaf)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.parametrize("make", ["load", "random"])
def test_repeated_heads_are_copies(make):
    config = make_config(**WIDE | dict(num_key_value_heads=2))
    heads = []
    for shards in (1, 8):
        mesh = make_mesh(shards)
        if make == "load":
            params = load(config, make_tensors(config), mesh=mesh)
        else:
            params = make_random(config, seed=0, dtype=FLOAT32, mesh=mesh)
        layer = params["layers"]["1"]["attention"]["kv_proj"]
        heads.append(np.asarray(layer).reshape(-1, 2 * config.head_dim, 48))
    np.testing.assert_array_equal(heads[1], np.repeat(heads[0], 4, axis=0))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_random_parameters_have_the_structure_of_loaded_ones(dtype):
    params = make_random(CONFIG, seed=3, dtype=dtype, mesh=make_mesh(1))
    options: dict[str, Any] = dict(dtype=dtype, mesh=make_mesh(1))
    loaded = load_params(CONFIG, in_memory(TENSORS), **options)
    forms = [
        [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]
        for tree in (random_params(CONFIG, seed=3, **options), loaded)
    ]
    assert forms[0] == forms[1]
    for leaf in jax.tree.leaves(params):
        values = np.asarray(leaf, np.float32)
        if leaf.ndim == 1:
            assert not values.any()
        else:  # with at least 1500 values, the standard deviation is within 10 %
            assert abs(values.std() * leaf.shape[1] ** 0.5 - 1) < 0.1


def test_seed_decides_random_parameters():
    first, again, other = (
        make_random(CONFIG, seed=seed, dtype=FLOAT32, mesh=make_mesh(1))
        for seed in (3, 3, 4)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])
    layers = first["layers"]
    assert not np.array_equal(
        layers["0"]["attention"]["q_proj"], layers["1"]["attention"]["q_proj"]
    )


def test_random_parameters_are_the_same_on_any_mesh():
    config = make_config(**WIDE)
    first, second = (
        make_random(config, seed=1, dtype=FLOAT32, mesh=mesh)
        for mesh in (make_mesh(1), make_mesh(8, 2))
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_random_parameters_need_no_extra_memory():
    make = partial(
        weights._random_matrix,
        shape=(1024, 512),
        dtype=BFLOAT16,
        stored=BFLOAT16,
        block=32,
        copies=2,
    )
    words = jnp.zeros(2, jnp.uint32)
    compiled: Any = jax.jit(make).lower(words).compile(READERS_COMPILER)
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == 2 * 1024 * 512
    assert memory.temp_size_in_bytes < 1024


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("shards", [1, 8])
def test_declaration_determines_all_parameters(shards, dtype):
    config = make_config(**WIDE | dict(num_key_value_heads=2))
    options: dict[str, Any] = dict(dtype=dtype, mesh=make_mesh(shards))
    made = [
        load_params(config, in_memory(make_tensors(config)), **options),
        random_params(config, seed=3, **options),
        abstract_params(config, **options),
    ]
    forms = [
        [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]
        for tree in made
    ]
    assert forms[0] == forms[1] == forms[2]
    assert len(set(map(jax.tree.structure, made))) == 1
    gate_up = made[2]["layers"]["0"]["feed_forward"]["gate_up_proj"]
    assert isinstance(gate_up, NativeMatrix | PanelMatrix) == (shards == 1)


def test_network_uses_the_same_arrays():
    params = load_params(CONFIG, in_memory(TENSORS), dtype=FLOAT32, mesh=make_mesh(1))
    network: Any = build_network(CONFIG, params)
    assert network.params is params
    assert network.config is CONFIG

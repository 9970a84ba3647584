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
from jaxspec.models.gemma.network import param_specs
from jaxspec.models.matrices import Matrix
from jaxspec.models.weights import load_params, random_params
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh
from jaxspec_checkpoints import CheckpointError, in_memory
from tests.support.programs import READERS_COMPILER
from tests.support.weights import (
    CONFIG,
    FLOAT32,
    TENSORS,
    check_same_forms,
    make_config,
    make_tensors,
)

BFLOAT16 = jnp.dtype(jnp.bfloat16)
UNTIED = make_config(tie_word_embeddings=False)
ZEROS = np.zeros((2, 2), np.float32)
HEAD = {"lm_head.weight": TENSORS["model.embed_tokens.weight"][::-1].copy()}
WIDE = dict(num_attention_heads=8, num_key_value_heads=8, intermediate_size=1024)


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


@pytest.mark.parametrize("name", TENSORS)
def test_error_names_a_missing_or_wrong_tensor(name):
    tensor = TENSORS[name]
    rest = {other: tensor for other, tensor in TENSORS.items() if other != name}
    with pytest.raises(CheckpointError, match=f"no tensor '{name}': it is incomplete"):
        load(CONFIG, rest)
    wrong = np.concatenate([tensor, tensor[:1]])
    with pytest.raises(CheckpointError) as error:
        load(CONFIG, TENSORS | {name: wrong})
    expected = (
        f"{name!r} has shape {wrong.shape}, but config.json requires {tensor.shape}"
    )
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (CONFIG, {}, "embed_tokens.weight' and 23 more"),
        (
            CONFIG,
            make_tensors(make_config(num_hidden_layers=3)),
            r"'model.layers.2..* \(num_hidden_layers=2\) does not have",
        ),
        (UNTIED, TENSORS, "no tensor 'lm_head.weight', and conf"),
        *(
            (CONFIG, TENSORS | {name: ZEROS}, f"'{name}' is not part of Gemma 2")
            for name in (
                "model.layers.0.self_attn.rotary_emb.inv_freq",
                "model.layers.0.self_attn.q_proj.bias",
                "model.layers.0.mlp.down_proj",
                "model.layers.x.mlp.down_proj.weight",
                "vision.layers.0.mlp.down_proj.weight",
                "model.embed_tokens",
                "lm_head.weight",  # opening drops one that equals the embedding
            )
        ),
    ],
)
def test_missing_or_unknown_tensors_are_an_error(config, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        load(config, tensors)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_untied_model_has_one_more_matrix_in_every_tree(scan_layers):
    config = dataclasses.replace(UNTIED, scan_layers=scan_layers)
    made = check_same_forms(config, HEAD | TENSORS, mesh=make_mesh(2))
    assert {tree["head"].shape for tree in made} == {(96, 48)}
    # Apart from the head, random values equal the tied model's.
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    options: dict[str, Any] = dict(dtype=FLOAT32, mesh=make_mesh(2))
    random, plain = values_of(made[1]), make_random(tied, seed=3, **options)
    assert not np.array_equal(random.pop("head"), random["embedding"])
    jax.tree.map(np.testing.assert_array_equal, random, plain)


def test_untied_head_is_read_and_returned():
    options: dict[str, Any] = dict(dtype=FLOAT32, mesh=make_mesh(1), is_trained=True)
    params = load_params(UNTIED, in_memory(HEAD | TENSORS), **options)
    head = HEAD["lm_head.weight"]
    np.testing.assert_array_equal(values_of(params)["head"], head)
    np.testing.assert_array_equal(values_of(params)["embedding"], head[::-1])
    found = weights.tensors_of(param_specs(UNTIED), params)
    assert found.keys() == {*TENSORS, "lm_head.weight"}
    np.testing.assert_array_equal(found["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("changes", "axes", "expected"),
    [
        (
            WIDE,
            {},
            dict(all=(12, 48), norm=(48,), q_proj=(8, 48), kv_proj=(16, 48))
            | dict(o_proj=(48, 8), gate_up_proj=(256, 48), down_proj=(48, 128)),
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
def test_parameters_are_split_over_eight_devices(changes, axes, expected):
    config = make_config(**changes)
    options = dict(mesh=make_mesh(8, 2)) | axes
    tensors = make_tensors(config)
    params = values_of(check_same_forms(config, tensors, **options)[0])
    layer = params["layers"]["1"]
    named = layer["attention"] | layer["feed_forward"]
    named |= {"all": params["embedding"], "norm": layer["input_norm"]}
    for name, shape in expected.items():
        assert named[name].addressable_shards[0].data.shape == shape
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
        if make == "load":
            params = load(config, make_tensors(config), mesh=make_mesh(shards))
        else:
            options: Any = dict(dtype=FLOAT32, mesh=make_mesh(shards))
            params = make_random(config, seed=0, **options)
        layer = params["layers"]["1"]["attention"]["kv_proj"]
        heads.append(np.asarray(layer).reshape(-1, 2 * config.head_dim, 48))
    np.testing.assert_array_equal(heads[1], np.repeat(heads[0], 4, axis=0))


def test_seed_decides_random_parameters_on_any_mesh():
    config = make_config(**WIDE)
    first, again, other = (
        make_random(config, seed=seed, dtype=FLOAT32, mesh=mesh)
        for seed, mesh in ((3, make_mesh(1)), (3, make_mesh(8, 2)), (4, make_mesh(1)))
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])
    one, two = (first["layers"][layer]["attention"]["q_proj"] for layer in "01")
    assert not np.array_equal(one, two)


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
    _, random, abstract = check_same_forms(config, make_tensors(config), **options)
    for leaf in jax.tree.leaves(values_of(random)):
        values = np.asarray(leaf, np.float32)
        if leaf.ndim == 1:
            assert not values.any()
        else:  # with at least 1500 values, the standard deviation is within 10 %
            assert abs(values.std() * leaf.shape[1] ** 0.5 - 1) < 0.1
    gate_up = abstract["layers"]["0"]["feed_forward"]["gate_up_proj"]
    assert isinstance(gate_up, NativeMatrix | PanelMatrix) == (shards == 1)

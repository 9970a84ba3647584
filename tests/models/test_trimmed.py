"""A trimmed head has the whole head's logits for kept tokens, and no others."""

import dataclasses
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import families
from jaxspec.models.network import build_network
from jaxspec.models.trimmed import LOWEST, TOKEN_IDS, to_target_vocab
from jaxspec.models.weights import abstract_params, load_params, random_params
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh
from jaxspec_checkpoints import Sizes, in_memory, tensor_shapes
from jaxspec_checkpoints.layout import EMBEDDING, HEAD
from jaxspec_checkpoints.quantization import Scheme, named_scheme, quantized
from jaxspec_kernels import native
from tests.models import llama
from tests.support.oracles import forms_of
from tests.support.weights import CONFIG, TENSORS, make_config

# Token ids of 96 to keep: neither the first ones nor contiguous, and divisible over two
# devices.
KEPT = (0, 1, 2, 7, 31, 32, 50, 51, 64, 93, 94, 95)
TRIMMED = dataclasses.replace(CONFIG, draft_vocab_size=len(KEPT))


GROUPED = dict(hidden_size=128, num_attention_heads=16, intermediate_size=128)


def test_removed_tokens_have_probability_zero():
    params = {TOKEN_IDS: jnp.array([1, 4], jnp.int32)}
    found = to_target_vocab(params, jnp.array([[0.5, 2.0]]), 5)
    np.testing.assert_array_equal(found, [[LOWEST, 0.5, LOWEST, LOWEST, 2.0]])
    distribution = jax.nn.softmax(found / 1e4)
    np.testing.assert_array_equal(distribution[0, jnp.array([0, 2, 3])], 0)
    whole = jnp.ones((1, 5))
    assert to_target_vocab({}, whole, 5) is whole


def logits_of(config: Any, tensors: Any, **options: Any) -> np.ndarray:
    params = load_params(config, tensors, **(OPTIONS | options))
    rows = np.random.default_rng(1).normal(size=(6, config.hidden_size))
    network = build_network(config, params)
    return np.asarray(network.logits(jnp.asarray(rows, jnp.float32)))


def check_equal(whole: Any, tensors: Any, **options: Any) -> None:
    trimmed = dataclasses.replace(whole, draft_vocab_size=len(KEPT))
    expected = logits_of(whole, tensors, **options)
    found = logits_of(trimmed, tensors, token_ids=KEPT, **options)
    np.testing.assert_allclose(found[:, KEPT], expected[:, KEPT], atol=1e-5)
    assert (np.delete(found, KEPT, axis=1) == LOWEST).all()


def check_kept_logits() -> None:
    check_equal(CONFIG, in_memory(TENSORS))


OPTIONS: dict[str, Any] = dict(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1))


@pytest.mark.parametrize("kind", [None, "int8"])
def test_untied_head_is_trimmed_and_quantized(kind):
    """The head keeps only some rows; the untied embedding remains whole."""
    config = make_config(tie_word_embeddings=False)
    head = np.random.default_rng(5).normal(size=TENSORS[EMBEDDING].shape)
    tensors = in_memory(TENSORS | {HEAD: head.astype(np.float32)})
    if kind is not None:
        scheme = named_scheme(kind, has_embedding=True)
        config = dataclasses.replace(config, quantization=scheme)
    check_equal(config, tensors)
    rows = np.random.default_rng(1).normal(size=(6, config.hidden_size))
    expected = np.tanh(rows @ head.T / 3) * 3
    # Allowed error of int8 rows of 48 values; with a wrong matrix it would exceed 3.
    atol = 1e-5 if kind is None else 0.3
    np.testing.assert_allclose(logits_of(config, tensors), expected, atol=atol)
    params = load_params(config, tensors, **OPTIONS)
    assert params["head"].dtype == params["embedding"].dtype
    trimmed = dataclasses.replace(config, draft_vocab_size=len(KEPT))
    params = load_params(trimmed, tensors, token_ids=KEPT, **OPTIONS)
    assert params["head"].shape[0] == len(KEPT)
    assert params["embedding"].shape[0] == config.vocab_size


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_differently_quantized_head_is_dequantized(kind):
    """Files of compressed-tensors, AWQ and GPTQ may have a quantized head.

    Its scheme differs from the requested one, so it is dequantized.
    """
    config = make_config(**GROUPED, tie_word_embeddings=False)
    arrays = random_tensors(config, tensor_shapes)
    plain = in_memory({HEAD: arrays[EMBEDDING][::-1].copy()})[HEAD]
    stored = quantized(plain, Scheme(kind=kind, group_size=32))
    tensors = in_memory(arrays) | {HEAD: stored}
    expected = logits_of(config, in_memory(arrays | {HEAD: stored.whole()}))
    np.testing.assert_allclose(logits_of(config, tensors), expected, atol=1e-4)
    scheme = named_scheme("int8", has_embedding=True)
    config = dataclasses.replace(config, quantization=scheme)
    np.testing.assert_allclose(logits_of(config, tensors), expected, atol=0.3)


@pytest.mark.parametrize("kind", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("has_operations", [True, False])
def test_kept_logits_equal_the_whole_heads(kind, has_operations, monkeypatch):
    """Logits of kept tokens are equal for all storage layouts of the matrices."""
    if not has_operations:
        monkeypatch.setenv(native.VARIABLE, native.OFF)
    if kind is None:
        check_kept_logits()
        return
    # Groups of int4 have 128 features, so the model is wider.
    config = make_config(**GROUPED)
    scheme = named_scheme(kind, has_embedding=True)
    tensors = random_tensors(config, tensor_shapes)
    config = dataclasses.replace(config, quantization=scheme)
    check_equal(config, in_memory(tensors))
    if kind == "int8":
        read = in_memory(TENSORS)
        read[EMBEDDING] = quantized(read[EMBEDDING], named_scheme("int8"))
        check_equal(dataclasses.replace(CONFIG, quantization=scheme), read)


def random_tensors(config: Any, shapes_of: Any) -> Any:
    sizes = Sizes(**{one.name: getattr(config, one.name) for one in fields(Sizes)})
    random = np.random.default_rng(2)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes_of(sizes).items()
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_trimmed_head_is_split_over_devices(dtype):
    options: dict[str, Any] = dict(dtype=jnp.dtype(dtype), mesh=make_mesh(8, 2))
    options |= dict(mesh_axes=DRAFT_MESH_AXES)
    check_equal(CONFIG, in_memory(TENSORS), **options)
    params = load_params(TRIMMED, in_memory(TENSORS), token_ids=KEPT, **options)
    shards = params["head"].values.addressable_shards
    assert {one.data.shape for one in shards} == {(len(KEPT) // 2, CONFIG.hidden_size)}


def test_untied_head_is_trimmed_in_place(monkeypatch):
    """Trimming replaces the head's rows; the embedding still has all input tokens."""
    monkeypatch.setitem(families.FAMILIES, "llama", llama.FAMILY)
    sizes: Any = {
        item.name: getattr(CONFIG, item.name)
        for item in fields(llama.LlamaConfig)
        if hasattr(CONFIG, item.name)
    }
    config = llama.LlamaConfig(**sizes)
    check_equal(config, in_memory(random_tensors(config, llama.tensor_shapes)))


def test_loaded_random_and_abstract_parameters_match():
    loaded = load_params(TRIMMED, in_memory(TENSORS), token_ids=KEPT, **OPTIONS)
    random = random_params(TRIMMED, seed=3, token_ids=KEPT, **OPTIONS)
    abstract = abstract_params(TRIMMED, **OPTIONS)
    assert forms_of(loaded) == forms_of(random) == forms_of(abstract)
    # Except for the head, the parameters equal those of the whole model.
    for name in ("head", TOKEN_IDS):
        del random[name]
    whole = random_params(CONFIG, seed=3, **OPTIONS)
    jax.tree.map(np.testing.assert_array_equal, random, whole)

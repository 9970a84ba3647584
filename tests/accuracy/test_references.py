"""The same weights give the same logits as in the two reference programs.

HuggingFace's eager float32 model and google-deepmind's own network, for scaled-down
2B, 9B and 27B, from every format that weights come in.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import Params, load_params
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints import (
    Checkpoint,
    Sizes,
    bundled_target,
    open_checkpoint,
)
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes
from jaxspec_checkpoints.gemma.published import (
    GEMMA2,
    PAD_ROWS,
    published_config,
)
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.flax_trees import flax_leaves, nested
from tests.checkpoints.models import FAMILIES
from tests.support.oracles import (
    PagedModel,
    hf_logits,
    load_ours,
    make_hf_model,
    model_config,
)

SIZES = tuple(FAMILIES)
# Three layers (local, global, local), with caps and a window so small that they affect
# every test.
CHANGES: dict[str, Any] = dict(
    vocab_size=160,
    num_hidden_layers=3,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=8,
)
# hidden_size / num_attention_heads must be an integer, as in the published 27B: the
# gemma library rounds it down.
SIZE_CHANGES: dict[str, dict[str, int]] = {
    "2b": {},
    "9b": {},
    "27b": dict(hidden_size=160, intermediate_size=1280),
}
INSTALL = "pip install --no-deps -r tests/accuracy/gemma_requirements.txt"
CLASSES = {"2b": "Gemma2_2B", "9b": "Gemma2_9B", "27b": "Gemma2_27B"}
TOLERANCE = 1e-4
# The window is 8: most queries of a local layer do not see the first tokens.
TOKENS = np.random.default_rng(1).integers(3, 160, 60)


@functools.cache
def reference(size: str) -> Any:
    """Return a random model whose text does not repeat itself.

    With tied embeddings a random model repeats its last token, even with keys at wrong
    positions. Layers with large outputs and random signs in the final norm prevent
    that.
    """
    model = make_hf_model(seed=6, **FAMILIES[size] | CHANGES | SIZE_CHANGES[size])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.add_(2)
            layer.post_feedforward_layernorm.weight.add_(2)
        weight = model.model.norm.weight
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        # Gemma's norms scale by 1 + weight.
        weight.copy_(2 * signs * (1 + weight) - 1)
    return model


def _write_shards(model: Any, size: str, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def _convert(to: str, model: Any, size: str, folder: Path) -> None:
    source = folder.with_name(f"{folder.name}-source")
    model.save_pretrained(source)
    write_checkpoint(open_checkpoint(source), folder, to=to, progress=False)


@functools.cache
def published_networks() -> dict[str, Any]:
    """Return the network classes of 2B, 9B and 27B; each class has its `config`.

    Skips the calling test where the library is not installed.
    """
    if importlib.util.find_spec("gemma") is None:
        pytest.skip(f"google-deepmind's gemma library is not installed: {INSTALL}")
    with _stand_ins():
        nn = importlib.import_module("gemma.gm.nn")
        # The library imports a module when its attribute is first used, so use them
        # while the stand-ins are installed.
        kauldron = importlib.import_module("kauldron.kd")
        assert kauldron.nn.Identity
        assert kauldron.sharding
        return {size: getattr(nn, name) for size, name in CLASSES.items()}


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Import the network without unused dependencies.

    Two imports would need TensorFlow: `kauldron.typing` names its tensors in
    annotations, and `gemma.gm.ckpts` reads checkpoints with a class that newer versions
    of kauldron do not have. The network uses only a list of paths from the latter.
    """
    tensorflow: Any = types.ModuleType("tensorflow")
    tensorflow.Tensor = type("Tensor", (), {})
    spec = importlib.util.find_spec("gemma.gm")
    assert spec is not None
    checkpoints = types.ModuleType("gemma.gm.ckpts")
    folders = spec.submodule_search_locations or []
    checkpoints.__path__ = [str(Path(folder, "ckpts")) for folder in folders]
    with pytest.MonkeyPatch.context() as patch:
        for module in (tensorflow, checkpoints):
            patch.setitem(sys.modules, module.__name__, module)
        yield


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Relax jax's strict settings of our tests, which the library violates."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision("highest"),
    ):
        yield


def make_network(size: str, config: Mapping[str, Any], **changes: Any) -> Any:
    """Scale a published network down to the sizes of a `config.json`.

    Properties that `config.json` does not contain are kept as published: the
    orientation of `gating_einsum`, and the scale of queries.

    Args:
        changes: Fields of the library's own config, which override the sizes.
    """
    network = published_networks()[size]
    published = network.config
    fields = dict(
        num_embed=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        attention_types=published.attention_types[: config["num_hidden_layers"]],
        attn_logits_soft_cap=config["attn_logit_softcapping"],
        final_logit_softcap=config["final_logit_softcapping"],
        sliding_window_size=config["sliding_window"],
    )
    scaled = dataclasses.replace(published, **(fields | changes))
    return network(config=scaled, dtype=jnp.float32)


def to_tree(model: Any, size: str, **options: Any) -> dict[str, Any]:
    """Return a model's weights as the gemma library's parameters."""
    tensors = {name: value.detach().numpy() for name, value in model.named_parameters()}
    config, options = model.config.to_dict(), options | {"is_model_first": size == "2b"}
    return nested(flax_leaves(tensors, config, **options))


def _write_nested(model: Any, size: str, folder: Path) -> None:
    """Save the gemma library's own parameters with Orbax, without our writer.

    Rows past the vocabulary must not matter, so they are NaN.
    """
    model.config.save_pretrained(folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / f"gemma2-{size}", to_tree(model, size))


WRITERS: dict[str, Callable[[Any, str, Path], None]] = {
    "hf": lambda model, size, folder: model.save_pretrained(folder),
    "hf_shards": _write_shards,
    "kaggle_flat": functools.partial(_convert, "kaggle"),
    "kaggle_nested": _write_nested,
    "orbax": functools.partial(_convert, "orbax"),
}


def write(model: Any, size: str, folder: Path, *, kind: str) -> Path:
    """Write a model and a tokenizer with one of `WRITERS`; return `folder`."""
    WRITERS[kind](model, size, folder)
    shutil.copyfile(bundled_target() / "tokenizer.model", folder / "tokenizer.model")
    return folder


@functools.cache
def our_model(size: str) -> PagedModel:
    """Return the model of a published size, compiled once.

    `our_logits` changes its parameters.
    """
    model = reference(size)
    return PagedModel(model_config(model), load_ours(model))


def our_logits(size: str, params: Params) -> np.ndarray:
    ours = our_model(size)
    ours.params, ours.length = params, 0
    ours.kv_pages = tuple(jnp.full_like(layer, jnp.nan) for layer in ours.kv_pages)
    return ours.run(TOKENS)


def load(checkpoint: Checkpoint) -> Params:
    config = config_from_hf(checkpoint.config, checkpoint.generation_config)
    return load_params(
        config, checkpoint.tensors, dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )


@functools.cache
def expected_logits(size: str) -> np.ndarray:
    return hf_logits(reference(size), TOKENS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", WRITERS)
def test_logits_equal_huggingface(kind, size, tmp_path):
    model = reference(size)
    folder = write(model, size, tmp_path / "model", kind=kind)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == kind.partition("_")[0]
    ours = our_logits(size, load(checkpoint))
    assert np.abs(ours - expected_logits(size)).max() <= TOLERANCE


def library_logits(size: str, **changes: Any) -> np.ndarray:
    """Return the logits of the gemma library, with changes of its own config."""
    model = reference(size)
    network = make_network(size, model.config.to_dict(), **changes)
    tree = to_tree(model, size, pad_rows=0)
    with own_rules():
        rows = jnp.asarray(TOKENS, jnp.int32)[None]
        return np.asarray(network.apply({"params": tree}, rows).logits[0])


@pytest.mark.parametrize(
    "size", ["2b", *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])]
)
def test_logits_equal_the_gemma_library(size):
    theirs = library_logits(size)
    ours = our_logits(size, load_ours(reference(size)))
    assert np.abs(ours - theirs).max() <= TOLERANCE
    assert np.abs(expected_logits(size) - theirs).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_feature_has_an_effect_in_the_gemma_library(size):
    """Without this, the comparison above would prove nothing about a feature."""
    config = published_networks()[size].config
    # The other scale of queries: in the scaled-down 2B 8 becomes 9.
    ways = type(config.query_pre_attn_norm)
    other = {
        "2b": ways.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        "9b": ways.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        "27b": ways.BY_ONE_OVER_SQRT_HEAD_DIM,
    }
    kinds = config.attention_types[: CHANGES["num_hidden_layers"]]
    changes: list[dict[str, Any]] = [
        dict(attn_logits_soft_cap=None),
        dict(final_logit_softcap=None),
        dict(sliding_window_size=9),
        dict(query_pre_attn_norm=other[size]),
        dict(attention_types=kinds[1:] + kinds[:1]),
    ]
    base = library_logits(size)
    for change in changes:
        difference = np.abs(library_logits(size, **change) - base).max()
        assert difference > 100 * TOLERANCE, change


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_match_the_gemma_library(size):
    """Compare the names and shapes of all parameters, and sizes without a shape."""
    network = published_networks()[size]
    config = published_config(size)
    model = config_from_hf(config)
    theirs = network.config
    assert theirs.query_pre_attn_scalar() == model.query_pre_attn_scalar**-0.5
    assert theirs.attn_logits_soft_cap == model.attn_logit_softcapping
    assert theirs.final_logit_softcap == model.final_logit_softcapping
    assert theirs.sliding_window_size == model.sliding_window
    assert theirs.local_base_frequency == model.rope_theta
    assert theirs.global_base_frequency == model.rope_theta
    windows = [model.window(layer) is not None for layer in range(model.num_layers)]
    local = [kind.name == "LOCAL_SLIDING" for kind in theirs.attention_types]
    assert local == windows

    sizes = Sizes.from_config(config)
    expected = leaf_shapes(
        sizes,
        num_rows=sizes.vocab_size + PAD_ROWS,
        is_model_first=GEMMA2.is_model_first(sizes),
    )
    with own_rules():
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        made = network(config=theirs, dtype=jnp.bfloat16)
        tree = jax.eval_shape(made.init, jax.random.key(0), tokens)["params"]
    assert expected == {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }

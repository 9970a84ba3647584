"""google-deepmind's `gemma` library as an oracle: its networks with our weights.

The mapping to its parameters is implemented here a second time, on purpose: the tests
check the one in `jaxspec_checkpoints`.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

INSTALL = "pip install --no-deps -r tests/accuracy/gemma_requirements.txt"
CLASSES = {"2b": "Gemma2_2B", "9b": "Gemma2_9B", "27b": "Gemma2_27B"}


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


def logits(network: Any, tree: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of every position of one sequence, `[token, vocab]`."""
    with own_rules():
        rows = jnp.asarray(tokens, jnp.int32)[None]
        return np.asarray(network.apply({"params": tree}, rows).logits[0])


def shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its path; nothing is allocated."""
    with own_rules():
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        tree = jax.eval_shape(network.init, jax.random.key(0), tokens)["params"]
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in flat
    }


def to_tree(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], size: str
) -> dict[str, Any]:
    """Return canonical tensors as the library's parameters, in its nested form."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tree: dict[str, Any] = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for number in range(config["num_hidden_layers"]):
        part = functools.partial(_part, tensors, number)
        gating = np.stack([part("mlp.gate_proj"), part("mlp.up_proj")])
        keys, values = part("self_attn.k_proj"), part("self_attn.v_proj")
        tree[f"layer_{number}"] = {
            "attn": {
                "q_einsum": {"w": _heads(part("self_attn.q_proj"), heads)},
                "kv_einsum": {
                    "w": np.stack([_heads(keys, kv_heads), _heads(values, kv_heads)])
                },
                # The transpose groups the rows of a head: (head x dim, model).
                "attn_vec_einsum": {
                    "w": np.stack(np.split(part("self_attn.o_proj").T, heads))
                },
            },
            "mlp": {
                "gating_einsum": gating.swapaxes(1, 2) if size == "2b" else gating,
                "linear": part("mlp.down_proj").T,
            },
            "pre_attention_norm": {"scale": part("input_layernorm")},
            "post_attention_norm": {"scale": part("post_attention_layernorm")},
            "pre_ffw_norm": {"scale": part("pre_feedforward_layernorm")},
            "post_ffw_norm": {"scale": part("post_feedforward_layernorm")},
        }
    return tree


def _part(tensors: Mapping[str, np.ndarray], number: int, name: str) -> np.ndarray:
    return tensors[f"model.layers.{number}.{name}.weight"]


def _heads(projection: np.ndarray, num_heads: int) -> np.ndarray:
    """Split a (head x dim, model) matrix into one (model, dim) matrix per head."""
    return np.stack([head.T for head in np.split(projection, num_heads)])

"""The EAGLE-3 head: one decoder layer over a token's embedding and fused hidden states.

The inputs of a row are a token and the target's hidden states at the token before it,
from three layers, fused to the head's width. At tokens that the target has not read
yet, the layer's own output replaces the target's hidden states. Its keys and values are
in pages like those of any layer, at the slot of the row.

The layer is Llama's (SiLU, no caps, no post-norms) for any target: other engines train
and run it like this. The library speculators also has Qwen3's, which normalizes queries
and keys. References: Li et al. 2025, arXiv:2503.01840.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads.config import (
    NUM_TARGET_LAYERS,
    Eagle3Config,
    LayerConfig,
)
from jaxspec.models.layers import (
    attend,
    feed_forward_block,
    gate_block,
    normalise,
    rope_tables,
)
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import ParamPath, Params, ParamSpec, Specs
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import SILU, Norm

# Norms other than the one between attention and the feed-forward block.
_VECTORS = {
    ("layer", "hidden_norm"): "layers.0.hidden_norm",
    ("layer", "input_norm"): "layers.0.input_layernorm",
    ("norm",): "norm",
}


def param_specs(config: Eagle3Config) -> Specs:
    """Declare every parameter: shape, logical axes, split unit, tensors."""
    model, fused = config.hidden_size, NUM_TARGET_LAYERS * config.target_hidden_size
    specs: Specs = {
        ("fc",): matrix_spec(model, fused, ("model", "model"), "fc"),
        # The layer's input is embedding and hidden state, concatenated.
        **layer_specs(config, 2 * model),
    }
    if config.has_lm_head:
        specs["lm_head",] = matrix_spec(
            config.draft_vocab_size, model, ("vocab", "model"), "lm_head"
        )
    for path, name in _VECTORS.items():
        tensors = (f"{name}.weight",)
        specs[path] = ParamSpec(shape=(model,), axes=("model",), tensors=tensors)
    return specs


def layer_specs(
    config: LayerConfig, width: int, *, path: ParamPath = ("layer",), number: int = 0
) -> Specs:
    """Declare a decoder layer, and the head's token embedding if it has one.

    Args:
        width: Width of the rows that attention reads.
        path: The layer's place in the tree.
        number: The layer's number in the file.
    """
    model, hidden, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_q_heads * head, config.num_kv_heads * head
    attention, mlp = (*path, "attention"), (*path, "feed_forward")
    at = f"layers.{number}."
    q, k, v, o = (f"{at}self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"{at}mlp.{name}_proj" for name in ("gate", "up", "down"))
    blocks = 2 * gate_block(hidden)
    specs: Specs = {
        (*attention, "q_proj"): matrix_spec(
            queries, width, ("q_head", "model"), q, unit=head
        ),
        (*attention, "kv_proj"): matrix_spec(
            2 * keys, width, ("kv_head", "model"), k, v, unit=2 * head
        ),
        (*attention, "o_proj"): matrix_spec(
            model, queries, ("model", "q_head"), o, unit=head
        ),
        (*mlp, "gate_up_proj"): matrix_spec(
            2 * hidden, model, ("hidden", "model"), gate, up, unit=blocks
        ),
        (*mlp, "down_proj"): matrix_spec(model, hidden, ("model", "hidden"), down),
        (*path, "post_attention_norm"): ParamSpec(
            shape=(model,),
            axes=("model",),
            tensors=(f"{at}post_attention_layernorm.weight",),
        ),
    }
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            tensors = (f"{at}self_attn.{name}.weight",)
            specs[*path, name] = ParamSpec(shape=(head,), axes=(None,), tensors=tensors)
    if config.has_embedding:
        specs["embedding",] = matrix_spec(
            config.vocab_size, model, ("vocab", "model"), "embed_tokens"
        )
    return specs


def matrix_spec(
    rows: int, columns: int, axes: tuple[str, str], *names: str, unit: int = 1
) -> ParamSpec:
    """Declare a matrix made of the tensors with these names, stacked by rows."""
    tensors = tuple(f"{name}.weight" for name in names)
    return ParamSpec(shape=(rows, columns), axes=axes, unit=unit, tensors=tensors)


def fuse(
    config: Eagle3Config,
    params: Params,
    streams: Sequence[Float[Array, "row target_model"]],
) -> Float[Array, "row model"]:
    """Fuse the target's residual streams at the chosen layers, the lowest first."""
    assert len(streams) == NUM_TARGET_LAYERS
    return params["fc"].multiply(jnp.concatenate(streams, axis=-1))


def embed(
    params: Params, tokens: Int[Array, " row"], target: Matrix
) -> Float[Array, "row model"]:
    """Return rows of the head's embedding, or of the target's if it has none.

    The rows are not multiplied by Gemma's scale, which the layer's norm would cancel.
    """
    return params.get("embedding", target).rows(tokens)


def forward(
    config: Eagle3Config,
    params: Params,
    batch: TokenBatch,
    embedded: Float[Array, "row model"],
    hidden: Float[Array, "row model"],
    kv_pages: KvPages,
    backend: Backend,
) -> tuple[Float[Array, "row model"], KvPages]:
    """Run the layer; return its output, which is the next pass's `hidden`, and pages.

    Args:
        batch: `tokens` is not read: `embedded` replaces it.
        hidden: At the token before, fused or from an earlier pass.
    """
    layer_params = params["layer"]
    norm = functools.partial(Norm, epsilon=config.rms_norm_eps)
    normed = normalise(norm(layer_params["hidden_norm"]), hidden)
    rows = jnp.concatenate(
        [normalise(norm(layer_params["input_norm"]), embedded), normed], axis=-1
    )
    mixed, kv_pages = attend(
        layer_params["attention"],
        rows,
        kv_pages,
        batch=batch,
        tables=rope_tables(batch.positions, config.head_dim, config.rope_theta),
        num_q_heads=config.num_q_heads,
        q_norm=norm(layer_params["q_norm"]) if config.has_qk_norm else None,
        k_norm=norm(layer_params["k_norm"]) if config.has_qk_norm else None,
        scale=config.head_dim**-0.5,
        backend=backend,
    )
    stream = (normed if config.norm_before_residual else hidden) + mixed
    stream = feed_forward_block(
        layer_params["feed_forward"],
        stream,
        before=norm(layer_params["post_attention_norm"]),
        after=None,
        activation=SILU,
        backend=backend,
    )
    return stream, kv_pages


def logits(
    config: Eagle3Config,
    params: Params,
    hidden: Float[Array, "row model"],
    target: Matrix | None = None,
) -> Float[Array, "row draft_vocab"]:
    """Return logits of the layer's output, over the head's own vocabulary.

    Args:
        target: The target's output matrix, for a head that has none.
    """
    normed = normalise(Norm(params["norm"], config.rms_norm_eps), hidden)
    matrix = params["lm_head"] if config.has_lm_head else target
    assert matrix is not None, "the target's output matrix is missing"
    return matrix.multiply(normed)

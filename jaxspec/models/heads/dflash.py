"""The DFlash drafter: a few layers that fill in a block of masks in one pass.

A block is the newest token, and a mask token in the place of each draft. Its rows see
each other in both directions, and the text before the block. The rows do not see the
text's tokens. Each layer computes keys and values at those positions from the target's
hidden states, fused to the drafter's width (`write_context`). The row of a mask
predicts the token at the mask's position.

The layers are Qwen3's (SiLU, queries and keys normalized, no post-norms) for any
target. Layers with a sliding window see only earlier rows of the block. References:
Chen et al. 2026, arXiv:2602.06036.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models import cpu
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads.config import DFlashConfig
from jaxspec.models.heads.eagle3 import layer_specs, matrix_spec
from jaxspec.models.layers import (
    attend,
    feed_forward_block,
    normalise,
    rope_tables,
    write_keys_and_values,
)
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import ParamPath, Params, ParamSpec, Specs
from jaxspec_kernels.bits import KvPools
from jaxspec_kernels.decoder_blocks import SILU, Norm


def param_specs(config: DFlashConfig) -> Specs:
    """Declare every parameter: shape, logical axes, split unit, tensors."""
    model = config.hidden_size
    fused = len(config.target_layers) * config.target_hidden_size
    specs: Specs = {("fc",): matrix_spec(model, fused, ("model", "model"), "fc")}
    vectors: dict[ParamPath, str] = {
        ("hidden_norm",): "hidden_norm",
        ("norm",): "norm",
    }
    for number in range(config.num_layers):
        path = "layers", str(number)
        specs |= layer_specs(config, model, path=path, number=number)
        vectors[*path, "input_norm"] = f"layers.{number}.input_layernorm"
    for path, name in vectors.items():
        tensors = (f"{name}.weight",)
        specs[path] = ParamSpec(shape=(model,), axes=("model",), tensors=tensors)
    if config.has_lm_head:
        specs["lm_head",] = matrix_spec(
            config.draft_vocab_size, model, ("vocab", "model"), "lm_head"
        )
    return specs


def embed(
    config: DFlashConfig, params: Params, tokens: Int[Array, " row"], target: Matrix
) -> Float[Array, "row model"]:
    """Return rows of the drafter's embedding, or of the target's if it has none.

    Like other engines, this does not multiply the rows by Gemma's scale.
    """
    rows = params.get("embedding", target).rows(tokens)
    return rows.astype(jnp.float32) * config.embedding_scale


def write_context(
    config: DFlashConfig,
    params: Params,
    streams: Sequence[Float[Array, "row target_model"]],
    positions: Int[Array, " row"],
    slot_mapping: Int[Array, " row"],
    kv_pages: KvPools,
    backend: Backend,
) -> KvPools:
    """Write all layers' keys and values of known tokens; return the pages.

    Args:
        streams: The target's residual streams at the tokens, the lowest layer's first.
    """
    norm = functools.partial(Norm, epsilon=config.rms_norm_eps)
    joined = cpu.pad_rows(jnp.concatenate(streams, axis=-1))
    positions = cpu.pad_rows(positions)
    num_slots = kv_pages[0].shape[0] * kv_pages[0].shape[1]
    pads = 0, len(positions) - len(slot_mapping)
    slot_mapping = jnp.pad(slot_mapping, pads, constant_values=num_slots)
    fused = params["fc"].multiply(joined)
    rows = normalise(norm(params["hidden_norm"]), fused)
    tables = rope_tables(positions, config.head_dim, config.rope_theta)
    return tuple(
        write_keys_and_values(
            layer["attention"],
            rows,
            pages,
            slot_mapping=slot_mapping,
            tables=tables,
            num_q_heads=config.num_q_heads,
            k_norm=norm(layer["k_norm"]),
            backend=backend,
        )
        for layer, pages in zip(_layers(config, params), kv_pages, strict=True)
    )


def forward(
    config: DFlashConfig,
    params: Params,
    batch: TokenBatch,
    embedded: Float[Array, "row model"],
    kv_pages: KvPools,
    backend: Backend,
) -> tuple[Float[Array, "row model"], KvPools]:
    """Run all layers over blocks; return their normalized output, and the pages.

    A row sees the rows of its block whose keys are written: a block may end early.

    Args:
        batch: One region of blocks. `tokens` is not read: `embedded` replaces it.
    """
    (region,) = batch.regions
    num_slots = kv_pages[0].shape[0] * kv_pages[0].shape[1]
    seqs, width = region.kv_len.shape[0], region.num_queries
    is_written = batch.slot_mapping[: seqs * width].reshape(seqs, 1, width) < num_slots
    mask = jnp.broadcast_to(is_written, (seqs, width, width))
    block = replace(batch, regions=(replace(region, ancestor_mask=mask),))
    norm = functools.partial(Norm, epsilon=config.rms_norm_eps)
    tables = rope_tables(batch.positions, config.head_dim, config.rope_theta)
    stream, updated = embedded, []
    for layer, pages, window in zip(
        _layers(config, params), kv_pages, config.windows, strict=True
    ):
        mixed, pages = attend(
            layer["attention"],
            normalise(norm(layer["input_norm"]), stream),
            pages,
            batch=block if window is None else batch,
            tables=tables,
            num_q_heads=config.num_q_heads,
            q_norm=norm(layer["q_norm"]),
            k_norm=norm(layer["k_norm"]),
            scale=config.head_dim**-0.5,
            window=window,
            backend=backend,
        )
        stream = feed_forward_block(
            layer["feed_forward"],
            stream + mixed,
            before=norm(layer["post_attention_norm"]),
            after=None,
            activation=SILU,
            backend=backend,
        )
        updated.append(pages)
    return normalise(norm(params["norm"]), stream), tuple(updated)


def logits(
    config: DFlashConfig,
    params: Params,
    hidden: Float[Array, "row model"],
    target: Matrix,
) -> Float[Array, "row draft_vocab"]:
    """Return logits of the output, over the drafter's own vocabulary.

    Args:
        target: The target's output matrix, for a drafter that has none.
    """
    matrix = params["lm_head"] if config.has_lm_head else target
    found = matrix.multiply(hidden)
    if config.logit_soft_cap is None:
        return found
    return jnp.tanh(found / config.logit_soft_cap) * config.logit_soft_cap


def _layers(config: DFlashConfig, params: Params) -> list[Params]:
    return [params["layers"][str(number)] for number in range(config.num_layers)]

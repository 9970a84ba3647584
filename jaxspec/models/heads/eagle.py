"""The EAGLE head: a decoder layer over a token's embedding and a hidden state.

The inputs of a row are a token and the target's last hidden state at the token before
it, normalized, as the output matrix takes it. A matrix fuses the two. The layer's
output predicts the target's hidden state at the token: the target's output matrix turns
it into logits, and it is the next pass's hidden state. Keys and values are stored as
those of an EAGLE-3 head.

The layer is Llama's without its first norm. EAGLE-1 and EAGLE-2 have the same head and
differ in their trees. References: Li et al. 2024, arXiv:2401.15077 and
arXiv:2406.16858.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads.config import EagleConfig
from jaxspec.models.heads.eagle3 import embed as embed
from jaxspec.models.heads.eagle3 import layer_specs, matrix_spec
from jaxspec.models.layers import attend, feed_forward_block, rope_tables
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import Params, ParamSpec, Specs
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import SILU, Norm


def param_specs(config: EagleConfig) -> Specs:
    """Declare every parameter: shape, logical axes, split unit, tensors."""
    model = config.hidden_size
    specs = {
        ("fc", "weight"): matrix_spec(model, 2 * model, ("model", "model"), "fc"),
        **layer_specs(config, model),
    }
    if config.has_bias:
        specs["fc", "bias"] = ParamSpec(
            shape=(model,), axes=("model",), tensors=("fc.bias",)
        )
    return specs


def fuse(
    config: EagleConfig,
    params: Params,
    streams: Sequence[Float[Array, "row target_model"]],
) -> Float[Array, "row model"]:
    """Return the target's normalized last hidden states unchanged."""
    (rows,) = streams
    return rows


def forward(
    config: EagleConfig,
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
        hidden: At the token before, from the target or an earlier pass.
    """
    layer_params = params["layer"]
    joined = jnp.concatenate([embedded.astype(hidden.dtype), hidden], axis=-1)
    stream = params["fc"]["weight"].multiply(joined)
    if config.has_bias:
        stream += params["fc"]["bias"].astype(stream.dtype)[None]
    mixed, kv_pages = attend(
        layer_params["attention"],
        stream,
        kv_pages,
        batch=batch,
        tables=rope_tables(batch.positions, config.head_dim, config.rope_theta),
        num_q_heads=config.num_q_heads,
        scale=config.head_dim**-0.5,
        backend=backend,
    )
    stream = feed_forward_block(
        layer_params["feed_forward"],
        stream + mixed,
        before=Norm(layer_params["post_attention_norm"], config.rms_norm_eps),
        after=None,
        activation=SILU,
        backend=backend,
    )
    return stream, kv_pages


def logits(
    config: EagleConfig,
    params: Params,
    hidden: Float[Array, "row model"],
    target: Matrix,
) -> Float[Array, "row vocab"]:
    """Return logits of the layer's output.

    Args:
        target: The target's output matrix. Its soft cap is omitted, as in other
            engines: a cap does not change the order.
    """
    return target.multiply(hidden)

"""Medusa: one residual network for each position after the next token.

The only input of each is the target's last hidden state, normalized: neither the next
token nor another head's output. References: Cai et al. 2024, arXiv:2401.10774.
"""

import jax
from jaxtyping import Array, Float

from jaxspec.models.heads.config import MedusaConfig
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import Params, ParamSpec, Specs


def param_specs(config: MedusaConfig) -> Specs:
    """Declare every parameter: shape, logical axes, tensors."""
    model, specs = config.target_hidden_size, Specs()
    for head in range(config.num_heads):
        for block in range(config.num_blocks):
            name = f"blocks.{head}.layers.{block}"
            path = "blocks", str(head), str(block)
            specs[*path, "weight"] = ParamSpec(
                shape=(model, model),
                axes=("model", "model"),
                tensors=(f"{name}.weight",),
            )
            if config.has_bias:
                specs[*path, "bias"] = ParamSpec(
                    shape=(model,), axes=("model",), tensors=(f"{name}.bias",)
                )
    names = [f"lm_heads.{number}" for number in range(config.lm_heads)]
    for number, name in enumerate(["lm_head"] if config.lm_heads == 1 else names):
        specs["lm_heads", str(number)] = ParamSpec(
            shape=(config.draft_vocab_size, model),
            axes=("vocab", "model"),
            tensors=(f"{name}.weight",),
        )
    return specs


def forward(
    config: MedusaConfig, params: Params, rows: Float[Array, "row model"]
) -> tuple[Float[Array, "row model"], ...]:
    """Return each head's output for the target's normalized last hidden states."""
    outputs = []
    for head in range(config.num_heads):
        stream, blocks = rows, params["blocks"][str(head)]
        for block in range(config.num_blocks):
            inner = blocks[str(block)]["weight"].multiply(stream)
            if config.has_bias:
                inner += blocks[str(block)]["bias"].astype(inner.dtype)[None]
            stream = stream + jax.nn.silu(inner)
        outputs.append(stream)
    return tuple(outputs)


def logits(
    config: MedusaConfig,
    params: Params,
    head: int,
    rows: Float[Array, "row model"],
    target: Matrix,
) -> Float[Array, "row draft_vocab"]:
    """Return logits of one head's output, over the heads' vocabulary.

    Args:
        target: The target's output matrix, for heads that have none. Its soft cap is
            omitted, as in other engines: a cap does not change the order.
    """
    if not config.lm_heads:
        return target.multiply(rows)
    return params["lm_heads"][str(min(head, config.lm_heads - 1))].multiply(rows)

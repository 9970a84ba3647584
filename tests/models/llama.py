"""An example of a second family: Llama, untied, without biases.

Besides this module the engine needs only `FAMILIES["llama"] = FAMILY`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Float

from jaxspec.config.model import SIZES, ModelConfig, end_tokens
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.families import Family
from jaxspec.models.layers import attend, mean_square, rope_tables
from jaxspec.models.network import ForwardOutput, Pages
from jaxspec.models.params import Params, ParamSpec, Specs
from jaxspec.models.stack import run_layers
from jaxspec_checkpoints import Layout, Sizes
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.sums import row_sums


@no_type_check
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The config of one Llama."""

    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "LlamaConfig":
        names = "max_position_embeddings", "rms_norm_eps", "pad_token_id"
        return cls(
            **{ours: config[theirs] for theirs, ours in SIZES.items()},
            **{name: config[name] for name in (*names, "bos_token_id")},
            rope_theta=config["rope_parameters"]["rope_theta"],
            eos_token_ids=end_tokens(config, generation or {}),
        )


def param_specs(config: LlamaConfig) -> Specs:
    """Return the specification of each parameter and its canonical tensors."""
    model, hidden, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_q_heads * head, config.num_kv_heads * head

    def declare(shape: tuple[int, ...], axis: str, *names: str, unit: int = 1) -> Any:
        axes = (axis, "model")[: len(shape)]
        tensors = tuple(f"{name}.weight" for name in names)
        return ParamSpec(shape=shape, axes=axes, tensors=tensors, unit=unit)

    vocab = (config.vocab_size, model)
    specs: Specs = {
        ("embedding",): declare(vocab, "vocab", "model.embed_tokens"),
        ("final_norm",): declare((model,), "model", "model.norm"),
        ("head",): declare(vocab, "vocab", "lm_head"),
    }
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        q, k, v, o = (f"{at}self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"{at}mlp.{name}_proj" for name in ("gate", "up", "down"))
        named = {
            "q_proj": declare((queries, model), "q_head", q, unit=head),
            "kv_proj": declare((2 * keys, model), "kv_head", k, v, unit=2 * head),
            "o_proj": declare((model, queries), "model", o),
            "gate": declare((hidden, model), "hidden", gate),
            "up": declare((hidden, model), "hidden", up),
            "down": declare((model, hidden), "model", down),
            "norm": declare((model,), "model", f"{at}input_layernorm"),
            "mlp_norm": declare((model,), "model", f"{at}post_attention_layernorm"),
        }
        specs |= {("layers", str(layer), name): spec for name, spec in named.items()}
    return specs


def forward(
    config: LlamaConfig,
    params: Params,
    batch: TokenBatch,
    kv_pages: Pages,
    backend: Backend,
) -> tuple[ForwardOutput, Pages]:
    """Run all layers; return their output and the updated pages per layer."""
    stream = params["embedding"].rows(batch.tokens)
    tables = rope_tables(batch.positions, config.head_dim, config.rope_theta)

    def run(
        layer: int, own: Params, stream: Array, batch: TokenBatch, pages: KvPages
    ) -> tuple[Array, KvPages]:
        del layer  # all layers are alike
        mixed, pages = attend(
            own,
            _norm(config, stream, own["norm"]),
            pages,
            batch=batch,
            tables=tables,
            num_q_heads=config.num_q_heads,
            scale=config.head_dim**-0.5,
            backend=backend,
        )
        stream += mixed
        rows = _norm(config, stream, own["mlp_norm"])
        inner = jax.nn.silu(own["gate"].multiply(rows)) * own["up"].multiply(rows)
        return stream + own["down"].multiply(inner), pages

    streams, kv_pages = run_layers(config, params, stream, batch, kv_pages, run)
    stream = streams[-1]
    is_finite = jax.numpy.isfinite(row_sums(stream)[:, 0])
    rows = _norm(config, stream, params["final_norm"])
    return ForwardOutput(rows, is_finite, streams), kv_pages


def logits(
    config: LlamaConfig, params: Params, rows: Float[Array, "row model"]
) -> Float[Array, "row vocab"]:
    """Return the logits of rows, by the untied output matrix."""
    return params["head"].multiply(rows)


def _norm(config: LlamaConfig, rows: Array, weight: Array) -> Array:
    return rows * jax.lax.rsqrt(mean_square(rows) + config.rms_norm_eps) * weight[None]


def tensor_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint.

    Every parameter of `param_specs` is made of them.
    """
    model, hidden = sizes.hidden_size, sizes.intermediate_size
    queries = sizes.num_q_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, model),
        "self_attn.k_proj": (keys, model),
        "self_attn.v_proj": (keys, model),
        "self_attn.o_proj": (model, queries),
        "mlp.gate_proj": (hidden, model),
        "mlp.up_proj": (hidden, model),
        "mlp.down_proj": (model, hidden),
        "input_layernorm": (model,),
        "post_attention_layernorm": (model,),
    }
    vocab = (sizes.vocab_size, model)
    shapes = {"model.embed_tokens": vocab, "model.norm": (model,), "lm_head": vocab}
    for number in range(sizes.num_layers):
        shapes |= {f"model.layers.{number}.{name}": one for name, one in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


FAMILY = Family(
    config=LlamaConfig,
    architecture="LlamaForCausalLM",
    network=__name__,
    layout=Layout(title="Llama", tensor_shapes=tensor_shapes),
)

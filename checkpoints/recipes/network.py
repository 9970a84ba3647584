"""Gemma 2 for training: dense causal attention, float32 residual, bf16 matmuls.

The serving implementation (paged KV, `jaxspec.models.gemma.network`) is tested against
HuggingFace. This one exports weights under the same HuggingFace names, so a mistake
here appears as a higher loss there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]


def draft_config(target: dict[str, Any]) -> dict[str, Any]:
    """Return the draft's config.json: the target's family, shallow and narrow."""
    return target | dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
    )


def target_config(vocab_size: int) -> dict[str, Any]:
    """Return the target's config.json, in HuggingFace's fields."""
    return dict(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attention_dropout=0.0,
        initializer_range=0.02,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        tie_word_embeddings=True,
        use_cache=True,
        torch_dtype="bfloat16",
    )


def init_params(config: dict[str, Any], seed: int) -> Params:
    """Return random float32 weights by HuggingFace's names; matrices are (out, in)."""
    random = np.random.default_rng(seed)
    model, hidden = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        values = random.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return jnp.asarray(values, jnp.float32)

    params: Params = {}
    embedding = random.standard_normal((config["vocab_size"], model)) * 0.02
    params["model.embed_tokens.weight"] = jnp.asarray(embedding, jnp.float32)
    params["model.norm.weight"] = jnp.zeros(model)
    # The output projections start small, so that a layer starts near the identity;
    # the post-norms would undo it, hence their (1 + weight) starts below one.
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        params[name + "self_attn.q_proj.weight"] = matrix(queries, model)
        params[name + "self_attn.k_proj.weight"] = matrix(keys, model)
        params[name + "self_attn.v_proj.weight"] = matrix(keys, model)
        params[name + "self_attn.o_proj.weight"] = matrix(model, queries)
        params[name + "mlp.gate_proj.weight"] = matrix(hidden, model)
        params[name + "mlp.up_proj.weight"] = matrix(hidden, model)
        params[name + "mlp.down_proj.weight"] = matrix(model, hidden)
        for norm in ("input", "pre_feedforward"):
            params[name + f"{norm}_layernorm.weight"] = jnp.zeros(model)
        for norm in ("post_attention", "post_feedforward"):
            damped = jnp.full(model, -0.7, jnp.float32)
            params[name + f"{norm}_layernorm.weight"] = damped
    return params


def _matmul(
    left: jax.Array, right: jax.Array, left_axis: int, right_axis: int
) -> jax.Array:
    return jax.lax.dot_general(
        left,
        right.astype(jnp.bfloat16),
        (((left_axis,), (right_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _to_bf16(values: jax.Array) -> jax.Array:
    # XLA:CPU would fuse what computes `values` into every matmul that reads them and
    # leave its fast bf16 kernel: 0.34 s instead of 0.24 s for one MLP's gradient.
    return jax.lax.optimization_barrier(values.astype(jnp.bfloat16))


@jax.custom_vjp
def linear(inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `inputs @ weight.T` in bf16 with a float32 result; inputs [token, in]."""
    return _matmul(_to_bf16(inputs), weight, 1, 1)


def _linear_forward(inputs: jax.Array, weight: jax.Array):
    narrow = _to_bf16(inputs)
    return jax.lax.optimization_barrier(_matmul(narrow, weight, 1, 1)), (narrow, weight)


def _linear_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array):
    inputs, weight = saved
    narrow = _to_bf16(grad)
    return _matmul(narrow, weight, 1, 0), _matmul(narrow, inputs, 0, 0)


linear.defvjp(_linear_forward, _linear_backward)


def rms_norm(inputs: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    variance = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    return inputs * jax.lax.rsqrt(variance + epsilon) * (1.0 + weight)


def rotate(inputs: jax.Array, theta: float) -> jax.Array:
    """Apply the rotary embedding in half-split order; inputs [row, token, head, d]."""
    half = inputs.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(inputs.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    first, second = inputs[..., :half], inputs[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def attention(
    query: jax.Array,  # [row, token, kv_head, group, head_dim], scaled
    key: jax.Array,  # [row, token, kv_head, head_dim]
    value: jax.Array,  # [row, token, kv_head, head_dim]
    segments: jax.Array,  # [row, token]
    *,
    window: int,
    cap: float,
    block: int = 128,
) -> jax.Array:
    """Attend causally, in blocks of queries; keys outside the window are not read."""
    rows, length = segments.shape
    mixed = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(0, (start - window + 1) // block * block)
        here = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)[None]
        same = segments[:, start:stop, None] == segments[:, None, first:stop]
        mask = same & (here >= 0) & (here < window)
        # r row, t query, s key, k kv head, g group, d head_dim
        scores = jnp.einsum(
            "rtkgd,rskd->rkgts", query[:, start:stop], key[:, first:stop]
        )
        scores = jnp.where(mask[:, None, None], jnp.tanh(scores / cap) * cap, -1e30)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed.append(jnp.einsum("rkgts,rskd->rtkgd", weights, value[:, first:stop]))
    return jnp.concatenate(mixed, axis=1)


def layers_of(params: Params, config: dict[str, Any]) -> list[Params]:
    """Return one dict per layer; names lose their `model.layers.N.` prefix."""
    layers = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        layers.append(
            {
                name.removeprefix(prefix): value
                for name, value in params.items()
                if name.startswith(prefix)
            }
        )
    return layers


def window_of(number: int, config: dict[str, Any], length: int) -> int:
    """Return the window of layer `number`: layer 0 is local, then they alternate."""
    return config["sliding_window"] if number % 2 == 0 else length


def embed(params: Params, config: dict[str, Any], tokens: jax.Array) -> jax.Array:
    embedding = params["model.embed_tokens.weight"]
    scale = jnp.sqrt(jnp.float32(config["hidden_size"]))
    return embedding[tokens].astype(jnp.float32) * scale


def project(
    stream: jax.Array, layer: Params, config: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query, key and value, each [token, head, head_dim], not yet rotated."""
    normed = rms_norm(stream, layer["input_layernorm.weight"], config["rms_norm_eps"])
    query, key, value = (
        linear(normed, layer[f"self_attn.{part}_proj.weight"]).reshape(
            len(stream), -1, config["head_dim"]
        )
        for part in "qkv"
    )
    return query, key, value


def finish_layer(
    stream: jax.Array, mixed: jax.Array, layer: Params, config: dict[str, Any]
) -> jax.Array:
    """Add attention's output and the feed-forward part; `mixed` [token, q_head * d]."""
    epsilon = config["rms_norm_eps"]
    mixed = linear(mixed, layer["self_attn.o_proj.weight"])
    stream = stream + rms_norm(mixed, layer["post_attention_layernorm.weight"], epsilon)
    normed = rms_norm(stream, layer["pre_feedforward_layernorm.weight"], epsilon)
    gate = jax.nn.gelu(linear(normed, layer["mlp.gate_proj.weight"]), approximate=True)
    inner = gate * linear(normed, layer["mlp.up_proj.weight"])
    outer = linear(inner, layer["mlp.down_proj.weight"])
    return stream + rms_norm(outer, layer["post_feedforward_layernorm.weight"], epsilon)


def logits_of(params: Params, config: dict[str, Any], stream: jax.Array) -> jax.Array:
    """Return soft-capped float32 logits [token, vocab]."""
    stream = rms_norm(stream, params["model.norm.weight"], config["rms_norm_eps"])
    cap = config["final_logit_softcapping"]
    return jnp.tanh(linear(stream, params["model.embed_tokens.weight"]) / cap) * cap


def forward(
    params: Params, config: dict[str, Any], tokens: jax.Array, segments: jax.Array
) -> jax.Array:
    """Return soft-capped float32 logits `[row * token, vocab]`."""
    rows, length = tokens.shape
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    stream = embed(params, config, tokens.reshape(-1))
    for number, layer in enumerate(layers_of(params, config)):
        query, key, value = (
            part.reshape(rows, length, -1, head_dim)
            for part in project(stream, layer, config)
        )
        query = rotate(query, config["rope_theta"])
        query = query * config["query_pre_attn_scalar"] ** -0.5
        mixed = attention(
            query.reshape(rows, length, kv_heads, -1, head_dim),
            rotate(key, config["rope_theta"]),
            value,
            segments,
            window=window_of(number, config, length),
            cap=config["attn_logit_softcapping"],
        )
        stream = finish_layer(stream, mixed.reshape(rows * length, -1), layer, config)
    return logits_of(params, config, stream)

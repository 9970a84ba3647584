"""The start of a head's training: a linear fit of the target's next hidden states.

Random matrices are a bad start for Gemma 3: the residual stream's largest dimensions
are thousands of times its smallest, and the weights of the last norm are large. The
first logits of an EAGLE-3 head for the 270M had a standard deviation near 40, and a
loss of 160. A fitted head starts with a loss below the log of its vocabulary's size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.heads.config import DFlashConfig, Eagle3Config, LayerConfig
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.params import Params

# Divisor of every dimension of the target's residual streams, [layer, model]. It is not
# trained, and is part of `fc` in the files of a trained head.
STREAM_SCALE = "stream_scale"
# Weight of the penalty on the fit's squares, relative to that of one feature.
_RIDGE = 0.03
# Attention score of a token with itself. Scores with other tokens are near 0, and a few
# hundred of them have less weight together.
_OWN_SCORE = 12.0
# Standard deviation of the weights of queries and keys that the fit does not use,
# relative to random matrices.
_SMALL = 0.1


class Examples(NamedTuple):
    """What a head reads at some tokens, and the target's hidden state that it predicts.

    Attributes:
        streams: [token, layer, model] the target's residual streams at the token.
        next_tokens: [token] the token after it.
        wanted: [token, model] the target's last hidden state after `next_tokens`,
            before the weights of its last norm.
    """

    streams: np.ndarray
    next_tokens: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A linear map to the target's next hidden state.

    Attributes:
        scale: [layer, model] root mean square of each dimension of the streams.
        from_streams: [model, layer * model] of the streams, divided by `scale`.
        from_token: [model, model] of the normalized embedding of the next token; zeros
            if the fit leaves it out.
        size: Root mean square of the predicted states.
        average_size: That of the mean of the wanted states.
        directions: [direction, model] main directions of the wanted states, the largest
            first.
    """

    scale: np.ndarray
    from_streams: np.ndarray
    from_token: np.ndarray
    size: float
    average_size: float
    directions: np.ndarray


def counted_examples(
    tokens: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    states: Any,
    norm: np.ndarray,
) -> Examples:
    """Return the tokens of rows after which a head's first draft counts in the loss.

    Args:
        states: The rows' `States`.
        norm: The weights of the target's last norm.
    """
    proposed = np.arange(tokens.shape[1] - 1)[None] + 2
    is_counted = (proposed >= starts[:, None]) & (proposed < sizes[:, None])
    rows = np.asarray(states.rows, np.float32)[:, 1:][is_counted]
    is_used = np.abs(norm) > 1e-3
    divisor = np.where(is_used, norm, 1.0)
    return Examples(
        streams=np.asarray(states.streams, np.float32)[:, :-1][is_counted],
        next_tokens=tokens[:, 1:][is_counted],
        wanted=np.where(is_used, rows / divisor, 0.0).astype(np.float32),
    )


def fit_next_states(
    batches: Iterable[Examples], embedding: np.ndarray, *, reads_token: bool
) -> Fit:
    """Fit a linear map by ridge regression over all batches.

    Args:
        embedding: The target's.
        reads_token: Whether the fit includes the embedding of the next token.
    """
    scale, squares, products, outer, total, count = None, 0.0, 0.0, 0.0, 0.0, 0
    for batch in batches:
        if not len(batch.wanted):
            continue
        if scale is None:
            scale = np.maximum(np.sqrt(np.mean(batch.streams**2, axis=0)), 1e-6)
        features = (batch.streams / scale).reshape(len(batch.wanted), -1)
        if reads_token:
            rows = embedding[batch.next_tokens].astype(np.float32)
            rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-12)
            features = np.concatenate([features, rows], axis=1)
        squares = squares + (features.T @ features).astype(np.float64)
        products = products + (features.T @ batch.wanted).astype(np.float64)
        outer = outer + (batch.wanted.T @ batch.wanted).astype(np.float64)
        total = total + batch.wanted.sum(axis=0, dtype=np.float64)
        count += len(batch.wanted)
    assert scale is not None, "no token counts in the loss"
    assert isinstance(squares, np.ndarray) and isinstance(outer, np.ndarray)
    width, num_streams = outer.shape[0], scale.size
    penalty = _RIDGE * count * np.eye(len(squares))
    weights = np.linalg.solve(squares + penalty, products)
    power = np.sum(weights * (squares @ weights)) / (count * width)
    _, directions = np.linalg.eigh(outer)  # ascending
    from_token = weights[num_streams:].T if reads_token else np.zeros((width, width))
    return Fit(
        scale=scale.astype(np.float32),
        from_streams=weights[:num_streams].T.astype(np.float32),
        from_token=from_token.astype(np.float32),
        size=float(np.sqrt(power)),
        average_size=float(np.sqrt(np.mean((total / count) ** 2))),
        directions=directions.T[::-1].astype(np.float32),
    )


def start_eagle3(config: Eagle3Config, params: Params, fit: Fit) -> Params:
    """Return parameters with which a head computes the fit.

    The residual stream has the prediction from the target's states. Attention adds that
    from the next token: the keys of a token depend on its embedding, and equal its
    queries, so that it attends to itself. The feed-forward block adds nothing.
    """
    assert not config.has_qk_norm and not config.norm_before_residual
    width, model = config.head_dim, config.hidden_size
    rank = config.num_kv_heads * width
    left, values, right = np.linalg.svd(fit.from_token)
    root = np.sqrt(values[:rank])
    inputs = np.zeros((root.size, 2 * model), np.float32)
    inputs[:, :model] = root[:, None] * right[: root.size]
    layer = _carrying(config, params["layer"], inputs, left[:, : root.size] * root)
    groups = config.num_q_heads // config.num_kv_heads
    kv_proj = np.array(layer["attention"]["kv_proj"].values)
    key = kv_proj.reshape(config.num_kv_heads, 2, width, -1)[:, 0]  # a view
    # Rows of 2 * model random numbers with a variance of 1 / (2 * model).
    key[..., :model] *= (2 * _OWN_SCORE / width**0.5) ** 0.5
    key[..., model:] *= _SMALL
    query = np.repeat(key, groups, axis=0).reshape(-1, key.shape[-1])
    attention = layer["attention"]
    layer["attention"] = attention | {
        "kv_proj": _matrix(kv_proj, attention["kv_proj"]),
        "q_proj": _matrix(query, attention["q_proj"]),
    }
    return _with_fit(params | {"layer": layer}, fit, fit.size)


def start_dflash(config: DFlashConfig, params: Params, fit: Fit) -> Params:
    """Return parameters with which a drafter proposes from an average of predictions.

    The values of attention are the main directions of the predicted states, and the
    first layer's output matrix maps them back. In the other layers, that matrix is
    zero, and so is the last matrix of every MLP: they add nothing at first. What these
    matrices multiply is not zero, so that they have a gradient.
    """
    rank = config.num_kv_heads * config.head_dim
    directions = fit.directions[:rank]
    layers = dict(params["layers"])
    for name, layer in layers.items():
        outputs = directions.T if name == "0" else np.zeros_like(directions.T)
        layers[name] = _carrying(config, layer, directions, outputs)
    return _with_fit(params | {"layers": layers}, fit, fit.average_size)


def _carrying(
    config: LayerConfig, layer: Params, inputs: np.ndarray, outputs: np.ndarray
) -> Params:
    """Return a layer whose attention output is that of two matrices.

    Args:
        inputs: [rank, width] from attention's input to values.
        outputs: [model, rank] from values to attention's output.
    """
    width, num_kv_heads = config.head_dim, config.num_kv_heads
    groups = config.num_q_heads // num_kv_heads
    rank = inputs.shape[0]
    attention, mlp = layer["attention"], layer["feed_forward"]
    kv_proj = np.array(attention["kv_proj"].values)
    value = np.zeros((num_kv_heads * width, kv_proj.shape[1]), np.float32)
    value[:rank] = inputs
    shape = num_kv_heads, width, -1
    kv_proj.reshape(num_kv_heads, 2, width, -1)[:, 1] = value.reshape(shape)
    columns = np.zeros((outputs.shape[0], num_kv_heads * width), np.float32)
    columns[:, :rank] = outputs / groups
    # Every query head of a group has the same values.
    columns = columns.reshape(-1, num_kv_heads, 1, width)
    o_proj = np.repeat(columns, groups, axis=2).reshape(outputs.shape[0], -1)
    return layer | {
        "attention": attention
        | {
            "kv_proj": _matrix(kv_proj, attention["kv_proj"]),
            "o_proj": _matrix(o_proj, attention["o_proj"]),
        },
        "feed_forward": mlp
        | {
            "down_proj": _matrix(
                np.zeros(mlp["down_proj"].values.shape), mlp["down_proj"]
            )
        },
    }


def _with_fit(params: Params, fit: Fit, size: float) -> Params:
    """Return parameters with the fit's `fc`, and logits of predictions of a size.

    The last norm makes all rows equally large, so its weights are the size of the
    predictions: a fit explains only a part of a state, and its logits are less certain
    than the target's. If the head has an output matrix of its own, it takes over the
    norm's weights: steps of the optimizer are of the same size for all parameters, and
    too large for a matrix whose inputs are.
    """
    norm, made = np.asarray(params["norm"]) * np.float32(size), {}
    if "lm_head" in params:
        table = np.asarray(params["lm_head"].values) * norm
        made["lm_head"] = _matrix(table, params["lm_head"])
        norm = np.ones_like(norm)
    made["norm"] = jax.device_put(norm, params["norm"].sharding)
    made["fc"] = _matrix(fit.from_streams, params["fc"])
    made[STREAM_SCALE] = jnp.asarray(fit.scale)
    return params | made


def without_scale(params: Params) -> Params:
    """Return parameters that read the streams as they are, for a file."""
    if STREAM_SCALE not in params:
        return params
    params = dict(params)
    scale = np.asarray(params.pop(STREAM_SCALE)).reshape(-1)
    return params | {"fc": DenseMatrix(np.asarray(params["fc"].values) / scale)}


def _matrix(values: np.ndarray, like: Any) -> DenseMatrix:
    """Return a float32 matrix, placed like another."""
    values = np.asarray(values, np.float32)
    return DenseMatrix(jax.device_put(values, like.values.sharding))

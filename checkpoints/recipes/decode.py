"""Continues prompts with a dense KV cache, to generate the target's text fast.

Every row is one stream of `length` positions: a prompt is run token by token, its
continuation is sampled, and when that ends the row's next prompt follows at once. No
step is spent on finished rows, and the result is a packed row with segment ids, as
training needs it. Positions inside a document differ from the row's by a constant,
which does not change rotary attention.
"""

import functools
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import network

# Keys are cached in blocks of this many positions; a finished block is never copied.
BLOCK = 128
# Halvings of the interval [-NUCLEUS_RANGE, 0] in which the top-p cut is searched.
NUCLEUS_STEPS, NUCLEUS_RANGE = 13, 16.0
TEMPERATURE, TOP_P = 0.8, 0.95
# Number of labels per token: the target's most likely next tokens, with their
# log-probabilities, best first.
NUM_LABELS = 64


class Mix(NamedTuple):
    """Number of rows of a batch per way of sampling; greedy rows come first."""

    greedy: int
    nucleus: int  # TEMPERATURE, TOP_P
    full: int  # temperature 1, the whole distribution

    def names(self) -> list[str]:
        """Return the way of sampling of each row."""
        return [
            name
            for name, count in zip(self._fields, self, strict=True)
            for _ in range(count)
        ]


class Prompts(NamedTuple):
    """The queue of each row: `tokens` [row, prompt, token], `sizes` [row, prompt]."""

    tokens: jax.Array
    sizes: jax.Array


Pair = tuple[jax.Array, jax.Array]


class Cache(NamedTuple):
    """Keys and values by layer: finished blocks, and the block being filled."""

    past: list[list[Pair]]
    block: list[Pair]


class Stream(NamedTuple):
    """State of a row between positions; all [row]."""

    token: jax.Array
    prompt: jax.Array  # index of the current document in the queue
    offset: jax.Array  # position of `token` in its document
    first: jax.Array  # position in the row where the document begins


def narrow(params: network.Params) -> network.Params:
    """Return the weights as they are exported: rounded to bf16, vectors kept wide."""
    return {
        name: value.astype(jnp.bfloat16)
        if value.ndim == 2
        else value.astype(jnp.bfloat16).astype(jnp.float32)
        for name, value in params.items()
    }


def _rotate(inputs: jax.Array, position: jax.Array, theta: float) -> jax.Array:
    """Apply the rotary embedding of one position; inputs [row, head, head_dim]."""
    half = inputs.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = inputs[..., :half], inputs[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def _attend(
    query: jax.Array,  # [row, kv_head, group, head_dim], scaled
    blocks: list[Pair],  # keys, values of BLOCK positions
    mask: jax.Array,  # [row, position]
    cap: float,
) -> jax.Array:
    # r row, k kv head, g group, d head_dim, s position. Keys are [row, kv_head,
    # head_dim, position]: with head_dim last on both sides the product takes 6x longer.
    scores = jnp.concatenate(
        [jnp.einsum("rkgd,rkds->rkgs", query, key) for key, _ in blocks], axis=-1
    )
    scores = jnp.where(mask[:, None, None], jnp.tanh(scores / cap) * cap, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    parts = jnp.split(weights, len(blocks), axis=-1)
    mixed = [
        jnp.einsum("rkgs,rksd->rkgd", part, value)
        for part, (_, value) in zip(parts, blocks, strict=True)
    ]
    return functools.reduce(jnp.add, mixed)


def _logits(
    params: network.Params,
    config: dict[str, Any],
    token: jax.Array,
    cache: Cache,
    *,
    position: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Run one token per row; return logits [row, vocab] and the extended cache."""
    rows, kv_heads = token.shape[0], config["num_key_value_heads"]
    theta, offset = config["rope_theta"], position % BLOCK
    stream = network.embed(params, config, token)
    grown = []
    for number, layer in enumerate(network.layers_of(params, config)):
        query, key, value = network.project(stream, layer, config)
        query = _rotate(query, position, theta).reshape(
            rows, kv_heads, -1, key.shape[-1]
        )
        query = query * config["query_pre_attn_scalar"] ** -0.5
        keys, values = cache.block[number]
        key = _rotate(key, position, theta)[..., None]
        keys = jax.lax.dynamic_update_slice(keys, key, (0, 0, 0, offset))
        values = jax.lax.dynamic_update_slice(
            values, value[:, :, None], (0, 0, offset, 0)
        )
        grown.append((keys, values))
        past = cache.past[number]
        window = network.window_of(number, config, (len(past) + 1) * BLOCK)
        past = past[max(0, len(past) - -(-(window - 1) // BLOCK)) :]
        start = position - offset - len(past) * BLOCK
        here = start + jnp.arange((len(past) + 1) * BLOCK)[None]
        mask = (here >= first[:, None]) & (here <= position)
        mixed = _attend(
            query,
            [*past, (keys, values)],
            mask & (position - here < window),
            config["attn_logit_softcapping"],
        )
        stream = network.finish_layer(stream, mixed.reshape(rows, -1), layer, config)
    return network.logits_of(params, config, stream), Cache(cache.past, grown)


def label(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids and log-probabilities of the most likely tokens, best first."""
    # Without the barrier XLA:CPU merges a later slice of the ids into `top_k` and falls
    # back to sorting the vocabulary: 130 ms a step instead of 2.
    best, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits, NUM_LABELS))
    return ids, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draw one index per row in proportion to `weights` [row, vocab]."""
    # Invert the cumulative distribution in two levels: one cumulative sum over the
    # whole vocabulary costs XLA:CPU as much as a layer.
    rows, vocab = weights.shape
    groups = weights.reshape(rows, vocab // 64, 64)
    totals = jnp.cumsum(jnp.sum(groups, axis=-1), axis=-1)
    goal = uniform[:, None] * totals[:, -1:]
    group = jnp.minimum(jnp.sum(totals <= goal, axis=-1), vocab // 64 - 1)
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    before = jnp.take_along_axis(totals, group[:, None], axis=1) - jnp.sum(
        inside, axis=-1, keepdims=True
    )
    sums = jnp.cumsum(inside, axis=-1) + before
    # Rounding may put the goal past the last sum; then take the token with the largest
    # weight.
    index = jnp.sum(sums <= goal, axis=-1)
    chosen = jnp.take_along_axis(inside, jnp.minimum(index, 63)[:, None], axis=1)[:, 0]
    index = jnp.where((index > 63) | (chosen == 0), jnp.argmax(inside, axis=-1), index)
    return group * 64 + index


def _nucleus(weights: jax.Array, top_p: float) -> jax.Array:
    """Set weights to 0 outside the smallest set that holds `top_p` of their sum."""
    goal = top_p * jnp.sum(weights, axis=-1, keepdims=True)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]):
        low, high = bounds
        middle = 0.5 * (low + high)
        inside = jnp.where(weights >= jnp.exp(middle), weights, 0.0)
        is_enough = jnp.sum(inside, axis=-1, keepdims=True) >= goal
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    # A sort of the vocabulary would cost more than the whole forward pass.
    low = jnp.full_like(goal, -NUCLEUS_RANGE)
    low, _ = jax.lax.fori_loop(0, NUCLEUS_STEPS, halve, (low, jnp.zeros_like(goal)))
    return jnp.where(weights >= jnp.exp(low), weights, 0.0)


def choose(logits: jax.Array, best: jax.Array, key: jax.Array, mix: Mix) -> jax.Array:
    """Return the next token of every row, drawn by the row's way of sampling."""
    sampled = logits[mix.greedy :] - jnp.max(logits[mix.greedy :], -1, keepdims=True)
    uniform = jax.random.uniform(key, sampled.shape[:1])
    warm = jnp.exp(sampled[: mix.nucleus] / TEMPERATURE)
    parts = [
        best[: mix.greedy],
        _draw(_nucleus(warm, TOP_P), uniform[: mix.nucleus]),
        _draw(jnp.exp(sampled[mix.nucleus :]), uniform[mix.nucleus :]),
    ]
    return jnp.concatenate([part.astype(jnp.int32) for part in parts])


def _advance(
    stream: Stream,
    drawn: jax.Array,
    prompts: Prompts,
    max_new: int,
    position: jax.Array,
) -> Stream:
    """Move every row to its next position, and set the token there.

    The token comes from the prompt, from the continuation or, after the end of the
    continuation, from the next prompt.
    """
    row = jnp.arange(stream.token.shape[0])
    size = prompts.sizes[row, stream.prompt]
    is_written = stream.offset >= size
    is_stop = (stream.token == corpus.EOS_ID) | (stream.token == corpus.END_OF_TURN_ID)
    is_over = (is_written & is_stop) | (stream.offset + 1 >= size + max_new)
    prompt = stream.prompt + is_over
    offset = jnp.where(is_over, 0, stream.offset + 1)
    forced = prompts.tokens[
        row, prompt, jnp.minimum(offset, prompts.tokens.shape[2] - 1)
    ]
    is_forced = offset < prompts.sizes[row, prompt]
    return Stream(
        token=jnp.where(is_forced, forced, drawn),
        prompt=prompt,
        offset=offset,
        first=jnp.where(is_over, position + 1, stream.first),
    )


def write_rows(
    params: network.Params,
    config: dict[str, Any],
    prompts: Prompts,
    key: jax.Array,
    *,
    mix: Mix,
    length: int,
    max_new: int,
) -> dict[str, jax.Array]:
    """Fill rows of `length` tokens; pure, to be jitted with static keyword arguments.

    Returns:
        `tokens`, `segments` (1 for the first document of a row), `is_written` (whether
        the token was drawn, not given), and `ids` and `log_probs`, the labels of the
        token's successor; all [position, row] and the last two [position, row, label].
    """
    rows, layers = prompts.sizes.shape[0], config["num_hidden_layers"]
    shape = (rows, config["num_key_value_heads"], config["head_dim"], BLOCK)
    keys = jnp.zeros(shape)
    values = keys.swapaxes(2, 3)
    zero = jnp.zeros(rows, jnp.int32)
    stream = Stream(prompts.tokens[:, 0, 0], zero, zero, zero)
    past: list[list[Pair]] = [[] for _ in range(layers)]
    written = []

    def step(past, carry, position):
        stream, block = carry
        logits, cache = _logits(
            params,
            config,
            stream.token,
            Cache(past, block),
            position=position,
            first=stream.first,
        )
        ids, log_probs = label(logits)
        drawn = choose(logits, ids[:, 0], jax.random.fold_in(key, position), mix)
        size = prompts.sizes[jnp.arange(rows), stream.prompt]
        out = dict(
            tokens=stream.token.astype(jnp.uint16),
            segments=(stream.prompt + 1).astype(jnp.uint8),
            is_written=stream.offset >= size,
            ids=ids.astype(jnp.uint16),
            log_probs=log_probs.astype(jnp.float16),
        )
        stream = _advance(stream, drawn, prompts, max_new, position)
        return (stream, cache.block), out

    for start in range(0, length, BLOCK):
        (stream, block), out = jax.lax.scan(
            functools.partial(step, past),
            (stream, [(keys, values)] * layers),
            jnp.arange(start, start + BLOCK),
        )
        written.append(out)
        past = [[*old, new] for old, new in zip(past, block, strict=True)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *written)

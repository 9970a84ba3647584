"""Log-probabilities of tokens under the model itself, before every control.

If the vocabulary is split over devices, each reads its own part. They exchange a few
numbers per row, never a whole vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.models.network import Network
from jaxspec.program.plan import NO_TOKEN, TILE, StepShape
from jaxspec.program.rows import Active, ControlRows
from jaxspec.program.wire import TokenLogprobs, num_columns
from jaxspec_kernels.sums import row_sums


def token_logprobs(
    logits: Float[Array, "row vocab"],
    tokens: Int[Array, " row"],
    *,
    num_top: int,
    backend: Backend,
    chosen: Int[Array, "row id"] | None = None,
) -> Int[Array, "row column"]:
    """Return a row per token in the layout of `TokenLogprobs.read`.

    Args:
        tokens: The token of each row of `logits`; values for an id outside the
            vocabulary are junk.
        num_top: Number of most probable tokens; pads past the vocabulary's size.
        chosen: Further token ids; values for ids outside the vocabulary are junk.
    """
    vocab_size = logits.shape[1]
    axes = backend.vocab_axes(vocab_size)
    if chosen is None:
        chosen = jnp.zeros((len(tokens), 0), jnp.int32)

    def run(logits: Array, tokens: Array, chosen: Array) -> Array:
        return _local_logprobs(logits, tokens, chosen, num_top, axes)

    columns, whole = PartitionSpec(None, axes), PartitionSpec()
    split = backend.split(run, (columns, whole, whole), whole)
    return split(logits, tokens, chosen)


def _local_logprobs(
    logits: Float[Array, "row vocab"],
    tokens: Int[Array, " row"],
    chosen: Int[Array, "row id"],
    num_top: int,
    axes: tuple[str, ...] | None,
) -> Int[Array, "row column"]:
    size = logits.shape[1]
    first = 0 if axes is None else jax.lax.axis_index(axes) * size

    def total(values: Array) -> Array:
        return values if axes is None else jax.lax.psum(values, axes)

    def maximum(values: Array) -> Array:
        return values if axes is None else jax.lax.pmax(values, axes)

    largest = maximum(logits.max(axis=1))
    exp_sum = total(row_sums(jnp.exp(logits - largest[:, None]))[:, 0])

    def logprob(values: Array) -> Array:
        # The difference first: logits are large where their sum rounds.
        shape = -1, *(1,) * (values.ndim - 1)
        return (values - largest.reshape(shape)) - jnp.log(exp_sum).reshape(shape)

    column = tokens - first
    is_here = (column >= 0) & (column < size)
    # A maximum over one element, not a gather: from a single row of logits XLA:CPU
    # would recompute the gathered one, with other instructions and other bits.
    is_token = jnp.arange(size)[None] == column[:, None]
    token_logit = jnp.where(is_token, logits, -jnp.inf).max(axis=1)
    token_logit = total(jnp.where(is_here, token_logit, 0.0))
    rank = 1 + total((logits > token_logit[:, None]).sum(axis=1, dtype=jnp.int32))

    place = chosen - first
    is_there = (place >= 0) & (place < size)
    chosen_logits = jnp.take_along_axis(logits, jnp.clip(place, 0, size - 1), axis=1)
    chosen_logits = total(jnp.where(is_there, chosen_logits, 0.0))

    top, ids = jax.lax.top_k(logits, min(num_top, size))
    ids = ids + first
    if axes is not None and num_top:
        # In order of the parts: among equal values the lowest id comes first.
        top = jax.lax.all_gather(top, axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, axes, axis=1, tiled=True)
        top, place = jax.lax.top_k(top, min(num_top, top.shape[1]))
        ids = jnp.take_along_axis(ids, place, axis=1)
    pads = (0, 0), (0, num_top - top.shape[1])
    top = jnp.pad(logprob(top), pads, constant_values=-jnp.inf)
    ids = jnp.pad(ids, pads, constant_values=NO_TOKEN)
    values: tuple[Any, ...] = (
        logprob(token_logit),
        rank,
        ids,
        top,
        logprob(chosen_logits),
    )
    return jnp.concatenate(TokenLogprobs(*values).parts(), axis=1)


def maybe_logprobs(
    logits: Float[Array, "token vocab"],
    tokens: Int[Array, "seq width"],
    chosen: Int[Array, "seq id"] | None,
    *,
    shape: StepShape,
    backend: Backend,
) -> Int[Array, "seq width column"] | None:
    """Return `token_logprobs` if the shape has logprobs, else None.

    Args:
        logits: Row i of a sequence has the logits from which its i-th token was
            sampled.
        chosen: `chosen_ids` of the sequences.
    """
    num_top = shape.features.num_logprobs
    if num_top is None:
        return None
    if chosen is not None:
        chosen = jnp.repeat(chosen, tokens.shape[1], axis=0)
    table = token_logprobs(
        logits, tokens.reshape(-1), num_top=num_top, backend=backend, chosen=chosen
    )
    return table.reshape(*tokens.shape, -1)


def chosen_ids(
    controls: ControlRows, active: Active, *, shape: StepShape
) -> Int[Array, "seq id"] | None:
    """Return the token ids whose logprobs each sequence's request returns.

    Junk for a request without such ids; None if the shape has none.
    """
    if not shape.features.num_logprob_token_ids:
        return None
    return controls.logprob_token_ids.at[active.row].get(mode="clip")


def empty_logprobs(
    tokens: Int[Array, "seq width"], *, shape: StepShape
) -> Int[Array, "seq width column"] | None:
    """Return zeros of the shape that `maybe_logprobs` returns."""
    num_top = shape.features.num_logprobs
    if num_top is None:
        return None
    numbers = num_columns(num_top, shape.features.num_logprob_token_ids)
    return jnp.zeros((*tokens.shape, numbers), jnp.int32)


def prompt_logprobs(
    model: Network,
    hidden: Float[Array, "token model"],
    tokens: Int[Array, " token"],
    after: Int[Array, " tile"],
    *,
    shape: StepShape,
    backend: Backend,
) -> Int[Array, "tile token column"]:
    """Return the logprobs of the token after each token of the prompt tiles.

    Computed tile by tile, because the logits of a whole chunk would be the launch's
    largest array.

    Args:
        after: The token after each tile's last.
    """
    num_top = shape.features.num_prompt_logprobs
    assert num_top is not None
    following = tokens.reshape(-1, TILE)[:, 1:]
    following = jnp.concatenate([following, after[:, None]], axis=1)

    def of_tile(tile: tuple[Array, Array]) -> Array:
        logits = model.logits(tile[0])
        return token_logprobs(logits, tile[1], num_top=num_top, backend=backend)

    tiles = hidden.reshape(*following.shape, -1), following
    return jax.lax.map(of_tile, tiles)

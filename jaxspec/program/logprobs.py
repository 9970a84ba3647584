"""Log-probabilities of tokens under the model itself, before every control.

With the vocabulary split over devices each looks at its own part; a few numbers per row
go between them, never a vocabulary.
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


def tell(
    logits: Float[Array, "row vocab"],
    tokens: Int[Array, " row"],
    *,
    num_top: int,
    backend: Backend,
    chosen: Int[Array, "row id"] | None = None,
) -> Int[Array, "row column"]:
    """A row per token, as `TokenLogprobs.read` reads it.

    Args:
        tokens: What each row of `logits` is asked about; what is told of one outside
            the vocabulary is junk.
        num_top: Most probable tokens to tell; past the vocabulary's size come pads.
        chosen: Tokens to tell of besides; junk for those outside the vocabulary.
    """
    vocab_size = logits.shape[1]
    axes = backend.vocab_axes(vocab_size)
    if chosen is None:
        chosen = jnp.zeros((len(tokens), 0), jnp.int32)

    def run(logits: Array, tokens: Array, chosen: Array) -> Array:
        return _tell(logits, tokens, chosen, num_top, axes)

    columns, whole = PartitionSpec(None, axes), PartitionSpec()
    told = backend.split(run, (columns, whole, whole), whole)
    return told(logits, tokens, chosen)


def _tell(
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

    def most(values: Array) -> Array:
        return values if axes is None else jax.lax.pmax(values, axes)

    largest = most(logits.max(axis=1))
    amount = total(row_sums(jnp.exp(logits - largest[:, None]))[:, 0])

    def logprob(values: Array) -> Array:
        # The difference first: logits are large where their sum rounds.
        shape = -1, *(1,) * (values.ndim - 1)
        return (values - largest.reshape(shape)) - jnp.log(amount).reshape(shape)

    column = tokens - first
    is_here = (column >= 0) & (column < size)
    # As the largest of one: of a single row's logits, XLA:CPU would rather compute the
    # one that is gathered again, with other instructions and in other bits.
    is_own = jnp.arange(size)[None] == column[:, None]
    found = jnp.where(is_own, logits, -jnp.inf).max(axis=1)
    own = total(jnp.where(is_here, found, 0.0))
    rank = 1 + total((logits > own[:, None]).sum(axis=1, dtype=jnp.int32))

    place = chosen - first
    is_there = (place >= 0) & (place < size)
    found = jnp.take_along_axis(logits, jnp.clip(place, 0, size - 1), axis=1)
    others = total(jnp.where(is_there, found, 0.0))

    top, ids = jax.lax.top_k(logits, min(num_top, size))
    ids = ids + first
    if axes is not None and num_top:
        # In order of the parts, so that of equal values the lowest id stays first.
        top = jax.lax.all_gather(top, axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, axes, axis=1, tiled=True)
        top, place = jax.lax.top_k(top, min(num_top, top.shape[1]))
        ids = jnp.take_along_axis(ids, place, axis=1)
    pads = (0, 0), (0, num_top - top.shape[1])
    top = jnp.pad(logprob(top), pads, constant_values=-jnp.inf)
    ids = jnp.pad(ids, pads, constant_values=NO_TOKEN)
    made: tuple[Any, ...] = logprob(own), rank, ids, top, logprob(others)
    return jnp.concatenate(TokenLogprobs(*made).parts(), axis=1)


def tell_some(
    logits: Float[Array, "token vocab"],
    tokens: Int[Array, "seq width"],
    chosen: Int[Array, "seq id"] | None,
    *,
    shape: StepShape,
    backend: Backend,
) -> Int[Array, "seq width column"] | None:
    """`tell`, where the shape asks for it.

    Args:
        logits: Row i of a sequence says what its i-th token is drawn from.
        chosen: `chosen_ids` of the sequences.
    """
    num_top = shape.features.num_logprobs
    if num_top is None:
        return None
    if chosen is not None:
        chosen = jnp.repeat(chosen, tokens.shape[1], axis=0)
    told = tell(
        logits, tokens.reshape(-1), num_top=num_top, backend=backend, chosen=chosen
    )
    return told.reshape(*tokens.shape, -1)


def chosen_ids(
    controls: ControlRows, active: Active, *, shape: StepShape
) -> Int[Array, "seq id"] | None:
    """The tokens that each sequence's request has chosen to be told of.

    Junk where it has chosen none; None where the shape tells of none.
    """
    if not shape.features.num_told_ids:
        return None
    return controls.told_ids.at[active.row].get(mode="clip")


def blank(
    tokens: Int[Array, "seq width"], *, shape: StepShape
) -> Int[Array, "seq width column"] | None:
    """What `tell_some` returns, before anything is known."""
    num_top = shape.features.num_logprobs
    if num_top is None:
        return None
    numbers = num_columns(num_top, shape.features.num_told_ids)
    return jnp.zeros((*tokens.shape, numbers), jnp.int32)


def tell_prompt(
    model: Network,
    hidden: Float[Array, "token model"],
    tokens: Int[Array, " token"],
    after: Int[Array, " tile"],
    *,
    shape: StepShape,
    backend: Backend,
) -> Int[Array, "tile token column"]:
    """The same for prompt tiles: what every token of theirs says about the next.

    Tile by tile: the logits of a whole chunk would be the launch's largest array.

    Args:
        after: The token after each tile's last.
    """
    num_top = shape.features.num_prompt_logprobs
    assert num_top is not None
    following = tokens.reshape(-1, TILE)[:, 1:]
    following = jnp.concatenate([following, after[:, None]], axis=1)

    def tell_tile(tile: tuple[Array, Array]) -> Array:
        logits = model.logits(tile[0])
        return tell(logits, tile[1], num_top=num_top, backend=backend)

    tiles = hidden.reshape(*following.shape, -1), following
    return jax.lax.map(tell_tile, tiles)

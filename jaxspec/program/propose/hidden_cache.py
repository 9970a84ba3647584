"""Cache one hidden vector per row between launches, for heads.

For Medusa, the vector is the normalized output of the target's last layer, at the token
before the newest one: the target has not read the newest token yet. For EAGLE and
EAGLE-3, it is the output of the head's layer for the newest token.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.proposal import Seen
from jaxspec.program.rows import Active
from jaxspec.sharding import replicated


def hidden_cache_forms(width: int, pool: PoolShape, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape and placement of one vector per row."""
    shape = (pool.num_rows, width)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=replicated(mesh))


def read_hidden(
    last: Float[Array, "row model"], active: Active
) -> Float[Array, "seq model"]:
    """Return the vectors of a launch's sequences; those of pads are junk."""
    return last.at[active.row].get(mode="clip")


def zero_broken(
    values: Float[Array, "some token model"], source: Float[Array, "some token _"]
) -> Float[Array, "some token model"]:
    """Zero the outputs computed from hidden states with NaN or infinity.

    A NaN of the target ends its request; it must not count as a NaN of the head.
    """
    is_finite = jnp.isfinite(source).all(axis=2, keepdims=True)
    return jnp.where(is_finite, values, 0)


def store_hidden(
    last: Float[Array, "row model"],
    nodes: Float[Array, "seq node model"],
    tiles: Float[Array, "tile token model"] | None,
    active: Active,
    seen: Seen,
) -> Float[Array, "row model"]:
    """Store the vectors of the last accepted tokens, and of the ends of prompts."""
    end = seen.num_accepted[:, None, None]
    newest = jnp.take_along_axis(nodes, end, axis=1)[:, 0]
    row = jnp.where(active.is_active, active.row, last.shape[0])
    last = last.at[row].set(newest.astype(last.dtype), mode="drop")
    if tiles is None or seen.first_row is None:
        return last
    return last.at[seen.first_row].set(tiles[:, -1].astype(last.dtype), mode="drop")

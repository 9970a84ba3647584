"""What a head keeps of each row between launches: one vector, of its newest token.

For heads that look at nothing else, that is the target's last hidden state, normalised,
at the token before the newest: the newest has not been fed yet.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.proposal import Seen
from jaxspec.program.rows import Active
from jaxspec.sharding import replicated


def last_forms(width: int, pool: PoolShape, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and placement of one vector a row."""
    shape = (pool.num_rows, width)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=replicated(mesh))


def last_rows(
    last: Float[Array, "row model"], active: Active
) -> Float[Array, "seq model"]:
    """The vectors of a launch's sequences; those of pads are anybody's."""
    return last.at[active.row].get(mode="clip")


def without_broken(
    made: Float[Array, "some token model"], given: Float[Array, "some token _"]
) -> Float[Array, "some token model"]:
    """What was made of the target's hidden states; zeros where those are no numbers.

    A target that is broken ends its request; it does not make the head a broken one.
    """
    is_finite = jnp.isfinite(given).all(axis=2, keepdims=True)
    return jnp.where(is_finite, made, 0)


def note_last(
    last: Float[Array, "row model"],
    nodes: Float[Array, "seq node model"],
    tiles: Float[Array, "tile token model"] | None,
    active: Active,
    seen: Seen,
) -> Float[Array, "row model"]:
    """Keep what was made at the last token that stayed, and at the ends of prompts."""
    end = seen.num_accepted[:, None, None]
    newest = jnp.take_along_axis(nodes, end, axis=1)[:, 0]
    row = jnp.where(active.is_active, active.row, last.shape[0])
    last = last.at[row].set(newest.astype(last.dtype), mode="drop")
    if tiles is None or seen.first_row is None:
        return last
    return last.at[seen.first_row].set(tiles[:, -1].astype(last.dtype), mode="drop")

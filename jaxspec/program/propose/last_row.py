"""What a head keeps of each row between launches: one vector, of its newest token.

For heads that look at nothing else, that is the target's last hidden state, normalised,
at the token before the newest: the newest has not been fed yet.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.config import EngineConfig
from jaxspec.models import cpu
from jaxspec.models.params import Params
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.levels import Continue, Levels
from jaxspec.program.propose.proposal import (
    NORMALISED,
    Context,
    Head,
    Proposal,
    Seen,
)
from jaxspec.program.rows import Active
from jaxspec.sharding import replicated


@dataclass(frozen=True, kw_only=True)
class LastRow(Head):
    """A head on the target's last hidden state alone.

    A kind of it says with `levels` what it makes of that.
    """

    @classmethod
    def of(cls, config: EngineConfig) -> "LastRow":
        """What an engine's configuration asks for."""
        assert config.speculative is not None and config.head_config is not None
        return cls(config=config.head_config, is_greedy=config.speculative.is_greedy)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """What logits are made of."""
        return (NORMALISED,)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """One hidden state a row."""
        return last_forms(self.config.target_hidden_size, pool, mesh)

    def levels(
        self, params: Params, rows: Float[Array, "row model"], context: Context
    ) -> tuple[Continue, Continue, Any]:
        """What `Levels.propose` is given.

        Args:
            rows: A vector for each sequence, and pads.
        """
        raise NotImplementedError

    def propose(
        self,
        params: Params | None,
        state: Array,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Array]:
        """Draw a token for every level, and the next best beside each."""
        assert params is not None, "a head came without parameters"
        rows = cpu.pad_rows(last_rows(state, context.active))
        levels = Levels(context, is_greedy=self.is_greedy, before=before)
        return levels.propose(*self.levels(params, rows, context))[0], state

    def observe(
        self, params: Params | None, state: Array, context: Context, seen: Seen
    ) -> Array:
        """Keep the hidden state at the last token that the target was fed and kept."""
        nodes, tiles = seen.nodes[0], None if seen.tiles is None else seen.tiles[0]
        tiles = None if tiles is None else without_broken(tiles, tiles)
        return note_last(
            state, without_broken(nodes, nodes), tiles, context.active, seen
        )


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

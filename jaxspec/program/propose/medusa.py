"""Medusa proposes: every head one level, from the same hidden state.

What a level's drafts continue does not matter to its head, so that trees of any shape
cost no more passes than a chain.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.config.engine import EngineConfig
from jaxspec.models import cpu
from jaxspec.models.heads import medusa
from jaxspec.models.heads.config import MedusaConfig
from jaxspec.models.params import Params
from jaxspec.models.trimmed import head_of, to_target_vocab
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.draft_sampling import Levels, entry_of, logits_by_level
from jaxspec.program.propose.hidden_cache import (
    last_forms,
    last_rows,
    note_last,
    without_broken,
)
from jaxspec.program.propose.proposal import (
    NORMALISED,
    Context,
    Head,
    Proposal,
    Seen,
)


@dataclass(frozen=True, kw_only=True)
class Medusa(Head):
    """As many heads as there may be drafts in a row."""

    config: MedusaConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "Medusa":
        """Build it from an engine's configuration."""
        assert config.speculative is not None
        assert isinstance(config.head_config, MedusaConfig)
        return cls(config=config.head_config, is_greedy=config.speculative.is_greedy)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The last hidden state, normalised, of which logits are made."""
        return (NORMALISED,)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """One hidden state per row."""
        return last_forms(self.config.target_hidden_size, pool, mesh)

    def propose(
        self,
        params: Params | None,
        state: Array,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Array]:
        """Draw a token for every level, and the next best beside each.

        The logits of all heads are made at once.
        """
        assert params is not None, "a head came without parameters"
        rows = cpu.pad_rows(last_rows(state, context.active))
        tree, seqs = context.tree, context.active.row.shape[0]
        found = jnp.stack(medusa.forward(self.config, params, rows)[: tree.num_levels])
        is_finite = jnp.isfinite(found).all(axis=(0, 2))
        found = jnp.where(is_finite[None, :, None], found, 0)
        logits_of = self._logits(params, found, context)

        def first(level: Array | int, drafts: Array, kept: None) -> tuple:
            return logits_of(level)[:seqs], ~is_finite[:seqs], kept

        def following(level: Array | int, drafts: Array, kept: None) -> tuple:
            # Whatever is continued, it is by the same tokens.
            every = jnp.repeat(logits_of(level)[:seqs], tree.width, axis=0)
            return every, ~is_finite[:seqs], kept

        levels = Levels(context, is_greedy=self.is_greedy, before=before)
        return levels.propose(first, following, None)[0], state

    def observe(
        self, params: Params | None, state: Array, context: Context, seen: Seen
    ) -> Array:
        """Keep the hidden state at the last token that the target was fed and kept."""
        nodes, tiles = seen.nodes[0], None if seen.tiles is None else seen.tiles[0]
        tiles = None if tiles is None else without_broken(tiles, tiles)
        return note_last(
            state, without_broken(nodes, nodes), tiles, context.active, seen
        )

    def _logits(
        self, params: Params, found: Float[Array, "level row model"], context: Context
    ) -> Callable[[Array | int], Float[Array, "row vocab"]]:
        """Logits of a level, over the target's vocabulary."""
        config, vocab = self.config, context.pool.vocab_size
        assert context.target is not None, "nobody has the matrix of logits"
        shared = head_of(context.target)

        def widen(logits: Array) -> Array:
            return to_target_vocab(params, logits, vocab)

        def one_head(head: int, rows: Array) -> Array:
            return widen(medusa.logits(config, params, head, rows, shared))

        if config.lm_heads < 2:
            return logits_by_level(functools.partial(one_head, 0), found, vocab)
        heads = [functools.partial(one_head, head) for head in range(len(found))]
        return lambda level: jax.lax.switch(level, heads, entry_of(found, level))

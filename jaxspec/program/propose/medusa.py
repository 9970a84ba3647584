"""Medusa: each head proposes one level, from the same hidden state.

A head does not depend on the drafts of earlier levels, so a tree of any shape costs no
more passes than a chain.
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
from jaxspec.program.propose.draft_sampling import (
    DraftSampler,
    at_level,
    logits_by_level,
)
from jaxspec.program.propose.hidden_cache import (
    hidden_cache_forms,
    read_hidden,
    store_hidden,
    zero_broken,
)
from jaxspec.program.propose.proposal import (
    NORMALISED,
    Head,
    Proposal,
    ProposerContext,
    Seen,
)


@dataclass(frozen=True, kw_only=True)
class Medusa(Head):
    """One head for each level of drafts."""

    config: MedusaConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "Medusa":
        """Build the proposer from an engine's configuration."""
        assert config.speculative is not None
        assert isinstance(config.head_config, MedusaConfig)
        return cls(
            config=config.head_config, drafts_argmax=config.speculative.drafts_argmax
        )

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The head reads the last hidden state, after the final norm."""
        return (NORMALISED,)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shape of one hidden state per row."""
        return hidden_cache_forms(self.config.target_hidden_size, pool, mesh)

    def propose(
        self,
        params: Params | None,
        state: Array,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Array]:
        """Sample a token for every level, and the next best tokens at each.

        The logits of all heads are computed at once.
        """
        assert params is not None, "a head without parameters"
        rows = cpu.pad_rows(read_hidden(state, context.active))
        tree, seqs = context.tree, context.active.row.shape[0]
        outputs = jnp.stack(
            medusa.forward(self.config, params, rows)[: tree.num_levels]
        )
        is_finite = jnp.isfinite(outputs).all(axis=(0, 2))
        outputs = jnp.where(is_finite[None, :, None], outputs, 0)
        logits_of = self._logits(params, outputs, context)

        def first_level(level: Array | int, drafts: Array, carry: None) -> tuple:
            return logits_of(level)[:seqs], ~is_finite[:seqs], carry

        def later_level(level: Array | int, drafts: Array, carry: None) -> tuple:
            # All rows of a level have the same children.
            count = tree.max_parents_per_level
            every = jnp.repeat(logits_of(level)[:seqs], count, axis=0)
            return every, ~is_finite[:seqs], carry

        sampler = DraftSampler(context, drafts_argmax=self.drafts_argmax, before=before)
        return sampler.propose(first_level, later_level, None)[0], state

    def observe(
        self, params: Params | None, state: Array, context: ProposerContext, seen: Seen
    ) -> Array:
        """Store the hidden state at the last accepted token."""
        nodes, tiles = seen.nodes[0], None if seen.tiles is None else seen.tiles[0]
        tiles = None if tiles is None else zero_broken(tiles, tiles)
        return store_hidden(
            state, zero_broken(nodes, nodes), tiles, context.active, seen
        )

    def _logits(
        self,
        params: Params,
        outputs: Float[Array, "level row model"],
        context: ProposerContext,
    ) -> Callable[[Array | int], Float[Array, "row vocab"]]:
        """Return a function of the level: logits over the target's vocabulary."""
        config, vocab = self.config, context.pool.vocab_size
        assert context.target is not None, "the target's output matrix is missing"
        shared = head_of(context.target)

        def widen(logits: Array) -> Array:
            return to_target_vocab(params, logits, vocab)

        def one_head(head: int, rows: Array) -> Array:
            return widen(medusa.logits(config, params, head, rows, shared))

        if config.lm_heads < 2:
            return logits_by_level(functools.partial(one_head, 0), outputs, vocab)
        heads = [functools.partial(one_head, head) for head in range(len(outputs))]
        return lambda level: jax.lax.switch(level, heads, at_level(outputs, level))

"""Medusa proposes: every head one level, from the same hidden state.

What a level's drafts continue does not matter to its head, so that trees of any shape
cost no more passes than a chain.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.heads import medusa
from jaxspec.models.heads.config import MedusaConfig
from jaxspec.models.params import Params
from jaxspec.models.trimmed import head_of, to_target_vocab
from jaxspec.program.propose.last_row import LastRow
from jaxspec.program.propose.levels import Continue, entry_of, logits_by_level
from jaxspec.program.propose.proposal import Context


@dataclass(frozen=True, kw_only=True)
class Medusa(LastRow):
    """As many heads as there may be drafts in a row."""

    config: MedusaConfig

    def levels(
        self, params: Params, rows: Float[Array, "row model"], context: Context
    ) -> tuple[Continue, Continue, None]:
        """Every head's logits, made at once."""
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

        return first, following, None

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

"""A draft model proposes all drafts in one pass over mask tokens (PARD).

The pass reads the newest tokens (the largest number that a round may add), then one
mask fewer than there are drafts: the row of the newest token predicts the first draft,
each mask's row the next one. The next pass overwrites the masks' keys and values with
those of the actual tokens, before any row reads them.

No draft depends on the drafts before it, so a tree of any shape costs no more than a
chain. The distribution of a draft is still known: given the text before the round, it
is independent of the other drafts.

References: An et al. 2025, arXiv:2504.18583.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config.engine import EngineConfig
from jaxspec.models.batch import TokenBatch
from jaxspec.models.params import Params
from jaxspec.program import history
from jaxspec.program.propose.draft_model import DraftModel, Pages
from jaxspec.program.propose.draft_sampling import (
    DraftSampler,
    logits_by_level,
    zero_broken_rows,
)
from jaxspec.program.propose.proposal import Proposal, ProposerContext
from jaxspec.program.token_batch import make_token_batch


@dataclass(frozen=True, kw_only=True)
class Pard(DraftModel):
    """A draft model trained to fill in masks."""

    @classmethod
    def of(cls, config: EngineConfig) -> "Pard":
        """Build the proposer from an engine's configuration."""
        assert config.speculative is not None
        assert config.draft_model_config is not None
        return cls(
            config=config.draft_model_config,
            drafts_argmax=config.speculative.drafts_argmax,
        )

    def propose(
        self,
        params: Params | None,
        state: Pages,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Pages]:
        """Sample all levels from the rows of one pass.

        A sequence that wants no drafts is left out: the model may lack keys and values
        of earlier tokens, and the keys and values that it would write for the newest
        tokens would then be wrong.

        Args:
            before: Its valid drafts replace the model's own.
        """
        tree, active = context.tree, context.active
        seqs, num_levels = active.row.shape[0], tree.num_levels
        model = self._model(params, context)
        output, pages = model.forward(self._masked(context), state)

        def by_level(part: Array) -> Array:
            rows = part.reshape(seqs, -1, *part.shape[1:])
            return rows[:, -num_levels:].swapaxes(0, 1)

        # Rows of sequences that are left out are junk.
        is_finite = by_level(output.is_finite).all(axis=0)
        is_finite |= context.wanted_levels == 0
        rows = zero_broken_rows(output.hidden_states, output.is_finite)
        logits_of = logits_by_level(
            model.logits, by_level(rows), context.pool.vocab_size
        )

        def first_level(level: Array | int, drafts: Array, carry: Pages) -> tuple:
            return logits_of(level), ~is_finite, carry

        def later_level(level: Array | int, drafts: Array, carry: Pages) -> tuple:
            count = tree.max_parents_per_level
            return jnp.repeat(logits_of(level), count, axis=0), ~is_finite, carry

        sampler = DraftSampler(context, drafts_argmax=self.drafts_argmax, before=before)
        proposal, _ = sampler.propose(first_level, later_level, ())
        return proposal, pages

    def _masked(self, context: ProposerContext) -> TokenBatch:
        """Return a batch of every sequence's newest tokens, followed by masks.

        Tokens whose keys and values exist are computed again: the number of new tokens
        is data, while the width of the pass is static.
        """
        active, tree, mask = context.active, context.tree, self.config.mask_token_id
        assert mask is not None, "the model has no mask token"
        seqs = active.row.shape[0]
        back = jnp.arange(-tree.max_emitted, 0, dtype=jnp.int32)[None]
        newest: Int[Array, "seq token"] = history.read(
            context.token_pages,
            active.page_table,
            jnp.maximum(active.num_tokens[:, None] + back, 0),
        )
        masks = jnp.full((seqs, tree.num_levels - 1), mask, jnp.int32)
        is_written = active.is_active & (context.wanted_levels > 0)
        tokens = jnp.concatenate([newest, masks], axis=1)
        return make_token_batch(
            tokens,
            active.num_tokens + tree.num_levels - 1,
            active.page_table,
            jnp.broadcast_to(is_written[:, None], tokens.shape),
            context.pool,
            local_page_table=active.local_page_table,
        )

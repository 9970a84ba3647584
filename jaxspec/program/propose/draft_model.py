"""The draft model proposes K levels of drafts in K passes.

The first pass reads the two newest tokens and gives level 1; each later pass gives one
more level.

A chain, or a tree, whose side branches are the next best tokens. If only the main chain
has children, each later pass takes one token, as for a chain; otherwise each takes the
whole tree, as far as it is sampled.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.config.engine import EngineConfig, ModelConfig
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import ForwardOutput, Network, build_network
from jaxspec.models.params import Params
from jaxspec.program.plan import NO_TOKEN, TILE, PoolShape
from jaxspec.program.propose.draft_sampling import DraftSampler, zero_broken_rows
from jaxspec.program.propose.proposal import Model, Proposal, ProposerContext, Seen
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.state import page_forms
from jaxspec.program.token_batch import make_token_batch
from jaxspec.program.tree.compact_kv import compact_kv
from jaxspec.program.tree.tree import Tree, template_of
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_kernels.bits import KvPools

Pages = KvPools


@dataclass(frozen=True, kw_only=True)
class DraftModel(Model):
    """A small model with pages of its own, addressed by the target's page ids."""

    config: ModelConfig

    is_unused_without_drafts: ClassVar[bool] = True

    @classmethod
    def of(cls, config: EngineConfig) -> "DraftModel":
        """Build the proposer from an engine's configuration."""
        assert config.speculative is not None
        assert config.draft_model_config is not None
        template = template_of(config.speculative)
        kind = TreeModel if template and template.has_side_paths else cls
        return kind(
            config=config.draft_model_config,
            drafts_argmax=config.speculative.drafts_argmax,
        )

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shapes of the pages of keys and values."""
        return page_forms(self.config, dtype, pool, mesh, DRAFT_MESH_AXES)

    def draft_prefill(
        self,
        params: Params | None,
        state: Pages,
        context: ProposerContext,
        active: Active,
        next_tokens: Int[Array, " token"],
    ) -> tuple[Pages, Float[Array, " token"]]:
        """Prefill prompts and tokens that the target generated without drafts.

        A draft that is a point mass, or shares its noise with the target, is accepted
        if it equals the target's token: the mean of these is the acceptance
        probability. For other drafts it would be the mean of min(1, q / p) over the
        target's tokens, but p of tokens sampled earlier is not stored: those have no
        estimate.
        """
        assert context.prompts is not None, "no tokens to prefill"
        model, backend = self._model(params, context), context.backend(DRAFT_MESH_AXES)
        output, pages = model.forward(context.prompts, state)

        def compare(tile: tuple[ForwardOutput, Active, Array]) -> Array:
            output, active, next_tokens = tile
            logits, _ = _finite_logits(model, output)
            token, probs = sample_draft(
                logits, 0, active, backend, drafts_argmax=self.drafts_argmax
            )
            acceptance = (token == next_tokens).astype(jnp.float32)
            if probs is not None:
                is_drawn = active.is_sampled & ~active.is_coupled
                acceptance = jnp.where(is_drawn, -1.0, acceptance)
            return jnp.where(next_tokens != NO_TOKEN, acceptance, -1.0)

        def skip(tile: tuple[ForwardOutput, Active, Array]) -> Array:
            return jnp.full(tile[2].shape, -1.0)

        # Most launches are prompts, which need no estimate. And the logits of a whole
        # chunk would be the largest array.
        tiles = jax.tree.map(
            lambda part: part.reshape(-1, TILE, *part.shape[1:]),
            (output, active, next_tokens),
        )
        acceptance = jax.lax.map(
            lambda tile: jax.lax.cond((tile[2] != NO_TOKEN).any(), compare, skip, tile),
            tiles,
        )
        return pages, acceptance.reshape(-1)

    def propose(
        self,
        params: Params | None,
        state: Pages,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Pages]:
        """Sample a main chain per sequence, and the side branches of a tree.

        The first pass reads the two newest tokens. The later ones run in a loop, up to
        the largest number of levels that a sequence wants.

        Args:
            before: Its valid drafts replace the model's own on the main chain.
        """
        tree, active, pool = context.tree, context.active, context.pool
        model = self._model(params, context)
        seqs = active.row.shape[0]

        def first_level(level: Array | int, drafts: Array, pages: Pages) -> tuple:
            output, pages = model.forward(_newest(active, pool), pages)
            newest = jax.tree.map(lambda part: part[1::2], output)
            return *_finite_logits(model, newest), pages

        def later_level(level: Array | int, drafts: Array, pages: Pages) -> tuple:
            if not tree.has_side_paths:
                batch = _next(drafts[:, level - 1], level, active, pool)
                output, pages = model.forward(batch, pages)
                return *_finite_logits(model, output), pages
            output, pages = model.forward(_whole(tree, drafts, active, pool), pages)
            logits, is_broken = _finite_logits(model, _level(tree, level, output, seqs))
            # Several rows of a level may have children, the main chain's first.
            return logits, is_broken[:: tree.max_parents_per_level], pages

        sampler = DraftSampler(context, drafts_argmax=self.drafts_argmax, before=before)
        return sampler.propose(first_level, later_level, state)

    def _model(self, params: Params | None, context: ProposerContext) -> Network:
        assert params is not None, "a draft model without parameters"
        return build_network(self.config, params, context.backend(DRAFT_MESH_AXES))


@dataclass(frozen=True, kw_only=True)
class TreeModel(DraftModel):
    """A draft model for trees whose side branches have children.

    The passes write keys and values of the whole tree, each to its row's slot. After
    the verdict, those of accepted drafts are moved to their positions.
    """

    @property
    def target_layers(self) -> tuple[int, ...]:
        """No layers, because it observes rounds only to learn the accepted path."""
        return ()

    def observe(
        self, params: Params | None, state: Pages, context: ProposerContext, seen: Seen
    ) -> Pages:
        """Move keys and values of accepted drafts."""
        if seen.tree_row is None:
            return state
        active, pool = context.active, context.pool
        backend = context.backend(DRAFT_MESH_AXES)
        return compact_kv(
            self.config, state, seen.tree, seen.tree_row, active, pool, backend
        )


def _finite_logits(model: Network, output: ForwardOutput) -> tuple[Array, Array]:
    """Return the logits, and which rows hold NaN or infinity.

    Such rows are replaced by zeros before the logits are computed.
    """
    rows = zero_broken_rows(output.hidden_states, output.is_finite)
    return model.logits(rows), ~output.is_finite


def _next(
    token: Array, step: Array | int, active: Active, pool: PoolShape
) -> TokenBatch:
    """Return a batch of the draft before the one that is sampled next."""
    kv_len, is_written = active.num_tokens + step, active.is_active[:, None]
    return make_token_batch(
        token[:, None],
        kv_len,
        active.page_table,
        is_written,
        pool,
        local_page_table=active.local_page_table,
    )


def _whole(
    tree: Tree, drafts: Int[Array, "seq draft"], active: Active, pool: PoolShape
) -> TokenBatch:
    """Return a batch of the newest token and all drafts.

    No row attends to drafts that are not sampled yet.
    """
    tokens = jnp.concatenate([active.last_tokens[:, 1:], drafts], axis=1)
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    kv_len = active.num_tokens + tree.num_nodes
    return make_token_batch(
        tokens,
        kv_len,
        active.page_table,
        is_written,
        pool,
        tree=tree,
        local_page_table=active.local_page_table,
    )


def _level(
    tree: Tree, step: Array | int, output: ForwardOutput, seqs: int
) -> ForwardOutput:
    """Take the rows with children at a level from a pass over the tree."""
    rows = jnp.asarray(tree.branching)[step]

    def take(part: Array) -> Array:
        nodes = part.reshape(seqs, tree.num_rows, *part.shape[1:])
        return nodes[:, rows].reshape(-1, *part.shape[1:])

    return jax.tree.map(take, output)


def _newest(active: Active, pool: PoolShape) -> TokenBatch:
    """Return a batch of the two newest tokens of every sequence.

    Two tokens, since after a fully accepted round the draft model has no keys and
    values for the last draft token. Otherwise the same values are written again.
    """
    tokens = active.last_tokens
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    return make_token_batch(
        tokens,
        active.num_tokens,
        active.page_table,
        is_written,
        pool,
        local_page_table=active.local_page_table,
    )

"""The DFlash drafter proposes all drafts in one pass over a block of masks.

After each target pass, `observe` computes the drafter's keys and values from the
target's hidden states. They use the target's page ids. A round's pass over a block
writes keys and values from the newest token on; `observe` replaces those of accepted
tokens, and the next block overwrites the others. There is no draft lag.

No draft depends on the drafts before it, as with PARD: a tree of any shape costs no
more than a chain, and the distribution of each draft is known.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.config.engine import EngineConfig
from jaxspec.models import cpu
from jaxspec.models.heads import dflash
from jaxspec.models.heads.config import DFlashConfig
from jaxspec.models.params import Params
from jaxspec.models.trimmed import head_of, to_target_vocab
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.draft_sampling import DraftSampler, logits_by_level
from jaxspec.program.propose.hidden_cache import zero_broken
from jaxspec.program.propose.proposal import Head, Proposal, ProposerContext, Seen
from jaxspec.program.state import layer_pages
from jaxspec.program.token_batch import make_token_batch
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_kernels.bits import KvPools


@dataclass(frozen=True, kw_only=True)
class DFlash(Head):
    """Layers over the target's hidden states, with pages of their own."""

    config: DFlashConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "DFlash":
        """Build the proposer from an engine's configuration."""
        assert config.speculative is not None
        assert isinstance(config.head_config, DFlashConfig)
        return cls(
            config=config.head_config, drafts_argmax=config.speculative.drafts_argmax
        )

    @property
    def target_layers(self) -> tuple[int, ...]:
        """See `Observer`."""
        return self.config.target_layers

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shapes of each layer's pages of keys and values."""
        config, axes = self.config, DRAFT_MESH_AXES
        pages = layer_pages(config, pool.num_pages, dtype, pool, mesh, axes)
        return (pages,) * config.num_layers

    def propose(
        self,
        params: Params | None,
        state: KvPools,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, KvPools]:
        """Sample all levels from the rows of one pass.

        Each sequence gets one mask per wanted draft.
        """
        assert params is not None, "a head without parameters"
        head_params, config, vocab = params, self.config, context.pool.vocab_size
        tree, seqs = context.tree, context.active.row.shape[0]
        outputs, state = self._run_block(params, state, context)
        rows = outputs.reshape(seqs, -1, outputs.shape[1])[:, 1:].swapaxes(0, 1)
        level = jnp.arange(tree.num_levels, dtype=jnp.int32)[:, None]
        is_finite = jnp.isfinite(rows).all(axis=2)
        rows = jnp.where(is_finite[:, :, None], rows, 0)
        # Rows past the wanted drafts are not used.
        is_broken = (~is_finite & (level < context.wanted_levels[None])).any(axis=0)
        assert context.target is not None, "the target's output matrix is missing"
        shared = head_of(context.target)

        def logits(rows: Array) -> Array:
            found = dflash.logits(config, head_params, rows, shared)
            return to_target_vocab(head_params, found, vocab)

        logits_of = logits_by_level(
            lambda rows: cpu.with_pads(logits, rows), rows, vocab
        )

        def first_level(level: Array | int, drafts: Array, carry: None) -> tuple:
            return logits_of(level), is_broken, carry

        def later_level(level: Array | int, drafts: Array, carry: None) -> tuple:
            # All rows of a level have the same children.
            count = tree.max_parents_per_level
            return jnp.repeat(logits_of(level), count, axis=0), is_broken, carry

        sampler = DraftSampler(context, drafts_argmax=self.drafts_argmax, before=before)
        return sampler.propose(first_level, later_level, None)[0], state

    def _run_block(
        self, params: Params, state: KvPools, context: ProposerContext
    ) -> tuple[Float[Array, "row model"], KvPools]:
        """Run the layers over every sequence's newest token and masks."""
        active, config, pool = context.active, self.config, context.pool
        num_levels = context.tree.num_levels
        seqs = active.row.shape[0]
        masks = jnp.full((seqs, num_levels), config.mask_token_id, jnp.int32)
        tokens = jnp.concatenate([active.last_tokens[:, 1:], masks], axis=1)
        column = jnp.arange(num_levels + 1, dtype=jnp.int32)[None]
        wanted = context.wanted_levels[:, None]
        batch = make_token_batch(
            tokens,
            active.num_tokens + num_levels,
            active.page_table,
            active.is_active[:, None] & (column <= wanted) & (wanted > 0),
            pool,
        )
        count = batch.tokens.shape[0]
        padded = cpu.pad_batch(batch, pool.num_pages * pool.page_size)
        target = {} if context.target is None else context.target
        tokens = jnp.maximum(padded.tokens, 0)
        embedded = dflash.embed(config, params, tokens, target["embedding"])
        outputs, state = dflash.forward(
            config, params, padded, embedded, state, context.backend(DRAFT_MESH_AXES)
        )
        return outputs[:count], state

    def observe(
        self,
        params: Params | None,
        state: KvPools,
        context: ProposerContext,
        seen: Seen,
    ) -> KvPools:
        """Write keys and values of the accepted tokens and the prompts."""
        assert params is not None, "a head without parameters"
        active, pool, width = context.active, context.pool, context.tree.max_emitted
        node = jnp.arange(width, dtype=jnp.int32)[None]
        is_kept = active.is_active[:, None] & (node <= seen.num_accepted[:, None])
        batch = make_token_batch(
            seen.next_tokens[:, :width],  # not read
            active.num_tokens - 1 + width,
            active.page_table,
            is_kept,
            pool,
        )
        streams = [
            _flat(zero_broken(one, seen.nodes[-1])[:, :width]) for one in seen.nodes
        ]
        positions, slots = batch.positions, batch.slot_mapping
        if seen.tiles is not None:
            assert context.prompts is not None
            positions = jnp.concatenate([positions, context.prompts.positions])
            slots = jnp.concatenate([slots, context.prompts.slot_mapping])
            streams = [
                jnp.concatenate([one, _flat(zero_broken(tiles, seen.tiles[-1]))])
                for one, tiles in zip(streams, seen.tiles, strict=True)
            ]
        return dflash.write_context(
            self.config,
            params,
            streams,
            positions,
            slots,
            state,
            context.backend(DRAFT_MESH_AXES),
        )


def _flat(part: Float[Array, "some token model"]) -> Float[Array, "row model"]:
    return part.reshape(-1, part.shape[2]).astype(jnp.float32)

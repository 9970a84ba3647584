"""The EAGLE-3 head: runs over all tokens of the target, then over its own drafts.

A row belongs to a position: its inputs are the target's hidden states there and the
token after it. Its keys and values use that position's slot, in pages with the target's
ids. So the last slot of a page depends on one token more than the page holds: prefix
caching keys pages by that token, too (`jaxspec.engine.scheduling.kv_cache`). A pass of
the head follows every pass of the target, so there is no draft lag.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.config.engine import EngineConfig
from jaxspec.models import cpu
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads import eagle3
from jaxspec.models.heads.config import Eagle3Config, LayerConfig
from jaxspec.models.heads.weights import functions_of_head
from jaxspec.models.params import Params
from jaxspec.models.trimmed import head_of, to_target_vocab
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.draft_sampling import DraftSampler, zero_broken_rows
from jaxspec.program.propose.hidden_cache import (
    hidden_cache_forms,
    read_hidden,
    store_hidden,
    zero_broken,
)
from jaxspec.program.propose.proposal import Head, Proposal, ProposerContext, Seen
from jaxspec.program.state import layer_pages
from jaxspec.program.token_batch import join_batches, make_token_batch
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_kernels.bits import KvPages

# Pages of keys and values; the layer's newest output for each row.
_State = tuple[KvPages, Array]


@dataclass(frozen=True, kw_only=True)
class Eagle3(Head):
    """One layer over the target's hidden states, with pages of its own.

    Attributes:
        target_layers: Numbers of target layers after which they are read.
    """

    config: LayerConfig
    target_layers: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig) -> "Eagle3":
        """Build the proposer from an engine's configuration."""
        head = config.head_config
        assert config.speculative is not None
        assert isinstance(head, Eagle3Config)
        return cls(
            config=head,
            target_layers=head.layers_of(config.model_config),
            drafts_argmax=config.speculative.drafts_argmax,
        )

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Pages of keys and values; the layer's newest output for every row."""
        config, axes = self.config, DRAFT_MESH_AXES
        pages = layer_pages(config, pool.num_pages, dtype, pool, mesh, axes)
        return pages, hidden_cache_forms(config.hidden_size, pool, mesh)

    def propose(
        self,
        params: Params | None,
        state: _State,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, _State]:
        """Sample a main chain per sequence, and the next best tokens at each level.

        The first draft uses the layer's output for the newest token, from the end of
        the last round. Each later one takes a pass over the draft before it, with the
        layer's own output in place of the target's hidden states. `observe` overwrites
        the keys and values of these passes with those from the target's states.
        """
        assert params is not None, "a head without parameters"
        assert not context.tree.has_side_paths, "only the main chain may have children"
        head_params, active = params, context.active
        pages, last = state

        def read(hidden: Array) -> tuple[Array, Array]:
            is_finite = jnp.isfinite(hidden).all(axis=1)
            rows = zero_broken_rows(hidden, is_finite)
            return self._logits(head_params, rows, context), ~is_finite

        def first_level(level: Array | int, drafts: Array, carry: _State) -> tuple:
            return *read(carry[1]), carry

        def later_level(level: Array | int, drafts: Array, carry: _State) -> tuple:
            batch = make_token_batch(
                drafts[:, level - 1][:, None],
                active.num_tokens + level - 1,
                active.page_table,
                active.is_active[:, None],
                context.pool,
                local_page_table=active.local_page_table,
            )
            hidden, pages = self._run(head_params, batch, carry[1], carry[0], context)
            return *read(hidden), (pages, hidden)

        sampler = DraftSampler(context, drafts_argmax=self.drafts_argmax, before=before)
        proposal, (pages, _) = sampler.propose(
            first_level, later_level, (pages, read_hidden(last, active))
        )
        return proposal, (pages, last)

    def observe(
        self, params: Params | None, state: _State, context: ProposerContext, seen: Seen
    ) -> _State:
        """Run the head over the accepted tokens and the prompts."""
        assert params is not None, "a head without parameters"
        active, pool, width = context.active, context.pool, context.tree.max_emitted
        pages, last = state
        node = jnp.arange(width, dtype=jnp.int32)[None]
        is_kept = active.is_active[:, None] & (node <= seen.num_accepted[:, None])
        batch = make_token_batch(
            seen.next_tokens[:, :width],
            active.num_tokens - 1 + width,
            active.page_table,
            is_kept,
            pool,
            local_page_table=active.local_page_table,
        )
        streams = [_flat(one[:, :width]) for one in seen.nodes]
        if seen.tiles is not None:
            assert context.prompts is not None and seen.next_tile_tokens is not None
            tokens = seen.next_tile_tokens.reshape(-1)
            prompts = dataclasses.replace(context.prompts, tokens=tokens)
            batch = join_batches([batch, prompts])
            streams = [
                jnp.concatenate([one, _flat(tiles)])
                for one, tiles in zip(streams, seen.tiles, strict=True)
            ]
        hidden = self._fuse(params, streams)
        hidden, pages = self._run(params, batch, hidden, pages, context)
        count = is_kept.size
        nodes = hidden[:count].reshape(*is_kept.shape, -1)
        nodes = zero_broken(nodes, seen.nodes[-1][:, :width])
        tiles = None
        if seen.tiles is not None:
            tiles = hidden[count:].reshape(*seen.tiles[0].shape[:2], -1)
            tiles = zero_broken(tiles, seen.tiles[-1])
        return pages, store_hidden(last, nodes, tiles, active, seen)

    def _fuse(
        self, params: Params, streams: Sequence[Float[Array, "row target_model"]]
    ) -> Float[Array, "row model"]:
        joined = jnp.concatenate(streams, axis=1)

        def fuse(rows: Array) -> Array:
            parts = jnp.split(rows, len(streams), axis=1)
            return self._network.fuse(self.config, params, parts)

        return cpu.with_pads(fuse, joined)

    def _run(
        self,
        params: Params,
        batch: TokenBatch,
        hidden: Float[Array, "row model"],
        pages: KvPages,
        context: ProposerContext,
    ) -> tuple[Float[Array, "row model"], KvPages]:
        """Run one pass of the layer; return its output and the pages."""
        count = batch.tokens.shape[0]
        padded = cpu.pad_batch(batch, pages.shape[0] * pages.shape[1])
        missing = padded.tokens.shape[0] - count
        tokens = jnp.maximum(padded.tokens, 0)  # pads have none
        target = {} if context.target is None else context.target
        outputs, pages = self._network.forward(
            self.config,
            params,
            padded,
            self._network.embed(params, tokens, target["embedding"]),
            jnp.pad(hidden, ((0, missing), (0, 0))),
            pages,
            context.backend(DRAFT_MESH_AXES),
        )
        return outputs[:count], pages

    @property
    def _network(self) -> Any:
        """Return the network functions of the head's kind."""
        return functions_of_head(self.config)

    def _logits(
        self,
        params: Params,
        hidden: Float[Array, "row model"],
        context: ProposerContext,
    ) -> Float[Array, "row vocab"]:
        """Return logits over the target's vocabulary."""
        assert isinstance(self.config, Eagle3Config)
        config, vocab_size = self.config, context.pool.vocab_size
        assert context.target is not None, "the target's output matrix is missing"
        shared = head_of(context.target)
        draft_logits = cpu.with_pads(
            lambda rows: eagle3.logits(config, params, rows, shared), hidden
        )
        return to_target_vocab(params, draft_logits, vocab_size)


def _flat(part: Float[Array, "some token model"]) -> Float[Array, "row model"]:
    return part.reshape(-1, part.shape[2]).astype(jnp.float32)

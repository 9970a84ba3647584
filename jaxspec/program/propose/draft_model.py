"""The draft model proposes a chain: a first pass of two tokens, then one at a time."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.config import EngineConfig, ModelConfig
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Hidden, Network, build_network
from jaxspec.models.params import Params
from jaxspec.program.plan import NO_TOKEN, TILE, PoolShape
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.region import make_region
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.state import page_forms
from jaxspec.sharding import DRAFT_MESH_AXES

Pages = tuple[Array, ...]
# Drafts, probabilities of all but the first, who is broken, pages.
_Carry = tuple[Array, Array | None, Array, Pages]


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A small model with pages of its own, at the target's page ids.

    Attributes:
        is_greedy: Propose the argmax, a point mass, also where the request samples.
    """

    config: ModelConfig
    is_greedy: bool = False

    has_params: ClassVar[bool] = True
    may_find_none: ClassVar[bool] = False
    may_find_few: ClassVar[bool] = False

    @classmethod
    def of(cls, config: EngineConfig) -> "DraftModel":
        """What an engine's configuration asks for."""
        assert config.speculative is not None
        assert config.draft_model_config is not None
        is_greedy = config.speculative.draft_sample_method == "greedy"
        return cls(config=config.draft_model_config, is_greedy=is_greedy)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Pages of keys and values."""
        return page_forms(self.config, dtype, pool, mesh, DRAFT_MESH_AXES)

    def catch_up(
        self,
        params: Params | None,
        state: Pages,
        context: Context,
        active: Active,
        following: Int[Array, " token"],
    ) -> tuple[Pages, Float[Array, " token"]]:
        """Take in prompts, and tokens that the target made without drafts.

        A certain draft, or one that shares its noise with the target, would have stayed
        where it is the same token: a mean of these is the chance of a draft to stay. Of
        any other the chance is the mean of min(1, q / p) over the target's tokens, and
        p of a token that was drawn long ago is not kept: of those nothing is said.
        """
        assert context.prompts is not None, "there is nothing to take in"
        model, backend = self._model(params, context), context.backend(DRAFT_MESH_AXES)
        hidden, pages = model.hidden(context.prompts, state)

        def compare(tile: tuple[Hidden, Active, Array]) -> Array:
            hidden, active, following = tile
            logits, _ = _finite_logits(model, hidden)
            token, probs = sample_draft(
                logits, 0, active, backend, is_greedy=self.is_greedy
            )
            likeness = (token == following).astype(jnp.float32)
            if probs is not None:
                is_drawn = active.is_sampled & ~active.is_coupled
                likeness = jnp.where(is_drawn, -1.0, likeness)
            return jnp.where(following != NO_TOKEN, likeness, -1.0)

        def skip(tile: tuple[Hidden, Active, Array]) -> Array:
            return jnp.full(tile[2].shape, -1.0)

        # Of most launches nothing is asked: they are prompts. And the logits of a whole
        # chunk would be the largest array of all.
        tiles = jax.tree.map(
            lambda part: part.reshape(-1, TILE, *part.shape[1:]),
            (hidden, active, following),
        )
        likeness = jax.lax.map(
            lambda tile: jax.lax.cond((tile[2] != NO_TOKEN).any(), compare, skip, tile),
            tiles,
        )
        return pages, likeness.reshape(-1)

    def propose(
        self,
        params: Params | None,
        state: Pages,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Pages]:
        """Draw a chain of tokens per sequence.

        The first pass takes the two newest tokens. The others are a loop of as many
        turns as the launch wants drafts.

        Args:
            before: Drafts that the model is fed in place of its own, as far as they
                count.
        """
        assert context.tree.is_chain, "a draft model proposes a chain"
        num_draft_tokens, active = context.tree.num_nodes, context.active
        model, backend = self._model(params, context), context.backend(DRAFT_MESH_AXES)
        adjust = context.adjuster(DRAFT_MESH_AXES)
        seqs = active.row.shape[0]

        def draw(
            hidden: Hidden, step: Array | int, drafts: Array
        ) -> tuple[Array, Array | None, Array]:
            logits, is_broken = _finite_logits(model, hidden)
            if adjust is not None:
                logits = adjust(logits[:, None], drafts, num_before=step)[:, 0]
            token, probs = sample_draft(
                logits, step, active, backend, is_greedy=self.is_greedy
            )
            if before is not None:
                token, probs = _keep(before, step, token, probs)
            return drafts.at[:, step].set(token), probs, is_broken

        def extend(step: Array, carry: _Carry) -> _Carry:
            drafts, rest, was_broken, pages = carry
            batch = _next(drafts[:, step - 1], step, active, context.pool)
            hidden, pages = model.hidden(batch, pages)
            drafts, probs, is_broken = draw(hidden, step, drafts)
            if rest is not None and probs is not None:
                rest = jax.lax.dynamic_update_index_in_dim(rest, probs, step - 1, 0)
            return drafts, rest, was_broken | is_broken, pages

        hidden, pages = model.hidden(_newest(active, context.pool), state)
        newest = jax.tree.map(lambda part: part[1::2], hidden)
        none = jnp.zeros((seqs, num_draft_tokens), jnp.int32)
        drafts, probs, is_broken = draw(newest, 0, none)
        if num_draft_tokens > 1:
            # By draft: a turn of the loop writes one piece of memory.
            rest = None
            if probs is not None:
                rest = jnp.zeros((num_draft_tokens - 1, *probs.shape), probs.dtype)
            drafts, rest, is_broken, pages = jax.lax.fori_loop(
                1, context.num_wanted, extend, (drafts, rest, is_broken, pages)
            )
            if probs is not None and rest is not None:
                probs = jnp.concatenate([probs[None], rest]).transpose(1, 0, 2)
        elif probs is not None:
            probs = probs[:, None]
        num_drafts = jnp.where(is_broken, 0, context.num_wanted)
        return Proposal(drafts, num_drafts, probs, is_broken), pages

    def _model(self, params: Params | None, context: Context) -> Network:
        assert params is not None, "a draft model came without parameters"
        return build_network(self.config, params, context.backend(DRAFT_MESH_AXES))


def _keep(
    before: Proposal, index: Array | int, token: Array, probs: Array | None
) -> tuple[Array, Array | None]:
    """Draft `index` of each sequence: what others have proposed, else what was drawn.

    Returns:
        The token and what it was drawn from: all of the mass on it where it is theirs.
    """
    assert before.probs is None, "what comes before a draft model is certain"
    is_kept = index < before.num_drafts
    token = jnp.where(is_kept, before.tokens[:, index], token)
    if probs is None:
        return token, None
    every = jnp.arange(probs.shape[1], dtype=jnp.int32)[None]
    certain = (every == token[:, None]).astype(probs.dtype)
    return token, jnp.where(is_kept[:, None], certain, probs)


def _finite_logits(model: Network, hidden: Hidden) -> tuple[Array, Array]:
    """Logits, and the rows that are NaN or infinite: theirs are those of zeros."""
    rows = jnp.where(hidden.is_finite[:, None], hidden.rows, 0)
    return model.logits(rows), ~hidden.is_finite


def _next(token: Array, step: Array, active: Active, pool: PoolShape) -> TokenBatch:
    """The draft before the one that is drawn in a step."""
    kv_len, is_written = active.num_tokens + step, active.is_active[:, None]
    return make_region(token[:, None], kv_len, active.page_table, is_written, pool)


def _newest(active: Active, pool: PoolShape) -> TokenBatch:
    """The two newest tokens of every sequence.

    Two: after a fully accepted round the draft has no keys and values for the last
    draft token. Where it has them, the same values are written again.
    """
    tokens = active.last_tokens
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    return make_region(tokens, active.num_tokens, active.page_table, is_written, pool)

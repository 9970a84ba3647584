"""The draft model proposes a chain: a first pass of two tokens, then one at a time."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxspec.config import EngineConfig, ModelConfig
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Hidden, Network, build_network
from jaxspec.models.params import Params
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.region import join, make_region
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.state import page_forms
from jaxspec.sharding import DRAFT_MESH_AXES

Pages = tuple[Array, ...]


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

    def prefill(self, params: Params | None, state: Pages, context: Context) -> Pages:
        """Bring the draft's pages up to date with prompt tokens."""
        if context.prompts is None:
            return state
        _, pages = self._model(params, context).hidden(context.prompts, state)
        return pages

    def propose(
        self,
        params: Params | None,
        state: Pages,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Pages]:
        """Draw a chain of tokens per sequence.

        The first pass takes the two newest tokens, and prompt tokens ride along in it.
        The others are a loop: a program's size is what it takes to compile.

        Args:
            before: Drafts that the model is fed in place of its own, as far as they
                count.
        """
        assert context.tree.is_chain, "a draft model proposes a chain"
        num_draft_tokens, active = context.tree.num_nodes, context.active
        model, pages = self._model(params, context), state
        backend = context.backend(DRAFT_MESH_AXES)
        adjust = context.adjuster(DRAFT_MESH_AXES)

        def draw(hidden: Hidden, step: Array | int, drafts: Array | None):
            logits, is_broken = _finite_logits(model, hidden)
            if adjust is not None:
                logits = adjust(logits[:, None], drafts, num_before=step)[:, 0]
            token, probs = sample_draft(
                logits, step, active, backend, is_greedy=self.is_greedy
            )
            if before is not None:
                token, probs = _keep(before, step, token, probs)
            return token, probs, is_broken

        seqs = active.row.shape[0]
        hidden, pages = model.hidden(_newest(active, context), pages)
        newest = slice(1, 2 * seqs, 2)
        newest = Hidden(hidden.rows[newest], hidden.is_finite[newest])
        # Only controls ask which drafts came before.
        drafts = None
        if adjust is not None:
            drafts = jnp.zeros((seqs, num_draft_tokens), jnp.int32)
        token, probs, was_broken = draw(newest, 0, drafts)

        def extend(carry: tuple[Array, Pages, Array | None], step: Array):
            token, pages, drafts = carry
            if drafts is not None:
                drafts = drafts.at[:, step - 1].set(token)
            batch = _next(token, step, active, context.pool)
            hidden, pages = model.hidden(batch, pages)
            token, probs, is_broken = draw(hidden, step, drafts)
            return (token, pages, drafts), (token, probs, is_broken)

        steps = jnp.arange(1, num_draft_tokens, dtype=jnp.int32)
        (_, pages, _), (tokens, rest, is_broken) = jax.lax.scan(
            extend, (token, pages, drafts), steps
        )
        if probs is not None and rest is not None:
            probs = jnp.concatenate([probs[None], rest]).transpose(1, 0, 2)
        tokens = jnp.concatenate([token[None], tokens]).T
        is_broken = was_broken | is_broken.any(axis=0)
        num_drafts = jnp.where(is_broken, 0, num_draft_tokens)
        return Proposal(tokens, num_drafts, probs, is_broken), pages

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
    rows, is_finite = hidden
    return model.logits(jnp.where(is_finite[:, None], rows, 0)), ~is_finite


def _next(token: Array, step: Array, active: Active, pool: PoolShape) -> TokenBatch:
    """The draft before the one that is drawn in a step."""
    kv_len, is_written = active.num_tokens + step, active.is_active[:, None]
    return make_region(token[:, None], kv_len, active.page_table, is_written, pool)


def _newest(active: Active, context: Context) -> TokenBatch:
    """The two newest tokens of every sequence, then the prompts'.

    Two: after a fully accepted round the draft has no keys and values for the last
    draft token. Where it has them, the same values are written again.
    """
    tokens = active.last_tokens
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    first = make_region(
        tokens, active.num_tokens, active.page_table, is_written, context.pool
    )
    return first if context.prompts is None else join([first, context.prompts])

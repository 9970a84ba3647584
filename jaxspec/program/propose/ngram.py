"""Drafts copied from the sequence itself: what followed the same tokens before.

No network: matching is a few comparisons of integers over the known tokens.

References: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxspec.config import EngineConfig
from jaxspec.models.params import Params
from jaxspec.program import history
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.rows import Active


@dataclass(frozen=True)
class NGram:
    """How many tokens at a sequence's end must have come before, most and fewest."""

    longest: int
    shortest: int

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = True

    @classmethod
    def of(cls, config: EngineConfig) -> "NGram":
        """What an engine's configuration asks for."""
        speculative = config.speculative
        assert speculative is not None
        assert speculative.prompt_lookup_max is not None
        assert speculative.prompt_lookup_min is not None
        return cls(speculative.prompt_lookup_max, speculative.prompt_lookup_min)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Nothing is kept: the known tokens are the rows'."""
        return ()

    def catch_up(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        active: Active,
        following: Int[Array, " token"],
    ) -> tuple[Any, None]:
        """Nothing is kept."""
        return state, None

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Copy what followed the newest tokens when they last came."""
        assert before is None, "a lookup comes first"
        assert context.tree.is_chain, "a lookup finds a chain"
        found = look_up(
            context.active,
            context.token_pages,
            longest=self.longest,
            shortest=self.shortest,
            num_draft_tokens=context.tree.num_nodes,
        )
        return found, state


def look_up(
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    longest: int,
    shortest: int,
    num_draft_tokens: int,
) -> Proposal:
    """Find what followed the newest tokens when they last came.

    The longest match wins, of equal ones the most recent. A match must end before the
    last token and may overlap with what it matches. Where what followed runs into the
    end of the known tokens, it begins again: a text that repeats itself goes on so.
    """
    tokens = history.whole(token_pages, active.page_table)
    length = _match_lengths(tokens, active, longest)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_match = (length >= shortest) & (position < active.num_tokens[:, None] - 1)
    # in lengths [0,2,3,1,3] -> the last 3
    # A maximum and a remainder: XLA:CPU's argmax is many times slower.
    rank = jnp.where(is_match, length * tokens.shape[1] + position, 0)
    best = rank.max(axis=1) % tokens.shape[1]
    has_match = is_match.any(axis=1) & active.is_active
    num_known = jnp.maximum(active.num_tokens - 1 - best, 1)
    offset = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
    following = best[:, None] + 1 + offset % num_known[:, None]
    drafts = jnp.take_along_axis(tokens, following, axis=1, mode="clip")
    return Proposal(drafts, jnp.where(has_match, num_draft_tokens, 0))


def _match_lengths(
    tokens: Int[Array, "seq position"], active: Active, longest: int
) -> Int[Array, "seq position"]:
    """How many tokens up to each position equal those at the sequence's end."""
    length = jnp.zeros_like(tokens)
    is_equal = jnp.ones_like(tokens, bool)
    for back in range(min(longest, tokens.shape[1])):
        index = jnp.maximum(active.num_tokens - 1 - back, 0)
        newest = jnp.take_along_axis(tokens, index[:, None], axis=1)
        # Position p against the token `back` places before it; there is none before 0.
        here = (tokens == newest)[:, : tokens.shape[1] - back]
        is_equal &= jnp.pad(here, ((0, 0), (back, 0)))
        length += is_equal.astype(jnp.int32)
    return length

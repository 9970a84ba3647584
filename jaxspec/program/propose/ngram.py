"""Drafts copied from the sequence itself: what followed the same tokens before.

The simplest use of matches: the best one, however short, is followed as far as it goes.

References: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxspec.config import EngineConfig
from jaxspec.models.params import Params
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.matches import find_matches
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.rows import Active


@dataclass(frozen=True)
class NGram:
    """How many tokens at a sequence's end must have come before, most and fewest."""

    longest: int
    shortest: int

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = True
    may_find_few: ClassVar[bool] = False

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
    """Copy what followed the longest match, of equally long ones the most recent."""
    matches = find_matches(
        active,
        token_pages,
        longest=longest,
        shortest=shortest,
        num_matches=1,
        num_draft_tokens=num_draft_tokens,
    )
    num_drafts = jnp.where(matches.length[:, 0] > 0, num_draft_tokens, 0)
    return Proposal(matches.following[:, 0], num_drafts)

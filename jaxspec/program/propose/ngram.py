"""Propose the tokens that followed the sequence's newest tokens before.

This is the simplest use of matches: the continuation of the best match is copied,
however short the match is.

References: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config.engine import EngineConfig
from jaxspec.config.lookups import LookupRule
from jaxspec.models.params import Params
from jaxspec.program.propose.ngram_match import NUM_BRANCHES, fill_tree, find_matches
from jaxspec.program.propose.proposal import Lookup, Proposal, ProposerContext
from jaxspec.program.rows import Active
from jaxspec.program.tree.tree import Tree


@dataclass(frozen=True)
class NGram(Lookup):
    """An n-gram lookup: maximum and minimum number of last tokens to match."""

    longest: int
    shortest: int

    may_find_few: ClassVar[bool] = False

    @classmethod
    def of(cls, config: EngineConfig) -> "NGram":
        """Build the proposer from an engine's configuration."""
        speculative = config.speculative
        assert speculative is not None
        rule = LookupRule.of(speculative)
        return cls(rule.longest, rule.shortest)

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Copy the continuation of the newest tokens' latest occurrence."""
        assert before is None, "a lookup comes first"
        proposal = look_up(
            context.active,
            context.token_pages,
            longest=self.longest,
            shortest=self.shortest,
            tree=context.tree,
        )
        return proposal, state


def look_up(
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    longest: int,
    shortest: int,
    tree: Tree,
) -> Proposal:
    """Copy the continuation of the longest match; ties go to the most recent.

    The side branches of a tree are the continuations of the other matches.
    """
    matches = find_matches(
        active,
        token_pages,
        longest=longest,
        shortest=shortest,
        num_matches=1 if tree.is_chain else NUM_BRANCHES,
        num_levels=tree.num_levels,
    )
    num_valid_drafts = jnp.where(matches.length[:, 0] > 0, tree.num_levels, 0)
    drafts = matches.following[:, 0]
    if not tree.is_chain:
        drafts = fill_tree(matches, drafts, tree)
    return Proposal(drafts, num_valid_drafts)

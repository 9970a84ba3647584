"""Drafts copied from the sequence, or past answers: what most often came next there.

The longer a match, the more drafts it is trusted with; where equally long ones go on
differently, the drafts are those of which most are expected to stay.

References: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975. There a suffix tree on
the host counts all that followed, for matches of every length. Here the counts are of a
few of the longest matches, which are found on the device at every round.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.engine import EngineConfig
from jaxspec.config.lookups import NUM_MATCHES, WHOLE, LookupRule
from jaxspec.config.methods import MAX_DRAFT_TOKENS
from jaxspec.models.params import Params
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.corpus import corpus_forms, find_in_corpus, note
from jaxspec.program.propose.matches import (
    Matches,
    best_of,
    branch,
    find_matches,
)
from jaxspec.program.propose.proposal import Context, Lookup, Proposal, Seen
from jaxspec.sharding import replicated


@dataclass(frozen=True)
class Suffix(Lookup):
    """How far matches are trusted.

    Attributes:
        limits: Most drafts after a match of 0, 1, ... tokens; no more are compared.
        shortest: Fewest tokens of a match.
        min_share: Of the matches that are counted, at least so many must agree with a
            draft and those before it, in parts of `WHOLE`.
    """

    limits: tuple[int, ...]
    shortest: int
    min_share: int

    may_find_few: ClassVar[bool] = True

    @classmethod
    def of(cls, config: EngineConfig) -> "Suffix":
        """What an engine's configuration asks for."""
        speculative = config.speculative
        assert speculative is not None
        rule = LookupRule.of(speculative)
        made = cls(rule.limits, rule.shortest, rule.min_share)
        num_requests = speculative.suffix_decoding_max_cached_requests
        if not num_requests:
            return made
        return CorpusSuffix(**vars(made), num_requests=num_requests)

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Copy what followed the newest tokens before, as far as that is trusted."""
        assert before is None, "a lookup comes first"
        tree, matches = context.tree, self._matches(state, context)
        proposal = choose(matches, limits=self.limits, min_share=self.min_share)
        if not tree.is_chain:
            drafts = branch(matches, proposal.tokens, tree)
            proposal = proposal._replace(tokens=drafts)
        return proposal, state

    def _matches(self, state: Any, context: Context) -> Matches:
        """What is looked up."""
        return find_matches(
            context.active,
            context.token_pages,
            longest=len(self.limits) - 1,
            shortest=self.shortest,
            num_matches=NUM_MATCHES,
            num_draft_tokens=context.tree.num_levels,
        )


@dataclass(frozen=True)
class CorpusSuffix(Suffix):
    """The same beside answers of past requests, which every round adds to.

    Attributes:
        num_requests: How many of usual length there is room for.
    """

    num_requests: int

    @property
    def target_layers(self) -> tuple[int, ...]:
        """None: it is shown rounds for their tokens."""
        return ()

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """The corpus, whole on every device."""
        return corpus_forms(self.num_requests, replicated(mesh))

    def observe(
        self, params: Params | None, state: Any, context: Context, seen: Seen
    ) -> Any:
        """Enter the answers as they were before the round."""
        return note(
            state, context.active, context.token_pages, num_new=MAX_DRAFT_TOKENS + 1
        )

    def _matches(self, state: Any, context: Context) -> Matches:
        """The longest, of equally long ones those of the sequence itself."""
        own = super()._matches(state, context)
        others = find_in_corpus(
            state,
            context.active,
            context.token_pages,
            longest=len(self.limits) - 1,
            shortest=self.shortest,
            num_draft_tokens=context.tree.num_levels,
        )
        return best_of((own, others), NUM_MATCHES)


def choose(matches: Matches, *, limits: tuple[int, ...], min_share: int) -> Proposal:
    """The drafts of which most are expected to stay.

    Of the longest matches, which are counted, the share that agrees with what followed
    one of them, up to the i-th token, is taken for the chance that so many stay. The
    sum of the chances, as far as so long a match is trusted and a chance is not too
    small, is what is expected; of equals, the latest wins.

    Args:
        matches: The longest first, of equally long ones the latest.
        limits, min_share: Of `Suffix`.
    """
    length, following, num_following = matches
    draft = following.shape[2]
    offset = jnp.arange(draft, dtype=jnp.int32)[None, None]
    is_counted = (length == length[:, :1]) & (length > 0)
    num_counted = jnp.maximum(is_counted.sum(axis=1), 1)
    # How many drafts are the same after two matches.
    differs = following[:, :, None] != following[:, None]
    common = jnp.where(differs, offset[None], draft).min(axis=3)  # [seq, match, match]
    agrees = (common[..., None] > offset[None]) & is_counted[:, None, :, None]
    share = agrees.sum(axis=2) * (WHOLE // num_counted)[:, None, None]
    limit = jnp.array(limits, jnp.int32)[length[:, 0]][:, None, None]
    is_kept = (offset < limit) & (share >= min_share) & is_counted[:, :, None]
    expected = jnp.where(is_kept, share, 0).sum(axis=2)  # [seq, match]
    best = jnp.argmax(expected, axis=1)[:, None]
    num_drafts = jnp.take_along_axis(is_kept.sum(axis=2), best, axis=1)[:, 0]
    drafts = jnp.take_along_axis(following, best[:, :, None], axis=1)[:, 0]
    return Proposal(drafts, num_drafts.astype(jnp.int32))

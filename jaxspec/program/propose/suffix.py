"""Propose the most frequent continuation in the sequence, answers or corpora.

The longer a match, the more drafts it may give. Among equally long matches, the drafts
are the continuation with the largest expected number of accepted tokens.

References: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975. There a suffix tree on
the host counts the continuations of matches of every length. Here the device searches
in every round, and counts only a few of the longest matches.
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
from jaxspec.program.propose.answer_cache import (
    AnswerCache,
    answer_cache_forms,
    corpus_buckets,
    find_answers,
    store_answers,
    table_forms,
)
from jaxspec.program.propose.ngram_match import (
    Matches,
    fill_tree,
    find_matches,
    merge_matches,
)
from jaxspec.program.propose.proposal import Lookup, Proposal, ProposerContext, Seen
from jaxspec.sharding import replicated


@dataclass(frozen=True)
class Suffix(Lookup):
    """A lookup that drafts the most frequent continuation of a match.

    Attributes:
        limits: Maximum number of drafts after a match of 0, 1, ... tokens; longer
            matches are not searched.
        shortest: Smallest number of tokens of a match.
        min_share: Smallest share of the counted matches, in parts of `WHOLE`, that must
            agree with a draft and those before it.
        num_corpus_tokens: Maximum number of tokens of corpora, whose table is then the
            state; 0 without corpora.
    """

    limits: tuple[int, ...]
    shortest: int
    min_share: int
    num_corpus_tokens: int = 0

    may_find_few: ClassVar[bool] = True

    @classmethod
    def of(cls, config: EngineConfig) -> "Suffix":
        """Build the proposer from an engine's configuration."""
        speculative = config.speculative
        assert speculative is not None
        rule = LookupRule.of(speculative)
        num_tokens = speculative.suffix_decoding_max_corpus_tokens or 0
        proposer = cls(rule.limits, rule.shortest, rule.min_share, num_tokens)
        num_requests = speculative.suffix_decoding_max_cached_requests
        if not num_requests:
            return proposer
        return CachedSuffix(**vars(proposer), num_requests=num_requests)

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shape of the table of corpora, replicated on every device."""
        if not self.num_corpus_tokens:
            return ()
        return table_forms(corpus_buckets(self.num_corpus_tokens), replicated(mesh))

    def with_corpora(self, state: Any, corpora: AnswerCache) -> Any:
        """Return the state with another table of corpora."""
        return corpora

    def _tables(self, state: Any) -> tuple[AnswerCache, ...]:
        """Return the tables of the state, that of past answers first."""
        return (state,) if self.num_corpus_tokens else ()

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Copy the most frequent continuation of the newest tokens."""
        assert before is None, "a lookup comes first"
        tree, matches = context.tree, self._matches(state, context)
        proposal = choose(matches, limits=self.limits, min_share=self.min_share)
        if not tree.is_chain:
            drafts = fill_tree(matches, proposal.tokens, tree)
            proposal = proposal._replace(tokens=drafts)
        return proposal, state

    def _matches(self, state: Any, context: ProposerContext) -> Matches:
        """Return the longest matches; ties go to the sequence itself."""
        longest, num_levels = len(self.limits) - 1, context.tree.num_levels
        in_sequence = find_matches(
            context.active,
            context.token_pages,
            longest=longest,
            shortest=self.shortest,
            num_matches=NUM_MATCHES,
            num_levels=num_levels,
        )
        in_tables = [
            find_answers(
                table,
                context.active,
                context.token_pages,
                longest=longest,
                shortest=self.shortest,
                num_levels=num_levels,
            )
            for table in self._tables(state)
        ]
        if not in_tables:
            return in_sequence
        return merge_matches((in_sequence, *in_tables), NUM_MATCHES)


@dataclass(frozen=True)
class CachedSuffix(Suffix):
    """Suffix matches that also use past answers; every round adds to the cache.

    Attributes:
        num_requests: Capacity, in requests of usual length.
    """

    num_requests: int = 0

    @property
    def target_layers(self) -> tuple[int, ...]:
        """No layers, because it observes rounds only for their tokens."""
        return ()

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shapes of the tables, replicated on every device."""
        answers = answer_cache_forms(self.num_requests, replicated(mesh))
        corpora = super().state_forms(dtype, pool, mesh)
        return (answers, corpora) if self.num_corpus_tokens else answers

    def with_corpora(self, state: Any, corpora: AnswerCache) -> Any:
        """Return the state with another table of corpora."""
        return state[0], corpora

    def _tables(self, state: Any) -> tuple[AnswerCache, ...]:
        """Return the tables of the state, that of past answers first."""
        return state if self.num_corpus_tokens else (state,)

    def observe(
        self, params: Params | None, state: Any, context: ProposerContext, seen: Seen
    ) -> Any:
        """Store the answers up to the start of the round."""
        answers, *corpora = self._tables(state)
        answers = store_answers(
            answers, context.active, context.token_pages, num_new=MAX_DRAFT_TOKENS + 1
        )
        return (answers, *corpora) if corpora else answers


def choose(matches: Matches, *, limits: tuple[int, ...], min_share: int) -> Proposal:
    """Choose the continuation with the largest expected number of accepted drafts.

    Among the longest matches, the share that agrees with one continuation up to its
    i-th token estimates the probability that i tokens are accepted. Their sum, over
    tokens within the match's limit and shares of at least `min_share`, is the expected
    number; ties go to the latest match.

    Args:
        matches: The longest first, ties the latest first.
        limits, min_share: Of `Suffix`.
    """
    length, following, num_following = matches
    draft = following.shape[2]
    offset = jnp.arange(draft, dtype=jnp.int32)[None, None]
    is_counted = (length == length[:, :1]) & (length > 0)
    num_counted = jnp.maximum(is_counted.sum(axis=1), 1)
    # Length of the common prefix of two continuations.
    differs = following[:, :, None] != following[:, None]
    common = jnp.where(differs, offset[None], draft).min(axis=3)  # [seq, match, match]
    agrees = (common[..., None] > offset[None]) & is_counted[:, None, :, None]
    share = agrees.sum(axis=2) * (WHOLE // num_counted)[:, None, None]
    limit = jnp.array(limits, jnp.int32)[length[:, 0]][:, None, None]
    is_kept = (offset < limit) & (share >= min_share) & is_counted[:, :, None]
    expected = jnp.where(is_kept, share, 0).sum(axis=2)  # [seq, match]
    best = jnp.argmax(expected, axis=1)[:, None]
    num_valid_drafts = jnp.take_along_axis(is_kept.sum(axis=2), best, axis=1)[:, 0]
    drafts = jnp.take_along_axis(following, best[:, :, None], axis=1)[:, 0]
    return Proposal(drafts, num_valid_drafts.astype(jnp.int32))

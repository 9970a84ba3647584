"""Which drafts a lookup makes of the matches that it finds: a rule, as data.

The device follows it (`jaxspec.program.propose`), and so does the host where it watches
what drafts would have brought (`jaxspec.engine.scheduling.lookup_estimator`).
"""

import math
from dataclasses import dataclass

from jaxspec.config.methods import NGRAM
from jaxspec.config.speculation import SpeculativeConfig

# Matches that are counted, at most: the latest. Older ones would outvote them: with 8,
# continuations by the bundled target got a thirtieth fewer tokens a round than with 1.
NUM_MATCHES = 4
# What 1 is in shares of them: every number of matches divides it, so that shares are
# integers, and sums of them equal wherever they are computed.
WHOLE = math.lcm(*range(1, NUM_MATCHES + 1))


@dataclass(frozen=True, kw_only=True)
class LookupRule:
    """How far matches are trusted.

    Attributes:
        limits: Most drafts after a match of 0, 1, ... tokens; no more are compared.
        shortest: Fewest tokens of a match.
        min_share: Of the matches that are counted, at least so many must agree with a
            draft and those before it, in parts of `WHOLE`.
        num_matches: Of equally long matches so many are counted, the latest.
    """

    limits: tuple[int, ...]
    shortest: int
    min_share: int
    num_matches: int

    @classmethod
    def of(cls, speculative: SpeculativeConfig) -> "LookupRule":
        """What a configuration with a lookup asks for."""
        info = speculative.method_info
        assert info.lookup is not None
        if info.lookup == NGRAM:
            longest, shortest = (
                speculative.prompt_lookup_max,
                speculative.prompt_lookup_min,
            )
            assert longest is not None
            assert shortest is not None
            return cls(
                limits=(0, *[speculative.num_levels] * longest),
                shortest=shortest,
                min_share=0,
                num_matches=1,
            )
        depth = speculative.suffix_decoding_max_tree_depth
        factor = speculative.suffix_decoding_max_spec_factor
        min_prob = speculative.suffix_decoding_min_token_prob
        assert depth is not None
        assert factor is not None
        assert min_prob is not None
        return cls(
            limits=draft_limits(depth, factor, speculative.num_levels),
            shortest=info.shortest_match,
            # 0.3 of 12 is 3.6, whatever binary fractions make of it.
            min_share=math.ceil(round(min_prob * WHOLE, 6)),
            num_matches=NUM_MATCHES,
        )

    @property
    def longest(self) -> int:
        """Most tokens that are compared."""
        return len(self.limits) - 1


def draft_limits(depth: int, factor: float, most: int) -> tuple[int, ...]:
    """Most drafts after a match of 0, 1, ... tokens.

    As in vLLM: `factor` drafts for a token that matches, and no more than `depth`
    tokens of match and drafts together. Whoever matches more tokens matches fewer as
    well, and is not trusted less.
    """
    limits = [0]
    for length in range(1, depth):
        own = min(int(factor * length), depth - length, most)
        limits.append(max(own, limits[-1]))
    return tuple(limits)

"""The rule by which a lookup turns the matches it finds into drafts, as data.

The device applies the rule (`jaxspec.program.propose`); the host applies it too, to
estimate the acceptance of lookups (`jaxspec.engine.scheduling.lookup_estimator`).
"""

import math
from dataclasses import dataclass

from jaxspec.config.methods import NGRAM
from jaxspec.config.speculation import SpeculativeConfig

# Maximum number of matches whose continuations are compared, latest first. Older
# matches would outvote the latest ones: with 8 matches, a round of the bundled target
# had 3 % fewer tokens than with 1.
NUM_MATCHES = 4
# Shares of matches are counted in units of 1 / WHOLE. Every number of matches divides
# WHOLE, so that shares and their sums are integers, equal on host and device.
WHOLE = math.lcm(*range(1, NUM_MATCHES + 1))


@dataclass(frozen=True, kw_only=True)
class LookupRule:
    """Limits on the drafts from matches.

    Attributes:
        limits: Entry i: maximum number of drafts after a match of i tokens. Matches
            longer than the last entry's are not searched.
        shortest: Minimum number of tokens of a match.
        min_share: Minimum share of the counted matches that continue with a draft and
            the drafts before it, in units of 1 / `WHOLE`; other drafts are not made.
        num_matches: Maximum number of matches of equal length that are counted, latest
            first.
    """

    limits: tuple[int, ...]
    shortest: int
    min_share: int
    num_matches: int

    @classmethod
    def of(cls, speculative: SpeculativeConfig) -> "LookupRule":
        """Return the rule of a configuration with a lookup."""
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
            # Rounded first: 0.3 of 12 is 3.6, but not exactly in binary fractions.
            min_share=math.ceil(round(min_prob * WHOLE, 6)),
            num_matches=NUM_MATCHES,
        )

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a match."""
        return len(self.limits) - 1


def draft_limits(depth: int, factor: float, most: int) -> tuple[int, ...]:
    """Return the maximum number of drafts after a match of 0, 1, ... tokens.

    As in vLLM: `factor` drafts per matching token, and at most `depth` tokens of match
    and drafts together. A longer match includes the shorter ones, so the limits do not
    decrease.
    """
    limits = [0]
    for length in range(1, depth):
        own = min(int(factor * length), depth - length, most)
        limits.append(max(own, limits[-1]))
    return tuple(limits)

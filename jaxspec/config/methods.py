"""The speculative methods: one row each.

A new method is a row of `METHODS` and a proposer. The parts of its name, split at "+",
are its proposers (`jaxspec.program.propose`), in the order in which they are tried.
"""

from dataclasses import dataclass
from typing import Any

from jaxspec.errors import UnsupportedError, wrong_argument

# Largest K of methods that need no model pass per draft, of suffix drafts from the
# sequence itself, and of methods with one model pass per draft.
MAX_DRAFT_TOKENS = 16
MAX_SUFFIX_DRAFT_TOKENS = 32
MAX_MODEL_DRAFT_TOKENS = 8
DEFAULT_DRAFT_TOKENS = 5
# Minimum tokens of a match, without and with a draft model as fallback. Not 1: in prose
# at temperature 1 a third of the rounds match one token, and a tenth of their drafts
# are accepted. With a draft model, a match replaces its drafts only from four tokens
# on.
SHORT_MATCH, LONG_MATCH = 2, 4

NGRAM, SUFFIX = "ngram", "suffix"
DRAFT_MODEL, HEAD = "draft_model", "head"
PARD = "pard"


@dataclass(frozen=True, kw_only=True)
class Method:
    """The proposers of one method, and its limits.

    Attributes:
        lookup: Lookup in the text that the method uses, "ngram" or "suffix"; None for
            none. The method accepts the arguments of that lookup.
        weights: Kind of weights in its folder, "draft_model" or "head"; None without
            a folder.
        has_one_pass: One pass over the weights makes all draft tokens of a round.
        extends_side_branches: Side branches of a draft tree can be longer than one
            token.
        max_draft_tokens: Maximum number of draft tokens in a row.
        default_draft_tokens: Draft tokens in a row if the user gives no number.
    """

    lookup: str | None = None
    weights: str | None = None
    has_one_pass: bool = False
    extends_side_branches: bool = True
    max_draft_tokens: int = MAX_MODEL_DRAFT_TOKENS
    default_draft_tokens: int = DEFAULT_DRAFT_TOKENS

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model proposes, alone or where the lookup finds no match."""
        return self.weights == DRAFT_MODEL

    @property
    def has_head(self) -> bool:
        """Whether a small network on the target's hidden states proposes."""
        return self.weights == HEAD

    @property
    def is_parallel(self) -> bool:
        """Whether one pass of a draft model makes all draft tokens."""
        return self.has_draft_model and self.has_one_pass

    @property
    def shortest_match(self) -> int:
        """Minimum number of tokens that a suffix lookup must match."""
        return LONG_MATCH if self.has_draft_model else SHORT_MATCH


# Each lookup has two rows: alone, and with a draft model as its fallback (see
# `with_draft_model`).
METHODS = {
    "ngram": Method(lookup=NGRAM, max_draft_tokens=MAX_DRAFT_TOKENS),
    "ngram+draft_model": Method(lookup=NGRAM, weights=DRAFT_MODEL),
    "suffix": Method(
        lookup=SUFFIX,
        max_draft_tokens=MAX_SUFFIX_DRAFT_TOKENS,
        default_draft_tokens=MAX_DRAFT_TOKENS,
    ),
    "suffix+draft_model": Method(lookup=SUFFIX, weights=DRAFT_MODEL),
    "eagle": Method(weights=HEAD, extends_side_branches=False),
    "eagle3": Method(weights=HEAD, extends_side_branches=False),
    "medusa": Method(weights=HEAD, has_one_pass=True),
    "dflash": Method(
        weights=HEAD, has_one_pass=True, max_draft_tokens=MAX_DRAFT_TOKENS
    ),
    # PARD: a draft model that was trained to make all drafts in one pass, each in place
    # of a mask token.
    "pard": Method(
        weights=DRAFT_MODEL, has_one_pass=True, max_draft_tokens=MAX_DRAFT_TOKENS
    ),
    "draft_model": Method(weights=DRAFT_MODEL),
}
# The defaults are vLLM's.
SUFFIX_DEFAULTS: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_spec_factor": 4.0,
    "suffix_decoding_min_token_prob": 0.1,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_corpus_tokens": 0,  # ours
}
# Name of each lookup in error messages, and the keys of `SpeculativeConfig` that only
# this lookup uses.
LOOKUPS = {
    NGRAM: ("n-gram", ("prompt_lookup_max", "prompt_lookup_min")),
    SUFFIX: ("suffix", tuple(SUFFIX_DEFAULTS)),
}
# Ends the error messages about a missing or unknown source of drafts.
SOURCES_OF_DRAFTS = (
    "Drafts come from a whole model of the target's family, from a head, which is a "
    "small network on the hidden states of the target that it was trained for "
    f"({', '.join(repr(name) for name, row in METHODS.items() if row.has_head)}), or "
    "from the text itself ('[ngram]', method 'suffix')."
)


def method_of(name: Any) -> Method:
    """Return the row of a method.

    Raises:
        UnsupportedError: There is no such method.
    """
    row = METHODS.get(name) if isinstance(name, str) else None
    if row is None:
        *names, last = map(repr, METHODS)
        allowed = f"{', '.join(names)} or {last}"
        raise wrong_argument(
            UnsupportedError, "method", allowed, name, SOURCES_OF_DRAFTS
        )
    return row


def with_draft_model(method: str) -> str:
    """Return the name of `method` combined with a draft model as its fallback."""
    return f"{method}+{DRAFT_MODEL}"

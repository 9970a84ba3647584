"""Owns how drafts are proposed and judged: methods, their keys, the allowed values.

Knows nothing of models or engines; `jaxspec.engine.speculative_args` turns the names
of three generations of arguments into a `SpeculativeConfig`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, no_type_check

from jaxspec.config.quantization import check_quantization
from jaxspec.config.token_tree import (
    MAX_NODES,
    TREE_KEY,
    has_side_paths,
    leaf_paths,
    parents_of,
    read_paths,
)
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_choice,
    check_integer,
    check_number,
    wrong_argument,
)

# The step program is compiled for a ladder of draft lengths; these are its last rungs:
# tokens that are looked up take no passes of a draft model.
MAX_DRAFT_TOKENS = 16
MAX_MODEL_DRAFT_TOKENS = 8
DEFAULT_DRAFT_TOKENS = 5
# The program compares this many tokens at every position of every sequence.
MAX_PROMPT_LOOKUP = 32
DEFAULT_PROMPT_LOOKUP = 5
# Of suffix drafts one token fewer than this is compared; the defaults are vLLM's.
MAX_TREE_DEPTH = 64
# Fewest tokens of a match. In prose at temperature 1 a third of the rounds match one
# token, and a tenth of their drafts stay. Four take the place of a draft model.
SHORT_MATCH, LONG_MATCH = 2, 4
# About 60 kB each are kept on the device.
MAX_CACHED_REQUESTS = 4096

NGRAM, NGRAM_AND_MODEL, DRAFT_MODEL = "ngram", "ngram+draft_model", "draft_model"
SUFFIX, SUFFIX_AND_MODEL = "suffix", "suffix+draft_model"
# A draft model that proposes all drafts in one pass, in the places of mask tokens.
PARD = "pard"
MODELS = (DRAFT_MODEL, PARD)
# Heads: small networks on the target's hidden states.
EAGLE, EAGLE3 = "eagle", "eagle3"
MEDUSA = "medusa"
HEADS = (EAGLE, EAGLE3, MEDUSA)
METHODS = (
    NGRAM,
    NGRAM_AND_MODEL,
    SUFFIX,
    SUFFIX_AND_MODEL,
    *HEADS,
    PARD,
    DRAFT_MODEL,
)
ALLOWED_METHODS = ", ".join(map(repr, METHODS[:-1])) + f" or {DRAFT_MODEL!r}"
LOOKUP_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
SUFFIX_DEFAULTS: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_spec_factor": 4.0,
    "suffix_decoding_min_token_prob": 0.1,
    "suffix_decoding_max_cached_requests": 0,
}
# Whose drafts may continue any other.
ANY_TREE = (DRAFT_MODEL, MEDUSA, PARD)
# What drafts come from, for errors.
SOURCES_OF_DRAFTS = (
    "Drafts come from a whole model of the target's family, from a head, which is a "
    "small network on the hidden states of the target that it was trained for "
    f"({', '.join(map(repr, HEADS))}), or from the text itself ('[ngram]', method "
    "'suffix')."
)
# The rule that judges nothing: acceptance is given, and texts mean nothing.
SYNTHETIC = "synthetic"
ADAPTIVE, FIXED = "adaptive", "fixed"


# No checks by jaxtyping in the tests: the class has its own, with better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed and judged.

    Attributes:
        method: "draft_model"; "pard" is one that was trained to make all drafts in one
            pass (vLLM's `parallel_drafting`); "ngram" copies what followed the same
            tokens earlier in the sequence, "suffix" as many of them as the match's
            length and other matches promise; "ngram+draft_model" and
            "suffix+draft_model" ask the model where nothing matches, the latter also
            where only a few tokens match; "eagle", "eagle3" and "medusa" are heads on
            the target's hidden states.
        model: Folder of the draft model or head; None for "ngram" and "suffix".
        quantization: How the draft model's matrices are kept, as the engine's argument
            of that name says of the target; None: as its checkpoint has them.
        draft_vocab_size: Tokens that a draft model may propose, the most frequent ones
            (FR-Spec): its head is cut to those, which makes a pass cheaper, and no text
            another. None: all, or all that `draft_token_map` names.
        draft_token_map: JSON file of token ids, most frequent first, for a head that is
            cut. Default: `draft_token_map.json` in the draft model's folder, which
            `python -m jaxspec_checkpoints trim` writes.
        num_speculative_tokens: Most draft tokens per step; a request may ask for fewer.
            With a tree, its drafts.
        num_side_leaves: Beside each draft, the next best tokens at its place: where the
            target wants one of them, it adds one token more.
        speculative_token_tree: Which drafts are made, as vLLM writes them: a list of
            tuples, or its string. None: each continues the one before it.
        controller: "adaptive" makes as many as measured times and acceptance pay;
            "fixed" makes the most at every step.
        rejection_sample_method: Rule that decides which draft tokens stay, for requests
            that sample without a seed; those with one are "coupled". "block" samples
            from the same distribution as "standard" and keeps at least as many, on
            average. "synthetic" is for benchmarks: as many stay as one of the next two
            says.
        synthetic_acceptance_rates: Entry i is how often all drafts up to the i-th stay.
        synthetic_acceptance_length: Tokens per step on average, the target's own
            included; as many whole drafts always stay, and the next one sometimes.
        draft_sample_method: Draw drafts from the draft's distribution, or its argmax.
        disable_by_batch_size: With more running requests, none is drafted for.
        max_model_len: Sequences longer than this are not drafted for.
        draft_tensor_parallel_size: Devices one copy of the draft is spread over.
        prompt_lookup_max: Most tokens at a sequence's end that are looked for.
        prompt_lookup_min: Fewest of them that must match.
        suffix_decoding_max_tree_depth: Most tokens of a match and its drafts together.
        suffix_decoding_max_spec_factor: Most drafts for every token that matches.
        suffix_decoding_min_token_prob: Least share of the matches that must agree with
            a draft and those before it.
        suffix_decoding_max_cached_requests: Answers of so many past requests of the
            same `cache_salt` are looked into as well. 0: of none.
    """

    method: str = DRAFT_MODEL
    model: str | None = None
    quantization: str | None = None
    draft_vocab_size: int | None = None
    draft_token_map: str | None = None
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS
    num_side_leaves: int = 0
    speculative_token_tree: str | Sequence[Sequence[int]] | None = None
    controller: str = ADAPTIVE
    rejection_sample_method: str = "block"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str = "probabilistic"
    disable_by_batch_size: int | None = None
    max_model_len: int | None = None
    draft_tensor_parallel_size: int = 1
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    suffix_decoding_max_cached_requests: int | None = None

    def __post_init__(self):
        if self.method not in METHODS:
            hint = "No other kind of draft is supported yet."
            raise wrong_argument(
                UnsupportedError, "method", ALLOWED_METHODS, self.method, hint
            )
        self._check_model()
        self._check_quantization()
        self._check_trimmed()
        self._check_lookup()
        self._check_suffix()
        most = self.max_levels
        way_out = "name no draft model" if self.has_folder else "leave method out"
        if self.speculative_token_tree is None:
            check_integer(
                ConfigError,
                "num_speculative_tokens",
                self.num_speculative_tokens,
                low=1,
                high=most,
                hint="The step program is compiled for a ladder of draft lengths that "
                f"ends at {most} for method {self.method!r}; to decode without drafts, "
                f"{way_out}.",
            )
        else:
            self._check_tree(most)
        self._check_leaves()
        choices = {
            "rejection_sample_method": ("standard", "block", "coupled", SYNTHETIC),
            "draft_sample_method": ("probabilistic", "greedy"),
            "controller": (ADAPTIVE, FIXED),
        }
        for name, allowed in choices.items():
            check_choice(ConfigError, name, getattr(self, name), allowed)
        lowest = {
            "disable_by_batch_size": 2,
            "max_model_len": 1,
            "draft_tensor_parallel_size": 1,
        }
        for name, low in lowest.items():
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), low=low)
        self._check_synthetic()

    @cached_property
    def parents(self) -> tuple[int, ...] | None:
        """Of each draft the one that it continues; None where that is the one before.

        In the order of `parents_of`.
        """
        if self.speculative_token_tree is not None:
            found = parents_of(read_paths(self.speculative_token_tree))
        else:
            count = self.num_speculative_tokens
            found = parents_of(leaf_paths(count, self.num_side_leaves))
        return None if found == tuple(range(-1, len(found) - 1)) else found

    @cached_property
    def num_levels(self) -> int:
        """Most drafts that may stay in a step, one after the other: K."""
        if self.speculative_token_tree is None:
            return self.num_speculative_tokens
        return max(map(len, read_paths(self.speculative_token_tree)))

    @property
    def num_nodes(self) -> int:
        """Drafts of a round, beside one another and one after the other."""
        return self.num_levels if self.parents is None else len(self.parents)

    @property
    def is_one_tree(self) -> bool:
        """Whether drafts are made all or none: fewer levels are not cheaper."""
        return self.speculative_token_tree is not None and self.parents is not None

    @property
    def forced_acceptance(self) -> tuple[float, ...] | None:
        """Chance of each draft to stay if those before it do; None for a real rule."""
        if self.rejection_sample_method != SYNTHETIC:
            return None
        rates, chances, before = self.synthetic_acceptance_rates, [], 1.0
        if rates is None:
            length = self.synthetic_acceptance_length
            assert length is not None
            # in 3.5 of 5 drafts -> [1, 1, 0.5, 0, 0]
            places = range(self.num_speculative_tokens)
            rates = [min(max(length - 1 - place, 0.0), 1.0) for place in places]
        for rate in rates:
            chances.append(rate / before if before else 0.0)
            before = rate
        return tuple(chances)

    def with_forced_acceptance(self, chance: float) -> "SpeculativeConfig":
        """The same drafts, each kept with this chance if those before it are.

        Raises:
            ConfigError: It is none, or there are chances already.
        """
        check_number(ConfigError, "forced acceptance", chance, low=0, high=1)
        if self.rejection_sample_method == SYNTHETIC:
            raise ConfigError(
                f"Acceptance is forced twice: to {chance}, and by "
                f"rejection_sample_method={SYNTHETIC!r}; give one of them.",
                parameter="rejection_sample_method",
                value=SYNTHETIC,
            )
        places = range(1, self.num_speculative_tokens + 1)
        return replace(
            self,
            rejection_sample_method=SYNTHETIC,
            synthetic_acceptance_rates=[chance**place for place in places],
        )

    @property
    def is_greedy(self) -> bool:
        """Whether drafts are the argmax, also of requests that sample."""
        return self.draft_sample_method == "greedy"

    @property
    def has_draft_model(self) -> bool:
        """Whether a second network proposes, alone or where nothing matches."""
        return not set(MODELS).isdisjoint(self.method.split("+"))

    @property
    def is_trimmed(self) -> bool:
        """Whether a draft model's head is cut to some of the tokens."""
        return self.draft_vocab_size is not None or self.draft_token_map is not None

    @property
    def is_parallel(self) -> bool:
        """Whether one pass of a draft model makes all drafts."""
        return self.method == PARD

    @property
    def has_one_pass(self) -> bool:
        """Whether weights of what proposes are read once, however many the drafts."""
        return self.method in (PARD, MEDUSA)

    @property
    def max_levels(self) -> int:
        """Most drafts in a row that there may be.

        Where each takes a pass, fewer.
        """
        has_passes = self.has_folder and not self.is_parallel
        return MAX_MODEL_DRAFT_TOKENS if has_passes else MAX_DRAFT_TOKENS

    @property
    def has_head(self) -> bool:
        """Whether a small network proposes, on the target's hidden states."""
        return self.method in HEADS

    @property
    def has_folder(self) -> bool:
        """Whether what proposes has weights."""
        return self.has_draft_model or self.has_head

    @property
    def has_lookup(self) -> bool:
        """Whether drafts are looked up in the sequence itself."""
        return self.method.split("+")[0] in (NGRAM, SUFFIX)

    @property
    def has_only_lookup(self) -> bool:
        """Whether nothing else proposes."""
        return self.method in (NGRAM, SUFFIX)

    @property
    def has_suffix(self) -> bool:
        """Whether as many are made as their match promises."""
        return self.method in (SUFFIX, SUFFIX_AND_MODEL)

    @property
    def shortest_match(self) -> int:
        """Fewest tokens that a suffix must match."""
        return LONG_MATCH if self.has_draft_model else SHORT_MATCH

    def _check_tree(self, most: int) -> None:
        """Refuse a tree that is none, or too deep, or not of as many drafts as said.

        Args:
            most: Drafts one after the other.
        """
        paths = read_paths(self.speculative_token_tree)
        written = self.speculative_token_tree
        if self.num_levels > most:
            allowed = f"a tree of at most {most} levels for method {self.method!r}"
            raise wrong_argument(ConfigError, TREE_KEY, allowed, written)
        are_leaves = self.has_head and self.method not in ANY_TREE
        if are_leaves and has_side_paths(parents_of(paths)):
            allowed = f"a chain with leaves beside it for method {self.method!r}"
            hint = (
                f"Only the chain of first choices is continued; {MEDUSA!r} and draft "
                "models take any tree."
            )
            raise wrong_argument(UnsupportedError, TREE_KEY, allowed, written, hint)
        if self.num_speculative_tokens != len(paths):
            raise wrong_argument(
                ConfigError,
                "num_speculative_tokens",
                f"{len(paths)}, as many as {TREE_KEY} has, or left out",
                self.num_speculative_tokens,
            )

    def _check_leaves(self) -> None:
        name = "num_side_leaves"
        check_integer(ConfigError, name, self.num_side_leaves, low=0)
        if self.num_side_leaves and self.speculative_token_tree is not None:
            hint = "A tree says itself what stands beside its drafts."
            allowed = f"left out with {TREE_KEY}"
            raise wrong_argument(ConfigError, name, allowed, self.num_side_leaves, hint)
        most = MAX_NODES // self.num_speculative_tokens - 1
        if self.num_side_leaves > most and self.speculative_token_tree is None:
            drafts = f"num_speculative_tokens={self.num_speculative_tokens}"
            allowed = f"at most {most} with {drafts}"
            hint = f"A step has room for {MAX_NODES} drafts, leaves included."
            raise wrong_argument(ConfigError, name, allowed, self.num_side_leaves, hint)
        if self.parents is not None and self.rejection_sample_method == SYNTHETIC:
            name = name if self.num_side_leaves else TREE_KEY
            allowed = f"left out with rejection_sample_method={SYNTHETIC!r}"
            hint = "Forced acceptance is of drafts one after the other."
            raise wrong_argument(ConfigError, name, allowed, getattr(self, name), hint)

    def _check_model(self) -> None:
        if self.has_folder and self.model is None:
            allowed = f"a folder for method {self.method!r}"
            raise wrong_argument(ConfigError, "model", allowed, None)
        if not self.has_folder and self.model is not None:
            both = SUFFIX_AND_MODEL if self.has_suffix else NGRAM_AND_MODEL
            hint = f"For both kinds of draft, set method to {both!r}."
            allowed = f"left out for method {self.method!r}"
            raise wrong_argument(ConfigError, "model", allowed, self.model, hint)

    def _check_quantization(self) -> None:
        name, kind = "speculative_model_quantization", self.quantization
        check_quantization(name, kind)
        if kind is not None and not self.has_folder:
            allowed = f"left out for method {self.method!r}, which has no weights"
            raise wrong_argument(ConfigError, name, allowed, kind)

    def _check_trimmed(self) -> None:
        for name in ("draft_vocab_size", "draft_token_map"):
            value = getattr(self, name)
            if value is not None and not self.has_draft_model:
                allowed = f"left out for method {self.method!r}"
                hint = "It cuts the head of a draft model."
                if self.has_head:
                    hint = "A head's own files say which tokens it can propose."
                raise wrong_argument(ConfigError, name, allowed, value, hint)
        if self.draft_vocab_size is not None:
            name = "draft_vocab_size"
            check_integer(ConfigError, name, self.draft_vocab_size, low=1)

    def _check_synthetic(self) -> None:
        names = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        given = [name for name in names if getattr(self, name) is not None]
        is_synthetic = self.rejection_sample_method == SYNTHETIC
        if len(given) != is_synthetic:
            raise ConfigError(
                f"rejection_sample_method={self.rejection_sample_method!r} takes "
                f"{'exactly one' if is_synthetic else 'none'} of {' and '.join(names)}"
                f", got {' and '.join(given) or 'none'}: they belong to {SYNTHETIC!r}.",
                parameter=given[-1] if given else names[0],
                value=getattr(self, given[-1]) if given else None,
            )
        count, rates = self.num_speculative_tokens, self.synthetic_acceptance_rates
        if self.synthetic_acceptance_length is not None:
            length = self.synthetic_acceptance_length
            check_number(ConfigError, names[1], length, low=1, high=count + 1)
        if rates is None:
            return
        if not isinstance(rates, (list, tuple)) or len(rates) != count:
            allowed = f"a list of num_speculative_tokens={count} numbers"
            raise wrong_argument(ConfigError, names[0], allowed, rates)
        for place, rate in enumerate(rates):
            # Whoever keeps a draft has kept those before it.
            most = rates[place - 1] if place else 1
            name = f"{names[0]}[{place}]"
            check_number(ConfigError, name, rate, low=0, high=most)

    def _check_lookup(self) -> None:
        if not self.has_lookup or self.has_suffix:
            self._check_left_out(LOOKUP_KEYS, f"n-gram drafts: method {NGRAM!r}")
            return
        most, fewest = (
            check_integer(
                ConfigError, name, getattr(self, name), low=1, high=MAX_PROMPT_LOOKUP
            )
            for name in LOOKUP_KEYS
        )
        if fewest > most:
            allowed = f"at most prompt_lookup_max={most}"
            raise wrong_argument(ConfigError, "prompt_lookup_min", allowed, fewest)

    def _check_suffix(self) -> None:
        if not self.has_suffix:
            owner = f"suffix drafts: method {SUFFIX!r}"
            self._check_left_out(tuple(SUFFIX_DEFAULTS), owner)
            return
        depth = check_integer(
            ConfigError,
            "suffix_decoding_max_tree_depth",
            self.suffix_decoding_max_tree_depth,
            low=self.shortest_match + 1,
            high=MAX_TREE_DEPTH,
            hint="It is the most tokens of a match and its drafts together, and "
            f"{self.shortest_match} must match for method {self.method!r}.",
        )
        name = "suffix_decoding_max_spec_factor"
        hint = "It is the number of drafts for every token that matches."
        factor = check_number(
            ConfigError, name, getattr(self, name), low=0, open_low=True, hint=hint
        )
        if factor * (depth - 1) < 1:
            allowed = f"at least 1/{depth - 1}"
            hint += f" The longest match has {depth - 1}: there would never be a draft."
            raise wrong_argument(ConfigError, name, allowed, factor, hint)
        check_number(
            ConfigError,
            "suffix_decoding_min_token_prob",
            self.suffix_decoding_min_token_prob,
            low=0,
            high=1,
        )
        name = "suffix_decoding_max_cached_requests"
        cached = check_integer(
            ConfigError, name, getattr(self, name), low=0, high=MAX_CACHED_REQUESTS
        )
        if cached and self.rejection_sample_method not in ("coupled", SYNTHETIC):
            raise wrong_argument(
                ConfigError,
                "rejection_sample_method",
                f"'coupled' with {name}={cached}",
                self.rejection_sample_method,
                "By any other rule a text that is drawn without a seed would depend on "
                "the answers of other requests.",
            )

    def _check_left_out(self, names: Sequence[str], owner: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                allowed = f"left out for method {self.method!r}"
                hint = f"It belongs to {owner}."
                value = getattr(self, name)
                raise wrong_argument(ConfigError, name, allowed, value, hint)

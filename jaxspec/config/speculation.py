"""How drafts are proposed and verified: the speculative arguments and their limits.

`jaxspec.config.methods` lists the methods. `jaxspec.engine.speculative_args` makes a
`SpeculativeConfig` from any of the three sets of argument names that vLLM and this
package have used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import no_type_check

from jaxspec.config.methods import (
    DEFAULT_DRAFT_TOKENS,
    DRAFT_MODEL,
    LOOKUPS,
    MAX_DRAFT_TOKENS,
    NGRAM,
    SUFFIX,
    Method,
    method_of,
    with_draft_model,
)
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

# Maximum `prompt_lookup_max`: the program compares this many tokens at every position
# of every sequence.
MAX_PROMPT_LOOKUP = 32
# Maximum `suffix_decoding_max_tree_depth`. A suffix lookup compares one token fewer
# than this.
MAX_TREE_DEPTH = 64
# Maximum `suffix_decoding_max_cached_requests`; each takes about 60 kB on the device.
MAX_CACHED_REQUESTS = 4096
# Maximum `suffix_decoding_max_corpus_tokens`; each token takes 310 to 620 bytes on the
# device, and as much on the host for each engine.
MAX_CORPUS_TOKENS = 2**20

# An acceptance rule for benchmarks: drafts are accepted at random, so that texts are
# meaningless.
SYNTHETIC = "synthetic"
ADAPTIVE, FIXED = "adaptive", "fixed"
_CHOICES = {
    "rejection_sample_method": ("standard", "block", "coupled", SYNTHETIC),
    "draft_sample_method": ("probabilistic", "greedy"),
    "controller": (ADAPTIVE, FIXED),
}
# Minimum values of the integer arguments, which may also be None.
_LOWEST = {
    "disable_by_batch_size": 2,
    "max_model_len": 1,
    "draft_tensor_parallel_size": 1,
}


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed and verified.

    Attributes:
        method: A name in `jaxspec.config.methods.METHODS`. "draft_model" is a second
            language model; "pard" is one that makes all drafts in one pass (vLLM's
            `parallel_drafting`); "ngram" copies what followed the same tokens earlier
            in the sequence; "suffix" does the same, with more tokens after longer
            matches and where several matches agree; "ngram+draft_model" and
            "suffix+draft_model" use the draft model where nothing matches, the latter
            also where the match is short; "eagle", "eagle3", "medusa" and "dflash" are
            heads on the target's hidden states.
        model: Folder of the draft model or head; None for "ngram" and "suffix".
        quantization: Quantization of the draft model's matrices, with the same values
            as the engine's `quantization`; None: as in the checkpoint.
        draft_vocab_size: Number of tokens, the most frequent ones, that a draft model
            may propose (FR-Spec). The LM head keeps only their rows, which makes a pass
            cheaper and changes no text. None: all tokens in `draft_token_map`. Without
            that argument, a draft model with more than 32,768 tokens and a map in its
            folder keeps the first 32,768 of the map; other draft models keep all.
        draft_token_map: JSON file of token ids, most frequent first, for a trimmed LM
            head. Default: `draft_token_map.json` in the draft model's folder, which
            `python -m jaxspec_checkpoints trim` writes.
        num_speculative_tokens: Maximum number of draft tokens per step (K); a request
            may set fewer. With a draft tree, the number of its drafts.
        num_side_leaves: Number of alternatives to each draft that are verified too: the
            next most likely tokens of the draft model. If the target chooses one of
            them, the step yields one token more.
        speculative_token_tree: Shape of the draft tree, as vLLM writes it: a list of
            tuples, or its string. None: a chain.
        controller: "adaptive" chooses K by measured times and acceptance; "fixed"
            always uses `num_speculative_tokens`.
        rejection_sample_method: Acceptance rule for requests that sample without a
            seed; requests with a seed use "coupled". "block" samples from the same
            distribution as "standard" and accepts no fewer drafts on average.
            "synthetic" is for benchmarks: the next two arguments give the acceptance.
        synthetic_acceptance_rates: Entry i: share of rounds that accept drafts 0 to i.
        synthetic_acceptance_length: Mean tokens per step, including the target's own.
            Every step yields its integer part; the fraction is the probability of one
            token more.
        draft_sample_method: Sample drafts from the draft's distribution, or take its
            argmax.
        disable_by_batch_size: With more running requests, no drafts are made.
        max_model_len: Maximum length in tokens of a sequence for which drafts are made.
        draft_tensor_parallel_size: Devices that one copy of the draft is spread over.
        prompt_lookup_max: Maximum length of a match of an n-gram lookup, in tokens.
        prompt_lookup_min: Minimum length of a match of an n-gram lookup, in tokens.
        suffix_decoding_max_tree_depth: Maximum number of tokens of a match and its
            drafts together.
        suffix_decoding_max_spec_factor: Maximum number of drafts per token of the
            match.
        suffix_decoding_min_token_prob: Minimum share of the matches that continue with
            a draft and the drafts before it; other drafts are not made.
        suffix_decoding_max_cached_requests: Number of past requests with the same
            `cache_salt` whose answers are searched as well.
        suffix_decoding_max_corpus_tokens: Maximum number of tokens of the corpora that
            are added at run time, and searched as well.
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
    suffix_decoding_max_corpus_tokens: int | None = None

    def __post_init__(self):
        info = self.method_info
        self._check_weights(info)
        self._check_lookup(info)
        max_draft_tokens = info.max_draft_tokens
        if self.speculative_token_tree is None:
            way_out = "name no draft model" if info.weights else "leave method out"
            check_integer(
                ConfigError,
                "num_speculative_tokens",
                self.num_speculative_tokens,
                low=1,
                high=max_draft_tokens,
                hint=f"The largest number for method {self.method!r} is "
                f"{max_draft_tokens}; to decode without drafts, {way_out}.",
            )
        else:
            self._check_tree(info)
        self._check_leaves()
        for name, allowed in _CHOICES.items():
            check_choice(ConfigError, name, getattr(self, name), allowed)
        for name, low in _LOWEST.items():
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), low=low)
        self._check_synthetic()

    @property
    def method_info(self) -> Method:
        """Properties of the method."""
        return method_of(self.method)

    @cached_property
    def parents(self) -> tuple[int, ...] | None:
        """Parent of each draft of the tree; None for a chain.

        In the order of `parents_of`.
        """
        if self.speculative_token_tree is not None:
            found = parents_of(read_paths(self.speculative_token_tree))
        else:
            found = parents_of(
                leaf_paths(self.num_speculative_tokens, self.num_side_leaves)
            )
        return None if found == tuple(range(-1, len(found) - 1)) else found

    @cached_property
    def num_levels(self) -> int:
        """Maximum number of drafts that a round accepts (K): the tree's depth."""
        if self.speculative_token_tree is None:
            return self.num_speculative_tokens
        return max(map(len, read_paths(self.speculative_token_tree)))

    @property
    def num_nodes(self) -> int:
        """Number of drafts of a round, side branches included."""
        return self.num_levels if self.parents is None else len(self.parents)

    def check_levels(self, max_draft_tokens: int, hint: str) -> None:
        """Reject more levels of drafts than the weights were trained to propose.

        Args:
            hint: Reason for the limit, shown in the error.
        """
        if self.num_levels <= max_draft_tokens:
            return
        name, allowed = "num_speculative_tokens", f"1 to {max_draft_tokens}"
        if self.speculative_token_tree is not None:
            name, allowed = TREE_KEY, f"a tree of at most {max_draft_tokens} levels"
        raise wrong_argument(ConfigError, name, allowed, getattr(self, name), hint)

    @property
    def is_one_tree(self) -> bool:
        """Whether K is either 0 or all levels: drafting fewer levels is not cheaper."""
        return self.speculative_token_tree is not None and self.parents is not None

    @property
    def forced_acceptance(self) -> tuple[float, ...] | None:
        """Forced acceptance probability of each draft after accepted ones, or None."""
        if self.rejection_sample_method != SYNTHETIC:
            return None
        rates, conditional, before = self.synthetic_acceptance_rates, [], 1.0
        if rates is None:
            length = self.synthetic_acceptance_length
            assert length is not None
            # mean length 3.5, K = 5 -> [1, 1, 0.5, 0, 0]
            places = range(self.num_speculative_tokens)
            rates = [min(max(length - 1 - place, 0.0), 1.0) for place in places]
        for rate in rates:
            conditional.append(rate / before if before else 0.0)
            before = rate
        return tuple(conditional)

    def with_forced_acceptance(self, probability: float) -> "SpeculativeConfig":
        """Return a copy that accepts each draft with this probability, in order.

        Raises:
            ConfigError: The value is not a probability, or acceptance is forced
                already.
        """
        check_number(ConfigError, "forced acceptance", probability, low=0, high=1)
        if self.rejection_sample_method == SYNTHETIC:
            raise ConfigError(
                f"Acceptance is forced twice: to {probability}, and by "
                f"rejection_sample_method={SYNTHETIC!r}; give one of them.",
                parameter="rejection_sample_method",
                value=SYNTHETIC,
            )
        places = range(1, self.num_speculative_tokens + 1)
        return replace(
            self,
            rejection_sample_method=SYNTHETIC,
            synthetic_acceptance_rates=[probability**place for place in places],
        )

    @property
    def drafts_argmax(self) -> bool:
        """Whether drafts are the argmax, also of requests that sample."""
        return self.draft_sample_method == "greedy"

    @property
    def is_trimmed(self) -> bool:
        """Whether a draft model's head is trimmed to some of the tokens."""
        return self.draft_vocab_size is not None or self.draft_token_map is not None

    def _check_tree(self, info: Method) -> None:
        """Reject malformed, too deep, or wrongly sized trees."""
        written = self.speculative_token_tree
        paths = read_paths(written)
        max_draft_tokens = info.max_draft_tokens
        if self.num_levels > max_draft_tokens:
            allowed = (
                f"a tree of at most {max_draft_tokens} levels for method "
                f"{self.method!r}"
            )
            raise wrong_argument(ConfigError, TREE_KEY, allowed, written)
        if not info.extends_side_branches and has_side_paths(parents_of(paths)):
            allowed = f"a chain with leaves for method {self.method!r}"
            hint = (
                "This method continues only the chain of most probable tokens; "
                "'medusa', 'dflash' and draft models support any tree."
            )
            raise wrong_argument(UnsupportedError, TREE_KEY, allowed, written, hint)
        if self.num_speculative_tokens != len(paths):
            raise wrong_argument(
                ConfigError,
                "num_speculative_tokens",
                f"{len(paths)}, the number of drafts in {TREE_KEY}, or left out",
                self.num_speculative_tokens,
            )

    def _check_leaves(self) -> None:
        name = "num_side_leaves"
        check_integer(ConfigError, name, self.num_side_leaves, low=0)
        if self.num_side_leaves and self.speculative_token_tree is not None:
            hint = "A tree already defines its side branches."
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
            hint = "Forced acceptance supports only a chain of drafts."
            raise wrong_argument(ConfigError, name, allowed, getattr(self, name), hint)

    def _check_weights(self, info: Method) -> None:
        """Reject a folder, and arguments about its weights, that the method ignores."""
        left_out = f"left out for method {self.method!r}"
        if info.weights and self.model is None:
            allowed = f"a folder for method {self.method!r}"
            raise wrong_argument(ConfigError, "model", allowed, None)
        if not info.weights and self.model is not None:
            both = with_draft_model(self.method)
            hint = f"For both kinds of draft, set method to {both!r}."
            raise wrong_argument(ConfigError, "model", left_out, self.model, hint)
        name, kind = "speculative_model_quantization", self.quantization
        check_quantization(name, kind)
        if kind is not None and not info.weights:
            allowed = f"{left_out}, which has no weights"
            raise wrong_argument(ConfigError, name, allowed, kind)
        if not info.has_draft_model:
            hint = "It cuts the head of a draft model."
            if info.has_head:
                hint = "A head's files define the tokens that it can propose."
            self._check_left_out(("draft_vocab_size", "draft_token_map"), hint)
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
        num_draft_tokens = self.num_speculative_tokens
        rates = self.synthetic_acceptance_rates
        if self.synthetic_acceptance_length is not None:
            length = self.synthetic_acceptance_length
            check_number(
                ConfigError, names[1], length, low=1, high=num_draft_tokens + 1
            )
        if rates is None:
            return
        if not isinstance(rates, (list, tuple)) or len(rates) != num_draft_tokens:
            allowed = f"a list of num_speculative_tokens={num_draft_tokens} numbers"
            raise wrong_argument(ConfigError, names[0], allowed, rates)
        for place, rate in enumerate(rates):
            # Rounds that accept this draft also accept the drafts before it.
            most = rates[place - 1] if place else 1
            name = f"{names[0]}[{place}]"
            check_number(ConfigError, name, rate, low=0, high=most)

    def _check_lookup(self, info: Method) -> None:
        for lookup, (title, keys) in LOOKUPS.items():
            if lookup != info.lookup:
                hint = f"It belongs to {title} drafts: method {lookup!r}."
                self._check_left_out(keys, hint)
        if info.lookup == NGRAM:
            self._check_ngram()
        elif info.lookup == SUFFIX:
            self._check_suffix(info.shortest_match)

    def _check_ngram(self) -> None:
        most, fewest = (
            check_integer(
                ConfigError, name, getattr(self, name), low=1, high=MAX_PROMPT_LOOKUP
            )
            for name in LOOKUPS[NGRAM][1]
        )
        if fewest > most:
            allowed = f"at most prompt_lookup_max={most}"
            raise wrong_argument(ConfigError, "prompt_lookup_min", allowed, fewest)

    def _check_suffix(self, shortest: int) -> None:
        depth = check_integer(
            ConfigError,
            "suffix_decoding_max_tree_depth",
            self.suffix_decoding_max_tree_depth,
            low=shortest + 1,
            high=MAX_TREE_DEPTH,
            hint="It limits the tokens of a match and its drafts together, and at "
            f"least {shortest} must match for method {self.method!r}.",
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
        for name, high in (
            ("suffix_decoding_max_cached_requests", MAX_CACHED_REQUESTS),
            ("suffix_decoding_max_corpus_tokens", MAX_CORPUS_TOKENS),
        ):
            count = check_integer(
                ConfigError, name, getattr(self, name), low=0, high=high
            )
            if count:
                self._check_table(name, count)

    def _check_table(self, name: str, count: int) -> None:
        """Check what a table of answers or corpora needs."""
        # Entries of a table end after this many tokens.
        check_integer(
            ConfigError,
            "num_speculative_tokens",
            self.num_levels,
            low=1,
            high=MAX_DRAFT_TOKENS,
            hint=f"{name} is {count}.",
        )
        if self.rejection_sample_method not in ("coupled", SYNTHETIC):
            raise wrong_argument(
                ConfigError,
                "rejection_sample_method",
                f"'coupled' with {name}={count}",
                self.rejection_sample_method,
                "With another rule, texts sampled without a seed would depend on the "
                "answers of other requests, or on the corpora.",
            )

    def _check_left_out(self, names: Iterable[str], hint: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None:
                allowed = f"left out for method {self.method!r}"
                raise wrong_argument(ConfigError, name, allowed, value, hint)

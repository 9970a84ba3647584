"""Owns how drafts are proposed and judged: methods, their keys, the allowed values.

Knows nothing of models or engines; `jaxspec.engine.speculative_args` turns the names
of three generations of arguments into a `SpeculativeConfig`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import no_type_check

from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_choice,
    check_integer,
    check_number,
    wrong_argument,
)

# The step program is compiled for a ladder of draft lengths; 8 is its last rung.
MAX_DRAFT_TOKENS = 8
DEFAULT_DRAFT_TOKENS = 5
# The program compares this many tokens at every position of every sequence.
MAX_PROMPT_LOOKUP = 32
DEFAULT_PROMPT_LOOKUP = 5

NGRAM, NGRAM_AND_MODEL, DRAFT_MODEL = "ngram", "ngram+draft_model", "draft_model"
METHODS = (NGRAM, NGRAM_AND_MODEL, DRAFT_MODEL)
# What drafts come from, for errors.
SOURCES_OF_DRAFTS = (
    "Drafts come from a whole model of the target's family, or from the text itself "
    "('[ngram]'); heads such as Medusa's and EAGLE's are not supported."
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
        method: "draft_model"; "ngram" copies what followed the same tokens earlier in
            the sequence; "ngram+draft_model" asks the model where nothing matches.
        model: Folder of the draft model; None for "ngram".
        num_speculative_tokens: Most draft tokens per step; a request may ask for fewer.
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
    """

    method: str = DRAFT_MODEL
    model: str | None = None
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS
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

    def __post_init__(self):
        if self.method not in METHODS:
            allowed = "'ngram', 'ngram+draft_model' or 'draft_model'"
            hint = "No other kind of draft is supported yet."
            raise wrong_argument(UnsupportedError, "method", allowed, self.method, hint)
        self._check_model()
        self._check_lookup()
        check_integer(
            ConfigError,
            "num_speculative_tokens",
            self.num_speculative_tokens,
            low=1,
            high=MAX_DRAFT_TOKENS,
            hint="The step program is compiled for a ladder of draft lengths that ends "
            f"at {MAX_DRAFT_TOKENS}; to decode without drafts, name no draft model.",
        )
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
    def has_draft_model(self) -> bool:
        """Whether a second network proposes, alone or where nothing matches."""
        return self.method != NGRAM

    @property
    def has_lookup(self) -> bool:
        """Whether drafts are looked up in the sequence itself."""
        return self.method != DRAFT_MODEL

    def _check_model(self) -> None:
        if self.has_draft_model and self.model is None:
            allowed = f"a folder for method {self.method!r}"
            raise wrong_argument(ConfigError, "model", allowed, None)
        if not self.has_draft_model and self.model is not None:
            hint = f"For both kinds of draft, set method to {NGRAM_AND_MODEL!r}."
            allowed = f"left out for method {self.method!r}"
            raise wrong_argument(ConfigError, "model", allowed, self.model, hint)

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
        names = ("prompt_lookup_max", "prompt_lookup_min")
        if not self.has_lookup:
            for name in names:
                if getattr(self, name) is not None:
                    allowed = f"left out for method {self.method!r}"
                    hint = f"It belongs to n-gram drafts: method {NGRAM!r}."
                    value = getattr(self, name)
                    raise wrong_argument(ConfigError, name, allowed, value, hint)
            return
        most, fewest = (
            check_integer(
                ConfigError, name, getattr(self, name), low=1, high=MAX_PROMPT_LOOKUP
            )
            for name in names
        )
        if fewest > most:
            allowed = f"at most prompt_lookup_max={most}"
            raise wrong_argument(ConfigError, "prompt_lookup_min", allowed, fewest)

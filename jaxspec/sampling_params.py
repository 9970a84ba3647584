"""Owns the parameters of one request, with vLLM's names and defaults.

Values are normalized and checked on the host before anything else happens. Independent
of models; `validate_for` is given the limits of an engine.
"""

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, no_type_check

from jaxspec.config.structured_outputs import (
    StructuredOutputsParams as StructuredOutputsParams,
)
from jaxspec.config.structured_outputs import check_structured_outputs
from jaxspec.errors import (
    RequestError,
    check_flag,
    check_integer,
    check_number,
    check_strings,
    check_token_id,
    check_token_ids,
    nearest,
    wrong_argument,
)

# A temperature below this counts as zero: greedy decoding.
GREEDY_TEMPERATURE = 1e-5
# Logits divided by less than this overflow the exponent of float32 probabilities.
MIN_TEMPERATURE = 0.01
# The step program compares each token with a fixed number of stop ids.
MAX_STOP_TOKEN_IDS = 32
# The step program's capacity for logprob_token_ids of one request, as in vLLM.
MAX_LOGPROB_TOKEN_IDS = 128

_REPLACED = {
    "best_of": "use n and choose among outputs yourself",
    "use_beam_search": "call LLM.beam_search, or sample with n",
    "length_penalty": "it belongs to beam search: see BeamSearchParams",
    "early_stopping": "beam search ends when its result can no longer change",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "truncate_prompt_tokens": "cut the list of prompt token ids before the call",
}
_FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(Enum):
    """Content of each `RequestOutput` of a request.

    CUMULATIVE: everything generated so far. DELTA: only what is new since the last one.
    FINAL_ONLY: one output after the request has ended.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Fields of the sampling distribution that command lines and model files can set.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")

_FIXED = (bool, int, float, str, type(None), RequestOutputKind)


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Fields may be assigned later: the engine checks them again when it admits the
    request (`validate_for`) and keeps a copy.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities add up to
            this.
        min_p: Drop tokens less likely than this times the most likely one.
        seed: The same seed gives the same text, whatever else runs; None uses the
            engine's seed.
        stop: Strings that end the text; they are cut off unless
            `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the text, at most 32.
        ignore_eos: Continue after the model's end tokens.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token,
            at the end of the text.
        n: Texts to generate per prompt; with a `seed`, text i has the seed `seed + i`.
        presence_penalty: Subtracted from the logit of every generated token.
        frequency_penalty: Subtracted from the logit of every generated token, for each
            of its occurrences.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of
            tokens in the prompt or generated.
        logprobs: Return the log-probability of each generated token and of this number
            of most likely ones, before penalties and temperature. -1 returns all.
        prompt_logprobs: As `logprobs`, for the tokens of the prompt.
        logprob_token_ids: Return the log-probabilities of these token ids with each
            generated token, in place of the most likely ones. `logprobs` may be left
            out, or be their number.
        flat_logprobs: Return logprobs as `FlatLogprobs`, with fewer objects.
        logit_bias: Added to the logits of these token ids.
        allowed_token_ids: No other token is generated.
        bad_words: Never generated, with or without a space before them.
        max_tokens: Maximum number of tokens to generate; None for the context's limit.
        min_tokens: No end of text before this number of tokens.
        detokenize: Make texts. False returns token ids only.
        skip_special_tokens: Leave special tokens, such as turn markers, out of texts.
        spaces_between_special_tokens: No effect: Gemma's pieces contain their spaces.
        output_kind: What each output contains; see `RequestOutputKind`. `LLM` always
            returns final outputs.
        structured_outputs: A `StructuredOutputsParams`, which constrains the text.
        skip_reading_prefix_cache: Compute the prompt's keys and values again, even if
            they are cached. Prompts with `prompt_logprobs` are always computed.
        extra_args: `{"num_speculative_tokens": k}` limits the draft tokens per step;
            `{"return_token_origins": True}` returns `CompletionOutput.token_origins`.
        skip_clone: No effect: the engine always makes a copy.
        watermarking, thinking_token_budget: vLLM's; only the default is allowed.
        prompt_logprob_token_ids, prompt_logprob_start: Only the default is allowed.
        stream_interval, repetition_detection: Only the default is allowed.
        routed_experts_prompt_start: Only the default is allowed.
        trace_decode_token_ids: Only the default is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Any = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __new__(cls, **given: object):
        """Reject unknown names, with a hint, before the fields are set."""
        known = {item.name for item in dataclasses.fields(cls)}
        for name in given.keys() - known:
            hint = _REPLACED.get(name) or nearest(name, known, "see SamplingParams.")
            raise RequestError(
                f"SamplingParams has no {name} (given {given[name]!r}): {hint}",
                parameter=name,
                value=given[name],
            )
        return super().__new__(cls)

    def __post_init__(self):
        self._check_numbers()
        self._check_stopping()
        self._check_logprobs()
        self._check_token_choices()
        self._check_greedy()

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """Make parameters from keywords for which None means the default.

        `max_tokens=None` still means up to the end of the context.
        """
        kept: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if value is not None or name == "max_tokens"
        }
        return cls(**kept)

    def clone(self) -> "SamplingParams":
        """Return an independent copy."""
        # Copied by hand because every request is copied: `deepcopy` takes ten times as
        # long.
        made = object.__new__(type(self))
        for name, value in vars(self).items():
            is_fixed = isinstance(value, _FIXED)
            setattr(made, name, value if is_fixed else copy.deepcopy(value))
        return made

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs to return in addition to each generated token's; None for none."""
        if self.logprobs is None and self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def num_speculative_tokens(self) -> int | None:
        """Maximum draft tokens per step of this request; None for the engine's."""
        return (self.extra_args or {}).get("num_speculative_tokens")

    def max_draft_tokens(self, engine_limit: int) -> int:
        """Return this request's maximum K; the engine's is `engine_limit`."""
        requested = self.num_speculative_tokens
        return engine_limit if requested is None else min(requested, engine_limit)

    @property
    def return_token_origins(self) -> bool:
        """Whether outputs have `token_origins`."""
        return (self.extra_args or {}).get("return_token_origins", False)

    def validate_for(
        self,
        vocab_size: int,
        *,
        max_draft_tokens: int | None = None,
        max_logprobs: int | None = None,
    ) -> None:
        """Check all fields again, also against the limits of the engine.

        Args:
            vocab_size: Token ids must be below this.
            max_draft_tokens: The engine's maximum of draft tokens per step; None skips
                the check.
            max_logprobs: The engine's maximum number of logprobs per token; None skips
                the check.

        Raises:
            RequestError: Names the field, its value and the allowed range.
        """
        self.__post_init__()
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
        }
        for name, tokens in named.items():
            for token in tokens or ():
                check_token_id(RequestError, name, token, vocab_size)
        requested = self.num_speculative_tokens
        if requested is not None and max_draft_tokens is not None:
            check_integer(
                RequestError,
                "num_speculative_tokens",
                requested,
                low=0,
                high=max_draft_tokens,
                hint="The upper limit is the engine's num_speculative_tokens.",
            )
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(self, name)
            if given is None or max_logprobs is None:
                continue
            if (vocab_size if given == -1 else given) > max_logprobs:
                allowed = f"at most {max_logprobs}"
                hint = "The upper limit is the engine's max_logprobs."
                if given == -1:
                    hint = f"-1 means all {vocab_size} tokens. {hint}"
                raise wrong_argument(RequestError, name, allowed, given, hint)

    def _number(self, name: str, **limits: Any) -> None:
        value = check_number(RequestError, name, getattr(self, name), **limits)
        setattr(self, name, value)

    def _integer(self, name: str, **limits: Any) -> None:
        value = check_integer(RequestError, name, getattr(self, name), **limits)
        setattr(self, name, value)

    def _check_numbers(self) -> None:
        self._integer("n", low=1)
        self._number("presence_penalty", low=-2, high=2)
        self._number("frequency_penalty", low=-2, high=2)
        self._number("repetition_penalty", low=0, open_low=True)
        if not 2**-126 <= self.repetition_penalty < 2**127:
            allowed = "above 0 and within the range of float32"
            given = self.repetition_penalty
            raise wrong_argument(RequestError, "repetition_penalty", allowed, given)
        self._number("temperature", low=0, high=2)
        self._number("top_p", low=0, high=1, open_low=True)
        self._number("min_p", low=0, high=1)
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            self.top_k = 0
        self._integer("top_k", low=0, hint="0 or -1 keeps every token.")
        if self.seed == -1 and not isinstance(self.seed, bool):
            self.seed = None
        if self.seed is not None:
            hint = "Text i of n has the seed + i." if self.n > 1 else ""
            self._integer("seed", low=-(2**63), high=2**63 - self.n, hint=hint)
            if self.seed < -1 <= self.seed + self.n - 1:
                allowed = "such that no text of n has the seed -1, which means no seed"
                raise wrong_argument(RequestError, "seed", allowed, self.seed, hint)
        for name in _FLAGS:
            check_flag(RequestError, name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            allowed = "a RequestOutputKind (CUMULATIVE, DELTA or FINAL_ONLY)"
            raise wrong_argument(RequestError, "output_kind", allowed, self.output_kind)

    def _check_stopping(self) -> None:
        if self.max_tokens is not None:
            hint = "None generates up to the end of the context."
            self._integer("max_tokens", low=1, hint=hint)
        hint = "It may not exceed max_tokens."
        self._integer("min_tokens", low=0, high=self.max_tokens, hint=hint)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = check_strings(RequestError, "stop", stop)
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs detokenize=True: stop strings are searched "
                "in the text. Use stop_token_ids to stop without text.",
                parameter="stop",
                value=self.stop,
            )
        self.stop_token_ids = check_token_ids(
            RequestError, "stop_token_ids", self.stop_token_ids
        )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} ids, got "
                f"{len(self.stop_token_ids)}: {self.stop_token_ids!r}.",
                parameter="stop_token_ids",
                value=self.stop_token_ids,
            )

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)  # as in vLLM, for OpenAI's older API
            if getattr(self, name) is not None:
                hint = "-1 means the whole vocabulary."
                self._integer(name, low=-1, hint=hint)
        if self.logprob_token_ids is None:
            return
        name = "logprob_token_ids"
        chosen = check_token_ids(RequestError, name, self.logprob_token_ids)
        self.logprob_token_ids = chosen
        if len(chosen) > MAX_LOGPROB_TOKEN_IDS:
            allowed = f"at most {MAX_LOGPROB_TOKEN_IDS} ids"
            raise wrong_argument(RequestError, name, allowed, len(chosen))
        if self.logprobs not in (None, len(chosen)):
            allowed = f"{len(chosen)}, the number of logprob_token_ids, or left out"
            raise wrong_argument(RequestError, "logprobs", allowed, self.logprobs)

    def _check_token_choices(self) -> None:
        if self.allowed_token_ids is not None:
            name, hint = "allowed_token_ids", "None allows every token."
            chosen = check_token_ids(RequestError, name, self.allowed_token_ids)
            if not chosen:
                allowed = "a list of at least one id"
                raise wrong_argument(RequestError, name, allowed, chosen, hint)
            self.allowed_token_ids = chosen
        self.bad_words = check_strings(RequestError, "bad_words", self.bad_words)
        check_structured_outputs(self.structured_outputs)
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.extra_args is not None:
            self.extra_args = _extra_args(self.extra_args)

    def _check_greedy(self) -> None:
        if self.is_greedy:
            # Greedy decoding does not sample, so the filters have no effect.
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
            if self.n > 1:
                hint = "Every text would be the same."
                allowed = "1 at temperature 0"
                raise wrong_argument(RequestError, "n", allowed, self.n, hint)
        elif self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature={self.temperature:g} is raised to {MIN_TEMPERATURE}; "
                "pass 0 for the most likely token.",
                UserWarning,
                stacklevel=4,
            )
            self.temperature = MIN_TEMPERATURE


@no_type_check
@dataclass(kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Attributes:
        beam_width: Number of texts to keep at each step, and to return.
        max_tokens: Maximum number of generated tokens of each.
        ignore_eos: Continue after an end of text.
        temperature: No effect: nothing is sampled, and texts are compared by the
            model's unmodified log-probabilities, as in vLLM.
        length_penalty: Log-probabilities are divided by this power of the length, which
            includes the prompt. Above 0, longer texts are preferred.
        include_stop_str_in_output: The server's texts include the token that ends them.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        for name in ("beam_width", "max_tokens"):
            setattr(
                self,
                name,
                check_integer(RequestError, name, getattr(self, name), low=1),
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_flag(RequestError, name, getattr(self, name))
        check_number(RequestError, "temperature", self.temperature, low=0, high=2)
        name = "length_penalty"
        check_number(RequestError, name, self.length_penalty, low=-10, high=10)


def _logit_bias(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        allowed = "a dict from token id to bias"
        raise wrong_argument(RequestError, "logit_bias", allowed, given)
    bias = {}
    texts = [key for key in given if isinstance(key, str) and not key.isdecimal()]
    if len(texts) > 1:
        described_as = "Every key of logit_bias"
        raise wrong_argument(
            RequestError,
            "logit_bias",
            "a token id",
            texts,
            described_as=described_as,
        )
    for key, value in given.items():
        # JSON has no integer keys: "42" is the id 42.
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = check_token_id(RequestError, "logit_bias", token)
        name = f"logit_bias[{token}]"
        bias[token] = check_number(RequestError, name, value, low=-100, high=100)
    return bias


def _extra_args(given: object) -> dict[str, Any]:
    drafts, origins = names = "num_speculative_tokens", "return_token_origins"
    if not isinstance(given, Mapping) or given.keys() - set(names):
        allowed = f"a dict with no keys other than {drafts!r} and {origins!r}"
        raise wrong_argument(RequestError, "extra_args", allowed, given)
    extra = {key: value for key, value in given.items() if value is not None}
    if drafts in extra:
        name = f"extra_args[{drafts!r}]"
        extra[drafts] = check_integer(RequestError, name, extra[drafts], low=0)
    check_flag(RequestError, f"extra_args[{origins!r}]", extra.get(origins, False))
    return extra

"""Validates callers' input and turns it into requests.

Every wrong input is rejected here, before the request exists and before any device
work. Limits of penalties, biases and bad words are those of the step program, which
stores every request's controls in arrays of fixed sizes.
"""

import functools
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, no_type_check

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.engine.output_processor import ParentRequest
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.structured_output import GrammarCompiler, GrammarState
from jaxspec.errors import (
    ConfigError,
    RequestError,
    UnsupportedError,
    check_integer,
    wrong_argument,
)
from jaxspec.inputs import ParsedPrompt, parse_prompt
from jaxspec.outputs import RequestSpecDecodeMetrics, RequestStateStats
from jaxspec.program.plan import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_STOP_IDS,
    RULES,
    Features,
    TokenControls,
)
from jaxspec.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer

# Largest `n`, as in vLLM, because each text is a request of its own.
MAX_TEXTS = 16_384
# Fields of vLLM that are not supported: default value, reason.
_REFUSED: dict[str, tuple[Any, str]] = {
    "watermarking": (None, "tokens follow the target's own distribution"),
    "prompt_logprob_token_ids": (None, "prompt_logprobs returns the most likely ones"),
    "prompt_logprob_start": (None, "prompt_logprobs are those of the whole prompt"),
    "stream_interval": (None, "every step with new tokens returns an output"),
    "thinking_token_budget": (None, "Gemma marks no thinking"),
    "repetition_detection": (None, "use the penalties, or stop strings"),
    "routed_experts_prompt_start": (0, "Gemma has no experts"),
    "trace_decode_token_ids": (None, "tokens are always sampled"),
}
Word = tuple[int, ...]


class Prepared(NamedTuple):
    """A checked request of a caller, before it is queued."""

    request_id: str
    requests: list[Request]  # one per text (`n`)
    parent: ParentRequest | None = None  # where there are several


class InputProcessor:
    """Makes requests from prompts and parameters; may be used in any thread."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer):
        self._config = config
        self.set_tokenizer(tokenizer)
        # Draws seeds of requests without one; repeatable if the engine has a seed.
        self._random = np.random.default_rng(config.seed)
        self._lock = threading.Lock()

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use a tokenizer for the following requests.

        Raises:
            ConfigError: It has too many end tokens.
        """
        self._tokenizer = tokenizer
        _check_ends(self.end_ids)
        self._grammars = GrammarCompiler(
            tokenizer,
            self._config.model_config.vocab_size,
            self.end_ids,
            self._config.structured_outputs,
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, unless the request ignores them."""
        ends = self._config.model_config.eos_token_ids
        return tuple(dict.fromkeys((*ends, *self._tokenizer.turn_end_ids)))

    @no_type_check  # it has its own checks, with better errors
    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Prepared:
        """Check a caller's input, and make a request for every text.

        Args:
            trace_headers: HTTP headers of the trace that the request belongs to.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable.
            NotImplementedError: A sampling value is not supported.
        """
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id must be a string, got {type(request_id).__name__}",
                parameter="request_id",
                value=request_id,
            )
        params = self.checked(params)
        self._check_priority(priority)
        if trace_headers and self._config.otlp_traces_endpoint is None:
            raise UnsupportedError(
                "trace_headers need an engine that records traces: set "
                "otlp_traces_endpoint, or leave them out.",
                parameter="trace_headers",
                value=trace_headers,
            )
        parsed = parse_prompt(
            prompt,
            self._tokenizer,
            self._config.model_config.vocab_size,
            self._config.max_model_len,
        )
        make = functools.partial(
            self._make,
            parsed,
            priority=priority,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            trace_headers=trace_headers,
        )
        if params.n == 1:
            return Prepared(request_id, [make(request_id, params)])
        parent = ParentRequest(request_id, params)
        children = [
            make(child_id, parent.child_params(index))
            for index, child_id in enumerate(parent.children)
        ]
        return Prepared(request_id, children, parent)

    def _check_priority(self, priority: Any) -> None:
        # As in vLLM, the policy "fcfs" ignores the priority.
        check_integer(RequestError, "priority", priority, low=-(2**31), high=2**31 - 1)

    @no_type_check
    def checked(self, params: SamplingParams) -> SamplingParams:
        """Return a checked copy of sampling parameters.

        Raises:
            RequestError: A sampling value is not acceptable.
            NotImplementedError: A sampling value is not supported.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, got {type(params).__name__}",
                parameter="params",
                value=params,
            )
        config, params = self._config, params.clone()
        speculative = config.speculative
        params.validate_for(
            config.model_config.vocab_size,
            max_draft_tokens=speculative and speculative.num_levels,
            max_logprobs=config.max_logprobs,
        )
        check_supported(params)
        self._check_text(params)
        if params.n > MAX_TEXTS:
            allowed = f"at most {MAX_TEXTS}"
            raise wrong_argument(RequestError, "n", allowed, params.n)
        # The device counts in 32 bits; larger values would change nothing.
        params.top_k = min(params.top_k, config.model_config.vocab_size)
        params.min_tokens = min(params.min_tokens, config.max_model_len)
        return params

    def _check_text(self, params: SamplingParams) -> None:
        """Reject parameters that need a missing tokenizer, or real verification."""
        if params.structured_outputs is not None and self._config.is_synthetic:
            raise UnsupportedError(
                "structured_outputs cannot be used with "
                "rejection_sample_method='synthetic', which accepts drafts at "
                "random.",
                parameter="structured_outputs",
                value=params.structured_outputs,
            )
        if not isinstance(self._tokenizer, NoTokenizer):
            return
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise self._tokenizer.missing(name, getattr(params, name))
        params.detokenize = False

    def check_form(self, form: StructuredOutputsParams) -> None:
        """Check that the grammar of `form` compiles; cache it for later requests.

        Raises:
            RequestError: It cannot.
        """
        self._grammars.matcher(form)

    @no_type_check
    def features(self, params: SamplingParams) -> Features:
        """Return the features that programs need for requests of these parameters.

        Raises:
            RequestError: A sampling value is not acceptable.
            NotImplementedError: A sampling value is not supported.
        """
        params = self.checked(params)
        controls = make_controls(params, self._tokenizer, self._stop_ids(params))
        return self._features(params, has_controls=controls is not None)

    def _features(self, params: SamplingParams, *, has_controls: bool) -> Features:
        max_logprobs = self._config.num_logprobs
        return Features(
            all_greedy=params.temperature == 0,
            has_controls=has_controls,
            has_grammar=params.structured_outputs is not None,
            num_logprobs=_compiled_logprobs(params.num_logprobs, max_logprobs),
            num_prompt_logprobs=_compiled_logprobs(
                params.prompt_logprobs, max_logprobs
            ),
        )

    def _make(
        self,
        parsed: ParsedPrompt,
        request_id: str,
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int,
        trace_headers: Mapping[str, str] | None,
    ) -> Request:
        config = self._config
        num_prompt = len(parsed.token_ids)
        limit = config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        max_draft_tokens = params.max_draft_tokens(config.max_draft_tokens)
        metrics = None
        seed, rule = self._seed_and_rule(params)
        if max_draft_tokens:
            metrics = RequestSpecDecodeMetrics.empty(
                config.max_draft_tokens,
                is_synthetic=config.is_synthetic,
            )
        stop_ids = self._stop_ids(params)
        controls = make_controls(params, self._tokenizer, stop_ids)
        grammar = self._begin_text(params, num_prompt, stop_ids)
        return Request(
            request_id=request_id,
            prompt=parsed.text,
            prompt_token_ids=parsed.token_ids,
            params=params,
            max_total=limit,
            max_draft_tokens=max_draft_tokens,
            seed=seed,
            rule=rule,
            stop_ids=stop_ids,
            controls=controls,
            grammar=grammar,
            features=self._features(params, has_controls=controls is not None),
            priority=priority,
            cache_salt=parsed.cache_salt,
            can_read_prefix_cache=_may_read_cache(params),
            stats=RequestStateStats(
                arrival_time=arrival_time, queued_ts=time.monotonic()
            ),
            spec_metrics=metrics,
            trace_headers=trace_headers,
        )

    def _begin_text(
        self, params: SamplingParams, num_prompt: int, stop_ids: tuple[int, ...]
    ) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        state = GrammarState(
            matcher=self._grammars.matcher(params.structured_outputs),
            num_prompt=num_prompt,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
        )
        state.compute([])  # computed here, no launch waits for it
        return state

    def _seed_and_rule(self, params: SamplingParams) -> tuple[tuple[int, int], int]:
        with self._lock:
            drawn = self._random.integers(0, 2**32, size=2, dtype=np.uint32)
        if params.seed is not None:
            # The coupled rule gives the same text with any K, drafter or batch.
            words = params.seed >> 32 & 0xFFFFFFFF, params.seed & 0xFFFFFFFF
            return words, RULES["coupled"]
        speculative, rule = self._config.speculative, "standard"
        if speculative is not None and not self._config.is_synthetic:
            rule = speculative.rejection_sample_method
        return (int(drawn[0]), int(drawn[1])), RULES[rule]

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        named = tuple(params.stop_token_ids or ())
        if params.ignore_eos:
            return named
        return tuple(dict.fromkeys((*self.end_ids, *named)))


def _check_ends(ends: tuple[int, ...]) -> None:
    max_ends = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(set(ends)) > max_ends:
        raise ConfigError(
            f"The model has {len(set(ends))} end token ids; at most {max_ends} are "
            f"supported, with {MAX_STOP_TOKEN_IDS} stop_token_ids besides: name fewer "
            "as eos_token_id in generation_config.json.",
            parameter="eos_token_id",
            value=ends,
        )


def check_supported(params: SamplingParams) -> None:
    """Reject unsupported fields, instead of ignoring them.

    Raises:
        NotImplementedError: Names the field, its value and the reason.
    """
    for name, (default, reason) in _REFUSED.items():
        value = getattr(params, name)
        if value != default:
            raise UnsupportedError(
                f"{name}={value!r} is not supported: {reason}. Leave it at "
                f"{default!r}.",
                parameter=name,
                value=value,
            )


def _may_read_cache(params: SamplingParams) -> bool:
    """Whether the request may reuse cached pages.

    One that wants prompt logprobs may not: the cache does not store them.
    """
    return params.prompt_logprobs is None and not params.skip_reading_prefix_cache


def _compiled_logprobs(requested: int | None, num_logprobs: int) -> int | None:
    """Round the number of logprobs up to `num_logprobs`; None if none are requested.

    So one program serves any number of them.
    """
    return None if requested is None else num_logprobs


def make_controls(
    params: SamplingParams, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> TokenControls | None:
    """Return the token controls of a request; None if it has none.

    Args:
        stop_ids: End tokens, which are masked before `min_tokens`.

    Raises:
        RequestError: There are more entries than the program has room for, or no token
            is left that could be generated.
    """
    bias = tuple(sorted((params.logit_bias or {}).items()))
    if len(bias) > MAX_BIAS:
        raise _too_many("logit_bias", f"at most {MAX_BIAS} token ids", len(bias))
    words = _bad_words(params.bad_words or [], tokenizer)
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = tuple(sorted(set(params.allowed_token_ids)))
        _check_some_left(allowed, words, stop_ids if params.min_tokens else ())
    controls = TokenControls(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=bias,
        allowed=allowed,
        bad_words=words,
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
    )
    return None if controls == TokenControls() else controls


def _bad_words(texts: list[str], tokenizer: Tokenizer) -> tuple[Word, ...]:
    """Spell every word in token ids, as the start of a text and after a space."""
    words: list[Word] = []
    for text in texts:
        bare = text.lstrip(" ")
        for form in (bare, f" {bare}") if bare else (text,):
            ids = tokenizer.encode(
                form, add_special_tokens=False, parse_special_tokens=False
            )
            if len(ids) > MAX_BAD_WORD_LEN:
                raise wrong_argument(
                    RequestError,
                    "bad_words",
                    f"words of at most {MAX_BAD_WORD_LEN} tokens",
                    text,
                    f"It has {len(ids)}.",
                )
            words.append(tuple(ids))
    unique = dict.fromkeys(words)
    # A word that ends in another bad word is covered by it.
    spellings = tuple(
        word
        for word in unique
        if not any(word[start:] in unique for start in range(1, len(word)))
    )
    if len(spellings) > MAX_BAD_WORDS:
        allowed = f"at most {MAX_BAD_WORDS} spellings in token ids"
        raise _too_many("bad_words", allowed, len(spellings))
    return spellings


def _check_some_left(
    allowed: tuple[int, ...], words: tuple[Word, ...], stop_ids: tuple[int, ...]
) -> None:
    forbidden = {word[0] for word in words if len(word) == 1}.union(stop_ids)
    if forbidden.issuperset(allowed):
        raise wrong_argument(
            RequestError,
            "allowed_token_ids",
            "a list with an id that bad_words does not forbid and, with min_tokens, "
            "that is not an end token",
            list(allowed),
        )


def _too_many(name: str, allowed: str, count: int) -> RequestError:
    return RequestError(
        f"{name} must hold {allowed}, got {count}.", parameter=name, value=count
    )

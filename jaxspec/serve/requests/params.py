"""Converts a request's fields to `SamplingParams`.

Fields that a request leaves out come from the model's generation config, then from
OpenAI's defaults.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.errors import RequestError, UnsupportedError, refuse, wrong_argument
from jaxspec.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxspec.serve.requests.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseFormat,
)
from jaxspec.serve.requests.tool_choice import form_of

_log = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
# Maximum number of characters of a grammar. A grammar of ten times this length takes
# half a minute to compile.
MAX_GRAMMAR_CHARACTERS = 2**16
# Fields of a request passed to `SamplingParams` unchanged; `make_params` converts the
# two others.
_SAME = tuple(
    item.name
    for item in fields(SamplingParams)
    if item.name in GenerationBody.model_fields
    and item.name not in ("max_tokens", "structured_outputs")
)
# Fields that a beam search does not support, with the values that mean "no effect". A
# beam search refuses any other value.
_NOT_OF_BEAMS: dict[str, Any] = {
    **{"stop": None, "stop_token_ids": None, "min_tokens": 0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    **{"logit_bias": None, "allowed_token_ids": None, "bad_words": None},
    "return_token_origins": False,
    "logprob_token_ids": None,
}
# Older fields of vLLM: "guided_" followed by one of these names of
# `StructuredOutputsParams`.
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")
_OLDER_FORMS = tuple(f"guided_{kind}" for kind in _GUIDED)
# For each parameter of the engine, the request fields that can set it. `field_of` names
# the first one that the request sets.
_FIELDS: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "input"),
    "prompt_token_ids": ("prompt",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "extra_args": ("num_speculative_tokens", "vllm_xargs"),
    "structured_outputs": ("response_format", "text", *_OLDER_FORMS),
    **dict.fromkeys(_GUIDED, ("structured_outputs", *_OLDER_FORMS)),
}


def make_params(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Make the sampling parameters of a request.

    Args:
        defaults: Recommended values from the model's files.

    Raises:
        RequestError: A value is invalid, or two contradict each other.
        UnsupportedError: A field asks for an unsupported feature.
    """
    _check(body)
    given = {name: getattr(body, name) for name in _SAME}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(body, ChatBody):
        max_tokens, logprobs = _for_chat(body)
        prompt_logprobs = body.prompt_logprobs
    else:
        assert isinstance(body, CompletionBody)
        max_tokens, logprobs = _for_completion(body)
        # Echoed tokens have logprobs like generated ones.
        prompt_logprobs = logprobs if body.echo else None
        if prompt_logprobs is None:
            prompt_logprobs = body.prompt_logprobs
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")
    own: dict[str, Any] = {
        "max_tokens": max_tokens,
        # With `logprob_token_ids`, logprobs are returned for those ids, not for the
        # most likely tokens.
        "logprobs": None if body.logprob_token_ids else logprobs,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": _structured_outputs(body),
        "extra_args": _extra_args(body),
        "output_kind": (
            RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        ),
    }
    if body.use_beam_search:
        given["temperature"] = 1.0  # unused; 0 would be refused with n > 1
    return SamplingParams(**{**defaults, **given, **own})


def field_of(body: GenerationBody, name: str | None) -> str | None:
    """Return the field of a request that sets the engine's parameter `name`."""
    given = body.model_fields_set
    root = (name or "").partition("[")[0]
    if root in given:
        return name
    return next((one for one in _FIELDS.get(root, ()) if one in given), name)


def make_beams(
    body: GenerationBody, params: SamplingParams, max_model_len: int
) -> BeamSearchParams | None:
    """Make the parameters of a request's beam search; None without one.

    Args:
        params: Result of `make_params`; its `n` is the beam width.
        max_model_len: Limit for requests without `max_tokens`.

    Raises:
        RequestError: A value is invalid.
        UnsupportedError: A field has no effect in a beam search.
    """
    if not body.use_beam_search:
        return None
    shaped = {name: getattr(body, name) for name in _NOT_OF_BEAMS}
    shaped["structured_outputs"] = params.structured_outputs
    shaped["prompt_logprobs"] = params.prompt_logprobs
    for name, value in shaped.items():
        if value not in (None, [], {}, _NOT_OF_BEAMS.get(name)):
            reason = "use_beam_search compares texts by the model's unmodified "
            reason += "log-probabilities"
            raise _unsupported(name, value, reason)
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or max_model_len,
        ignore_eos=params.ignore_eos,
        temperature=0.0 if body.temperature is None else body.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


def _check(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "Stream options can only be defined when `stream=True`.",
            parameter="stream_options",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "`prompt_logprobs` are not available when `stream=True`.",
            parameter="prompt_logprobs",
        )
    refuse("kv_transfer_params", body.kv_transfer_params)


def _check_token_ids(
    token_ids: Sequence[int] | None, *, has_logprobs: bool, required: str
) -> None:
    """Refuse `logprob_token_ids` that are empty, or without `logprobs`."""
    name = "logprob_token_ids"
    if token_ids is not None and not token_ids:
        raise RequestError(f"`{name}` must not be an empty list.", parameter=name)
    if token_ids and not has_logprobs:
        message = f"when using `{name}`, `logprobs` must be {required}."
        raise RequestError(message, parameter=name)


def _for_completion(body: CompletionBody) -> tuple[int | None, int | None]:
    """Return `max_tokens` and `logprobs` of a completion."""
    if body.suffix:
        raise _unsupported("suffix", body.suffix, "Gemma cannot fill in text")
    if body.prompt_embeds is not None:
        raise UnsupportedError(
            "prompt_embeds is not supported: prompts are given as text or token ids.",
            parameter="prompt_embeds",
        )
    max_tokens = body.max_tokens
    if "max_tokens" not in body.model_fields_set:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    token_ids, has_logprobs = body.logprob_token_ids, body.logprobs is not None
    _check_token_ids(token_ids, has_logprobs=has_logprobs, required="set")
    if body.echo and max_tokens == 0:
        if token_ids:
            raise RequestError(
                "`logprob_token_ids` apply to generated tokens, but with `echo` and "
                "`max_tokens=0` no tokens are generated.",
                parameter="logprob_token_ids",
            )
        max_tokens = 1  # the engine generates at least one, which is not shown
    return max_tokens, body.logprobs


def _for_chat(body: ChatBody) -> tuple[int | None, int | None]:
    """Return `max_tokens` and the number of logprobs of a chat."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "when using `top_logprobs`, `logprobs` must be set to true.",
            parameter="top_logprobs",
            value=body.top_logprobs,
        )
    _check_token_ids(
        body.logprob_token_ids,
        has_logprobs=bool(body.logprobs),
        required="set to true",
    )
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    return max_tokens, (body.top_logprobs or 0) if body.logprobs else None


def _unsupported(name: str, value: object, reason: str) -> UnsupportedError:
    message = f"{name}={value!r} is not supported: {reason}."
    return UnsupportedError(message, parameter=name, value=value)


def _extra_args(body: GenerationBody) -> dict[str, Any] | None:
    """Return our own parameters, which vLLM's clients send as `vllm_xargs`."""
    extra = dict(body.vllm_xargs or {})
    if body.num_speculative_tokens is not None:
        extra["num_speculative_tokens"] = body.num_speculative_tokens
    if body.return_token_origins:
        extra["return_token_origins"] = True
    return extra or None


def _structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    _check_guided(body)
    given: dict[str, Any] = {}
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(by_alias=True, exclude_unset=True)
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            _log.warning("guided_%s is deprecated: use structured_outputs", kind)
            given[kind] = value
    calls = form_of(body) if isinstance(body, ChatBody) else None
    if calls is not None and (given or body.structured_outputs is not None):
        raise RequestError(
            "`tool_choice` forces a tool call: it cannot be combined with "
            "`structured_outputs`.",
            parameter="tool_choice",
        )
    if body.response_format is not None:
        given |= _formatted(body.response_format)
    if calls is not None:
        # `response_format` describes answers without a tool call. Agents send it with
        # every request, so it is ignored here.
        _check_length("tools", calls.json)
        return calls
    if not given and body.structured_outputs is None:
        return None
    _check_length("structured_outputs", given)
    return StructuredOutputsParams(**given)


def _check_length(name: str, given: object) -> None:
    length = len(json.dumps(given, ensure_ascii=False))
    if length > MAX_GRAMMAR_CHARACTERS:
        allowed = f"at most {MAX_GRAMMAR_CHARACTERS} characters of JSON"
        raise wrong_argument(RequestError, name, allowed, length)


def _check_guided(body: GenerationBody) -> None:
    """Refuse unknown `guided_` fields, which would have no effect."""
    if body.guided_decoding_backend is not None:
        _log.warning("guided_decoding_backend has no effect: llguidance is always used")
    for name, value in sorted((body.model_extra or {}).items()):
        if name.startswith("guided_") and value is not None:
            known = ", ".join(_OLDER_FORMS)
            raise RequestError(
                f"{name} is not a field of this API: use structured_outputs, or one "
                f"of {known}.",
                parameter=name,
                value=value,
            )


def _formatted(wanted: ResponseFormat) -> dict[str, Any]:
    """Convert OpenAI's `response_format` to arguments of `StructuredOutputsParams`."""
    if wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        return {"structural_tag": wanted.model_dump(exclude_none=True)}
    if wanted.type != "json_schema":
        allowed = "'text', 'json_object', 'json_schema' or 'structural_tag'"
        name = "response_format.type"
        raise wrong_argument(RequestError, name, allowed, wanted.type)
    schema = wanted.json_schema and wanted.json_schema.json_schema
    if schema is None:
        name, allowed = "response_format.json_schema", "an object with a 'schema'"
        raise wrong_argument(RequestError, name, allowed, None)
    return {"json": schema}

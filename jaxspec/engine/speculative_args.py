"""Owns the merge of the speculative arguments: three generations, one meaning.

`speculative_model=` and its companions, `speculative_config={...}` and `spec_model=`
may be mixed as long as they do not contradict each other. Knows nothing about folders
and models: `jaxspec.engine.arg_utils` looks at those.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxspec.config import SpeculativeConfig
from jaxspec.errors import ConfigError, UnsupportedError, wrong_argument

# Argument -> key of speculative_config.
_SPECULATIVE_NAMES = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
_SPECULATIVE_KEYS = tuple(item.name for item in fields(SpeculativeConfig))
# Keys that change nothing here: what they tune does not exist, but for the draft's
# revision, which `EngineArgs` takes from what the caller gave.
_SPECULATIVE_NO_EFFECT = (
    "enforce_eager",
    "revision",
    "code_revision",
    "disable_padded_drafter_batch",
    "disable_logprobs",
    "disable_mqa_scorer",
)
_SPECULATIVE_LATER = (
    "quantization",
    "kv_cache_dtype",
    "parallel_drafting",
    "use_heterogeneous_vocab",
    "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
)


def merge_speculative_arguments(
    arguments: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Join the three generations of `arguments` into keys of `SpeculativeConfig`.

    Returns:
        None when nothing asks for speculation.

    Raises:
        ConfigError: One thing was given twice with different values, a key is unknown,
            or there is no draft model to go with the rest.
        NotImplementedError: A kind of speculation that does not exist here yet.
    """
    config = arguments.get("speculative_config")
    given = {}
    for key, value in _normalised_keys(config).items():
        given[key] = (f"speculative_config[{key!r}]", value)
    for name, key in _SPECULATIVE_NAMES.items():
        value = arguments.get(name)
        if value is None:
            continue
        if name == "spec_decoding_acceptance_method":
            value = "standard"
        source, other = given.setdefault(key, (name, value))
        if other != value:
            raise ConfigError(
                f"{name}={value!r} contradicts {source}={other!r}; give one of them.",
                parameter=name,
                value=value,
            )
    merged = {key: value for key, (_, value) in given.items()}
    if merged == {"rejection_sample_method": "standard"}:
        # The older default, spelled out; it asks for nothing by itself.
        return None
    _check_method(merged)
    if given and "model" not in given:
        source, value = next(iter(given.values()))
        raise ConfigError(
            f"{source}={value!r} was given without a draft model: add "
            "speculative_model, or leave it out to decode without drafts.",
            parameter=source,
            value=value,
        )
    if config is not None and not given:
        raise ConfigError(
            "speculative_config must name a draft model under 'model', got {}.",
            parameter="speculative_config",
            value={},
        )
    for key in _SPECULATIVE_NO_EFFECT:
        merged.pop(key, None)
    return merged or None


def _normalised_keys(config: object) -> dict[str, Any]:
    """Check the keys of `speculative_config`; drop the ones set to None."""
    if config is None:
        return {}
    known = (
        *_SPECULATIVE_KEYS,
        *_SPECULATIVE_NO_EFFECT,
        *_SPECULATIVE_LATER,
        "prompt_lookup_max",
        "prompt_lookup_min",
    )
    if not isinstance(config, Mapping):
        allowed = "a dict with keys among " + ", ".join(known)
        raise wrong_argument(ConfigError, "speculative_config", allowed, config)
    values = {}
    for spelled, value in config.items():
        key = str(spelled).replace("-", "_")
        if key == "tensor_parallel_size":
            hint = "pass draft_tensor_parallel_size."
        elif key in known:
            hint = ""
        else:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {known}."
        if hint:
            raise ConfigError(
                f"speculative_config has no key {spelled!r} (given {value!r}): {hint}",
                parameter="speculative_config",
                value=config,
            )
        if value is None:
            continue
        if key in _SPECULATIVE_LATER and value is not False:
            raise UnsupportedError(
                f"speculative_config[{key!r}]={value!r} is not supported yet.",
                parameter=key,
                value=value,
            )
        if key not in _SPECULATIVE_LATER:
            values[key] = value
    return values


def _check_method(merged: Mapping[str, Any]) -> None:
    method, model = merged.get("method"), merged.get("model")
    if model in ("ngram", "[ngram]"):
        method = "ngram"
    if method not in (None, "draft_model"):
        hint = "Drafts come from a smaller model only; other methods are to come."
        raise wrong_argument(UnsupportedError, "method", "'draft_model'", method, hint)
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        if key in merged:
            raise ConfigError(
                f"{key}={merged[key]!r} belongs to n-gram drafts; method "
                "'draft_model' takes no such key.",
                parameter=key,
                value=merged[key],
            )

"""Merges the three ways to configure speculation into one dict of settings.

`speculative_model=` and its companions, `speculative_config={...}` and `spec_model=`
may be mixed as long as they do not contradict each other. Knows nothing about folders
and models: `jaxspec.engine.arg_utils` reads those.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxspec.config.engine import KV_CACHE_NAMES
from jaxspec.config.methods import (
    DRAFT_MODEL,
    LOOKUPS,
    NGRAM,
    PARD,
    SOURCES_OF_DRAFTS,
    SUFFIX,
    SUFFIX_DEFAULTS,
    method_of,
    with_draft_model,
)
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import TREE_KEY, read_paths
from jaxspec.engine.vllm_arguments import (
    VLLM_SPECULATIVE_KEYS,
    check_vllm_arguments,
)
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_choice,
    check_flag,
    nearest,
    wrong_argument,
)
from jaxspec_checkpoints.heads import MLP_SPECULATOR, MLP_SPECULATOR_REMOVED

_log = logging.getLogger(__name__)

# Argument -> key of speculative_config.
SPECULATIVE_NAMES = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
# vLLM's older names of acceptance rules.
_OLD_RULES = {"rejection_sampler": "standard"}
# vLLM's spellings of n-gram drafts, as a model and as a method.
_NGRAM_MODELS = ("ngram", "[ngram]")
_NGRAM_METHODS = ("ngram", "[ngram]", "ngram_gpu")
# vLLM's default, in tokens.
_DEFAULT_PROMPT_LOOKUP = 5
# vLLM's older notation for a kind of draft in place of a model.
_KIND = re.compile(r"\[.*\]")
_SPECULATIVE_KEYS = tuple(item.name for item in fields(SpeculativeConfig))
# Read by `EngineArgs` from the caller's dict.
_REVISION = "revision"
# Keys of removed features, and what to use instead.
_DYNAMIC = (
    "Dynamic trees were removed, because they were 0.59 to 1.05 times as fast as "
    f"plain decoding. Use a static tree ({TREE_KEY}), num_side_leaves or a chain."
)
TYPICAL_REMOVED = (
    "Typical acceptance was removed, because its texts do not follow the target's "
    "distribution. Use rejection_sample_method 'block', 'standard' or 'coupled'."
)
_SPECULATIVE_REMOVED = {
    "dynamic_tree_top_k": _DYNAMIC,
    "dynamic_tree_num_nodes": _DYNAMIC,
    "posterior_threshold": TYPICAL_REMOVED,
    "posterior_alpha": TYPICAL_REMOVED,
}
# vLLM's key for a separate type of the draft's keys and values.
_KV_CACHE_DTYPE = "kv_cache_dtype"
# vLLM's key for a draft model that makes all drafts in one pass.
_PARALLEL = "parallel_drafting"


def merge_speculative_arguments(
    arguments: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Merge the three ways to configure speculation into `SpeculativeConfig` keys.

    The ways are `speculative_model=` and its companions, `speculative_config=`, and
    `spec_model=`.

    Returns:
        None if no argument enables speculation.

    Raises:
        ConfigError: Two arguments set one key to different values, a key is unknown, or
            the draft model is missing.
        NotImplementedError: The kind of speculation is not supported.
    """
    config = arguments.get("speculative_config")
    settings = {}
    for key, value in _normalised_keys(config).items():
        settings[key] = (f"speculative_config[{key!r}]", value)
    for name, key in SPECULATIVE_NAMES.items():
        value = arguments.get(name)
        if value is None:
            continue
        if name == "spec_decoding_acceptance_method":
            value = _OLD_RULES[value]
        source, other = settings.setdefault(key, (name, value))
        if other != value:
            raise ConfigError(
                f"{name}={value!r} contradicts {source}={other!r}; give one of them.",
                parameter=name,
                value=value,
            )
    merged = {key: value for key, (_, value) in settings.items()}
    if merged == {"rejection_sample_method": "standard"}:
        # The default of the older arguments; it does not enable speculation.
        return None
    if config is not None and not settings:
        raise ConfigError(
            "speculative_config must name a draft model or a head under 'model', or "
            "'ngram' or 'suffix' under 'method', got {}.",
            parameter="speculative_config",
            value={},
        )
    if settings:
        _settle_method(merged)
    _settle_kv_cache_dtype(merged, arguments.get(_KV_CACHE_DTYPE, "auto"))
    method = merged.get("method", DRAFT_MODEL)
    info = method_of(method)
    if settings and info.weights and "model" not in settings:
        source, value = next(iter(settings.values()))
        raise ConfigError(
            f"{source}={value!r} was given without a draft model: add "
            "speculative_model (a model, or '[ngram]'), or leave it out to decode "
            "without drafts.",
            parameter=source,
            value=value,
        )
    if info.lookup == NGRAM:
        is_first = method == NGRAM and arguments.get("speculative_model") is not None
        _settle_lookup(merged, is_first_generation=is_first)
    if info.lookup == SUFFIX:
        merged = SUFFIX_DEFAULTS | merged
        if (
            merged["suffix_decoding_max_cached_requests"]
            or merged["suffix_decoding_max_corpus_tokens"]
        ):
            # Texts must not depend on other requests' answers: see `SpeculativeConfig`.
            merged.setdefault("rejection_sample_method", "coupled")
    if TREE_KEY in merged:
        # vLLM's meaning: every draft of the tree counts.
        num_nodes = len(read_paths(merged[TREE_KEY]))
        merged.setdefault("num_speculative_tokens", num_nodes)
    merged.pop(_REVISION, None)
    return merged or None


def _normalised_keys(config: object) -> dict[str, Any]:
    """Check the keys of `speculative_config`; drop the ones set to None."""
    if config is None:
        return {}
    known = (
        *_SPECULATIVE_KEYS,
        _KV_CACHE_DTYPE,
        _PARALLEL,
        _REVISION,
    )
    if not isinstance(config, Mapping):
        allowed = "a dict with keys among " + ", ".join(known)
        raise wrong_argument(ConfigError, "speculative_config", allowed, config)
    values = {}
    for spelled, value in config.items():
        key = str(spelled).replace("-", "_")
        reason = _SPECULATIVE_REMOVED.get(key)
        if (key, value) == ("rejection_sample_method", "typical"):
            reason = TYPICAL_REMOVED
        if reason and value is not None:
            raise UnsupportedError(
                f"speculative_config[{key!r}]={value!r} is not supported. {reason}",
                parameter=key,
                value=value,
            )
        if key == "tensor_parallel_size":
            hint = "pass draft_tensor_parallel_size."
        elif key in (*known, *_SPECULATIVE_REMOVED, *VLLM_SPECULATIVE_KEYS):
            hint = ""
        else:
            hint = nearest(key, known, f"known: {known}.")
        if hint and (key, value) != ("tensor_parallel_size", None):
            raise ConfigError(
                f"speculative_config has no key {spelled!r} (given {value!r}): {hint}",
                parameter="speculative_config",
                value=config,
            )
        if value is not None:
            values[key] = value
    no_effect = check_vllm_arguments(
        VLLM_SPECULATIVE_KEYS, values, "speculative_config[{!r}]"
    )
    if no_effect:
        _log.warning("Arguments without effect: %s", ", ".join(no_effect))
    return {
        key: value for key, value in values.items() if key not in VLLM_SPECULATIVE_KEYS
    }


def _settle_kv_cache_dtype(merged: dict[str, Any], target: str) -> None:
    """Reject a type of the draft's keys and values that is not the target's.

    Args:
        target: `kv_cache_dtype` of the engine.
    """
    cache_dtype = merged.pop(_KV_CACHE_DTYPE, target)
    name = f"speculative_config[{_KV_CACHE_DTYPE!r}]"
    check_choice(ConfigError, name, cache_dtype, tuple(KV_CACHE_NAMES))
    if KV_CACHE_NAMES[cache_dtype] != KV_CACHE_NAMES[target]:
        hint = (
            "The draft's keys and values are stored in the same type as the "
            f"target's: leave it out, or set {_KV_CACHE_DTYPE} for both."
        )
        allowed = f"left out or {target!r}, as for the target"
        raise wrong_argument(UnsupportedError, name, allowed, cache_dtype, hint)


def _settle_method(merged: dict[str, Any]) -> None:
    """Normalize the method's name; reject keys of other methods."""
    method, model = merged.get("method"), merged.get("model")
    if _PARALLEL in merged:
        method = _settle_parallel(method, merged.pop(_PARALLEL))
    if method in _NGRAM_METHODS:
        method = NGRAM
    if model in _NGRAM_MODELS:
        if method not in (None, NGRAM):
            raise ConfigError(
                f"method={method!r} contradicts the draft model {model!r}; give one "
                "of them.",
                parameter="method",
                value=method,
            )
        method = NGRAM
        del merged["model"]
    elif isinstance(model, str) and _KIND.fullmatch(model):
        raise UnsupportedError(
            f"speculative_model={model!r} is not supported. {SOURCES_OF_DRAFTS}",
            parameter="speculative_model",
            value=model,
        )
    if method == MLP_SPECULATOR:
        raise UnsupportedError(
            f"method={method!r} is not supported. {MLP_SPECULATOR_REMOVED}",
            parameter="method",
            value=method,
        )
    chosen = DRAFT_MODEL if method is None else method
    if not method_of(chosen).weights and merged.get("model") is not None:
        raise ConfigError(
            f"method={method!r} takes no draft model, got {model!r}; leave one of them "
            f"out, or set method to {with_draft_model(chosen)!r} for both kinds of "
            "draft.",
            parameter="model",
            value=model,
        )
    _refuse_keys_of_others(merged, chosen)
    if method is not None:
        merged["method"] = method


def _settle_parallel(method: Any, is_parallel: Any) -> Any:
    """Apply vLLM's `parallel_drafting` to a method."""
    check_flag(ConfigError, _PARALLEL, is_parallel)
    if is_parallel == (method == PARD):
        return method
    if not is_parallel:
        raise ConfigError(
            f"{_PARALLEL}=False contradicts method={PARD!r}; give one of them.",
            parameter=_PARALLEL,
            value=is_parallel,
        )
    if method not in (None, DRAFT_MODEL):
        hint = "Only a draft model proposes several tokens in one pass."
        allowed = f"left out for method {method!r}"
        raise wrong_argument(UnsupportedError, _PARALLEL, allowed, is_parallel, hint)
    return PARD


def _refuse_keys_of_others(merged: Mapping[str, Any], method: str) -> None:
    """Reject keys of a lookup that the method does not use."""
    for owner, (title, keys) in LOOKUPS.items():
        other_way = " (or speculative_model to '[ngram]')" if owner == NGRAM else ""
        for key in keys:
            if key in merged and owner != method_of(method).lookup:
                raise ConfigError(
                    f"{key}={merged[key]!r} is for {title} drafts, and has no effect "
                    f"with method {method!r}. Set method to {owner!r}{other_way}, or "
                    "leave it out.",
                    parameter=key,
                    value=merged[key],
                )


def _settle_lookup(merged: dict[str, Any], *, is_first_generation: bool) -> None:
    """Fill in the lookup lengths, by the rules of the arguments that were used.

    `speculative_model="[ngram]"` requires the longest length, and the shortest defaults
    to 1. With method NGRAM in the dict, both default to the one that is given, or to 5.
    """
    longest, shortest = (merged.get(key) for key in LOOKUPS[NGRAM][1])
    if is_first_generation and longest is None:
        raise ConfigError(
            "speculative_model='[ngram]' requires ngram_prompt_lookup_max, the "
            f"maximum length of a matching n-gram; {_DEFAULT_PROMPT_LOOKUP} is a "
            "good value.",
            parameter="ngram_prompt_lookup_max",
        )
    if is_first_generation and shortest is None:
        shortest = 1
    if longest is None:
        longest = _DEFAULT_PROMPT_LOOKUP if shortest is None else shortest
    merged["prompt_lookup_max"] = longest
    merged["prompt_lookup_min"] = longest if shortest is None else shortest

import copy
import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.errors import RequestError
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

# vLLM's fields and defaults, copied from the reference and not from our class.
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "skip_clone": False,
    "routed_experts_prompt_start": 0,
}
VLLM_DEFAULTS |= dict.fromkeys(
    (
        *("watermarking", "seed", "logprobs", "prompt_logprobs", "logprob_token_ids"),
        *("prompt_logprob_token_ids", "prompt_logprob_start", "stream_interval"),
        *("structured_outputs", "logit_bias", "allowed_token_ids", "extra_args"),
        *("skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection"),
        "trace_decode_token_ids",
    )
)

# Each case: a field, a rejected value, and the allowed values in the message, or the
# alternative to a field that does not exist.
REFUSED = [
    ("best_of", 3, "use n"),
    ("use_beam_search", 3, "sample with n"),
    ("length_penalty", 3, "beam search"),
    ("early_stopping", 3, "beam search"),
    ("guided_decoding", 3, "structured_outputs"),
    ("logits_processors", 3, "logit_bias"),
    ("truncate_prompt_tokens", 3, "token ids"),
    ("temprature", 3, "did you mean temperature?"),
    ("n", 0, "at least 1"),
    ("n", 1.5, "an integer"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("repetition_penalty", 0, "above 0"),
    *(("temperature", value, "[0, 2]") for value in (-0.1, 2.1, math.nan)),
    *(("top_p", value, "(0, 1]") for value in (0.0, 1.01)),
    ("top_k", -2, "at least 0"),
    ("top_k", 1.5, "an integer"),
    *(("min_p", value, "[0, 1]") for value in (-0.1, 1.1)),
    ("seed", 1.5, "an integer"),
    ("seed", 2**63, str(2**63 - 1)),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", ["a", 3], "strings"),
    ("stop", 3, "a list of non-empty strings"),
    ("stop_token_ids", [1, "2"], "an integer of at least 0"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", 7, "a list of token ids"),
    ("stop_token_ids", list(range(33)), "at most 32"),
    ("ignore_eos", 1, "True or False"),
    ("detokenize", "no", "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("include_stop_str_in_output", 0, "True or False"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "None"),
    ("min_tokens", -1, "from 0 to 16"),
    ("min_tokens", 17, "from 0 to 16"),
    ("logprobs", -2, "at least -1"),
    ("prompt_logprobs", 1.5, "at least -1"),
    ("logprobs", False, "at least -1"),
    ("output_kind", 2, "FINAL_ONLY"),
    ("logit_bias", [5], "a dict"),
    ("logit_bias", {"x": 1.0}, "an integer"),
    ("logit_bias", {5: 101.0}, "[-100, 100]"),
    ("logit_bias", {"x": 1.0, "3": 1.0, "y": 1.0}, "got ['x', 'y']"),
    ("allowed_token_ids", [], "at least one"),
    ("bad_words", [""], "non-empty"),
    ("extra_args", {"draft": 3}, "no keys other than 'num_speculative_tokens' and"),
    ("extra_args", {"return_token_origins": 1}, "True or False"),
    ("extra_args", {"num_speculative_tokens": -1}, "at least 0"),
    ("extra_args", 3, "a dict"),
    ("logprob_token_ids", [-1], "Every id of logprob_token_ids"),
    *(("repetition_penalty", value, "float32") for value in (1e-50, 1e39)),
]


def faulty_part(value: Any) -> object:
    """Return the wrong element, which the message may show without the whole value."""
    if isinstance(value, dict):
        key, element = next(iter(value.items()))
        return key if key == "x" else element
    return value[-1] if isinstance(value, list) and value else value


def test_fields_and_defaults_equal_vllms():
    params = SamplingParams()
    assert {
        item.name: getattr(params, item.name) for item in fields(params)
    } == VLLM_DEFAULTS


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED)
def test_bad_value_error_has_field_value_and_range(name: str, value: Any, allowed: str):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert allowed in message
    assert repr(value) in message or repr(faulty_part(value)) in message
    assert isinstance(caught.value, ValueError)
    assert name in str(caught.value.parameter)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2),
        ("top_p", 1),
        ("top_k", 10**6),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("repetition_penalty", 0.5),
        ("seed", 0),
        ("seed", -(2**63)),
        ("stop_token_ids", list(range(32))),
        ("min_tokens", 16),
        ("logprobs", -1),
        ("logit_bias", {3: -100}),
        ("max_tokens", None),
    ],
)
def test_ends_of_ranges_are_allowed(name: str, value: Any):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("top_k", -1, 0),
        ("seed", -1, None),
        ("stop", "end", ["end"]),
        ("temperature", 1, 1.0),
        ("max_tokens", np.int64(7), 7),
        ("top_p", np.float32(0.5), 0.5),
        ("stop_token_ids", (4, np.int32(5)), [4, 5]),
        ("logit_bias", {"42": 1}, {42: 1.0}),
        ("logprobs", True, 1),
    ],
)
def test_values_are_normalised(name: str, given: Any, value: Any):
    found = getattr(SamplingParams(**{name: given}), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6, 0.8])
def test_only_greedy_disables_filters(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy == (temperature != 0.8)
    filters = (1.0, 0, 0.0) if params.is_greedy else (0.5, 3, 0.2)
    assert (params.top_p, params.top_k, params.min_p) == filters
    with pytest.warns(UserWarning, match=r"0\.001 is raised to 0\.01"):
        assert SamplingParams(temperature=0.001).temperature == 0.01


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(temperature=0, n=2), "n must be 1 at temperature 0, got 2"),
        (dict(stop="x", detokenize=False), r"stop=\['x'\] needs detokenize=True"),
        (dict(n=2, seed=-2), "seed must be such that no text"),
        (dict(logprob_token_ids=[5, 9], logprobs=3), "logprobs must be 2, the number"),
        (dict(logprob_token_ids=[5, 9], logprobs=0), "logprobs must be 2, the number"),
        (
            dict(logprob_token_ids=[*range(129)]),
            "logprob_token_ids must be at most 128 ids",
        ),
    ],
)
def test_contradicting_values_are_rejected(given: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)
    for seed in (-3, 0, None):
        SamplingParams(n=2, seed=seed)


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": [100]},
        {"logit_bias": {100: 1.0}},
        {"allowed_token_ids": [0, 100]},
        {"logprob_token_ids": [100]},
    ],
)
def test_ids_must_be_in_the_vocabulary(given):
    params = SamplingParams(**given)
    params.validate_for(101)
    with pytest.raises(RequestError, match=r"from 0 to 99, got 100"):
        params.validate_for(100)


def test_logprob_token_ids_set_the_number_of_logprobs():
    chosen = [5, 9]
    assert SamplingParams().num_logprobs is None
    assert SamplingParams(logprobs=4).num_logprobs == 4
    assert SamplingParams(logprob_token_ids=[]).num_logprobs is None
    assert SamplingParams(logprob_token_ids=chosen).num_logprobs == 2
    assert SamplingParams(logprob_token_ids=chosen, logprobs=2).num_logprobs == 2
    SamplingParams(logprob_token_ids=list(range(128)))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_at_most_the_engines(name: str):
    def ask(count: int) -> SamplingParams:
        fields: dict[str, Any] = {name: count}
        return SamplingParams(**fields)

    ask(20).validate_for(100, max_logprobs=20)
    ask(-1).validate_for(20, max_logprobs=20)
    for asked in (21, -1):
        params = ask(asked)
        params.validate_for(100)
        with pytest.raises(RequestError, match=rf"{name} must be at most 20, got"):
            params.validate_for(100, max_logprobs=20)


def test_validate_for_checks_assigned_fields():
    params = SamplingParams()
    params.temperature = 5.0
    with pytest.raises(RequestError, match=r"temperature must be .* got 5\.0"):
        params.validate_for(100)
    params.temperature, params.top_p = 0, 0.3
    params.validate_for(100)
    assert params.top_p == 1.0


def test_from_optional_drops_none_except_for_max_tokens():
    params = SamplingParams.from_optional(temperature=None, n=None, max_tokens=None)
    assert (params.temperature, params.n, params.max_tokens) == (1.0, 1, None)
    assert SamplingParams.from_optional(top_k=4).top_k == 4


def test_clone_is_independent():
    params = SamplingParams(
        stop=["a"],
        temperature=0.5,
        stop_token_ids=[5],
        logit_bias={3: 1.0},
        allowed_token_ids=[3],
        extra_args={"num_speculative_tokens": 2},
        bad_words=["b"],
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )
    clone = params.clone()
    assert clone == params
    assert type(clone) is SamplingParams
    for name, value in vars(params).items():
        if isinstance(value, list | dict | StructuredOutputsParams):
            assert getattr(clone, name) is not value, name
    clone.structured_outputs.choice.append("c")
    assert params.structured_outputs.choice == ["a", "b"]
    assert clone != params
    assert copy.copy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params

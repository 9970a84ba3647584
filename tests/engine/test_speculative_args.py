from typing import Any

import pytest

from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.engine.speculative_args import merge_speculative_arguments as merge
from jaxspec.errors import ConfigError, UnsupportedError

SAME = {"model": "draft", "num_speculative_tokens": 5}
PARD = SAME | {"method": "pard"}


def config(values: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"speculative_config": (values or {}) | keys}


def suffix(method: str = "suffix", **changes: float) -> dict[str, Any]:
    """Return the merged arguments of suffix drafts."""
    keys = {f"suffix_decoding_{name}": value for name, value in changes.items()}
    return {"method": method} | SUFFIX_DEFAULTS | keys


def ngram(most: int, fewest: int, method: str = "ngram") -> dict[str, Any]:
    """Return the merged arguments of n-gram drafts."""
    keys = {"prompt_lookup_max": most, "prompt_lookup_min": fewest}
    return {"method": method} | keys


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"speculative_config": None}, None),
        ({"speculative_model": "draft", "num_speculative_tokens": 5}, SAME),
        (config(SAME), SAME),
        ({"spec_model": "draft", "spec_tokens": 5}, SAME),
        # Arguments of several vLLM versions mixed, and one value given twice.
        (config(model="draft") | {"num_speculative_tokens": 5}, SAME),
        (config(SAME) | {"spec_model": "draft"}, SAME),
        (config({"model": "draft", "num-speculative-tokens": 5}), SAME),
        # Keys that have no effect here, and switches that are off.
        (config(SAME, enforce_eager=True), SAME),
        (config(SAME, parallel_drafting=False), SAME),
        (config(SAME, quantization=None), SAME),
        (
            config(SAME) | {"speculative_model_quantization": "int8"},
            SAME | {"quantization": "int8"},
        ),
        # The older default acceptance rule, alone and with a draft.
        ({"spec_decoding_acceptance_method": "rejection_sampler"}, None),
        (
            {
                "speculative_model": "draft",
                "speculative_draft_tensor_parallel_size": 1,
                "speculative_max_model_len": 99,
                "speculative_disable_by_batch_size": 4,
                "spec_decoding_acceptance_method": "rejection_sampler",
                "spec_method": "draft_model",
            },
            {
                "model": "draft",
                "draft_tensor_parallel_size": 1,
                "max_model_len": 99,
                "disable_by_batch_size": 4,
                "rejection_sample_method": "standard",
                "method": "draft_model",
            },
        ),
        # Acceptance forced to given rates.
        (
            config(
                SAME
                | {"rejection-sample-method": "synthetic"}
                | {"synthetic-acceptance-length": 3.5}
            ),
            SAME
            | {"rejection_sample_method": "synthetic"}
            | {"synthetic_acceptance_length": 3.5},
        ),
        # All drafts in one pass: vLLM's key, and our method's name.
        (config(SAME, parallel_drafting=True), PARD),
        (
            config(SAME | {"parallel-drafting": True}) | {"spec_method": "draft_model"},
            PARD,
        ),
        (config(SAME) | {"spec_method": "pard"}, PARD),
        # n-gram drafts: in vLLM's oldest arguments the maximum is required, and the
        # minimum defaults to 1 ...
        ({"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 4}, ngram(4, 1)),
        (
            {"speculative_model": "[ngram]", "num_speculative_tokens": 5}
            | {"ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 3},
            ngram(4, 3) | {"num_speculative_tokens": 5},
        ),
        # ... in later versions both default to 5, or to the one that is given.
        ({"spec_method": "ngram"}, ngram(5, 5)),
        ({"spec_model": "ngram"}, ngram(5, 5)),
        (config(method="ngram"), ngram(5, 5)),
        (config(method="[ngram]"), ngram(5, 5)),
        (config(method="ngram_gpu"), ngram(5, 5)),
        (config(model="[ngram]"), ngram(5, 5)),
        (config(method="ngram", prompt_lookup_max=4), ngram(4, 4)),
        (config({"method": "ngram", "prompt-lookup-min": 3}), ngram(3, 3)),
        (
            config(method="ngram", prompt_lookup_min=2)
            | {"ngram_prompt_lookup_max": 6},
            ngram(6, 2),
        ),
        # A lookup with a draft model.
        (
            {"spec_method": "ngram+draft_model", "spec_model": "draft"},
            {"model": "draft"} | ngram(5, 5, "ngram+draft_model"),
        ),
        (
            config(method="ngram+draft_model", prompt_lookup_max=3)
            | {"speculative_model": "draft"},
            {"model": "draft"} | ngram(3, 3, "ngram+draft_model"),
        ),
        # Suffix drafts, alone and with a draft model.
        ({"spec_method": "suffix"}, suffix()),
        (
            config(
                {"method": "suffix", "suffix-decoding-max-tree-depth": 32},
                suffix_decoding_max_spec_factor=2.0,
                suffix_decoding_min_token_prob=None,
            ),
            suffix(max_tree_depth=32, max_spec_factor=2.0),
        ),
        # The answer cache needs this rule: with others, texts would depend on past
        # answers.
        (
            config(method="suffix", suffix_decoding_max_cached_requests=10),
            suffix(max_cached_requests=10) | {"rejection_sample_method": "coupled"},
        ),
        (
            config(method="suffix", suffix_decoding_max_corpus_tokens=10),
            suffix(max_corpus_tokens=10) | {"rejection_sample_method": "coupled"},
        ),
        (
            {"spec_method": "suffix+draft_model", "spec_model": "draft"},
            {"model": "draft"} | suffix("suffix+draft_model"),
        ),
        # Leaves are accepted with any method.
        (
            config(method="ngram", num_side_leaves=1),
            ngram(5, 5) | {"num_side_leaves": 1},
        ),
    ],
    ids=str,
)
def test_arguments_of_all_vllm_versions_give_the_same_config(
    arguments: dict[str, Any], expected: dict[str, Any] | None
):
    assert merge(arguments) == expected


NO_MODEL = "without a draft model"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        # Contradictions name both arguments.
        (
            {"speculative_model": "a", "spec_model": "b"},
            ["contradicts", "speculative_model='a'", "spec_model='b'"],
        ),
        (
            config(SAME) | {"num_speculative_tokens": 3},
            ["contradicts", "num_speculative_tokens=3", "['num_speculative_tokens']=5"],
        ),
        (
            config(SAME, rejection_sample_method="block")
            | {"spec_decoding_acceptance_method": "rejection_sampler"},
            ["contradicts", "'standard'", "'block'"],
        ),
        # No draft model.
        ({"num_speculative_tokens": 5}, ["num_speculative_tokens=5", NO_MODEL]),
        ({"spec_tokens": 5}, ["spec_tokens=5", NO_MODEL]),
        (config(num_speculative_tokens=5), ["ive_config['num_speculative_t", NO_MODEL]),
        ({"speculative_disable_by_batch_size": 4}, ["by_batch_size=4", NO_MODEL]),
        *(
            ({"spec_method": method}, [f"spec_method='{method}'", NO_MODEL])
            for method in ("draft_model", "ngram+draft_model", "suffix+draft_model")
        ),
        # Keys of speculative_config.
        (config(), ["{}", "'model'"]),
        ({"speculative_config": "draft"}, ["'draft'", "a dict"]),
        (config(SAME, tensor_parallel_size=2), ["2", "draft_tensor_parallel_size"]),
        (
            config(SAME, num_spec_tokens=3),
            ["3", "did you mean num_speculative_tokens?"],
        ),
        (config(SAME, prompt_lookup_max=4), ["prompt_lookup_max=4", "n-gram"]),
        (
            config(SAME, synthetic_acceptance_rate=0.8),
            ["0.8", "did you mean synthetic_acceptance_rates?"],
        ),
        (
            config(SAME, kv_cache_dtype="int4"),
            ["speculative_config['kv_cache_dtype'] must be one of 'auto'"],
        ),
        # Contradictions of lookups.
        (
            {"speculative_model": "[ngram]"},
            ["speculative_model='[ngram]' requires ngram_prompt_lookup_max"],
        ),
        (
            {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 2},
            ["requires ngram_prompt_lookup_max"],
        ),
        (
            {"spec_model": "[ngram]", "spec_method": "draft_model"},
            ["'draft_model'", "contradicts", "'[ngram]'"],
        ),
        (
            {"spec_model": "ngram", "spec_method": "ngram+draft_model"},
            ["'ngram+draft_model'", "contradicts", "'ngram'"],
        ),
        (
            {"spec_model": "draft", "spec_method": "ngram"},
            ["no draft model, got 'draft'", "'ngram+draft_model'"],
        ),
        (
            {"speculative_model": "draft", "ngram_prompt_lookup_max": 4},
            ["prompt_lookup_max=4", "n-gram", "'[ngram]'"],
        ),
        ({"ngram_prompt_lookup_min": 4}, ["prompt_lookup_min=4", "n-gram"]),
        (
            {"spec_model": "draft", "spec_method": "suffix"},
            ["no draft model, got 'draft'", "'suffix+draft_model'"],
        ),
        (
            {"spec_method": "suffix", "ngram_prompt_lookup_max": 4},
            ["prompt_lookup_max=4", "n-gram", "no effect with method 'suffix'"],
        ),
        (
            config(suffix_decoding_max_tree_depth=8) | {"spec_method": "ngram"},
            [
                "suffix_decoding_max_tree_depth=8",
                "no effect with method 'ngram'",
                "'suffix'",
            ],
        ),
    ],
    ids=str,
)
def test_rejects_bad_arguments(arguments: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as caught:
        merge(arguments)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"spec_method": "eagle2", "spec_model": "x"}, "'eagle2'"),
        ({"spec_method": "hydra", "spec_model": "x"}, "'eagle', 'eagle3', 'medusa'"),
        ({"speculative_model": "[medusa]"}, "a head, which is a small network"),
        (config(model="[eagle]"), "speculative_model='[eagle]'"),
        (
            config(SAME, kv_cache_dtype="fp8"),
            "must be left out or 'auto', as for the target, got 'fp8'. The draft's "
            "keys and values are stored in the same type as the target's",
        ),
        (
            config(SAME, kv_cache_dtype="auto") | {"kv_cache_dtype": "int8"},
            "left out or 'int8', as for the target, got 'auto'",
        ),
        (
            config(SAME, parallel_drafting=True) | {"spec_method": "eagle3"},
            "parallel_drafting must be left out for method 'eagle3'",
        ),
        (config(SAME | {"use-heterogeneous-vocab": True}), "True"),
    ],
    ids=str,
)
def test_rejects_unsupported_values(arguments: dict[str, Any], text: str):
    with pytest.raises(NotImplementedError) as caught:
        merge(arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("target", "draft"), [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8"), ("int8", "int8")]
)
def test_accepts_the_targets_kv_cache_dtype_for_the_draft(target: str, draft: str):
    """Both of vLLM's names are accepted, and the draft's config does not store it."""
    found = merge(config(SAME, kv_cache_dtype=draft) | {"kv_cache_dtype": target})
    assert found == SAME


@pytest.mark.parametrize(
    ("arguments", "given", "alternative"),
    [
        (
            config(SAME, dynamic_tree_top_k=4),
            "['dynamic_tree_top_k']=4",
            "speculative_token_tree",
        ),
        (
            config(SAME | {"dynamic-tree-num-nodes": 16}),
            "['dynamic_tree_num_nodes']=16",
            "speculative_token_tree",
        ),
        (
            config(SAME, rejection_sample_method="typical"),
            "['rejection_sample_method']='typical'",
            "'block'",
        ),
        (config(SAME, posterior_alpha=0.3), "['posterior_alpha']=0.3", "'block'"),
        (
            {"spec_method": "mlp_speculator", "spec_model": "x"},
            "method='mlp_speculator'",
            "'eagle3'",
        ),
    ],
)
def test_names_the_alternative_to_removed_features(
    arguments: dict[str, Any], given: str, alternative: str
):
    with pytest.raises(UnsupportedError, match="removed") as caught:
        merge(arguments)
    assert given in str(caught.value)
    assert alternative in str(caught.value)
    assert caught.value.parameter is not None


@pytest.mark.parametrize("tree", ["[(0,), (1,), (0, 0)]", [(0,), (1,), (0, 0)]])
def test_tree_sets_the_number_of_drafts(tree: Any):
    keys = {"model": "draft", "speculative_token_tree": tree}
    expected = keys | {"num_speculative_tokens": 3}
    assert merge(config(keys)) == expected
    # The number may also be given beside the tree, as in vLLM.
    assert merge(config(expected)) == expected
    assert merge(config(keys) | {"num_speculative_tokens": 3}) == expected


def test_malformed_tree_names_its_field():
    with pytest.raises(ConfigError, match=r"\(1,\) comes after \(0,\)") as caught:
        merge(config(model="draft", speculative_token_tree="[(1,)]"))
    assert caught.value.parameter == "speculative_token_tree"

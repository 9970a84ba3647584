from typing import Any

import pytest

from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.engine.speculative_args import merge_speculative_arguments as merge
from jaxspec.errors import ConfigError, UnsupportedError

SAME = {"model": "draft", "num_speculative_tokens": 5}
PARD = SAME | {"method": "pard"}
FORCED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
OLDEST = {"speculative_model": "[ngram]"}


def config(values: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"speculative_config": (values or {}) | keys}


def suffix(**changes: Any) -> dict[str, Any]:
    """Return the merged arguments of suffix drafts, or of another method with them."""
    method = changes.pop("method", "suffix")
    keys = {f"suffix_decoding_{name}": value for name, value in changes.items()}
    return {"method": method} | SUFFIX_DEFAULTS | keys


def ngram(most: int, fewest: int, method: str = "ngram") -> dict[str, Any]:
    """Return the merged arguments of n-gram drafts."""
    keys = {"prompt_lookup_max": most, "prompt_lookup_min": fewest}
    return {"method": method} | keys


# The merged arguments, and all ways to give them.
SPELLINGS: list[tuple[Any, ...]] = [
    (
        None,
        {},
        {"speculative_config": None},
        # The older default acceptance rule.
        {"spec_decoding_acceptance_method": "rejection_sampler"},
    ),
    (
        SAME,
        {"speculative_model": "draft", "num_speculative_tokens": 5},
        {"spec_model": "draft", "spec_tokens": 5},
        config(SAME),
        config({"model": "draft", "num-speculative-tokens": 5}),
        # Arguments of several vLLM versions mixed, and one value given twice.
        config(model="draft") | {"num_speculative_tokens": 5},
        config(SAME) | {"spec_model": "draft"},
        # Keys that have no effect here, and switches that are off.
        config(SAME, enforce_eager=True),
        config(SAME, parallel_drafting=False),
        config(SAME, quantization=None),
    ),
    (
        SAME | {"quantization": "int8"},
        config(SAME) | {"speculative_model_quantization": "int8"},
    ),
    (
        {
            "model": "draft",
            "draft_tensor_parallel_size": 1,
            "max_model_len": 99,
            "disable_by_batch_size": 4,
            "rejection_sample_method": "standard",
            "method": "draft_model",
        },
        {
            "speculative_model": "draft",
            "speculative_draft_tensor_parallel_size": 1,
            "speculative_max_model_len": 99,
            "speculative_disable_by_batch_size": 4,
            "spec_decoding_acceptance_method": "rejection_sampler",
            "spec_method": "draft_model",
        },
    ),
    # Acceptance forced to given rates.
    (
        SAME | FORCED,
        config(SAME | {name.replace("_", "-"): one for name, one in FORCED.items()}),
    ),
    # All drafts in one pass: vLLM's key, and our method's name.
    (
        PARD,
        config(SAME, parallel_drafting=True),
        config(SAME | {"parallel-drafting": True}) | {"spec_method": "draft_model"},
        config(SAME) | {"spec_method": "pard"},
    ),
    # n-gram drafts: in vLLM's oldest arguments the maximum is required, and the minimum
    # defaults to 1 ...
    (ngram(4, 1), OLDEST | {"ngram_prompt_lookup_max": 4}),
    (
        ngram(4, 3),
        OLDEST | {"ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 3},
    ),
    # ... in later versions both default to 5, or to the one that is given.
    (
        ngram(5, 5),
        {"spec_method": "ngram"},
        {"spec_model": "ngram"},
        *(config(method=name) for name in ("ngram", "[ngram]", "ngram_gpu")),
        config(model="[ngram]"),
    ),
    (ngram(4, 4), config(method="ngram", prompt_lookup_max=4)),
    (ngram(3, 3), config({"method": "ngram", "prompt-lookup-min": 3})),
    (
        ngram(6, 2),
        config(method="ngram", prompt_lookup_min=2) | {"ngram_prompt_lookup_max": 6},
    ),
    # A lookup with a draft model.
    (
        {"model": "draft"} | ngram(5, 5, "ngram+draft_model"),
        {"spec_method": "ngram+draft_model", "spec_model": "draft"},
    ),
    (
        {"model": "draft"} | ngram(3, 3, "ngram+draft_model"),
        config(method="ngram+draft_model", prompt_lookup_max=3)
        | {"speculative_model": "draft"},
    ),
    # Suffix drafts, alone and with a draft model.
    (suffix(), {"spec_method": "suffix"}),
    (
        suffix(max_tree_depth=32, max_spec_factor=2.0),
        config(
            {"method": "suffix", "suffix-decoding-max-tree-depth": 32},
            suffix_decoding_max_spec_factor=2.0,
            suffix_decoding_min_token_prob=None,
        ),
    ),
    # The answer cache needs this rule: with others, texts would depend on past answers.
    *(
        (
            suffix(**{name: 10}) | {"rejection_sample_method": "coupled"},
            config({"method": "suffix", f"suffix_decoding_{name}": 10}),
        )
        for name in ("max_cached_requests", "max_corpus_tokens")
    ),
    (
        {"model": "draft"} | suffix(method="suffix+draft_model"),
        {"spec_method": "suffix+draft_model", "spec_model": "draft"},
    ),
    # Leaves are accepted with any method.
    (ngram(5, 5) | {"num_side_leaves": 1}, config(method="ngram", num_side_leaves=1)),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(given, expected) for expected, *every in SPELLINGS for given in every],
    ids=str,
)
def test_arguments_of_all_vllm_versions_give_the_same_config(arguments, expected):
    assert merge(arguments) == expected


NO_MODEL = "without a draft model"
UNKNOWN = {"spec_model": "x"}
# Arguments, and texts of the error.
CONFIG_ERRORS: list[tuple[Any, ...]] = [
    # Contradictions name both arguments.
    (dict(speculative_model="a", spec_model="b"), "l='a' contradicts spec_model='b'"),
    (
        config(SAME) | {"num_speculative_tokens": 3},
        *("contradicts", "num_speculative_tokens=3", "['num_speculative_tokens']=5"),
    ),
    (
        config(SAME, rejection_sample_method="block")
        | {"spec_decoding_acceptance_method": "rejection_sampler"},
        *("contradicts", "'standard'", "'block'"),
    ),
    # No draft model.
    ({"num_speculative_tokens": 5}, "num_speculative_tokens=5", NO_MODEL),
    ({"spec_tokens": 5}, "spec_tokens=5", NO_MODEL),
    (config(num_speculative_tokens=5), "ive_config['num_speculative_t", NO_MODEL),
    ({"speculative_disable_by_batch_size": 4}, "by_batch_size=4", NO_MODEL),
    *(
        ({"spec_method": method}, f"spec_method='{method}'", NO_MODEL)
        for method in ("draft_model", "ngram+draft_model", "suffix+draft_model")
    ),
    # Keys of speculative_config.
    (config(), "{}", "'model'"),
    ({"speculative_config": "draft"}, "'draft'", "a dict"),
    (config(SAME, tensor_parallel_size=2), "2", "draft_tensor_parallel_size"),
    (config(SAME, num_spec_tokens=3), "3", "did you mean num_speculative_tokens?"),
    (config(SAME, prompt_lookup_max=4), "prompt_lookup_max=4", "n-gram"),
    (config(SAME, synthetic_acceptance_rate=0.8), "0.8): did you mean synthetic_acc"),
    (config(SAME, kv_cache_dtype="int4"), "['kv_cache_dtype'] must be one of 'auto'"),
    # Contradictions of lookups.
    (OLDEST, "speculative_model='[ngram]' requires ngram_prompt_lookup_max"),
    (OLDEST | {"ngram_prompt_lookup_min": 2}, "requires ngram_prompt_lookup_max"),
    (
        {"spec_model": "[ngram]", "spec_method": "draft_model"},
        *("'draft_model'", "contradicts", "'[ngram]'"),
    ),
    (
        {"spec_model": "ngram", "spec_method": "ngram+draft_model"},
        *("'ngram+draft_model'", "contradicts", "'ngram'"),
    ),
    *(
        (
            {"spec_model": "draft", "spec_method": method},
            *("no draft model, got 'draft'", f"'{method}+draft_model'"),
        )
        for method in ("ngram", "suffix")
    ),
    (
        {"speculative_model": "draft", "ngram_prompt_lookup_max": 4},
        *("prompt_lookup_max=4", "n-gram", "'[ngram]'"),
    ),
    ({"ngram_prompt_lookup_min": 4}, "prompt_lookup_min=4", "n-gram"),
    (
        {"spec_method": "suffix", "ngram_prompt_lookup_max": 4},
        *("prompt_lookup_max=4", "n-gram", "no effect with method 'suffix'"),
    ),
    (
        config(suffix_decoding_max_tree_depth=8) | {"spec_method": "ngram"},
        *("_max_tree_depth=8", "no effect with method 'ngram'", "'suffix'"),
    ),
    (
        config(SAME, method="pard", parallel_drafting=False),
        "parallel_drafting=False contradicts method='pard'",
    ),
]
REMOVED, TREE = "removed", "speculative_token_tree"
UNSUPPORTED: list[tuple[Any, ...]] = [
    (UNKNOWN | {"spec_method": "eagle2"}, "'eagle2'"),
    (UNKNOWN | {"spec_method": "hydra"}, "'eagle', 'eagle3', 'medusa'"),
    ({"speculative_model": "[medusa]"}, "a head, which is a small network"),
    (config(model="[eagle]"), "speculative_model='[eagle]'"),
    (
        config(SAME, kv_cache_dtype="fp8"),
        "must be left out or 'auto', as for the target, got 'fp8'. The draft's keys "
        "and values are stored in the same type as the target's",
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
    # Removed features: the error names the alternative.
    (config(SAME, dynamic_tree_top_k=4), "['dynamic_tree_top_k']=4", REMOVED, TREE),
    (
        config(SAME | {"dynamic-tree-num-nodes": 16}),
        *("['dynamic_tree_num_nodes']=16", REMOVED, TREE),
    ),
    (
        config(SAME, rejection_sample_method="typical"),
        *("['rejection_sample_method']='typical'", REMOVED, "'block'"),
    ),
    (config(SAME, posterior_alpha=0.3), "['posterior_alpha']=0.3", REMOVED, "'block'"),
    (
        UNKNOWN | {"spec_method": "mlp_speculator"},
        *("method='mlp_speculator'", REMOVED, "'eagle3'"),
    ),
]


@pytest.mark.parametrize(
    ("error", "arguments", "texts"),
    [
        *((ConfigError, arguments, texts) for arguments, *texts in CONFIG_ERRORS),
        *((UnsupportedError, arguments, texts) for arguments, *texts in UNSUPPORTED),
    ],
    ids=str,
)
def test_errors_name_the_alternative_to_removed_arguments(error, arguments, texts):
    with pytest.raises(error) as caught:
        merge(arguments)
    for text in texts:
        assert text in str(caught.value)
    assert REMOVED not in texts or caught.value.parameter is not None


@pytest.mark.parametrize(
    ("target", "draft"), [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8"), ("int8", "int8")]
)
def test_accepts_the_targets_kv_cache_dtype_for_the_draft(target: str, draft: str):
    """Both of vLLM's names are accepted, and the draft's config does not store it."""
    found = merge(config(SAME, kv_cache_dtype=draft) | {"kv_cache_dtype": target})
    assert found == SAME


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

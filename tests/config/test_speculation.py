"""The drafting methods, and the keys that each accepts."""

import re
from contextlib import nullcontext
from typing import Any

import pytest

from jaxspec.config.lookups import LookupRule
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.errors import ConfigError

DRAFT: dict[str, Any] = {"model": "draft"}
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
NGRAM: dict[str, Any] = LOOKUP | {"method": "ngram"}
SUFFIX: dict[str, Any] = SUFFIX_DEFAULTS | {"method": "suffix"}
BOTH: dict[str, Any] = SUFFIX_DEFAULTS | DRAFT | {"method": "suffix+draft_model"}
DEPTH, FACTOR, PROB, CACHED, CORPUS = SUFFIX_DEFAULTS
LEAVES, PATHS = "num_side_leaves", "speculative_token_tree"
TREE = "[(0,), (1,), (0, 0), (0, 1)]"
OF_TREE: dict[str, Any] = DRAFT | {PATHS: TREE, "num_speculative_tokens": 4}
FORCED = DRAFT | {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.0,
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (DRAFT | {"num_speculative_tokens": 0}, "from 1 to 8, got 0"),
        (DRAFT | {"rejection_sample_method": "typicl"}, "'block'.*got 'typicl'"),
        (DRAFT | {"draft_sample_method": "x"}, "'probabilistic', 'greedy', got 'x'"),
        (DRAFT | {"disable_by_batch_size": 1}, "at least 2, got 1"),
        (DRAFT | {"max_model_len": 0}, "at least 1, got 0"),
        (DRAFT | {"draft_tensor_parallel_size": 0}, "at least 1, got 0"),
        ({}, "model must be a folder.*got None"),
        (LOOKUP | {"method": "ngram+draft_model"}, "model must be a folder"),
        (NGRAM | DRAFT, "model must be left out.*'draft'.*'ngram.draft_model'"),
        (
            DRAFT | {"prompt_lookup_max": 4},
            "prompt_lookup_max must be left out.*got 4.*method 'ngram'",
        ),
        ({"method": "ngram"}, "prompt_lookup_max must be an integer from 1 to 32"),
        (NGRAM | {"prompt_lookup_max": 33}, "lookup_max.*from 1 to 32, got 33"),
        (NGRAM | {"prompt_lookup_min": 0}, "lookup_min.*from 1 to 32, got 0"),
        (NGRAM | {"prompt_lookup_min": 5}, "min must be at most .*max=4, got 5"),
        (SUFFIX | DRAFT, "model must be left out.*'draft'.*'suffix.draft_model'"),
        (SUFFIX | LOOKUP, "prompt_lookup_max must be left out for .*'suffix'.*got 4"),
        (NGRAM | {FACTOR: 2.0}, f"{FACTOR} must be left out.*got 2.0.*'suffix'"),
        ({"method": "suffix"}, f"{DEPTH} must be an integer from 3 to 64, got None"),
        (SUFFIX | {DEPTH: 2}, f"{DEPTH} must be an integer from 3 to 64, got 2"),
        (SUFFIX | {DEPTH: 8, FACTOR: 0.14}, f"{FACTOR} must be at least 1/7, got 0.14"),
        (SUFFIX | {FACTOR: 0}, f"{FACTOR} must be a finite number above 0, got 0"),
        (SUFFIX | {PROB: -0.1}, rf"{PROB} must be a number in \[0, 1\], got -0.1"),
        (SUFFIX | {CACHED: -1}, f"{CACHED} must be .* from 0 to 4096, got -1"),
        (SUFFIX | {CACHED: 10}, f"method must be 'coupled' with {CACHED}=10, got 'bl"),
        (SUFFIX | {CORPUS: -1}, f"{CORPUS} must be .* from 0 to 1048576, got -1"),
        (SUFFIX | {CORPUS: 10}, f"method must be 'coupled' with {CORPUS}=10, got 'bl"),
        (BOTH | {DEPTH: 4}, "from 5 to 64"),
        (DRAFT | {LEAVES: -1}, f"{LEAVES} must be .*at least 0, got -1"),
        (
            DRAFT | {LEAVES: 12},
            f"{LEAVES} must be .*at most 11 with num_speculative_tokens=5, got 12",
        ),
        (OF_TREE | {LEAVES: 1}, f"{LEAVES} must be left out with speculative_token"),
        (
            OF_TREE | {"num_speculative_tokens": 5},
            "num_speculative_tokens must be 4, the number of drafts in speculative_to",
        ),
        (
            DRAFT | {PATHS: str([(0,) * n for n in range(1, 10)])},
            f"{PATHS} must .*at most 8 levels for method 'draft_model'",
        ),
        (
            FORCED | {LEAVES: 1},
            f"{LEAVES} must be left out with rejection_sample_method='synthetic'",
        ),
        (
            FORCED | OF_TREE,
            f"{PATHS} must be left out with rejection_sample_method='synthetic'",
        ),
    ],
)
def test_rejects_unusable_keys(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**keys)


@pytest.mark.parametrize("keys", [SUFFIX, BOTH], ids=["alone", "with a draft model"])
@pytest.mark.parametrize("more", range(3))
@pytest.mark.parametrize("factor", [0.05, 0.2, 1 / 3, 1.0])
def test_rejects_suffix_keys_that_never_draft(keys: Any, more: int, factor: float):
    depth = (3 if keys is SUFFIX else 5) + more
    is_refused = int(factor * (depth - 1)) == 0
    with pytest.raises(ConfigError, match=FACTOR) if is_refused else nullcontext():
        config = SpeculativeConfig(**keys | {DEPTH: depth, FACTOR: factor})
        rule = LookupRule.of(config)
        assert rule.shortest <= rule.longest
        assert rule.limits[rule.longest] > 0


@pytest.mark.parametrize("name", [CACHED, CORPUS])
def test_coupled_rule_allows_cached_answers_and_corpora(name: str):
    keys = SUFFIX | {name: 10, "rejection_sample_method": "coupled"}
    SpeculativeConfig(**keys, num_speculative_tokens=16)
    with pytest.raises(ConfigError, match=f"from 1 to 16, got 17. {name} is 10"):
        SpeculativeConfig(**keys, num_speculative_tokens=17)


@pytest.mark.parametrize(
    ("keys", "most"), [(NGRAM, 16), (SUFFIX, 32), (BOTH, 8), (DRAFT, 8)]
)
def test_max_drafts_of_each_method(keys: dict[str, Any], most: int):
    """Methods without passes of a draft model may have more drafts."""
    SpeculativeConfig(num_speculative_tokens=most, **keys)
    message = f"from 1 to {most}, got {most + 1}.*The largest number for method"
    message += f" {re.escape(repr(keys.get('method', 'draft_model')))}"
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(num_speculative_tokens=most + 1, **keys)


def forced(rule: str = "synthetic", **given: Any) -> SpeculativeConfig:
    keys = {f"synthetic_acceptance_{name}": value for name, value in given.items()}
    keys |= {"num_speculative_tokens": 3, "rejection_sample_method": rule}
    return SpeculativeConfig(**DRAFT | keys)


@pytest.mark.parametrize(
    ("given", "probabilities"),
    [
        ({"rates": [0.8, 0.4, 0.4]}, (0.8, 0.5, 1.0)),
        ({"rates": (1, 0, 0)}, (1.0, 0.0, 0.0)),
        ({"rates": [0.8**n for n in (1, 2, 3)]}, (0.8, 0.8, 0.8)),
        ({"length": 1}, (0.0, 0.0, 0.0)),
        ({"length": 2.25}, (1.0, 0.25, 0.0)),
        ({"length": 4}, (1.0, 1.0, 1.0)),
    ],
)
def test_forced_length_becomes_acceptance_rates(given, probabilities):
    """A length becomes conditional rates: whole drafts, and a share of the next."""
    assert forced(**given).forced_acceptance == pytest.approx(probabilities)


def test_one_probability_for_all_drafts():
    verified = forced("block")
    accepted = verified.with_forced_acceptance(0.8)
    assert accepted.synthetic_acceptance_rates == pytest.approx([0.8, 0.64, 0.512])
    assert accepted.forced_acceptance == pytest.approx((0.8, 0.8, 0.8))
    assert verified.with_forced_acceptance(0).forced_acceptance == (0.0, 0.0, 0.0)
    wrongs: list[Any] = [-0.1, 1.1, True, "x", float("nan")]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="forced acceptance must be a number in"):
            verified.with_forced_acceptance(wrong)
    with pytest.raises(ConfigError, match="forced twice: to 0.5, and by"):
        accepted.with_forced_acceptance(0.5)


def test_verifying_rules_force_no_acceptance():
    assert SpeculativeConfig(**DRAFT).rejection_sample_method == "block"
    for rule in ("standard", "block", "coupled"):
        assert forced(rule).forced_acceptance is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "takes exactly one of .*rates and .*length, got none"),
        ({"rates": [1, 1, 1], "length": 2}, "got .*rates and .*length"),
        ({"length": 2, "rule": "block"}, "'block' takes none of .*, got .*length"),
        ({"rates": [0.5, 0.5]}, "a list of num_speculative_tokens=3 numbers, got"),
        ({"rates": 0.5}, "a list of num_speculative_tokens=3 numbers, got 0.5"),
        ({"rates": [0.5, 0.6, 0.1]}, r"rates\[1\] must be a number in \[0, 0.5\]"),
        ({"rates": [1.1, 0.6, 0.1]}, r"rates\[0\] must be a number in \[0, 1\]"),
        ({"rates": [0.5, 0.2, -0.1]}, r"rates\[2\] must .* got -0.1"),
        ({"rates": [0.5, "x", 0.1]}, r"rates\[1\] must .* got 'x'"),
        ({"length": 0.9}, r"length must be a number in \[1, 4\], got 0.9"),
    ],
)
def test_rejects_impossible_forced_acceptance(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        forced(**given)


@pytest.mark.parametrize(
    ("keys", "parents", "num_levels"),
    [
        ({}, None, 5),
        ({"num_speculative_tokens": 3, LEAVES: 1}, (-1, 0, 1, -1, 0, 1), 3),
        (OF_TREE, (-1, 0, -1, 0), 2),
        ({"num_speculative_tokens": 2, PATHS: "[(0,), (0, 0)]"}, None, 2),
    ],
    ids=["chain", "leaves", "tree", "tree that is a chain"],
)
def test_leaves_and_trees_give_parents(keys: Any, parents: Any, num_levels: int):
    config = SpeculativeConfig(**DRAFT | keys)
    assert (config.parents, config.num_levels) == (parents, num_levels)
    assert config.num_nodes == len(parents or range(num_levels))
    assert config.is_one_tree is (keys is OF_TREE)

"""The drafting methods, and the keys that each accepts."""

from contextlib import nullcontext
from typing import Any

import pytest

from jaxspec.config.lookups import LookupRule
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.errors import ConfigError

LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
DEPTH, FACTOR, PROB, CACHED = SUFFIX_DEFAULTS


@pytest.mark.parametrize(
    ("method", "keys", "has_lookup", "has_draft_model"),
    [
        ("draft_model", {"model": "draft"}, False, True),
        ("ngram", LOOKUP, True, False),
        ("ngram+draft_model", LOOKUP | {"model": "draft"}, True, True),
        ("suffix", SUFFIX_DEFAULTS, True, False),
        ("suffix+draft_model", SUFFIX_DEFAULTS | {"model": "draft"}, True, True),
        ("pard", {"model": "draft"}, False, True),
        ("eagle", {"model": "head"}, False, False),
        ("eagle3", {"model": "head"}, False, False),
        ("medusa", {"model": "head"}, False, False),
    ],
)
def test_methods(method: str, keys: dict, *, has_lookup: bool, has_draft_model: bool):
    info = SpeculativeConfig(method=method, **keys).method_info
    assert bool(info.lookup) is has_lookup
    assert info.has_draft_model is has_draft_model
    assert info.has_head is (keys == {"model": "head"})
    assert bool(info.weights) is ("model" in keys)


@pytest.mark.parametrize("method", ["eagle2", "hydra", "ngram,draft_model", None])
def test_other_methods_are_not_supported(method: Any):
    with pytest.raises(NotImplementedError, match=f"'draft_model', got {method!r}"):
        SpeculativeConfig(model="draft", method=method)


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ({}, ["model must be a folder", "got None"]),
        ({"method": "ngram+draft_model"} | LOOKUP, ["model must be a folder"]),
        (
            {"method": "ngram", "model": "draft"} | LOOKUP,
            ["model must be left out", "'draft'", "'ngram+draft_model'"],
        ),
        (
            {"model": "draft", "prompt_lookup_max": 4},
            ["prompt_lookup_max must be left out", "got 4", "method 'ngram'"],
        ),
        ({"method": "ngram"}, ["prompt_lookup_max must be an integer from 1 to 32"]),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_max": 33},
            ["prompt_lookup_max", "from 1 to 32, got 33"],
        ),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_min": 0},
            ["prompt_lookup_min", "from 1 to 32, got 0"],
        ),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_min": 5},
            ["prompt_lookup_min must be at most prompt_lookup_max=4, got 5"],
        ),
        (
            {"method": "suffix", "model": "draft"} | SUFFIX_DEFAULTS,
            ["model must be left out", "'draft'", "'suffix+draft_model'"],
        ),
        (
            {"method": "suffix"} | SUFFIX_DEFAULTS | LOOKUP,
            ["prompt_lookup_max must be left out for method 'suffix'", "got 4"],
        ),
        (
            {"method": "ngram", FACTOR: 2.0} | LOOKUP,
            [f"{FACTOR} must be left out", "got 2.0", "method 'suffix'"],
        ),
        ({"method": "suffix"}, [f"{DEPTH} must be an integer from 3 to 64, got None"]),
    ],
)
def test_rejects_keys_of_another_method(keys: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**keys)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({DEPTH: 2}, f"{DEPTH} must be an integer from 3 to 64, got 2"),
        ({DEPTH: 8, FACTOR: 0.14}, f"{FACTOR} must be at least 1/7, got 0.14"),
        ({DEPTH: 65}, f"{DEPTH} must be an integer from 3 to 64, got 65"),
        ({DEPTH: 8.0}, f"{DEPTH} must be an integer from 3 to 64, got 8.0"),
        ({FACTOR: 0}, f"{FACTOR} must be a finite number above 0, got 0"),
        ({FACTOR: float("inf")}, f"{FACTOR} must be a finite number above 0, got inf"),
        ({PROB: -0.1}, rf"{PROB} must be a number in \[0, 1\], got -0.1"),
        ({PROB: 1.5}, rf"{PROB} must be a number in \[0, 1\], got 1.5"),
        ({CACHED: -1}, f"{CACHED} must be an integer from 0 to 4096, got -1"),
        ({CACHED: 10000}, f"{CACHED} must be an integer from 0 to 4096, got 10000"),
        ({"num_speculative_tokens": 17}, "from 1 to 16, got 17.*method 'suffix'"),
        ({"method": "suffix+draft_model", "model": "draft", DEPTH: 4}, "from 5 to 64"),
    ],
)
def test_rejects_unusable_suffix_keys(keys: dict[str, Any], text: str):
    values: dict[str, Any] = SUFFIX_DEFAULTS | {"method": "suffix"} | keys
    with pytest.raises(ConfigError, match=text):
        SpeculativeConfig(**values)


@pytest.mark.parametrize("model", [{}, {"model": "draft"}])
@pytest.mark.parametrize("more", range(3))
@pytest.mark.parametrize("factor", [0.05, 0.2, 1 / 3, 1.0])
def test_rejects_suffix_keys_that_never_draft(
    model: dict[str, str], more: int, factor: float
):
    method = "suffix+draft_model" if model else "suffix"
    depth = 5 + more if model else 3 + more
    keys: dict[str, Any] = SUFFIX_DEFAULTS | {DEPTH: depth, FACTOR: factor} | model
    is_refused = int(factor * (depth - 1)) == 0
    with pytest.raises(ConfigError, match=FACTOR) if is_refused else nullcontext():
        rule = LookupRule.of(SpeculativeConfig(method=method, **keys))
        assert rule.shortest <= rule.longest
        assert rule.limits[rule.longest] > 0


def test_cached_answers_require_the_coupled_rule():
    """With greedy drafts, the coupled rule accepts as many on average as the others."""
    keys: dict[str, Any] = SUFFIX_DEFAULTS | {CACHED: 10}
    SpeculativeConfig(method="suffix", rejection_sample_method="coupled", **keys)
    text = f"rejection_sample_method must be 'coupled' with {CACHED}=10, got 'block'"
    with pytest.raises(ConfigError, match=text):
        SpeculativeConfig(method="suffix", **keys)


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"method": "ngram"} | LOOKUP, 16),
        ({"method": "suffix"} | SUFFIX_DEFAULTS, 16),
        ({"method": "suffix+draft_model", "model": "draft"} | SUFFIX_DEFAULTS, 8),
        ({"model": "draft"}, 8),
    ],
)
def test_max_drafts_of_each_method(keys: dict[str, Any], most: int):
    """Methods without passes of a draft model may have more drafts."""
    SpeculativeConfig(num_speculative_tokens=most, **keys)
    with pytest.raises(ConfigError, match=f"from 1 to {most}, got {most + 1}"):
        SpeculativeConfig(num_speculative_tokens=most + 1, **keys)


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
def test_forced_acceptance(given: dict[str, Any], probabilities: tuple[float, ...]):
    """A length becomes conditional rates: whole drafts, and a share of the next."""
    config = SpeculativeConfig(
        model="draft",
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        **{f"synthetic_acceptance_{name}": value for name, value in given.items()},
    )
    assert config.forced_acceptance == pytest.approx(probabilities)


def test_one_probability_for_all_drafts():
    judged = SpeculativeConfig(model="draft", num_speculative_tokens=3)
    forced = judged.with_forced_acceptance(0.8)
    assert forced.synthetic_acceptance_rates == pytest.approx([0.8, 0.64, 0.512])
    assert forced.forced_acceptance == pytest.approx((0.8, 0.8, 0.8))
    assert judged.with_forced_acceptance(0).forced_acceptance == (0.0, 0.0, 0.0)
    wrongs: list[Any] = [-0.1, 1.1, True, "x", float("nan")]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="forced acceptance must be a number in"):
            judged.with_forced_acceptance(wrong)
    with pytest.raises(ConfigError, match="forced twice: to 0.5, and by"):
        forced.with_forced_acceptance(0.5)


def test_block_verification_is_the_default():
    assert SpeculativeConfig(model="draft").rejection_sample_method == "block"


def test_verifying_rules_force_no_acceptance():
    for rule in ("standard", "block", "coupled"):
        config = SpeculativeConfig(model="draft", rejection_sample_method=rule)
        assert config.forced_acceptance is None


@pytest.mark.parametrize(
    ("given", "text"),
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
        ({"length": 4.1}, r"length must be a number in \[1, 4\], got 4.1"),
        ({"length": True}, "got True"),
    ],
)
def test_rejects_impossible_forced_acceptance(given: dict[str, Any], text: str):
    rule = given.pop("rule", "synthetic")
    keys = {f"synthetic_acceptance_{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError, match=text):
        SpeculativeConfig(
            model="draft",
            num_speculative_tokens=3,
            rejection_sample_method=rule,
            **keys,
        )


MODEL: dict[str, Any] = {"model": "draft"}
TREE = "[(0,), (1,), (0, 0), (0, 1)]"


def test_parents_of_leaves_and_trees():
    config = SpeculativeConfig(**MODEL, num_speculative_tokens=3, num_side_leaves=1)
    assert config.parents == (-1, 0, 1, -1, 0, 1)
    assert config.num_levels == 3
    config = SpeculativeConfig(
        **MODEL, num_speculative_tokens=4, speculative_token_tree=TREE
    )
    assert config.parents == (-1, 0, -1, 0)
    assert config.num_levels == 2
    chain = SpeculativeConfig(
        **MODEL, num_speculative_tokens=2, speculative_token_tree="[(0,), (0, 0)]"
    )
    assert chain.parents is None
    assert config.num_nodes == 4
    assert config.is_one_tree and not SpeculativeConfig(**MODEL).is_one_tree
    assert SpeculativeConfig(**MODEL).parents is None
    assert SpeculativeConfig(**MODEL).num_levels == 5


@pytest.mark.parametrize(
    ("keys", "name", "text"),
    [
        ({"num_side_leaves": -1}, "num_side_leaves", "at least 0, got -1"),
        ({"num_side_leaves": 1.5}, "num_side_leaves", "an integer"),
        (
            {"num_side_leaves": 12},
            "num_side_leaves",
            "at most 11 with num_speculative_tokens=5, got 12",
        ),
        (
            {
                "num_side_leaves": 1,
                "speculative_token_tree": TREE,
                "num_speculative_tokens": 4,
            },
            "num_side_leaves",
            "left out with speculative_token_tree",
        ),
        (
            {"speculative_token_tree": TREE, "num_speculative_tokens": 5},
            "num_speculative_tokens",
            "must be 4, the number of drafts in speculative_token_tree, or left out",
        ),
        (
            {"speculative_token_tree": str([(0,) * n for n in range(1, 10)])},
            "speculative_token_tree",
            "at most 8 levels for method 'draft_model'",
        ),
        (
            {"speculative_token_tree": "[(0,), (1, 0)]"},
            "speculative_token_tree",
            "(1, 0) has no parent",
        ),
        (
            {
                "num_side_leaves": 1,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
            },
            "num_side_leaves",
            "left out with rejection_sample_method='synthetic'",
        ),
        (
            {
                "speculative_token_tree": TREE,
                "num_speculative_tokens": 4,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
            },
            "speculative_token_tree",
            "left out with rejection_sample_method='synthetic'",
        ),
    ],
)
def test_rejects_bad_trees(keys: dict[str, Any], name: str, text: str):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**MODEL | keys)
    assert caught.value.parameter == name
    assert text in str(caught.value)

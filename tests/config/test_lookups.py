"""The configuration determines the rule by which a lookup proposes drafts."""

from typing import Any

import pytest

from jaxspec.config.engine import SpeculativeConfig
from jaxspec.config.lookups import NUM_MATCHES, WHOLE, LookupRule, draft_limits
from jaxspec.config.methods import LONG_MATCH, SHORT_MATCH, SUFFIX_DEFAULTS


@pytest.mark.parametrize(
    ("depth", "factor", "most", "limits"),
    [
        (2, 1.0, 8, (0, 1)),
        (6, 1.0, 8, (0, 1, 2, 3, 3, 3)),
        (6, 1.0, 2, (0, 1, 2, 2, 2, 2)),
        (8, 0.5, 8, (0, 0, 1, 1, 2, 2, 2, 2)),
        (6, 3.0, 8, (0, 3, 4, 4, 4, 4)),
    ],
)
def test_draft_limits_by_match_length(depth, factor, most, limits):
    assert draft_limits(depth, factor, most) == limits


def test_ngram_rule_has_all_drafts_after_any_match():
    keys: dict[str, Any] = dict(prompt_lookup_max=3, prompt_lookup_min=2)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, **keys)
    rule = LookupRule.of(config)
    limits = (0, 5, 5, 5)
    assert rule == LookupRule(limits=limits, shortest=2, min_share=0, num_matches=1)
    assert rule.longest == 3


@pytest.mark.parametrize(
    ("method", "shortest"),
    [
        ({"method": "suffix"}, SHORT_MATCH),
        ({"method": "suffix+draft_model", "model": "draft"}, LONG_MATCH),
    ],
)
def test_suffix_rule_has_the_configured_limits(method: dict[str, Any], shortest: int):
    keys = {"suffix_decoding_min_token_prob": 0.3, "suffix_decoding_max_tree_depth": 6}
    method = method | SUFFIX_DEFAULTS | keys
    rule = LookupRule.of(SpeculativeConfig(num_speculative_tokens=8, **method))
    assert rule.shortest == shortest
    # The minimum share is 0.3: a draft of one match in four (0.25) is too rare, one in
    # three is enough.
    assert WHOLE // 4 < rule.min_share <= WHOLE // 3
    assert rule.num_matches == NUM_MATCHES
    assert not any(WHOLE % count for count in range(1, NUM_MATCHES + 1))
    factor = SUFFIX_DEFAULTS["suffix_decoding_max_spec_factor"]
    assert rule.limits == draft_limits(6, factor, 8)

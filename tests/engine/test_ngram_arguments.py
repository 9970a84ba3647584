"""Engine arguments of lookups, alone and together with a draft model."""

from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs

TARGET, DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"


def configure(**arguments: Any) -> EngineConfig:
    return EngineArgs(model=TARGET, **arguments).create_engine_config()


def test_ngram_drafts_need_no_model():
    keys = {"num_speculative_tokens": 3}
    configs = [
        configure(
            speculative_model="[ngram]",
            ngram_prompt_lookup_max=4,
            ngram_prompt_lookup_min=4,
            **keys,
        ),
        configure(
            speculative_config={"method": "ngram", "prompt_lookup_max": 4} | keys
        ),
    ]
    assert configs[0] == configs[1]
    speculative = configs[0].speculative
    assert speculative is not None
    assert (speculative.method, speculative.model) == ("ngram", None)
    assert (speculative.prompt_lookup_max, speculative.prompt_lookup_min) == (4, 4)
    assert speculative.max_model_len == configs[0].max_model_len
    assert configs[0].draft_model_config is None
    assert configs[0].num_draft_tokens == 3
    # All pages are the target's, so their number is the same as without drafts.
    assert configs[0].num_pages == configure().num_pages


def test_number_of_drafts_defaults_to_five_with_a_warning():
    with pytest.warns(UserWarning, match="num_speculative_tokens is not given: 5"):
        assert configure(spec_method="ngram").num_draft_tokens == 5


def test_draft_max_model_len_defaults_to_the_engines():
    said = configure(spec_method="ngram", spec_tokens=2, speculative_max_model_len=100)
    assert said.speculative is not None
    assert said.speculative.max_model_len == 100


def test_ngram_drafts_can_be_combined_with_a_draft_model():
    config = configure(spec_method="ngram+draft_model", spec_model=DRAFT, spec_tokens=3)
    assert config.speculative is not None
    assert config.speculative.method == "ngram+draft_model"
    assert config.speculative.prompt_lookup_max == 5
    assert config.draft_model_config is not None


def test_suffix_drafts_need_no_model():
    with pytest.warns(UserWarning, match="num_speculative_tokens is not given: 16"):
        config = configure(spec_method="suffix")
    assert config.speculative is not None
    assert config.speculative.method == "suffix"
    assert config.speculative.suffix_decoding_max_tree_depth == 24
    assert config.speculative.suffix_decoding_max_cached_requests == 0
    assert config.draft_model_config is None
    assert config.num_draft_tokens == 16
    assert config.num_pages == configure().num_pages


def test_suffix_drafts_precede_the_draft_models():
    config = configure(
        spec_method="suffix+draft_model", spec_model=DRAFT, spec_tokens=3
    )
    assert config.speculative is not None
    assert config.speculative.suffix_decoding_max_spec_factor == 4.0
    assert config.draft_model_config is not None

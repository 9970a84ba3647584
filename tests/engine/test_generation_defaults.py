import json
from pathlib import Path

from jaxspec.engine.generation_defaults import recommended_sampling
from jaxspec.sampling_params import SamplingParams

STORED = {
    "temperature": 0.6,
    "top_k": 64,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
    "bos_token_id": 2,
}


def test_names_become_those_of_sampling_params(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps(STORED))
    found = recommended_sampling(tmp_path, None)
    assert found == {
        "temperature": 0.6,
        "top_k": 64,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "max_tokens": 99,
    }
    assert SamplingParams(**found).max_tokens == 99
    changed = recommended_sampling(tmp_path, {"top_k": None, "max_new_tokens": 3})
    del found["top_k"]
    assert changed == found | {"max_tokens": 3}


def test_a_folder_may_recommend_nothing(tmp_path: Path):
    assert recommended_sampling(tmp_path, None) == {}
    assert recommended_sampling(None, {"top_p": 0.5}) == {"top_p": 0.5}

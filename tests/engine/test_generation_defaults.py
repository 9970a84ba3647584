import json
from pathlib import Path

from jaxspec.engine.generation_defaults import recommended_sampling
from jaxspec.sampling_params import SamplingParams
from tests.engine.test_arg_utils import configure, write_model

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


def test_recommended_sampling_is_read_and_overridden(tmp_path: Path):
    target = write_model(tmp_path / "target")
    recommended = {"temperature": 0.6, "top_k": 64, "max_new_tokens": 99, "bos": 2}
    Path(target, "generation_config.json").write_text(json.dumps(recommended))
    assert configure(target).generation_defaults == {
        "temperature": 0.6,
        "top_k": 64,
        "max_tokens": 99,
    }
    assert configure(target, generation_config="vllm").generation_defaults == {}
    changed = configure(target, override_generation_config={"top_k": 5})
    assert changed.generation_defaults["top_k"] == 5
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    elsewhere = configure(target, generation_config=str(other))
    assert elsewhere.generation_defaults == {"top_p": 0.5}

"""The tokens of a draft's trimmed vocabulary; errors name bad token maps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import trimming
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.trimming import check_special_tokens, kept_tokens
from jaxspec.errors import ConfigError
from jaxspec.models.families import config_from_hf
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from tests.support.oracles import TINY

MODEL = config_from_hf(TINY | dict(model_type="gemma2"))
# A map with the ids of 96 tokens. The special tokens are first: pad, end and begin.
RANKED = [0, 1, 2, 50, 7, 95, 31, 8]
LOOKUP = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def kept(
    folder: Path, *, is_dummy: bool = False, target: Any = MODEL, **keys: Any
) -> tuple[int, ...] | None:
    speculative = SpeculativeConfig(model=str(folder), **keys)
    return kept_tokens(speculative, target, MODEL, is_dummy=is_dummy)


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_first_tokens_of_a_map_are_kept(tmp_path):
    """The map in the draft's folder is the default, and kept ids are ascending."""
    write(tmp_path / TOKEN_MAP, RANKED)
    assert kept(tmp_path) is None, "a small vocabulary is kept by default"
    assert kept(tmp_path, draft_vocab_size=5) == (0, 1, 2, 7, 50)
    assert kept(tmp_path, draft_vocab_size=8) == tuple(sorted(RANKED))
    other = write(tmp_path / "other.json", {"token_ids": [1, 0, 2, 60], "of": "texts"})
    assert kept(tmp_path, draft_token_map=other) == (0, 1, 2, 60)
    options: dict[str, Any] = dict(draft_vocab_size=3, draft_token_map=other)
    assert kept(tmp_path, **options) == (0, 1, 2)


def test_large_vocabulary_with_a_map_is_trimmed_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(trimming, "DEFAULT_SIZE", 5)
    assert kept(tmp_path) is None, "there is no map"
    assert kept(tmp_path, is_dummy=True) is None
    write(tmp_path / TOKEN_MAP, RANKED)
    assert kept(tmp_path) == (0, 1, 2, 7, 50)
    assert kept(tmp_path, draft_vocab_size=6) == (0, 1, 2, 7, 50, 95)
    assert kept(tmp_path, draft_vocab_size=96) is None, "the whole vocabulary"
    write(tmp_path / TOKEN_MAP, RANKED[:4])
    assert kept(tmp_path) == (0, 1, 2, 50)


def test_random_weights_need_no_map(tmp_path):
    """Special tokens are kept, whatever their ids."""
    target = replace(MODEL, eos_token_ids=(1, 80))
    found = kept(tmp_path, is_dummy=True, target=target, draft_vocab_size=6)
    assert found == (0, 1, 2, 3, 4, 80)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([0, 1, 2, 7, 7, 8], "has token id 7 twice"),
        ([0, 1, 2, 96], "has token id 96, but ids go from 0 to vocab_size=96 - 1"),
        ([0, 1, 2, -1], "has token id -1, but ids go from 0"),
        ([], "must hold a JSON list of token ids"),
        ([0, 1, "2"], "must hold a JSON list of token ids"),
        ([0, 1, True], "must hold a JSON list of token ids"),
        ({"ids": [0]}, "an object with one as 'token_ids'"),
        (RANKED[1:], r"missing: pad_token_id \(0\)"),
        ([5, 6, 0], r"missing: bos_token_id \(2\), eos_token_id 1 \(1\)"),
        (list(range(96)), "lists all 96 tokens .* set draft_vocab_size"),
        (b"[0, 1", "draft_token_map: .*map.json must be readable JSON"),
        (b"\xff\xfe", "draft_token_map: .*map.json must be readable JSON"),
    ],
)
def test_rejects_bad_map(tmp_path, content, named):
    path = tmp_path / "map.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(ConfigError, match=named):
        kept(tmp_path, draft_token_map=str(path))
    with pytest.raises(ConfigError, match="draft_token_map: .*none.json is not a file"):
        kept(tmp_path, draft_token_map=str(tmp_path / "none.json"))
    pickled = tmp_path / "hot.pt"
    pickled.touch()
    with pytest.raises(ConfigError, match="draft_token_map: .*hot.pt is a pickle"):
        kept(tmp_path, draft_token_map=str(pickled))


def test_rejects_bad_sizes(tmp_path):
    with pytest.raises(ConfigError, match="jaxspec_checkpoints trim"):
        kept(tmp_path, draft_vocab_size=5)
    write(tmp_path / TOKEN_MAP, RANKED)
    for size in (0, -1, 97, 98, 2.5, True, "many"):
        with pytest.raises(ConfigError, match="draft_vocab_size must be an integer"):
            kept(tmp_path, draft_vocab_size=size)
    with pytest.raises(ConfigError, match="from 1 to 8, got 9: its token map lists no"):
        kept(tmp_path, draft_vocab_size=9)
    # The end tokens of both models must be kept.
    target = replace(MODEL, eos_token_ids=(1, 31))
    with pytest.raises(ConfigError, match=r"missing: eos_token_id 31 \(31\)"):
        kept(tmp_path, target=target, draft_vocab_size=6)


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        (LOOKUP, "It cuts the head of a draft model"),
        (SUFFIX_DEFAULTS | {"method": "suffix"}, "It cuts the head of a draft model"),
        ({"method": "eagle3", "model": "head"}, "A head's files define"),
        ({"method": "medusa", "model": "head"}, "A head's files define"),
    ],
)
def test_only_draft_models_are_trimmed(keys: dict[str, Any], hint: str):
    given: dict[str, Any] = {"draft_vocab_size": 5, "draft_token_map": "map.json"}
    for name, value in given.items():
        with pytest.raises(ConfigError, match=f"{name} must be left out.*{hint}"):
            SpeculativeConfig(num_speculative_tokens=2, **keys, **{name: value})


def test_missing_special_tokens_are_all_named():
    check_special_tokens((1, 5, 9), {"<eos>": 1, "<bos>": 9})
    with pytest.raises(ConfigError, match=r"missing: <pad> \(0\), <bos> \(2\)"):
        check_special_tokens((1, 5), {"<eos>": 1, "<pad>": 0, "<bos>": 2})

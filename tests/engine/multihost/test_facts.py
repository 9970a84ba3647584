"""Settings that the processes of one target compare when they start."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.hosts import HostsConfig
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.engine.multihost.facts import (
    LOCAL_FIELDS,
    _digest,
    _fact,
    difference,
    facts_of,
)
from jaxspec.errors import UnsupportedError
from tests.support.loops import make_config

FACTS = {"max_model_len": "128", "sources": "aa"}


def hosts(rank: int) -> HostsConfig:
    return HostsConfig(
        nnodes=3,
        node_rank=rank,
        master_addr="127.0.0.1",
        master_port=1,
        headless=rank > 0,
        secret_file=f"secret of {rank}",
    )


def test_error_names_the_first_fact_that_differs():
    assert difference(FACTS, dict(FACTS)) is None
    assert difference({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == (
        "b: 3 there, and 2 at the leader"
    )
    text = difference({"given.num_pages": "4"}, {"given.num_pages": "5"})
    assert text == "num_gpu_blocks_override: 5 there, and 4 at the leader"
    assert difference({}, {"c": "4"}) == "c: 4 there, and not set at the leader"


def test_every_field_of_a_configuration_is_a_fact():
    config = dataclasses.replace(make_config(num_draft_tokens=3), hosts=hosts(1))
    versions = {"jax": "1"}
    facts = facts_of(config, versions)
    assert facts["jax"] == "1" and facts["hosts.nnodes"] == "3"
    assert facts["model_config.hidden_size"] == repr(config.model_config.hidden_size)
    for item in dataclasses.fields(config):
        known = [name for name in facts if name.partition(".")[0] == item.name]
        assert known or item.name in LOCAL_FIELDS, item.name
    leader = dataclasses.replace(config, hosts=hosts(0), model="/elsewhere")
    assert facts_of(leader, versions) == facts
    wider = dataclasses.replace(config, max_num_seqs=config.max_num_seqs + 1)
    differs = difference(facts, facts_of(wider, versions))
    assert differs is not None and differs.startswith("max_num_seqs: ")


def test_corpora_need_one_host():
    keys = {"method": "suffix", "rejection_sample_method": "coupled"}
    values: dict[str, Any] = SUFFIX_DEFAULTS | keys
    values |= {"suffix_decoding_max_corpus_tokens": 8}
    config = make_config(num_draft_tokens=0)
    speculative = SpeculativeConfig(**values)
    dataclasses.replace(config, speculative=speculative)
    with pytest.raises(UnsupportedError, match="0 with several hosts, got 8"):
        dataclasses.replace(config, speculative=speculative, hosts=hosts(0))


def test_different_weights_of_the_same_names_and_sizes_are_detected(tmp_path: Path):
    config = make_config(num_draft_tokens=3)

    def facts(name: str, content: bytes) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        return facts_of(dataclasses.replace(config, model=str(folder)), {})

    def digest(content: bytes) -> str:
        path = tmp_path / "one"
        path.write_bytes(content)
        return _digest(path)

    base = (8).to_bytes(8, "little") + b'{"a":12}' + bytes(5 * 2**20)
    assert facts("a", base) == facts("b", base)
    for place in (0, 9, len(base) // 2, len(base) - 1):
        other = bytearray(base)
        other[place] ^= 1
        assert digest(bytes(other)) != digest(base), place
    differs = difference(facts("c", base), facts("d", base[:-1] + b"x"))
    assert differs is not None and differs.startswith("weights of the target: ")
    assert digest(b"") != digest(bytes(2**10))


def test_different_weights_in_gguf_files_are_detected(tmp_path: Path):
    config = make_config(num_draft_tokens=3)
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]

    def facts(folder: str, path: str, last: bytes) -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, content in zip(names, (b"", last), strict=True):
            (tmp_path / folder / name).write_bytes(b"GGUF" + bytes(2**20) + content)
        model = str(tmp_path / folder / path)
        return facts_of(dataclasses.replace(config, model=model), {})

    same = facts("a", "", b"x")
    assert facts("b", "", b"x") == same
    assert facts("b", names[0], b"x") == same
    fact = "weights of the target"
    assert facts("c", "", b"y")[fact] != same[fact]
    assert names[1] in same[fact]


def test_difference_at_the_end_of_a_long_fact_is_shown():
    long = "x" * 500
    assert _fact(long) != _fact(long + "y")
    assert len(_fact(long)) < 160

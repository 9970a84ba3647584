"""Kernels use the sizes of a tuned table; a broken table is an error."""

import functools
import importlib
import json
import zipfile
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.kernels.work import attention_key, sampling_key
from jaxspec_kernels import dispatch, paged_attention, tuning
from jaxspec_kernels.paged_attention.cases import CASES
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from jaxspec_kernels.rejection_sampling import (
    SamplingValues,
    Verdict,
    rejection_sampling,
)
from jaxspec_kernels.rejection_sampling.cases import CASES as SAMPLING_CASES

FACTS: dict[str, Any] = dict(
    seqs=8,
    queries=6,
    q_heads=16,
    kv_heads=8,
    head_dim=256,
    page_size=16,
    context=8192,
    window=4096,
    dtype="bfloat16",
)


def key_of(**changes: Any) -> str:
    facts: dict[str, Any] = FACTS | changes
    return tuning.attention_key(**facts)


KEY = key_of()


def sizes(**changes: str) -> tuning.Sizes | None:
    call = dict(
        operation="paged_attention",
        implementation="tpu",
        device_kind="Test Chip 9",
        key=KEY,
    )
    return tuning.sizes(**call | changes)


def table(**changes: Any) -> dict[str, Any]:
    whole = {
        "device": "Test Chip 9",
        "jax": "0.10.2",
        "date": "2026-11-21T00:00:00",
        "command": "python -m benchmarks.kernels.tune",
        "commit": "0123456789ab",
        "entries": {"paged_attention": {"tpu": {KEY: {"block_tokens": 256}}}},
    }
    return whole | changes


def gpu_table(entries: Any) -> dict[str, Any]:
    return table(entries={"paged_attention": {"gpu": entries}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of the package's tables."""
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    return tmp_path


def write(folder, content: str | dict[str, Any]) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "test-chip-9.json").write_text(text)


def test_only_measured_shapes_have_sizes(folder):
    write(folder, table())
    found = sizes()
    assert found is not None and found == {"block_tokens": 256}
    found["block_tokens"] = 1  # a caller cannot change the table
    (folder / "test-chip-9.json").unlink()  # it is read once
    assert sizes() == {"block_tokens": 256}
    assert sizes(key=key_of(queries=9)) is None
    assert sizes(operation="rejection_sampling") is None
    assert sizes(device_kind="Test Chip 10") is None
    assert sizes(implementation="gpu") is None


def test_a_table_in_a_zipped_package_is_read(tmp_path, monkeypatch):
    path = tmp_path / "package.zip"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("tuned/test-chip-9.json", json.dumps(table()))
    monkeypatch.setattr(tuning, "folder", lambda: zipfile.Path(path) / "tuned")
    assert sizes() == {"block_tokens": 256}


def test_every_table_in_the_package_is_whole():
    assert (tuning.folder() / "README.md").is_file()
    for path in tuning.folder().iterdir():
        if path.name.endswith(".json"):
            device = json.loads(path.read_text())["device"]
            assert path.name == tuning.file_name(device)
            tuning.read(path, device)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list, not an object"),
        (table(device="Other Chip"), "was measured on Other Chip, not on Test Chip 9"),
        (table(jax=""), "says jax = ''"),
        *(
            (
                {key: one for key, one in table().items() if key != name},
                f"says {name} = None",
            )
            for name in tuning.PROVENANCE
        ),
        (table(command=7), "says command = 7"),
        (table(entries=None), "needs entries for some of"),
        (table(entries={"write_kv_pages": {}}), "needs entries for some of"),
        (table(entries={"paged_attention": []}), "needs entries of paged_attention"),
        # An older format lacks the level for the implementation.
        (table(entries={"paged_attention": {KEY: {"a": 1}}}), "needs entries of paged"),
        (gpu_table([]), "holds no object as entries of paged_attention, gpu"),
        (gpu_table({"k": {}}), "paged_attention, gpu, k: {}"),
        (gpu_table({"k": {"a": 0}}), "whole numbers above 0"),
        (gpu_table({"k": {"a": 1.5}}), "whole numbers above 0"),
        (gpu_table({"k": {"a": True}}), "whole numbers above 0"),
    ],
)
def test_a_broken_table_is_an_error(content, message, folder):
    write(folder, content)
    with pytest.raises(ValueError, match=r"tuned table test-chip-9\.json") as caught:
        sizes()
    assert message in str(caught.value)
    assert "--again" in str(caught.value)


def test_an_operation_without_sizes_is_an_error():
    with pytest.raises(ValueError, match="'write_kv_pages' has no sizes to tune"):
        sizes(operation="write_kv_pages")


def test_every_fact_changes_the_key():
    changes = dict(
        seqs=16,
        queries=9,
        q_heads=8,
        kv_heads=4,
        head_dim=128,
        page_size=32,
        context=4096,
        window=None,
        dtype="float32",
    )
    assert changes.keys() == FACTS.keys()
    for name, value in changes.items():
        assert key_of(**{name: value}) != KEY, name


def test_near_sizes_share_a_key():
    assert key_of(seqs=5, context=5000) == KEY
    for queries in (5, 7, 8):  # for K = 4, 6 and 7, use the sizes measured for K = 5
        assert key_of(queries=queries) == KEY
    key = tuning.sampling_key(rows=33, columns=256_000, dtype="float32")
    assert key == "rows64-columns256000-float32"


def test_keys_name_the_sizes_of_cases():
    assert attention_key(CASES["tiny/verify"], "bfloat16") == (
        "seqs4-queries8-heads6/2-dim64-page16-context512-window128-bfloat16"
    )
    # The case has 8 sequences of 5 rows and a quarter of the vocabulary.
    key = sampling_key(SAMPLING_CASES["9b/tp4"], "float32")
    assert key == "rows64-columns64000-float32"


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        ("reference", {"block_tokens": 32}),
        ("tpu", {"block_tokens": 256}),
        ("gpu", dict(rows=16, keys=32, splits=3, num_warps=4, num_stages=2)),
    ],
)
def test_attention_takes_the_sizes_of_its_device(
    implementation, sizes, folder, monkeypatch
):
    case = CASES["tiny/verify"]
    key = attention_key(case, "float32")
    other = next(name for name in dispatch.IMPLEMENTATIONS if name != implementation)
    entries = {implementation: {key: sizes}, other: {key: {"unknown": 1}}}
    write(folder, table(entries={"paged_attention": entries}))
    given = {}

    def spy(query, *arrays, **settings):
        given.update(settings)
        return query

    module = importlib.import_module(
        f"jaxspec_kernels.paged_attention.{implementation}"
    )
    monkeypatch.setattr(module, "paged_attention", spy)
    heads = (2 * case.kv_heads, case.head_dim)
    arrays = (
        jnp.zeros((case.seqs, case.queries, case.q_heads, case.head_dim)),
        jnp.zeros((4, case.page_size, *heads)),
        jnp.zeros((case.seqs, -(-case.context // case.page_size)), jnp.int32),
        jnp.zeros(case.seqs, jnp.int32),
    )
    call = functools.partial(
        paged_attention,
        *arrays,
        scale=case.scale,
        window=case.window,
        implementation=implementation,
    )
    call()
    assert not given.keys() & {"block_tokens", "tiles"}
    call(device_kind="Test Chip 9")
    assert "unknown" not in given
    if implementation != "reference":
        assert given["device_kind"] == "Test Chip 9"
    expected = {"tiles": Tiles(**sizes)} if implementation == "gpu" else sizes
    assert {name: given[name] for name in expected} == expected


def test_sampling_takes_the_tile_of_its_device(folder, monkeypatch):
    case = SAMPLING_CASES["tiny/verify"]
    sizes = {"tile": 1024}
    key = sampling_key(case, "float32")
    entries = {"reference": {key: sizes}, "gpu": {key: {"tile": 2048}}}
    write(folder, table(entries={"rejection_sampling": entries}))
    given = {}

    def spy(tokens, *arrays, **settings):
        given.update(settings)
        return Verdict(tokens[:, 0], tokens[:, 0])

    path = "jaxspec_kernels.rejection_sampling.reference"
    monkeypatch.setattr(importlib.import_module(path), "rejection_sampling", spy)
    whole = jnp.zeros(case.seqs, jnp.int32)
    ones = jnp.ones(case.seqs)
    call = functools.partial(
        rejection_sampling,
        jnp.zeros((case.seqs, case.drafts), jnp.int32),
        None,
        jnp.zeros((case.seqs, case.drafts + 1, case.columns)),
        whole,
        SamplingValues(ones, whole, ones, ones),
        rule=whole,
        accept_uniform=jnp.zeros((case.seqs, case.drafts)),
        sample_uniform=jnp.zeros(case.seqs),
        implementation="reference",
    )
    call()
    assert "tile" not in given
    call(device_kind="Test Chip 9")
    assert given["tile"] == 1024

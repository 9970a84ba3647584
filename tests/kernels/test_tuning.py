"""Tuned sizes: what a table says is what a kernel gets, and a broken table is told."""

import functools
import importlib
import json
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec_kernels import bench, dispatch, paged_attention, tune, tuning
from jaxspec_kernels.bench_work import attention_key, sampling_key
from jaxspec_kernels.paged_attention.cases import CASES
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from jaxspec_kernels.rejection_sampling import Controls, Verdict, rejection_sampling
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
        "command": "python -m jaxspec_kernels.tune",
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


def test_a_measured_shape_has_its_sizes(folder):
    write(folder, table())
    assert sizes() == {"block_tokens": 256}


def test_what_was_not_measured_has_none(folder):
    write(folder, table())
    assert sizes(key=key_of(queries=9)) is None
    assert sizes(operation="rejection_sampling") is None
    assert sizes(device_kind="Test Chip 10") is None
    assert sizes(implementation="gpu") is None


def test_a_caller_cannot_change_the_table(folder):
    write(folder, table())
    found = sizes()
    assert found is not None
    found["block_tokens"] = 1
    assert sizes() == {"block_tokens": 256}


def test_a_table_is_read_once(folder):
    write(folder, table())
    sizes()
    (folder / "test-chip-9.json").unlink()
    assert sizes() is not None


def test_a_table_in_a_zipped_package_is_read(tmp_path, monkeypatch):
    path = tmp_path / "package.zip"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("tuned/test-chip-9.json", json.dumps(table()))
    monkeypatch.setattr(tuning, "folder", lambda: zipfile.Path(path) / "tuned")
    assert sizes() == {"block_tokens": 256}


def test_the_package_brings_its_folder():
    assert (tuning.folder() / "README.md").is_file()


def test_every_table_in_the_package_is_whole():
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
        (table(command=7), "says command = 7"),
        (table(entries=None), "needs entries for some of"),
        (table(entries={"write_kv_pages": {}}), "needs entries for some of"),
        (table(entries={"paged_attention": []}), "needs entries of paged_attention"),
        # The form before entries were told apart by implementation.
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


@pytest.mark.parametrize("name", tuning.PROVENANCE)
def test_a_table_says_where_it_is_from(name, folder):
    content = table()
    del content[name]
    write(folder, content)
    with pytest.raises(ValueError, match=f"says {name} = None"):
        sizes()


def test_an_operation_without_sizes_is_an_error():
    with pytest.raises(ValueError, match="'write_kv_pages' has no sizes to tune"):
        sizes(operation="write_kv_pages")


@pytest.mark.parametrize(
    "change",
    [
        {"seqs": 16},
        {"queries": 9},
        {"q_heads": 8},
        {"kv_heads": 4},
        {"head_dim": 128},
        {"page_size": 32},
        {"context": 4096},
        {"window": None},
        {"dtype": "float32"},
    ],
)
def test_every_fact_counts(change):
    assert key_of(**change) != KEY


def test_near_sizes_share_a_key():
    assert key_of(seqs=5, context=5000) == KEY
    for queries in (5, 7, 8):  # K = 4, 6 and 7; what was measured is K = 5
        assert key_of(queries=queries) == KEY
    key = tuning.sampling_key(rows=33, columns=256_000, dtype="float32")
    assert key == "rows64-columns256000-float32"


def test_keys_of_cases():
    assert attention_key(CASES["tiny/verify"], "bfloat16") == (
        "seqs4-queries8-heads6/2-dim64-page16-context512-window128-bfloat16"
    )
    # 8 sequences of 5 rows, a quarter of the vocabulary.
    key = sampling_key(SAMPLING_CASES["9b/tp4"], "float32")
    assert key == "rows64-columns64000-float32"


def test_search_changes_one_size_after_the_other():
    """Times are 10 a + b: what the first size became is kept for the second."""
    asked = []

    def seconds(sizes: tuning.Sizes) -> float | None:
        asked.append(dict(sizes))
        return None if sizes["a"] == 1 else 10.0 * sizes["a"] + sizes["b"]

    start = {"a": 4, "b": 4}
    found = tune.search(start, {"a": (1, 2, 4), "b": (3, 5)}, seconds)
    assert found == ({"a": 2, "b": 3}, 23.0)
    assert asked == [
        {"a": 4, "b": 4},
        {"a": 1, "b": 4},
        {"a": 2, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 5},
    ]


def test_search_without_any_time_finds_nothing():
    assert tune.search({}, {"tile": (1, 2)}, lambda sizes: None) is None


def arguments(path, *more: str) -> list[str]:
    given = ["--quick", "--case", "tiny/decode", "--operation", "paged_attention"]
    return [*given, "--output", str(path), *more]


def best_is_64(sizes: tuning.Sizes, step: Any, work: Any) -> float:
    return float(abs(sizes.get("block_tokens", 128) - 64) + 1) * 1e-6


def test_the_tuner_writes_a_table_that_is_read(folder):
    device = jax.devices()[0].device_kind
    path = folder / tuning.file_name(device)
    tune.main(arguments(path), timer=best_is_64)
    key = attention_key(CASES["tiny/decode"], "float32")
    found = tuning.sizes("paged_attention", "reference", device, key)
    assert found == {"block_tokens": 64}
    written = json.loads(path.read_text())
    assert written["jax"] == jax.__version__
    assert written["command"].startswith("python -m jaxspec_kernels.tune --quick")
    assert str(folder) not in path.read_text()
    micros = written["measured_us"]["paged_attention"]["reference"][key]
    assert micros == {"heuristic": 65.0, "tuned": 1.0}


def test_the_tuner_goes_on_where_it_stopped(folder):
    path, asked = folder / "cpu.json", []

    def timer(sizes: tuning.Sizes, step: Any, work: Any) -> float:
        asked.append(sizes)
        return 1.0

    tune.main(arguments(path), timer=timer)
    num_asked = len(asked)
    tune.main(arguments(path), timer=timer)
    assert len(asked) == num_asked
    tune.main(arguments(path, "--again"), timer=timer)
    assert len(asked) == 2 * num_asked


def no_table(*_: Any) -> Any:
    raise AssertionError("a case was tuned")


def planned(name: str, key: str) -> bench.Planned:
    return bench.Planned("paged_attention", name, None, key, no_table)


def test_a_key_is_tuned_once_for_each_implementation():
    cases = [planned("a", "x"), planned("b", "y"), planned("c", "x"), planned("d", "z")]
    entries = {"paged_attention": {"gpu": {"y": {"keys": 16}}}}
    missing = {
        name: [case.name for case in tune._missing(cases, {"entries": entries}, name)]
        for name in ("gpu", "tpu")
    }
    assert missing == {"gpu": ["a", "d"], "tpu": ["a", "b", "d"]}


def test_what_the_budget_left_is_printed(folder, capsys):
    tune.main(arguments(folder / "cpu.json", "--budget-s", "-1"), timer=no_table)
    printed = capsys.readouterr().out
    assert "cpu.json: 0 entries" in printed
    assert "not begun within -1 s, run again: paged_attention tiny/decode" in printed


def test_a_wrong_candidate_is_never_chosen(folder, monkeypatch, capsys):
    true = tune.sized

    def broken(work: Any, implementation: str, sizes: tuning.Sizes) -> Any:
        run = true(work, implementation, sizes)
        if sizes.get("block_tokens") != 64:
            return run
        return lambda *arrays, **settings: run(*arrays, **settings) + jnp.float32(1)

    monkeypatch.setattr(tune, "sized", broken)
    tune.main(arguments(folder / "cpu.json"), timer=best_is_64)
    entries = json.loads((folder / "cpu.json").read_text())["entries"]
    [found] = entries["paged_attention"]["reference"].values()
    assert found == {"block_tokens": 128}
    assert "{'block_tokens': 64} is wrong" in capsys.readouterr().err


def test_a_kernel_that_fails_by_itself_is_told(folder, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("not today")

    def broken(work: Any, implementation: str, sizes: tuning.Sizes) -> Any:
        # The first is the truth that others are compared with.
        return refuse if calls.pop() else true(work, implementation, sizes)

    true, calls = tune.sized, [True] * 3 + [False]
    monkeypatch.setattr(tune, "sized", broken)
    with pytest.raises(SystemExit, match="tiny/decode: the reference implementation"):
        tune.main(arguments(folder / "cpu.json"), timer=best_is_64)
    assert not (folder / "cpu.json").exists()


def test_a_cpu_is_not_tuned():
    with pytest.raises(SystemExit, match="only a CPU here"):
        tune.main([])
    with pytest.raises(SystemExit, match="name an --output"):
        tune.main(["--quick"])


def test_every_tuned_operation_has_axes():
    backends = ("reference", "tpu", "gpu")
    assert set(tune.AXES) == {
        (operation, backend) for operation in tuning.OPERATIONS for backend in backends
    }
    assert set(tuning.OPERATIONS) < set(bench.OPERATIONS)


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
        Controls(ones, whole, ones, ones),
        rule=whole,
        accept_uniform=jnp.zeros((case.seqs, case.drafts)),
        sample_uniform=jnp.zeros(case.seqs),
        implementation="reference",
    )
    call()
    assert "tile" not in given
    call(device_kind="Test Chip 9")
    assert given["tile"] == 1024

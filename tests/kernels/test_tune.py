"""The tuner times correct candidates, writes a readable table, lists skipped cases."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import bench, tune
from benchmarks.kernels.work import attention_key
from jaxspec_kernels import tuning
from jaxspec_kernels.paged_attention.cases import CASES

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of the package's tables."""
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    return tmp_path


def test_search_changes_one_size_after_the_other():
    """The time is 10 a + b: the best `a` is kept while `b` is searched."""
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
    first: list[Any] = []

    def best_noted(*given: Any) -> float:
        first.append(given)
        return best_is_64(*given)

    tune.main(arguments(path), timer=best_noted)
    key = attention_key(CASES["tiny/decode"], "float32")
    found = tuning.sizes("paged_attention", "reference", device, key)
    assert found == {"block_tokens": 64}
    written = json.loads(path.read_text())
    assert written["jax"] == jax.__version__
    assert written["command"].startswith("python -m benchmarks.kernels.tune --quick")
    assert str(folder) not in path.read_text()
    micros = written["measured_us"]["paged_attention"]["reference"][key]
    assert micros == {"heuristic": 65.0, "tuned": 1.0}
    # The tuner continues where it stopped.
    asked = []

    def timer(sizes: tuning.Sizes, step: Any, work: Any) -> float:
        asked.append(sizes)
        return 1.0

    tune.main(arguments(path), timer=timer)
    assert not asked
    tune.main(arguments(path, "--again"), timer=timer)
    assert len(asked) == len(first)


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


def test_cases_left_by_the_budget_are_printed(folder, capsys):
    tune.main(arguments(folder / "cpu.json", "--budget-s", "-1"), timer=no_table)
    printed = capsys.readouterr().out
    assert "cpu.json: 0 entries" in printed
    assert (
        "not started within -1 s (run again to measure these): paged_attention "
        "tiny/decode" in printed
    )


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
    assert "{'block_tokens': 64} are wrong" in capsys.readouterr().err


def test_failing_kernel_is_reported(folder, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("not today")

    def broken(work: Any, implementation: str, sizes: tuning.Sizes) -> Any:
        # The first call gives the truth with which candidates are compared.
        return refuse if calls.pop() else true(work, implementation, sizes)

    true, calls = tune.sized, [True] * 3 + [False]
    monkeypatch.setattr(tune, "sized", broken)
    with pytest.raises(SystemExit, match="tiny/decode: the reference implementation"):
        tune.main(arguments(folder / "cpu.json"), timer=best_is_64)
    assert not (folder / "cpu.json").exists()


def test_a_cpu_is_not_tuned():
    with pytest.raises(SystemExit, match="finds only a CPU"):
        tune.main([])
    with pytest.raises(SystemExit, match="give --output"):
        tune.main(["--quick"])


def test_every_tuned_operation_has_axes():
    backends = ("reference", "tpu", "gpu")
    assert set(tune.AXES) == {
        (operation, backend) for operation in tuning.OPERATIONS for backend in backends
    }
    assert set(tuning.OPERATIONS) < set(bench.OPERATIONS)

"""The kernel benchmark reports right times, and whether each goal is met.

Other projects' implementations do the same work, or give a reason why they cannot.
"""

import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import bench
from benchmarks.kernels import work as bench_work
from benchmarks.kernels.clock import Spread, copy_bandwidth, loop_of, measure
from benchmarks.kernels.work import READ_ONCE
from jaxspec_kernels import native
from jaxspec_kernels.paged_attention.cases import REAL_CASES, Case
from jaxspec_kernels.rejection_sampling.cases import Case as SamplingCase
from jaxspec_kernels.write_kv_pages.cases import Case as WritingCase

pytestmark = pytest.mark.usefixtures("unoptimised")

SMALL = Case(
    seqs=2,
    queries=3,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    page_size=4,
    context=30,
    window=None,
    scale=0.3,
)
WINDOW = Case(**vars(SMALL) | {"window": 6})
SAMPLED = SamplingCase(seqs=2, drafts=3, vocab_size=64, columns=64)
WRITES = WritingCase(tokens=3, pages=4, page_size=4, kv_heads=1, head_dim=8)


@functools.cache
def attention(case: Case, **settings: Any) -> bench_work.Work:
    given: dict[str, Any] = {"pool_bytes": 0} | settings
    return bench_work.attention(case, "float32", **given)


def by_reference(work: bench_work.Work) -> Any:
    return functools.partial(work.run, implementation="reference")


WORKS = ("attention", "window", "greedy", "top-p", "writing")


@functools.cache
def works() -> dict[str, bench_work.Work]:
    return {
        "attention": attention(SMALL),
        "window": attention(WINDOW),
        "greedy": bench_work.sampling(SAMPLED, "greedy", "float32", logit_bytes=0),
        "top-p": bench_work.sampling(SAMPLED, "top-p", "float32", logit_bytes=0),
        "writing": bench_work.writing(WRITES, "float32"),
    }


def test_loop_runs_every_call():
    """Each call appends its argument as a digit; the last round's index is returned."""

    def step(carry, number, digit):
        return carry * 10 + digit, number

    def call(carry, number, digit):
        return step(carry[0], number, digit)

    turns = [(jnp.int32(1),), (jnp.int32(2),)]
    result = jax.jit(loop_of(call, 3))((jnp.int32(0), jnp.int32(0)), *turns)
    assert [int(value) for value in result] == [121212, 2]


def test_reported_time_is_per_call():
    # A timing is the difference of two readings of the clock: here 12, 24 and 60
    # seconds, for 3 rounds of 2 calls each.
    times = iter([0.0, 12.0, 20.0, 44.0, 50.0, 110.0])
    spread = measure(
        lambda carry, number: carry + 1,
        jnp.int32(0),
        [(), ()],
        calls=5,
        repeats=3,
        clock=lambda: next(times),
    )
    assert spread == Spread(median_s=4.0, least_s=2.0, most_s=10.0)
    assert spread.in_microseconds() == {"median": 4e6, "least": 2e6, "most": 10e6}


def test_the_callers_arrays_are_not_donated():
    carry = jnp.zeros(3)
    measure(lambda carry, number: carry + 1, carry, [()], calls=1, repeats=1)
    np.testing.assert_array_equal(carry, 0)


def test_copies_are_read_and_written(monkeypatch):
    def fake(step: Any, carry: Any, turns: Any, **timing: Any) -> Spread:
        assert carry.nbytes == 4000
        return Spread.of([2.0])

    monkeypatch.setattr("benchmarks.kernels.clock.measure", fake)
    assert copy_bandwidth(4000, calls=1, repeats=1) == pytest.approx(4e-6)


def test_bytes_that_must_be_read():
    found = {name: work.num_bytes for name, work in works().items()}
    page = 4 * 4 * 8 * 4  # slots, heads of keys and values, head_dim, bytes
    query = 2 * 3 * 4 * 8 * 4
    # Without a window, 30 tokens are read from 8 pages. A window of 6 that starts at
    # position 27 begins in page 5.
    assert found["attention"] == 2 * 8 * page + 2 * query
    assert found["window"] == 2 * 3 * page + 2 * query
    assert found["greedy"] == 2 * 4 * 64 * 4
    assert found["top-p"] == 2 * 4 * 64 * 4 + 2 * 64 * 4
    assert found["writing"] == 2 * (3 * 2 * 8 * 4)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("case", [SMALL, WINDOW])
def test_invisible_slots_are_poisoned(case, is_ragged):
    work = attention(case, is_ragged=is_ragged)
    pages, table, kv_len = (np.asarray(array) for array in work.turns[0])
    lengths = [15, 29] if is_ragged else [30, 30]
    assert kv_len.tolist() == lengths
    finite = set(zip(*np.nonzero(np.isfinite(pages).all(axis=(2, 3))), strict=True))
    seen = {
        (table[seq, at // 4], at % 4)
        for seq, length in enumerate(lengths)
        for at in range(length)
        if case.window is None or at >= length - 3 - 6 + 1
    }
    assert finite == seen
    assert np.isfinite(work.result(by_reference(work))).all()


def test_each_call_in_a_loop_reads_different_pages():
    work = attention(SMALL, pool_bytes=3 * 2 * 8 * 512)
    pages, table, kv_len = work.turns[0]
    assert pages.shape[0] == 3 * 16
    first, second = (
        work.call(by_reference(work), work.carry, jnp.int32(number), *work.turns[0])
        for number in (0, 1)
    )
    assert np.isfinite(second).all()
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 0.01
    moved = work.call(
        by_reference(work), work.carry, jnp.int32(0), pages[16:], table, kv_len
    )
    np.testing.assert_array_equal(second, moved)


def test_logits_differ_from_call_to_call():
    size = 2 * 4 * 64 * 4
    work = bench_work.sampling(SAMPLED, "greedy", "float32", logit_bytes=3 * size)
    logits = [np.asarray(turn[0]) for turn in work.turns]
    assert len(logits) == 3
    for one, other in itertools.combinations(logits, 2):
        assert (one != other).any()
    many = bench_work.sampling(SAMPLED, "greedy", "float32", logit_bytes=99 * size)
    assert len(many.turns) == bench_work.MAX_TURNS


@pytest.mark.parametrize("name", WORKS)
def test_chain_has_the_requested_number_of_calls(name):
    """Two steps are two calls; the second continues with the first one's result."""
    work, made = works()[name], []

    def run(*arrays: Any, **settings: Any) -> Any:
        made.append(arrays[0])
        return by_reference(work)(*arrays, **settings)

    def two(carry: Any, *arrays: Any) -> Any:
        step = work.step(run)
        return step(step(carry, jnp.int32(0), *arrays), jnp.int32(1), *arrays)

    carry = jax.eval_shape(two, work.carry, *work.turns[0])
    assert len(made) == 2
    assert made[0] is not made[1]
    shapes = [array.shape for array in jax.tree.leaves(carry)]
    assert shapes == [array.shape for array in jax.tree.leaves(work.carry)]


def test_parity_detects_a_wrong_result(monkeypatch):
    make = functools.partial(attention, SMALL)
    planned = bench.Planned("paged_attention", "tiny/x", SMALL, None, make)
    right = bench.compare(planned, "reference")
    assert right == {"error": 0.0, "is_within_tolerance": True}
    true = bench_work.paged_attention
    attention.cache_clear()

    def wrong(*arrays: Any, implementation: str, **settings: Any) -> Any:
        off = 1.0 if implementation == "gpu" else 0.0
        return true(*arrays, implementation="reference", **settings) + jnp.float32(off)

    monkeypatch.setattr(bench_work, "paged_attention", wrong)
    row = bench.compare(planned, "gpu")
    assert row["error"] == pytest.approx(1.0)
    assert not row["is_within_tolerance"]
    attention.cache_clear()
    result = {"rows": [{"operation": "a", "case": "b"} | row]}
    assert bench.failures(result) == ["a b"]


@pytest.mark.parametrize("name", ["attention", "greedy", "writing"])
def test_nan_or_different_result_is_an_error(name):
    work = works()[name]
    result = work.result(by_reference(work))
    assert work.error(result, result) == 0
    bad = jax.tree.map(
        lambda leaf: leaf.at[0].set(jnp.nan if leaf.dtype == jnp.float32 else 99),
        result,
    )
    assert work.error(bad, result) > work.tolerance


def run_quick(tmp_path, *more: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    given = ["--quick", "--rivals", "none", "--output", str(path), *more]
    result = bench.main(given)
    assert json.loads(path.read_text()) == result
    return result


@pytest.mark.slow
def test_quick_run_reports_every_case(tmp_path, capsys):
    result = run_quick(tmp_path, "--case", "tiny/verify*")
    rows = {(row["operation"], row["case"]): row for row in result["rows"]}
    assert sorted(rows) == [
        ("paged_attention", "tiny/verify"),
        ("rejection_sampling", "tiny/verify/greedy"),
        ("rejection_sampling", "tiny/verify/sampled"),
        ("rejection_sampling", "tiny/verify/top-p"),
        ("write_kv_pages", "tiny/verify"),
    ]
    ours = "cpu" if native.is_available() else "reference"
    for row in rows.values():
        assert row["implementation"] == ours
        micros = row["back_to_back_us"]
        assert 0 < micros["least"] <= micros["median"] <= micros["most"]
        gb_per_s = row["num_bytes"] / micros["median"] / 1e3
        assert row["gb_per_s"] == pytest.approx(gb_per_s, abs=0.01)
    assert result["copy_gb_per_s"] > 0
    assert result["command"].endswith("--quick --rivals none --case 'tiny/verify*'")
    assert str(tmp_path) not in json.dumps(result)
    assert {goal["is_met"] for goal in result["goals"]} == {None}
    assert bench.failures(result) == []
    printed = capsys.readouterr().out
    assert printed.count("not measured") == len(result["goals"])
    assert "share_of_copy" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "entry", "failures"),
    [
        (RuntimeError, "failed", ["write_kv_pages tiny/verify"]),
        (NotImplementedError, "skipped", []),
    ],
)
def test_errors_of_a_case_are_reported(
    error, entry, failures, tmp_path, monkeypatch, capsys
):
    def broken(*arrays: Any, **settings: Any) -> None:
        raise error("out of something\nand a page of details")

    monkeypatch.setattr(bench_work, "write_kv_pages", broken)
    more = ["--case", "tiny/verify", "--operation", "write_kv_pages"]
    result = run_quick(tmp_path, *more)
    assert result["rows"][0][entry] == f"{error.__name__}: out of something"
    assert bench.failures(result) == failures
    assert ("FAILED: RuntimeError" in capsys.readouterr().out) == bool(failures)


def test_no_case_starts_after_the_budget(tmp_path):
    result = run_quick(tmp_path, "--case", "tiny/*", "--budget-s", "-1")
    assert {row["skipped"] for row in result["rows"]} == {"not started within -1 s"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "jax has only a CPU here"),
        (
            ["--quick", "--case", "nothing"],
            "'nothing' matches no case of paged_attention",
        ),
        (["--quick", "--calls", "0"], "must be at least 1"),
    ],
)
def test_rejects_arguments_that_cannot_run(arguments, message):
    with pytest.raises(SystemExit, match=message):
        bench.main(arguments)


def test_the_plan_of_a_real_device():
    """On a real device, the benchmark plans all real shapes, goals first.

    Their types are those that the device uses.
    """
    options = bench.make_parser().parse_args([])
    planned = bench.plan(options, "gpu")
    names = [(case.operation, case.name) for case in planned]
    assert len(set(names)) == len(names)
    attends = {name for operation, name in names if operation == "paged_attention"}
    assert attends == set(REAL_CASES)
    is_goal = [case.is_goal for case in planned]
    assert is_goal == sorted(is_goal, reverse=True)
    goals = {(case.operation, case.name) for case in planned if case.is_goal}
    # A page write may have the name of a goal for attention, and is none itself.
    assert goals == {
        ("paged_attention", f"{model}/tp1/{call}")
        for model in ("2b", "9b", "27b")
        for call in ("verify", "decode")
    } | {
        ("rejection_sampling", f"goal/6x256000/{controls}")
        for controls in ("greedy", "sampled", "top-p")
    }
    assert {case.key.split("-")[-1] for case in planned if case.key} == {
        "bfloat16",
        "float32",
    }


def row(operation: str, case: str, name: str, median: float, share: float) -> Any:
    return {
        "operation": operation,
        "case": case,
        "implementation": name,
        "back_to_back_us": {"median": median},
        "share_of_copy": share,
    }


@pytest.mark.parametrize(
    ("verify", "share", "sampling", "is_met"),
    [(115.0, 0.70, 20.0, True), (115.2, 0.69, 20.1, False)],
)
def test_goals_are_computed_from_the_times(verify, share, sampling, is_met):
    """Goals compare attention with a copy, and sampling with one read of the logits."""
    case = f"{bench.GOAL_SAMPLING}/top-p"
    rows = [
        row("paged_attention", "9b/tp1/verify", "gpu", verify, share),
        row("paged_attention", "9b/tp1/decode", "gpu", 100.0, 0.9),
        # These implementations are not ours, so goals do not count their times.
        row("paged_attention", "9b/tp1/verify", "a rival", 1.0, 1.0),
        row("paged_attention", "2b/tp1/verify", "a rival", 1.0, 1.0),
        row("rejection_sampling", case, "gpu", sampling, 0.5),
        row("rejection_sampling", case, READ_ONCE, 10.0, 1.0),
    ]
    found = bench.goals(rows, "gpu")
    measured = {goal["goal"]: goal for goal in found if goal["is_met"] is not None}
    figures = [goal["figure"] for goal in measured.values()]
    assert figures == pytest.approx([share, verify / 100, sampling / 10])
    assert {goal["is_met"] for goal in measured.values()} == {is_met}
    lines = bench.goal_lines(found)
    assert sum(line.lstrip().startswith("not measured") for line in lines) == 6
    word = "met" if is_met else "NOT MET"
    assert sum(line.lstrip().startswith(word) for line in lines) == 3


def test_dense_attention_attends_from_the_last_positions(monkeypatch):
    work, found = attention(WINDOW), []

    def fake(step: Any, carry: Any, turns: Any, **timing: Any) -> Spread:
        found.append((step(carry, jnp.int32(0), *turns[0]), turns[0]))
        return Spread.of([1.0])

    monkeypatch.setattr(bench_work, "measure", fake)
    rival = bench_work.rivals_of(work)["jax dot_product_attention, xla, dense"]
    rival(work, calls=1, repeats=1)
    [(result, (key, value))] = found
    assert key.shape[1] == 6 + 3 - 1  # only positions within the window
    query, key, value = (np.asarray(array) for array in (work.carry, key, value))
    for token, head in np.ndindex(3, 4):
        keys = key[0, : 6 + token, head // 2]
        scores = keys @ query[0, token, head] * 0.3
        weights = np.exp(scores - scores.max())
        truth = weights @ value[0, : 6 + token, head // 2] / weights.sum()
        np.testing.assert_allclose(result[0, token, head], truth, atol=1e-4)


def test_unsupported_rivals_give_the_reason():
    found = bench_work.rivals_of(attention(SMALL))
    with pytest.raises(NotImplementedError, match="one query per sequence"):
        found["jax pallas paged_attention"](attention(SMALL), calls=1, repeats=1)
    one = Case(**vars(WINDOW) | {"queries": 1})
    with pytest.raises(NotImplementedError, match="no sliding window"):
        found["jax pallas paged_attention"](attention(one), calls=1, repeats=1)


def test_rivals_of_sampling_run():
    work = works()["top-p"]
    for rival in bench_work.rivals_of(work).values():
        assert rival(work, calls=1, repeats=1).median_s > 0


def test_table_columns_are_aligned():
    rows = [
        row("paged_attention", "a", "gpu", 1.0, 0.5) | {"same_as": "b"},
        row("paged_attention", "a-long-name", "gpu", 1.0, 0.5) | {"skipped": "why"},
    ]
    for one in rows:
        one["back_to_back_us"] |= {"least": 0.5, "most": 2.0}
    lines = bench.table(rows).splitlines()
    assert len({line.index("gpu") for line in lines[1:]}) == 1
    assert lines[1].endswith("the shapes of b")
    assert "1.0 (0.5-2.0)" in lines[1]
    assert lines[2].endswith("why")

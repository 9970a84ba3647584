"""Goals are told as they are; rivals do the same work, or say why they cannot."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import bench
from benchmarks.kernels import work as bench_work
from benchmarks.kernels.clock import Spread
from benchmarks.kernels.work import READ_ONCE
from jaxspec_kernels.paged_attention.cases import Case
from tests.kernels.test_bench import SAMPLED, SMALL, WINDOW, attention


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
def test_goals(verify, share, sampling, is_met):
    """Verifying and decoding, a share of the copy, sampling against one read of 10."""
    case = f"{bench.GOAL_SAMPLING}/top-p"
    rows = [
        row("paged_attention", "9b/tp1/verify", "gpu", verify, share),
        row("paged_attention", "9b/tp1/decode", "gpu", 100.0, 0.9),
        # Neither of these is ours.
        row("paged_attention", "9b/tp1/verify", "a rival", 1.0, 1.0),
        row("paged_attention", "2b/tp1/verify", "a rival", 1.0, 1.0),
        row("rejection_sampling", case, "gpu", sampling, 0.5),
        row("rejection_sampling", case, READ_ONCE, 10.0, 1.0),
    ]
    found = bench.goals(rows, "gpu")
    told = {goal["goal"]: goal for goal in found if goal["is_met"] is not None}
    figures = [goal["figure"] for goal in told.values()]
    assert figures == pytest.approx([share, verify / 100, sampling / 10])
    assert {goal["is_met"] for goal in told.values()} == {is_met}
    lines = bench.goal_lines(found)
    assert sum(line.lstrip().startswith("not measured") for line in lines) == 6
    word = "met" if is_met else "NOT MET"
    assert sum(line.lstrip().startswith(word) for line in lines) == 3


def captured(monkeypatch, rival: Any, work: bench_work.Work) -> Any:
    """The result of one step of a rival."""
    found = []

    def fake(step: Any, carry: Any, turns: Any, **timing: Any) -> Spread:
        found.append((step(carry, jnp.int32(0), *turns[0]), turns[0]))
        return Spread.of([1.0])

    monkeypatch.setattr(bench_work, "measure", fake)
    rival(work, calls=1, repeats=1)
    return found[0]


def test_dense_attention_attends_from_the_last_positions(monkeypatch):
    work = attention(WINDOW)
    rival = bench_work.rivals_of(work)["jax dot_product_attention, xla, dense"]
    result, (key, value) = captured(monkeypatch, rival, work)
    assert key.shape[1] == 6 + 3 - 1  # only what the window reaches
    query, key, value = (np.asarray(array) for array in (work.carry, key, value))
    for token, head in np.ndindex(3, 4):
        keys = key[0, : 6 + token, head // 2]
        scores = keys @ query[0, token, head] * 0.3
        weights = np.exp(scores - scores.max())
        truth = weights @ value[0, : 6 + token, head // 2] / weights.sum()
        np.testing.assert_allclose(result[0, token, head], truth, atol=1e-4)


def test_rivals_that_do_not_fit_say_why():
    found = bench_work.rivals_of(attention(SMALL))
    with pytest.raises(NotImplementedError, match="one query per sequence"):
        found["jax pallas paged_attention"](attention(SMALL), calls=1, repeats=1)
    one = Case(**vars(WINDOW) | {"queries": 1})
    with pytest.raises(NotImplementedError, match="no sliding window"):
        found["jax pallas paged_attention"](attention(one), calls=1, repeats=1)


def test_rivals_of_sampling_run():
    work = bench_work.sampling(SAMPLED, "top-p", "float32", logit_bytes=0)
    for rival in bench_work.rivals_of(work).values():
        assert rival(work, calls=1, repeats=1).median_s > 0


def test_a_table_aligns_its_columns():
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

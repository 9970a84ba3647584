"""The sweep over a fake device, and the answer it gives in words."""

import json
from typing import Any

import pytest

from jaxspec.bench import spec
from jaxspec.bench.figures import form
from jaxspec.bench.figures.picture import picture
from jaxspec.bench.spec import Cell, answer, cell_table
from jaxspec.errors import ConfigError
from tests.bench.workloads import flags, line_in, use_fake_engine

SMALL = ("--output-len", 12, "--num-iters", 2)


def cell(size: int, count: int, speed_up: float, **changes: Any) -> Cell:
    values: dict[str, Any] = dict(
        temperature=0.0,
        batch_size=size,
        num_draft_tokens=count,
        speed_up=speed_up,
        least=speed_up - 0.01,
        most=speed_up + 0.01,
        num_runs=3,
        tokens_per_s=100.0,
        acceptance_rate=0.7,
    )
    return Cell(**(values | changes))


def test_a_sweep_measures_every_k_batch_and_temperature(monkeypatch, tmp_path, capsys):
    use_fake_engine(monkeypatch)
    path, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    sweep = ("--batch-sizes", 1, 2, "--temperatures", 0, 1, "--output-json", path)
    spec.run(flags("spec", *SMALL, *sweep, "--plot", drawn))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    places = [(one["temperature"], one["batch_size"]) for one in found["points"]]
    assert places == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for point in found["points"]:
        assert list(point["by_num_draft_tokens"]) == ["1", "2", "3"]
        for k, one in point["by_num_draft_tokens"].items():
            ceiling = one["ceiling"]
            assert len(ceiling["conditional_rates"]) == int(k)
            assert ceiling["measured"]["cost_ratio"] == pytest.approx(0.2)
            assert one["decode_speed_up"]["least"] <= one["decode_speed_up"]["median"]
            assert one.get("is_equal") == (True if point["temperature"] == 0 else None)
            # No round proposed more than it was asked to.
            drafted = one["acceptance"]
            most = int(k) * drafted["num_drafts"]
            assert 0 < drafted["num_draft_tokens"] <= most
        assert "acceptance" not in point["plain"]
    told = [(part["num_seqs"], part["num_draft_tokens"]) for part in found["parts"]]
    assert told == [(size, k) for size in (1, 2) for k in (0, 1, 2, 3)]
    assert len(found["answer"]) == 3
    assert "\n".join(found["answer"]) in printed
    assert "temperature 1, batch 2: ceiling at this acceptance, K = " in printed
    assert form.described(picture(found)) in drawn.read_text(encoding="utf-8")


def test_some_values_of_k(monkeypatch):
    use_fake_engine(monkeypatch)
    sweep = ("--batch-sizes", 1, "--temperatures", 0, "--draft-tokens", 3, 1)
    (found,) = spec.run(flags("spec", *SMALL, *sweep))
    assert list(found["points"][0]["by_num_draft_tokens"]) == ["1", "3"]


def test_the_answer_says_that_acceptance_is_forced(monkeypatch, capsys):
    use_fake_engine(monkeypatch, forced_acceptance=0.5)
    sweep = ("--batch-sizes", 1, "--temperatures", 0, "--draft-tokens", 2)
    (found,) = spec.run(flags("spec", *SMALL, *sweep))
    printed = capsys.readouterr().out
    assert found["forced_acceptance"] == pytest.approx([0.5] * 3)
    assert "is_equal" not in found["points"][0]["by_num_draft_tokens"]["2"]
    assert printed.startswith("ACCEPTANCE IS FORCED (synthetic)")
    assert found["answer"][-1].startswith("ACCEPTANCE IS FORCED (synthetic)")


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (("--draft-tokens", 4), {}, "--draft-tokens must be from 1 to"),
        ((), {"num_draft_tokens": 0}, "name no drafts"),
    ],
)
def test_what_cannot_be_measured(arguments, changes, said, monkeypatch):
    use_fake_engine(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=said):
        spec.run(flags("spec", *SMALL, *arguments))


def test_the_answer_names_the_best_k_and_where_it_ends():
    cells = [
        *(cell(1, 2, 1.8), cell(1, 5, 2.1)),
        *(cell(4, 2, 1.3), cell(4, 5, 1.2)),
        *(cell(16, 2, 0.97), cell(16, 5, 0.8)),
    ]
    first, last = answer(cells)
    assert first == (
        "Temperature 0: speculation pays: K = 5 at batch 1 (2.10 times plain, 2.09 to "
        "2.11 in 3 runs), K = 2 at batch 4 (1.30 times plain, 1.29 to 1.31 in 3 runs). "
        "From batch 16 on it does not (0.97 times plain, 0.96 to 0.98 in 3 runs): "
        "--speculative-disable-by-batch-size 4 turns it off above "
        "batch 4."
    )
    assert last.startswith("A K pays here when")


def test_the_answer_where_it_never_stops_paying_and_where_it_never_pays():
    cells = [cell(1, 2, 1.8), cell(4, 2, 1.3)]
    (first, _) = answer(cells)
    assert first.endswith("No batch was found at which it stops paying, up to 4.")
    losing = [cell(1, 2, 0.9, temperature=1.0), cell(8, 3, 0.95, temperature=1.0)]
    both = answer(cells + losing)
    assert len(both) == 3
    assert both[1] == (
        "Temperature 1: speculation does not pay at batch 1, 8; the best was 0.95 "
        "times plain, 0.94 to 0.96 in 3 runs, with K = 3 at batch 8."
    )


def test_answer_is_unclear_where_repeats_differ():
    (first, _) = answer([cell(1, 2, 0.95, least=0.8, most=1.3)])
    assert first == (
        "Temperature 0: these runs do not tell whether speculation pays. Unclear at "
        "batch 1 (0.95 times plain, 0.80 to 1.30 in 3 runs): give more --num-iters, on "
        "a quiet machine."
    )
    cells = [cell(1, 2, 1.5), cell(4, 2, 1.1, least=0.9, most=1.3), cell(8, 2, 0.8)]
    (first, _) = answer(cells)
    assert "Unclear at batch 4" in first
    assert "--speculative-disable-by-batch-size 4" in first


def test_a_batch_in_the_middle_that_does_not_pay_is_told():
    (first, _) = answer([cell(1, 2, 1.5), cell(2, 2, 0.9), cell(4, 2, 1.2)])
    assert "It does not at batch 2." in first
    assert first.endswith("up to 4.")


@pytest.mark.parametrize(
    ("speed_up", "least", "pays"),
    [(1.5, 1.2, True), (1.5, 0.99, False), (1.01, 1.005, False), (1.02, 1.01, True)],
)
def test_what_pays(speed_up, least, pays):
    assert cell(1, 1, speed_up, least=least).pays is pays


def test_the_table_has_a_row_for_every_place():
    cells = [
        *(cell(1, 2, 1.8), cell(1, 5, 2.1, acceptance_rate=0.5)),
        cell(4, 2, 1.3, temperature=0.8, acceptance_rate=None),
    ]
    assert cell_table(cells).splitlines()[1:] == [
        "temperature, batch  K = 2  K = 5  acceptance",
        "0, 1                 1.80   2.10       0.500",
        "0.8, 4               1.30      -           -",
    ]

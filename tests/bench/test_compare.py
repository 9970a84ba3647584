"""Comparison of forms on a fake device."""

import dataclasses
import json
from typing import Any

import pytest

from jaxspec.bench import compare, spec
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.compare import (
    Form,
    answer,
    entry_table,
    ranks_of,
    round_cost,
)
from jaxspec.bench.parts import Parts
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import Place, leaf_paths, read_paths
from jaxspec.errors import ConfigError
from tests.bench.workloads import cell, flags, line_in, use_fake_engine

TREE = "[(0,), (1,), (0, 0), (1, 0)]"
GIVEN = SpeculativeConfig(model="draft", num_speculative_tokens=3)
SMALL = ("--output-len", 12, "--num-iters", 1, "--batch-sizes", 1)
GREEDY = ("--temperatures", 0)


@pytest.mark.parametrize(
    ("name", "drafts", "levels", "leaves"),
    [
        ("chain", 3, 3, 0),
        ("chain=2", 2, 2, 0),
        ("leaves", 6, 3, 1),
        ("leaves=2", 9, 3, 2),
        (TREE, 4, 2, 0),
        ("best=4", 4, 2, 0),
    ],
)
def test_form_changes_only_the_tree(name, drafts, levels, leaves):
    for given in (GIVEN, dataclasses.replace(GIVEN, num_side_leaves=3)):
        found = Form.read(name).of(given, TREE)
        assert found.model == "draft"
        assert (found.num_levels, found.num_side_leaves) == (levels, leaves)
        assert found.num_nodes == drafts


def test_measures_every_form_and_chooses_tree(monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch)
    monkeypatch.setattr(compare, "MIN_COMPARED", 1)
    path, named = tmp_path / "out.json", ("chain", "leaves=2", TREE, "best=5")
    arguments = (*SMALL, "--temperatures", 0, 1, "--output-json", path)
    arguments += ("--num-prompts", 2)  # the batches run one after the other
    spec.run(flags("spec", *arguments, "--forms", *named))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert len(opened) == len(named)
    assert [one["form"] for one in found["forms"]] == list(named)
    assert [one["num_nodes"] for one in found["forms"][:3]] == [3, 9, 4]
    for one in found["forms"]:
        for temperature, point in zip((0, 1), one["points"], strict=True):
            assert point["temperature"] == temperature
            assert len(point["speculative"]["elapsed_s"]) == 2
            # The fake device never accepts a side branch, so both ways of counting
            # agree.
            drafted = point["speculative"]["acceptance"]
            assert point["tokens_per_round"] == drafted["mean_acceptance_length"]
            assert point.get("is_equal") == (None if temperature else True)
        nodes = [part["num_nodes"] for part in one["parts"]]
        assert nodes == [0, one["num_nodes"]]
    # The best tree has no node that was never accepted.
    best = read_paths(found["forms"][3]["speculative_token_tree"])
    assert best in {leaf_paths(levels, 0) for levels in range(1, 4)}
    assert found["forms"][3]["speculative_token_tree"] in printed
    assert "\n".join(found["answer"]) in printed


@pytest.mark.parametrize(
    ("arguments", "changes", "field"),
    [
        (("--forms", "chain", "best", "--no-parts"), {}, "--parts"),
        (("--forms", "chain"), {"num_draft_tokens": 0}, "speculative_model"),
        (("--forms", "best"), {}, "--forms"),
        (("--forms", TREE, "best"), {}, "--forms"),
        (("--forms", "best=65"), {}, "--forms"),
    ],
)
def test_rejects_forms_that_cannot_be_compared(arguments, changes, field, monkeypatch):
    use_fake_engine(monkeypatch, **changes)
    with pytest.raises(ConfigError) as caught:
        spec.run(flags("spec", *SMALL, *GREEDY, *arguments))
    assert caught.value.parameter == field


def test_few_comparisons_choose_no_tree(monkeypatch, capsys):
    use_fake_engine(monkeypatch)
    monkeypatch.setattr(compare, "MIN_COMPARED", 10**9)
    (found,) = spec.run(flags("spec", *SMALL, *GREEDY, "--forms", "chain", "best"))
    printed = capsys.readouterr().out
    assert "best: skipped: plain decoding was faster." in printed
    assert [one["form"] for one in found["forms"]] == ["chain"]


def parts(num_levels: int, num_nodes: int, draft_ms: float, verify_ms: float) -> Parts:
    seconds: Any = dict(draft_s=draft_ms / 1e3, verify_s=verify_ms / 1e3, accept_s=0.0)
    sizes = dict(num_seqs=1, num_draft_tokens=num_levels, num_nodes=num_nodes)
    return Parts(**sizes, **seconds, num_bytes=1)


def test_round_cost_is_interpolated():
    timed = [
        (parts(0, 0, 0, 4.0), False),
        (parts(4, 4, 8, 5.0), False),
        (parts(4, 12, 8, 9.0), False),
        # By noise, a smaller tree took longer than a larger one.
        (parts(2, 8, 12, 10.0), True),
    ]
    seconds = round_cost(timed)
    assert seconds(0, 0, False) == pytest.approx(4e-3)
    assert seconds(4, 4, False) == pytest.approx(8e-3 + 5e-3)
    assert seconds(2, 2, False) == pytest.approx(4e-3 + 4.5e-3)
    assert seconds(3, 8, True) == pytest.approx(18e-3 + 10e-3)
    assert seconds(4, 12, False) == pytest.approx(8e-3 + 10e-3)
    sizes = [seconds(4, count, False) for count in range(4, 65)]
    assert sizes == sorted(sizes)
    # No tree with side paths was timed, so draft passes are assumed to grow like the
    # target's.
    assert round_cost(timed[:3])(2, 12, True) == pytest.approx(4e-3 * 9 / 4 + 9e-3)
    # Beyond the largest timed tree, the last slope continues.
    assert round_cost(timed[:3])(4, 20, False) == pytest.approx(8e-3 + 13e-3)


def test_acceptance_by_position_of_a_chain_becomes_rank_0_at_each_depth():
    accepted = Acceptance(num_drafts=10, num_accepted=12, per_position=(8, 3, 1))
    assert ranks_of(GIVEN, accepted) == {
        Place(False, 1, 0): (10, 8),
        Place(False, 2, 0): (8, 3),
        Place(False, 3, 0): (3, 1),
    }


def entry(name: str, speed_up: float, **changes: Any) -> dict[str, Any]:
    """Make an entry of a result with one point."""
    point = cell("all", speed_up, speed_up)
    return {
        "form": name,
        "num_levels": 3,
        "num_nodes": 6 if name.startswith("leaves") else 3,
        "memory_bytes": changes.pop("memory_bytes", None),
        "points": [point | changes],
    }


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [entry("chain", 1.5), entry("chain=5", 1.8), entry("leaves=1", 1.9)],
            "choose leaves=1, 1.90 times as fast as plain decoding; the next is "
            "chain=5, 1.80 times.",
        ),
        (
            [entry("chain", 1.8), entry("leaves=1", 1.81), entry("leaves=2", 1.7)],
            "choose chain, 1.80 times as fast as plain decoding; the next is "
            "leaves=1, 1.81 times.",
        ),
        (
            [entry("chain", 0.9), entry("leaves", 1.0)],
            "use no drafts; leaves would be 1.00 times as fast as plain decoding.",
        ),
        ([entry("ngram", 1.3)], "choose ngram, 1.30 times as fast as plain decoding."),
    ],
)
def test_answer_names_what_to_choose(entries, message):
    first, last = answer(entries)
    assert first.startswith(f"Temperature 0, batch 1: {message}")
    assert last.startswith(
        "Shapes with side branches are chosen only if they are at least 1.02"
    )


def test_table_has_a_row_for_every_point():
    entries = [
        entry("ngram", 1.1, memory_bytes=3 * 2**19),
        # An entry with neither acceptance nor a decoding speed.
        entry("chain", 0.9, temperature=0.8, speculative={}),
        entry("leaves", 1.9, batch_size=4),
    ]
    rows = [row.split()[2:] for row in entry_table(entries).splitlines()[2:]]
    drafted = ["0.90", "0.50", "2.40", "25.00", "20.00"]
    assert rows == [
        ["ngram", "3", "3", *drafted, "1.10", "1.00", "1.5"],
        ["leaves", "3", "6", *drafted, "1.90", "1.80", "-"],
        ["chain", "3", "3", "-", "2.40", "-", "20.00", "0.90", "0.80", "-"],
    ]

"""Forms of drafts over a fake device: which are measured, chosen and told."""

import dataclasses
import json
import math
from typing import Any

import pytest

from jaxspec.bench import forms, spec
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.forms import Cell, Form, answer, cell_table, round_cost
from jaxspec.bench.parts import Parts
from jaxspec.bench.summary import rank_table, ranks_of
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import Place, leaf_paths, read_paths
from jaxspec.errors import ConfigError
from tests.bench.workloads import flags, line_in, use_fake_engine

TREE = "[(0,), (1,), (0, 0), (1, 0)]"
GIVEN = SpeculativeConfig(model="draft", num_speculative_tokens=3)
SMALL = ("--output-len", 24, "--num-iters", 1, "--batch-sizes", 1)
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
def test_a_form_is_of_the_same_drafts(name, drafts, levels, leaves):
    for given in (GIVEN, dataclasses.replace(GIVEN, num_side_leaves=3)):
        found = Form.read(name).of(given, TREE)
        assert found.model == "draft"
        assert (found.num_levels, found.num_side_leaves) == (levels, leaves)
        assert found.num_nodes == drafts


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("bush", "--forms"),
        ("leaves=0", "--forms"),
        ("leaves=x", "--forms"),
        ("best=65", "--forms"),
        ("dynamic=16", "--forms"),
        ("[(0,), (1, 0)]", "speculative_token_tree"),
    ],
)
def test_what_is_no_form_is_told(name: str, field: str):
    with pytest.raises(ConfigError) as caught:
        Form.read(name)
    assert caught.value.parameter == field


def test_every_form_is_measured_and_a_tree_is_chosen(monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch)
    monkeypatch.setattr(forms, "LEAST_COMPARED", 1)
    path = tmp_path / "out.json"
    named = ("chain", "leaves=2", TREE, "best=5")
    arguments = (*SMALL, "--temperatures", 0, 1, "--output-json", path)
    arguments += ("--num-prompts", 2)  # one after the other
    spec.run(flags("spec", *arguments, "--forms", *named))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert len(opened) == len(named)
    assert [one["form"] for one in found["forms"]] == list(named)
    assert [one["num_nodes"] for one in found["forms"][:3]] == [3, 9, 4]
    for one in found["forms"]:
        assert [point["temperature"] for point in one["points"]] == [0, 1]
        for point in one["points"]:
            # Nothing beside the chain is ever kept here.
            assert len(point["speculative"]["elapsed_s"]) == 2
            drafted = point["speculative"]["acceptance"]
            assert point["tokens_per_round"] == drafted["mean_acceptance_length"]
            assert point.get("is_equal") == (
                True if point["temperature"] == 0 else None
            )
            for hits in point["ranks"]:
                assert 0 < hits["compared"] >= hits["kept"]
                if hits["rank"] or hits["is_side"]:
                    assert hits["kept"] == 0
        nodes = [part["num_nodes"] for part in one["parts"]]
        assert nodes == [0, one["num_nodes"]]
    # What nobody wanted is not in the tree; nor does the fake device charge for rows.
    best = read_paths(found["forms"][3]["speculative_token_tree"])
    assert best in {leaf_paths(levels, 0) for levels in range(1, 4)}
    assert found["forms"][3]["speculative_token_tree"] in printed
    assert "\n".join(found["answer"]) in printed
    assert "temperature 0, batch 1: what the target wanted" in printed


@pytest.mark.parametrize(
    ("arguments", "changes", "field"),
    [
        (("--forms", "chain", "--draft-tokens", 2), {}, "--draft-tokens"),
        (("--forms", "chain", "--plot", "x.svg"), {}, "--plot"),
        (("--forms", "chain", "best", "--no-parts"), {}, "--parts"),
        (("--forms", "chain", "--num-prompts", -1), {}, "--num-prompts"),
        (("--forms", "chain"), {"num_draft_tokens": 0}, "speculative_model"),
        (("--forms", "best"), {}, "--forms"),
        (("--forms", TREE, "best"), {}, "--forms"),
    ],
)
def test_what_cannot_be_compared(arguments, changes, field, monkeypatch):
    use_fake_engine(monkeypatch, **changes)
    with pytest.raises(ConfigError) as caught:
        spec.run(flags("spec", *SMALL, *GREEDY, *arguments))
    assert caught.value.parameter == field


def test_no_tree_is_chosen_from_what_was_seen_too_seldom(monkeypatch, capsys):
    use_fake_engine(monkeypatch)
    monkeypatch.setattr(forms, "LEAST_COMPARED", 10**9)
    (found,) = spec.run(flags("spec", *SMALL, *GREEDY, "--forms", "chain", "best"))
    printed = capsys.readouterr().out
    assert "best: no drafts, by what was measured before it." in printed
    assert [one["form"] for one in found["forms"]] == ["chain"]


def parts(num_levels: int, num_nodes: int, draft_ms: float, verify_ms: float) -> Parts:
    return Parts(
        num_seqs=1,
        num_draft_tokens=num_levels,
        num_nodes=num_nodes,
        draft_s=draft_ms / 1e3,
        verify_s=verify_ms / 1e3,
        accept_s=0.0,
        num_bytes=1,
        num_flops=1,
    )


def test_rounds_cost_what_was_timed_and_lie_on_lines_between():
    timed = [
        (parts(0, 0, 0, 4.0), False),
        (parts(4, 4, 8, 5.0), False),
        (parts(4, 12, 8, 9.0), False),
        # A smaller tree that took longer: noise.
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
    # Without a tree with side paths, its passes grow as the target's do.
    assert round_cost(timed[:3])(2, 12, True) == pytest.approx(4e-3 * 9 / 4 + 9e-3)
    # Beyond what was timed it goes on as it did before.
    assert round_cost(timed[:3])(4, 20, False) == pytest.approx(8e-3 + 13e-3)


def cell(form: str, speed_up: float, **changes: Any) -> Cell:
    values: dict[str, Any] = dict(
        form=form,
        temperature=0.0,
        batch_size=1,
        num_levels=3,
        num_nodes=3 if form.startswith("chain") else 6,
        tokens_per_round=2.5,
        round_s=0.004,
        plain_round_s=0.003,
        speed_up=speed_up,
        least=speed_up - 0.1,
        acceptance=Acceptance(),
    )
    return Cell(**(values | changes))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [cell("chain", 1.5), cell("chain=5", 1.8), cell("leaves=1", 1.9)],
            "leaves=1, 1.90 times as fast; of chains chain=5, 1.80 times as fast.",
        ),
        (
            [cell("chain", 1.8), cell("leaves=1", 1.81), cell("leaves=2", 1.7)],
            "chain, 1.80 times as fast; of the others leaves=1, 1.81.",
        ),
        ([cell("chain", 0.9), cell("leaves", 1.0)], "no drafts; leaves would be 1.00"),
        ([cell("leaves", 1.3)], "leaves, 1.30 times as fast; no chain was measured."),
        ([cell("chain", 1.3)], "chain, 1.30 times as fast; nothing else was measured."),
    ],
)
def test_the_answer_names_the_form_to_choose(cells, said):
    first, last = answer(cells)
    assert first.startswith(f"Temperature 0, batch 1: {said}")
    assert last.startswith("A form is chosen over the fastest chain for 1.02")


def test_the_table_has_a_row_for_every_form():
    cells = [
        cell("chain", 1.8),
        cell(TREE + " and more", 1.7, temperature=0.8, round_s=None),
        cell("leaves", 1.9, batch_size=4),
    ]
    assert cell_table(cells).splitlines()[1:] == [
        "temperature, batch, form          drafts  tokens/round  round, ms  plain, ms"
        "  speed-up  least",
        "0, 1, chain                            3          2.50       4.00       3.00"
        "      1.80   1.70",
        "0, 4, leaves                           6          2.50       4.00       3.00"
        "      1.90   1.80",
        "0.8, 1, [(0,), (1,), (0, 0), ...       6          2.50          -       3.00"
        "      1.70   1.60",
    ]


def test_acceptance_adds_up_with_what_came_from_beside():
    one = Acceptance(num_drafts=4, num_accepted=6, num_beside=2, tree_ends={(3, 1): 4})
    other = Acceptance(num_drafts=1, tree_ends={(3, 1): 1, (3, 0): 2})
    both = one + other
    assert both.tokens_per_round == 1 + (6 + 2) / 5
    assert both.tree_ends == {(3, 1): 5, (3, 0): 2}
    assert (both - other).tree_ends == one.tree_ends
    assert math.isclose(one.mean_length, 2.5)


def test_ranks_of_a_chain_are_its_positions():
    kept = Acceptance(num_drafts=10, num_accepted=12, per_position=(8, 3, 1))
    ranks = ranks_of(GIVEN, kept)
    assert ranks == {
        Place(False, 1, 0): (10, 8),
        Place(False, 2, 0): (8, 3),
        Place(False, 3, 0): (3, 1),
    }
    assert rank_table(ranks).splitlines() == [
        "after, depth  rank 0  of",
        "chain, 1       0.800  10",
        "chain, 2       0.375   8",
        "chain, 3       0.333   3",
    ]

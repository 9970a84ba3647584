"""What programs cost: which ones a server begins with, and how they are told."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import compile_costs
from benchmarks.compile_costs import (
    KEY,
    RESULT,
    in_order,
    merged,
    num_before,
    programs,
    server_config,
    table,
    text_of,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_server_answers_after_one_program_and_drafts_after_two(scan_layers):
    """Of 9B with a 2B draft on a v5e-8: the goal is two at most."""
    config = server_config("v5e-8", "9b", "2b", scan_layers=scan_layers)
    assert config.model_config.scan_layers == scan_layers
    assert num_before(config, has_drafts=False) == 1
    assert num_before(config, has_drafts=True) == 2
    first, second, *_ = programs(config)
    assert first.chunk and first.num_draft_tokens == compile_costs.NUM_DRAFT_TOKENS
    assert second.is_catch_up


def test_a_server_without_a_draft_begins_with_one_program():
    config = server_config("v6e-1", "2b", None, scan_layers=False)
    assert num_before(config, has_drafts=False) == 1
    assert not any(one.num_draft_tokens for one in programs(config))


def make_row(**changes: Any) -> dict[str, Any]:
    row = {
        "devices": "v5e-8",
        "target": "9b",
        "draft": "2b",
        "program": "256x5+2048_sampled",
        "scan_layers": False,
        "programs_before_answer": 1,
        "programs_before_drafts": 2,
        "lower_cpu_s": 9.6,
        "compile_cpu_s": 60.2,
        "lowered_ops": 25_000,
        "compiled_ops": 52_000,
        "num_arguments": 704,
        "temp_bytes": 87_000_000,
        "code_bytes": 107_000_000,
    }
    return row | changes


def test_both_forms_of_a_program_are_in_one_line():
    scanned = make_row(scan_layers=True, lower_cpu_s=2.2, num_arguments=62)
    alone = make_row(program="catch-up+2048", draft=None, programs_before_drafts=None)
    lines = table([make_row(), scanned, alone]).splitlines()[2:]
    assert lines == [
        "| v5e-8 | 9b with 2b | 256x5+2048_sampled | 10+60, 2+60 | 25,000, 25,000 | "
        "52,000, 52,000 | 704, 62 | 87, 87 | 107, 107 | 1, 2 |",
        "| v5e-8 | 9b | catch-up+2048 | 10+60, - | 25,000, - | 52,000, - | 704, - | "
        "87, - | 107, - | 1, - |",
    ]


def test_a_row_that_is_measured_again_takes_its_place():
    rows = [make_row(), make_row(scan_layers=True)]
    again = make_row(compile_cpu_s=1.0)
    assert merged(rows, again) == [again, rows[1]]
    other = make_row(devices="v6e-1")
    assert merged(rows, other) == [*rows, other]


def test_the_readme_has_the_recorded_table():
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    assert len({tuple(row[name] for name in KEY) for row in rows}) == len(rows)
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert table(rows) in readme


def test_rows_stand_in_the_order_of_the_servers():
    first, second = make_row(devices="h100"), make_row(program="catch-up+256")
    last = make_row(target="27b")
    assert in_order([last, second, first]) == [first, second, last]


class Unreadable:
    """A compiled program whose text jax refuses."""

    def __init__(self, message: str):
        self.message = message

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_text_that_jax_cannot_read_is_none():
    assert (
        text_of(Unreadable("INTERNAL: async-update instruction should have 1")) is None
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        text_of(Unreadable("out of memory"))
    row = make_row(compiled_ops=None)
    assert "| 25,000, - | ?, - |" in table([row])


@pytest.mark.parametrize("server", compile_costs.SERVERS)
def test_the_programs_by_default_are_the_first_and_those_of_the_most_sequences(server):
    config = server_config(*server, scan_layers=False)
    every = programs(config)
    places = [number for number in compile_costs.PROGRAMS if number <= len(every)]
    chosen = [every[number - 1] for number in places]
    rounds = [one for one in chosen[2:] if one not in chosen[:2]]
    assert all(one.num_seqs == config.max_num_seqs for one in rounds)
    assert not any(one.chunk for one in rounds)
    found = [(one.num_draft_tokens, one.features.is_greedy) for one in rounds]
    plain, drafting = (0, True), compile_costs.NUM_DRAFT_TOKENS
    if server[2] is None:
        assert found == [plain]
    else:
        assert found == [(drafting, False), (drafting, True), plain]
        assert chosen[1].is_catch_up

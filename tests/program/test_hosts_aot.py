"""27B with a 2B draft over four hosts is one executable; the draft sums within each.

Compiled for sixteen TPUs that are not there; nothing has run on them.
"""

from typing import Any

import pytest

from tests.kernels import aot_tpu
from tests.program import aot_hosts
from tests.program.aot_hosts import CELLS, EXAMPLE, NUM_CHIPS, NUM_HOSTS, RECORD
from tests.program.aot_record import FOLDER

RECORDED = RECORD.read()
README = FOLDER.parent / "README.md"
HBM_BYTES = int(15.75 * 2**30)
# Beside arguments: logits of a sixteenth of the vocabulary, and what is fetched ahead.
PEAK_BYTES = 2**29
# Of each layer after attention and after the feed-forward part.
LAYER_SUMS = 2
# The embedding, and two to choose among a divided vocabulary.
OTHER_SUMS = 3


def check(row: dict[str, Any]) -> None:
    cell = CELLS[row["name"]]
    chips = NUM_CHIPS // NUM_HOSTS
    assert row["processes"] == [
        host for host in range(NUM_HOSTS) for _ in range(chips)
    ], "those of a host are side by side, the leader's first"
    assert row["executables"] == 1, "one for all hosts"
    assert row["hbm_bytes"] < HBM_BYTES
    assert row["peak_bytes"] < PEAK_BYTES
    assert row["donated_bytes"] >= row["state_bytes"]
    assert row["copied"] == [], "nothing is copied"
    target, draft = (
        layers or whole for layers, whole in zip(cell.layers, (46, 26), strict=True)
    )
    of_target = LAYER_SUMS * target + OTHER_SUMS
    # Twice in the text: the draft's first pass, and the loop of the others.
    of_draft = 2 * (LAYER_SUMS * draft + OTHER_SUMS)
    if cell.draft_devices == chips:
        assert row["groups"] == {
            f"all-reduce over {NUM_CHIPS}": of_target,
            f"all-reduce over {chips}": of_draft,
        }, "the draft's sums stay within a host"
    else:
        # 2B has four KV heads and eight query heads: its attention is whole on each of
        # sixteen chips, and sums are after the feed-forward part alone.
        of_draft -= 2 * draft
        assert row["groups"] == {f"all-reduce over {NUM_CHIPS}": of_target + of_draft}


def test_every_program_is_recorded():
    assert list(RECORDED) == list(CELLS)
    for row in RECORDED.values():
        check(row)
    assert aot_hosts.tell(RECORDED) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executables": 2}, "one for all hosts"),
        ({"copied": ["copy bf16[65536,2,128]"]}, "nothing is copied"),
        ({"processes": [0, 1] * 8}, "side by side"),
        ({"groups": {"all-reduce over 16": 21}}, "within a host"),
    ],
)
def test_a_program_that_does_more_is_refused(change: dict[str, Any], message: str):
    row = RECORDED[EXAMPLE]
    check(row)
    with pytest.raises(AssertionError, match=message):
        check(row | change)


@pytest.mark.aot
def test_an_example_compiles():
    _compile(EXAMPLE)


@pytest.mark.aot
@pytest.mark.battery(name="hosts")
@pytest.mark.parametrize("name", [one for one in CELLS if one != EXAMPLE])
def test_it_compiles(name: str):
    _compile(name)


def _compile(name: str) -> None:
    if aot_tpu.MISSING is not None:
        pytest.skip(aot_tpu.MISSING)
    check(aot_hosts.measure(name))

"""Training heads for 9B fits eight TPUs, copies no state, and has few collectives.

Programs are compiled without the devices; nothing runs.
"""

from typing import Any

import pytest

from tests.kernels import aot_tpu
from tests.program.aot_record import FOLDER
from tests.train import aot_train
from tests.train.aot_train import CELLS, EXAMPLE, RECORD, SHORT

RECORDED = RECORD.read()
PAGE = FOLDER.parent / "compilers.md"
HBM_BYTES = int(15.75 * 2**30)


def check(row: dict[str, Any]) -> None:
    cell = CELLS[row["name"]]
    assert (row["rows"], row["length"]) == (cell.rows, cell.length), "its size"
    for program in ("states", "step"):
        assert row[program]["executables"] == 1
    assert aot_train.peak(row) < HBM_BYTES
    # A head is small compared with the target, although the optimizer's moments take
    # twice its size.
    assert 0 < row["state_bytes"] < 2 * row["target_bytes"]
    assert row["step"]["donated_bytes"] >= row["state_bytes"], "updated in place"
    shapes = [*row["states"]["collectives"], *row["step"]["collectives"]]
    assert shapes, "chips share the work"
    assert not [name for name in shapes if "256000" in name], (
        "no logits of a whole vocabulary go from chip to chip"
    )


def test_every_program_is_recorded():
    assert list(RECORDED) == list(CELLS)
    for row in RECORDED.values():
        check(row)
    assert aot_train.make_table(RECORDED) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_bytes": HBM_BYTES}, "peak"),
        ({"step": {"executables": 1, "donated_bytes": 0}}, "in place"),
        ({"rows": 1}, "its size"),
    ],
)
def test_program_beyond_its_limits_fails(change: dict[str, Any], message: str):
    row = RECORDED[EXAMPLE]
    check(row)
    changed = {
        key: row[key] | value if isinstance(value, dict) else value
        for key, value in change.items()
    }
    with pytest.raises(AssertionError, match=message):
        check(row | changed)


@pytest.mark.aot
@pytest.mark.long_suite(name="train")
@pytest.mark.parametrize("name", [EXAMPLE, SHORT])
def test_training_compiles(name: str):
    """One program has few layers and heads, the other a head with several passes."""
    if aot_tpu.MISSING is not None:
        pytest.skip(aot_tpu.MISSING)
    check(aot_train.measure(name))

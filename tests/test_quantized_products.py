"""The table of products in docs/quantization.md is the recorded one."""

import json
from pathlib import Path

from benchmarks.quantized_products import FORMS, PATH, table_lines

ROOT = Path(__file__).parents[1]


def test_recorded_table_is_documented():
    lines = table_lines(json.loads(PATH.read_text(encoding="utf-8")))
    assert len(lines) == len(FORMS) + 3
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in text

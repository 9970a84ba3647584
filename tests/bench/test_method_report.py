"""Table and sentences on a comparison of methods."""

from jaxspec.bench.method_report import method_table, verdict
from tests.bench.workloads import cell


def test_table_and_verdict_of_methods():
    ngram = {"name": "ngram", "num_levels": 2}
    suffix = {"name": "suffix", "num_levels": 4}
    ngram["points"] = [cell("qa", 1.5, 1.6), cell("copying", 2.0, 2.0, is_equal=False)]
    suffix["points"] = [cell("qa", 0.9, 0.8)]
    entries = [ngram, suffix]
    head, _, *rows = method_table(entries).splitlines()
    assert head.endswith("| K = 1 | K = 2 | K = 4 | K chosen | lowest to highest |")
    assert rows[:3] == [
        "| ngram | qa | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | 1.60 | - "
        "| 1.50 | 1.40 to 1.60 |",
        "| suffix | qa | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | - | 0.80 "
        "| 0.90 | 0.80 to 1.00 |",
        "| ngram | copying | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | 2.00 "
        "| - | 2.00 | 1.90 to 2.10 |",
    ]
    equal, plain, share = verdict(entries)
    assert "in 2 of 3 cells" in equal
    assert "at least 0.90 times" in plain and "(suffix, qa, temp" in plain
    assert "at least 0.94 times" in share and "(ngram, qa, temp" in share

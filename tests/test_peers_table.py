"""The table of peers, from rows as `benchmarks.peers` writes them."""

from typing import Any

from benchmarks.peers.cells import NOT_MEASURED, WHY, peers_table


def row(peer: str, speed: float | None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"peer": peer, "mode": "plain", "dtype": "float32"}
    values |= {"batch_size": 1, "threads": 1}
    if speed is not None:
        values |= {"median_tokens_per_s": speed, "num_texts": 5, "num_equal": 4}
    return values | changes


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    arguments = {"num_tokens": 128, "num_speculative_tokens": 5, "repeats": 3}
    return {
        "date": "2026-11-22T10:00:00",
        "commit": "0123456789ab",
        "has_changes": False,
        "arguments": arguments | {"single_prompts": 5, "num_prompts": 8},
        "lookup_max": 4,
        "prompts": {"source": "benchmarks/prompts.jsonl"},
        "machine": {"cpu": "a CPU", "load_average": [0.1, 0.1, 0.1]},
        "peers": {
            "jaxspec": {"version": "0.1"},
            "fast": {"version": "2.0", "note": "it rounds"},
            "gone": {"skipped": "not installed"},
        },
        "rows": list(rows),
    }


def test_a_line_for_every_engine_and_mode():
    table = peers_table(
        result(
            row("jaxspec", 300.0),
            row("jaxspec", 400.0, dtype="bfloat16", num_texts=0, num_equal=0),
            row("jaxspec", 500.0, threads=2),
            row("slow", 100.4, ours_over_theirs=2.988),
            row("slow", 125.0, threads=2, ours_over_theirs=4.0, num_equal=5),
            row("slow", None, mode="draft", failed="did not start"),
            row("odd", 9.0, failed="it fell over"),
            row("odd", 9.0, failed="it fell over", mode="n-gram"),
            row("odd", 9.0, failed="it fell over", threads=2),
        ),
        {},
    )
    lines = table.splitlines()
    columns = "batch 1, 1 thread | batch 1, 2 threads | texts equal |"
    assert lines[0] == f"| engine | drafts | {columns}"
    assert lines[1] == "|---|---|---|---|---|"
    assert lines[2:5] == [
        "| jaxspec | plain | 300 | 500 | 8/10 |",
        "| jaxspec, bfloat16 | plain | 400 | - | - |",
        "| slow | plain | 100 (2.99) | 125 (4.00) | 9/10 |",
    ]
    assert lines[5] == "| odd | plain | 9 | 9 | 8/10 |"
    assert lines[6] == "| odd | n-gram | 9 | - | 4/5 |"
    assert lines[7] == ""
    assert "Texts are compared with ours without drafts. fast: it rounds.\n" in table
    assert "jaxspec 0.1, fast 2.0." in table
    assert "at commit 0123456789ab on a CPU, load 0.1" in table
    left_out = "slow, draft at batch 1: did not start"
    assert f"Not measured: gone: not installed; {left_out}." in table
    early = "odd, plain at batch 1, n-gram at batch 1: it fell over"
    assert f"Ended early, and fewer runs than others: {early}." in table
    assert "is ahead" not in table


def test_where_others_are_ahead_and_why():
    rows = [
        row("fast", 400.0, ours_over_theirs=0.99),
        row("fast", 400.0, ours_over_theirs=1.0, batch_size=8),
        row("fast", 500.0, ours_over_theirs=0.5, threads=2),
        row("fast", 500.0, ours_over_theirs=0.25, mode="draft"),
    ]
    table = peers_table(result(*rows), {"fast plain": "it reads less"})
    assert table.splitlines()[-2:] == [
        "- fast is ahead, plain in 2 of 3 places, up to 2.0 times: it reads less.",
        "- fast is ahead, draft in 1 of 1 places, up to 4.0 times: not explained yet.",
    ]
    table = peers_table(result(*rows), {"fast": "for all"})
    assert table.splitlines()[-1] == (
        "- fast is ahead, plain in 2 of 3 places, up to 2.0 times; draft in 1 of 1 "
        "places, up to 4.0 times: for all."
    )


def test_nothing_measured():
    assert peers_table(None) == NOT_MEASURED
    assert WHY.exists()

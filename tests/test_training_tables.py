"""Learning curves by the size of the text, and what they say the goal needs."""

import math

import pytest

from benchmarks.training import (
    even_acceptance,
    fit_curve,
    text_table,
    tokens_for,
    tokens_per_round,
)


def test_even_acceptance_yields_the_same_tokens_per_round():
    entry = {"sampled": [0.5, 0.4, 0.25]}
    assert tokens_per_round(entry) == pytest.approx(1 + 0.5 + 0.2 + 0.05)
    rate = even_acceptance(entry)
    assert rate + rate**2 + rate**3 == pytest.approx(0.75)
    for num_drafts in (1, 2, 5):
        same = {"sampled": [0.3] * num_drafts}
        assert even_acceptance(same) == pytest.approx(0.3)


def test_fit_says_how_much_text_an_acceptance_needs():
    points = [(tokens, 0.05 * math.log2(tokens / 1000)) for tokens in (2000, 8000)]
    rise, start = fit_curve(points)
    assert rise == pytest.approx(0.05)
    assert start + rise * math.log2(4000) == pytest.approx(0.1)
    assert tokens_for(points, 0.2) == pytest.approx(16_000)
    flat = [(2000, 0.3), (8000, 0.3)]
    falling = [(2000, 0.3), (8000, 0.2)]
    assert tokens_for(flat, 0.4) is tokens_for(falling, 0.4) is None


def test_table_has_the_last_step_of_all_texts():
    def run(num_tokens: int, *rates: float) -> dict[str, object]:
        log = [
            {"step": 10 * i, "loss": 1.0, "held_out_loss": 2.0, "sampled": [rate]}
            for i, rate in enumerate(rates)
        ]
        texts = {"num_tokens": num_tokens, "num_rows": num_tokens // 200}
        return {"name": "head", "settings": {"rows": 4}, "texts": texts, "log": log}

    speeds = [1 + i / 100 for i in range(101)]
    needed = {"name": "head", "acceptance": {"1.4": 0.4}, "speed_ups": speeds}
    result = {
        "by_text": [run(4000, 0.9, 0.3, 0.9), run(2000, 0.9, 0.2)],
        "needed": {"rows": [needed]},
    }
    rows = [line for line in text_table(result).splitlines() if "| head |" in line]
    assert rows == [
        "| head | 2,000 | 10 | 4.0 | 1.00 | 2.00 | 0.200 | 0.200 | 1.20 |",
        "| head | 4,000 | 10 | 2.0 | 1.00 | 2.00 | 0.300 | 0.300 | 1.30 |",
        "| head | 0.100 | 0.40 | 0.30 | 8,000 |",
    ]

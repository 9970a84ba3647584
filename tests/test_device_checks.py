"""The checks of whole engines run on any device, and count what differs."""

import json

import pytest

from benchmarks import device_checks


@pytest.mark.slow
def test_lossless_rows_have_equal_texts_and_full_acceptance(capsys):
    device_checks.main(
        ["lossless", "--dtypes", "float32", "--methods", "target as draft"]
        + ["--num-prompts", "2", "--num-tokens", "8"]
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    checked = [row for row in rows if row["what"] == "lossless"]
    assert [row["sampling"] for row in checked] == ["greedy", "seeded"]
    for row in checked:
        assert (row["num_equal"], row["num_texts"]) == (2, 2)
        assert row["acceptance_rate"] == 1
    speeds = [row for row in rows if row["what"] == "speed"]
    assert [row["method"] for row in speeds] == ["plain", "target as draft"]


def test_first_difference_is_the_position_of_the_first_other_token():
    assert device_checks.first_difference([1, 2, 3], [1, 5, 4]) == 1
    assert device_checks.first_difference([1, 2], [1, 2]) is None


def test_equal_texts_with_other_logprobs_have_no_equal_bits():
    one = [[(7, -0.5), (8, -1.0)], [(7, -0.5)]]
    other = [[(7, -0.5), (8, -1.25)], [(9, -0.5)]]
    assert device_checks._equal_bits(one, other) == {
        "num_texts": 2,
        "num_equal": 1,
        "num_equal_bits": 0,
        "largest_difference": 0.25,
    }

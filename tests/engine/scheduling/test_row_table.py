"""Bounds and draft lags of running requests equal those counted token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.program.plan import Features
from tests.support.requests import make_request


def one_row(request: Request) -> tuple[RowTable, np.ndarray]:
    table = RowTable(1)
    table.admit(request, longest=30)
    return table, np.array([request.row])


# One launch: (drafts of the request, K of the launch, allowed rounds, tokens of each
# round that runs). A launch ends early when one of its sequences ends.
LAUNCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4)).flatmap(
        lambda both: st.tuples(
            st.just(both[0]),
            st.integers(both[0], 5),
            st.just(both[1]),
            st.lists(st.integers(1, both[0] + 1), min_size=1, max_size=both[1]),
        )
    ),
    max_size=6,
)


@given(LAUNCHES, st.integers(0, 2))
def test_bounds_hold_for_any_device_results(launches, unread):
    """The bounds hold if all launches but the last `unread` are read."""
    table, row = one_row(make_request(max_total=200))
    known, lag = 3, 1  # number of tokens, and of those without draft keys

    def check_bounds() -> None:
        assert table.fewest_tokens(row)[0] <= known <= table.most_tokens(row)[0]
        assert lag <= table.num_draft_uncached[row][0]

    played = []
    for drafts, width, most, emitted in launches:
        if table.num_draft_uncached[row][0] > 2:
            # The request needs a draft prefill before it gets drafts.
            drafts, emitted = 0, [1] * len(emitted)
        played.append((np.array([drafts]), width, most, emitted))
        table.count_launched(row, np.array([drafts]), most)
        table.update_draft_lag(row, np.full(1, width), width, most)
        known += sum(emitted)
        for count in emitted:
            # A round with drafts writes draft keys of the two newest tokens and of all
            # drafts but the last. Of the emitted tokens, these have no draft keys: the
            # target's token and the last draft.
            if width and lag <= 2:
                lag = 2 if count == width + 1 else 1
            else:
                lag += count
        check_bounds()
    for drafts, width, most, emitted in played[: len(played) - unread]:
        missing = most - len(emitted)
        table.settle(row, drafts, most, missing, is_lag=not width)
        for count in emitted:
            check_bounds()
            table.count_read(row, drafts, np.array([count]))
    check_bounds()
    if not unread:
        assert table.num_tokens[row][0] == known
        for counts in (table.num_unread, table.num_unsure, table.ahead):
            assert counts[row][0] == 0
        if not any(width for _, width, *_ in played):
            assert table.num_draft_uncached[row][0] == lag


@pytest.mark.parametrize(
    ("total", "longest", "drafts", "rounds"),
    [
        (23, 100, 3, 5),  # 20 tokens, at most 4 a round
        (22, 100, 3, 5),
        (24, 100, 3, 6),
        (4, 100, 3, 1),
        (3, 100, 3, 1),
        (50, 20, 3, 4),  # the fifth round might draft tokens 20 and 21
        (50, 19, 3, 4),
        (50, 18, 3, 4),
        (50, 17, 3, 3),
        (50, 2, 0, 47),  # the length limit for drafts does not matter without drafts
    ],
)
def test_rounds_left_ends_with_the_first_possible_end(total, longest, drafts, rounds):
    table = RowTable(2, longest)
    far = make_request(max_total=1000 if longest > 50 else total)
    near = make_request(max_total=total)
    for request in (far, near):
        table.admit(request, longest=1000)
    rows = np.array([far.row, near.row])
    assert table.most_tokens(rows).tolist() == [3, 3]
    assert table.rounds_left(rows, np.full(2, drafts)) == rounds


def test_bounds_count_unread_launches():
    request = make_request(output_token_ids=[8])
    table, row = one_row(request)
    for drafts in (3, 0):
        table.count_launched(row, np.array([drafts]))
    # 4 tokens are known; a round of 3 drafts adds 1 to 4 tokens, a plain round 1.
    assert table.most_tokens(row).tolist() == [9]
    assert table.fewest_tokens(row).tolist() == [6]
    table.count_launched(row, np.array([3]))
    assert table.most_tokens(row).tolist() == [10]  # K of the longest compiled round
    table.count_read(row, np.array([3]), np.array([2]))
    assert table.fewest_tokens(row).tolist() == [8]


@pytest.mark.parametrize(
    ("widths", "lag"),
    [
        ([3], 2),
        ([0], 2),
        ([0, 0], 3),
        ([3, 3, 3], 2),
        ([3, 0, 0], 4),
        # Tokens that the draft model has not read remain without draft keys after later
        # rounds.
        ([0, 0, 3, 3], 5),
    ],
)
def test_draft_lag_counts_tokens_without_draft_keys(widths, lag):
    table, row = one_row(make_request())
    for width in widths:
        table.update_draft_lag(row, np.full(1, width), width)
    assert table.num_draft_uncached[row].tolist() == [lag]


def test_parallel_draft_model_reads_all_tokens_of_a_round():
    table, rows = RowTable(4, num_parallel=3), np.arange(4)
    table.num_draft_uncached[:] = [1, 4, 5, 4]
    assert table.lags(rows).tolist() == [False, False, True, False]
    # The draft model does not run for rows without drafts.
    table.update_draft_lag(rows, np.array([3, 1, 0, 0]), 3)
    assert table.num_draft_uncached.tolist() == [4, 4, 6, 5]
    table.update_draft_lag(rows, np.zeros(4), 0)
    assert table.num_draft_uncached.tolist() == [5, 5, 7, 6]


def test_rows_in_prefill_or_possibly_ended_do_not_decode():
    table = RowTable(4)
    requests = [make_request(max_total=20, max_draft_tokens=3) for _ in range(4)]
    for request in requests:
        table.admit(request, longest=25)
    rows = np.array([request.row for request in requests])
    table.is_decoding[rows[:3]] = True  # the last row is still being prefilled
    table.ahead[rows[0]], table.num_unread[rows[0]] = 17, 5  # this row may have ended
    table.num_draft_uncached[rows[1]] = 3  # needs a draft prefill
    found, wanted = table.decodable(max_draft_tokens=2)
    assert (sorted(found.tolist()), wanted.tolist()) == (sorted(rows[1:3]), [2, 2])
    assert table.lags(rows).tolist() == [False, True, False, False]
    found, wanted = table.decodable(max_draft_tokens=0)
    assert (sorted(found.tolist()), wanted.tolist()) == (sorted(rows[1:3]), [0, 0])
    assert table.lagging().tolist() == [rows[1]]
    table.count_launched(rows[1:2], np.array([0]))
    assert table.lagging().tolist() == [rows[1]]
    # Until its result is read, the number of tokens of a round with drafts is unknown.
    table.count_launched(rows[1:2], np.array([2]))
    assert table.lagging().tolist() == []


def test_released_row_keeps_only_its_count_of_unread_launches():
    table = RowTable(1)
    first = make_request(features=Features(num_logprobs=5, num_prompt_logprobs=5))
    table.admit(first, longest=30)
    row = np.array([first.row])
    assert table.features(row) == Features(num_logprobs=5)
    table.count_launched(row, np.array([2]))
    table.update_draft_lag(row, np.zeros(1), 0)
    table.update_draft_lag(row, np.zeros(1), 0)
    owner = table.owner[row].copy()
    table.release(first)
    assert (first.row, first.num_unread) == (-1, 1)
    second = make_request(tokens_to_prefill=[5, 6, 7])
    table.admit(second, longest=30)
    assert (table.owner[row] != owner).all()
    assert table.features(np.array([second.row])) == Features()
    assert table.num_draft_uncached[row].tolist() == [1]
    assert table.most_tokens(row).tolist() == [3]
    table.check()


@pytest.mark.parametrize(
    "name",
    ["num_tokens", "num_draft_uncached", "num_unread", "num_unsure", "ahead", "owner"],
)
def test_check_detects_impossible_values_in_rows(name):
    table, row = one_row(make_request())
    table.check()
    values = getattr(table, name)
    values[row] = {"num_tokens": 11, "num_draft_uncached": 0}.get(name, -1)
    with pytest.raises(AssertionError):
        table.check()

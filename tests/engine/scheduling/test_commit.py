"""`commit` adds the results of a launch to its requests, rows and totals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduling.commit import commit
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.program.plan import TILE, Features, StepPlan, StepShape, Tile
from jaxspec.program.wire import StepResult, TokenLogprobs
from tests.support.requests import make_request

WITH_LOGPROBS = Features(num_logprobs=2, num_prompt_logprobs=2)


def numbered(*leading: int) -> TokenLogprobs:
    """Return logprob entries whose `rank` is their index, which identifies them."""
    index = np.arange(np.prod(leading)).reshape(leading)
    wide = np.repeat(index[..., None], 2, axis=-1)
    return TokenLogprobs(
        own=index.astype(np.float32),
        rank=index.astype(np.int32),
        top_ids=wide.astype(np.int32),
        top=wide.astype(np.float32),
        chosen=wide.astype(np.float32),
    )


def make_launch(
    rows: RowTable, decoding: list[Request], tiles: list[Tile], tiled: list[Request]
) -> Launch:
    taken = np.array([request.row for request in decoding], np.int64)
    drafts = np.full(len(decoding), 3)
    rows.count_launched(taken, drafts)
    return Launch(
        plan=StepPlan(tiles=tiles),
        shape=StepShape(
            num_seqs=4, num_levels=3, max_prompt_tokens=64, features=WITH_LOGPROBS
        ),
        rows=taken,
        owners=rows.owner[taken],
        draft_counts=drafts,
        decoding=decoding,
        tiled=tiled,
        registered=[],
    )


def make_result(emitted: list[int]) -> StepResult:
    padded = np.array([*emitted, *[0] * (4 - len(emitted))])
    return StepResult(
        tokens=np.arange(16).reshape(4, 4),
        num_emitted=padded,
        num_valid_drafts=np.where(padded > 0, 3, 0),
        num_accepted=np.maximum(padded - 1, 0),
        is_done=padded == 0,
        is_broken=np.zeros(4, bool),
        is_draft_broken=np.zeros(4, bool),
        tile_token=np.array([14, 15]),
        tile_is_done=np.array([False, False]),
        tile_is_broken=np.array([False, False]),
        logprobs=numbered(4, 4),
        tile_logprobs=numbered(2),
        prompt_logprobs=numbered(2, TILE),
    )


def admit(count: int, **changes) -> tuple[RowTable, list[Request]]:
    rows = RowTable(count)
    requests = [make_request(max_total=90, **changes) for _ in range(count)]
    for request in requests:
        rows.admit(request, longest=90)
        request.status = Status.DECODE
    return rows, requests


def test_tokens_of_rounds_are_added_to_their_requests():
    rows, requests = admit(3, features=WITH_LOGPROBS)
    launch, stats = make_launch(rows, requests, [], []), EngineStats()
    acceptance = AcceptanceRates(num_rows=3, max_draft_tokens=3)
    requests[1].status = Status.FINISHED
    rows.release(requests[1])
    parts = commit(launch, make_result([2, 1, 4]), rows, stats, acceptance).parts
    assert [part.request for part in parts] == [requests[0], requests[2]]
    assert [part.token_ids for part in parts] == [[0, 1], [8, 9, 10, 11]]
    ranks = [p.logprobs.rank.tolist() for p in parts if p.logprobs is not None]
    assert ranks == [[0, 1], [8, 9, 10, 11]]
    assert (stats.num_generated_tokens, stats.num_accepted_tokens) == (6, 4)
    left = np.array([requests[0].row, requests[2].row])
    assert rows.num_tokens[left].tolist() == [5, 7]
    assert rows.ahead[left].tolist() == [0, 0]
    # Two requests continue: one of three drafts was accepted, and three of three. The
    # ended request does not count.
    once, all_three = acceptance.of_rows(left)
    assert once[0] > once[1] < all_three[1]
    assert (acceptance.of_rows(np.array([1])) == acceptance.mean()).all()


@pytest.mark.parametrize("num_returned", [0, 10, 40])
def test_prompt_logprobs_are_returned_once_in_order(num_returned):
    """The prompt of 50 tokens is right-aligned in tiles of 32 and 18 tokens."""
    rows, (request,) = admit(1, features=WITH_LOGPROBS, prompt_token_ids=[1] * 50)
    request.num_prompt_logprobs = num_returned
    tiles = [
        Tile(row=0, start=start, tokens=np.zeros(count, np.int32), is_last=start > 0)
        for start, count in ((0, 32), (32, 18))
    ]
    launch = make_launch(rows, [], tiles, [request, request])
    rows.count_launched(np.array([0]), np.zeros(1, np.int64))
    rates = AcceptanceRates(num_rows=3, max_draft_tokens=3)
    parts = commit(launch, make_result([]), rows, EngineStats(), rates).parts
    ranks = [
        rank
        for part in parts
        if part.prompt_logprobs is not None
        for rank in part.prompt_logprobs.rank.tolist()
    ]
    # Entry t of the first tile is for token t + 1; the entries of the second start at
    # 32 + 14. The last position of the prompt has the logprobs of the first generated
    # token.
    places = [*range(32), *range(TILE + TILE - 18, TILE + TILE - 1)]
    assert ranks == places[num_returned:]
    assert parts[-1].token_ids == [15]
    assert parts[-1].logprobs is not None
    assert parts[-1].logprobs.rank.tolist() == [1]
    assert request.num_prompt_logprobs == 49


# Rounds: (drafts, accepted, generated); a sequence that has ended generates nothing.
SEQUENCE = st.integers(0, 8).flatmap(
    lambda drafts: st.tuples(
        st.just(drafts), st.integers(0, drafts), st.booleans()
    ).map(lambda one: (one[0], one[1] * one[2], (one[1] + 1) * one[2]))
)
ROUND = st.lists(SEQUENCE, max_size=6)


@given(rounds=st.lists(ROUND))
def test_totals_equal_sums_over_the_rounds(rounds):
    stats = EngineStats()
    for sequences in rounds:
        stats.record_round(*np.array(sequences, np.int64).reshape(-1, 3).T)
    everybody = [one for sequences in rounds for one in sequences]
    drafting = [one for one in everybody if one[0] and one[2]]
    proposed = sum(drafts for drafts, _, _ in drafting)
    kept = sum(accepted for _, accepted, _ in drafting)
    assert stats.num_draft_rounds == len(drafting)
    assert stats.num_draft_tokens == proposed
    assert stats.num_accepted_tokens == kept
    assert stats.num_generated_tokens == sum(new for _, _, new in everybody)
    assert stats.acceptance_rate == (kept / proposed if proposed else 0)
    length = 1 + kept / len(drafting) if drafting else 1
    assert stats.mean_acceptance_length == length
    deepest = max((drafts for drafts, _, _ in drafting), default=0)
    assert stats.accepted_per_position == [
        sum(accepted > position for _, accepted, _ in drafting)
        for position in range(deepest)
    ]

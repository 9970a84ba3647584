"""A round's update of the rows equals that of a loop over its tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxspec.program import rows as program_rows
from jaxspec.program.plan import PoolShape
from jaxspec.program.rows import Emitted, init_rows
from tests.support.rows import make_active

COUNT, WIDTH, VOCAB = 400, 4, 6


def loop_truncate(token_ids, start, stop_ids, min_total, max_total):
    """Emit one token at a time and stop as plain decoding does."""
    kept = []
    for token in token_ids:
        kept.append(token)
        position = start + len(kept) - 1
        if token in stop_ids and position >= min_total:
            return kept, True
        if start + len(kept) >= max_total:
            return kept, True
    return kept, False


def check_truncate() -> None:
    """Check random rounds with stop ids, limits and idle rows."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (COUNT, WIDTH))
    count = random.integers(1, WIDTH + 1, COUNT)
    start = random.integers(5, 9, COUNT)
    stop_ids = [
        list(random.choice(VOCAB, random.integers(0, 3), replace=False))
        for _ in range(COUNT)
    ]
    min_total = np.where(random.random(COUNT) < 0.5, start + random.integers(0, 5), 0)
    max_total = start + random.integers(1, 9, COUNT)
    is_active = random.random(COUNT) < 0.9
    active = make_active(
        COUNT,
        num_tokens=start,
        stop_ids=stop_ids,
        min_total=min_total,
        max_total=max_total,
        is_active=is_active,
    )
    emitted = program_rows.truncate(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32), active
    )
    found = [np.asarray(part) for part in emitted]
    seen = set()
    for row in range(COUNT):
        if not is_active[row]:
            assert found[1][row] == 0 and found[2][row]
            continue
        kept, is_done = loop_truncate(
            tokens[row, : count[row]].tolist(),
            start[row],
            stop_ids[row],
            min_total[row],
            max_total[row],
        )
        got = found[0][row, : found[1][row]].tolist()
        assert (got, found[2][row]) == (kept, is_done), row
        seen.add((len(kept), int(count[row]), is_done))
    # The cases include an end at every offset of a round of every length.
    assert {(k, c, True) for c in range(1, 5) for k in range(1, c + 1)} <= seen


def check_append() -> None:
    """Check that tokens are written after the known ones, and nowhere else."""
    random = np.random.default_rng(1)
    pool = PoolShape(
        num_rows=6, num_pages=20, page_size=4, max_model_len=12, vocab_size=16
    )
    page_table = random.permutation(20)[:18].reshape(6, 3)
    rows = init_rows(pool)
    known = random.integers(0, VOCAB, (6, 12))
    length = np.array([3, 5, 7, 9, 11, 8])
    rows = dataclasses.replace(
        rows,
        page_table=jnp.asarray(page_table, jnp.int32),
        num_tokens=jnp.asarray(length, jnp.int32),
        is_done=jnp.zeros(6, bool),
    )
    token_pages = np.zeros((20, 4), np.int32)
    token_pages[page_table] = known.reshape(6, 3, 4)
    # Rows are not in order; one is idle, and one is a pad past the end.
    row = np.array([4, 0, 3, 2, 6])
    is_active = np.array([True, True, True, False, False])
    count = np.array([1, 4, 2, 0, 0])
    tokens = random.integers(10, 20, (5, WIDTH))
    active = make_active(5, row=row, num_tokens=[11, 3, 9, 7, 0], is_active=is_active)
    emitted = Emitted(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(count, jnp.int32),
        jnp.array([True, False, False, True, True]),
    )
    table = np.minimum(np.append(page_table, [[20] * 3], axis=0), 20)[row]
    active = dataclasses.replace(active, page_table=jnp.asarray(table, jnp.int32))
    found, found_pages = program_rows.append(
        rows, jnp.asarray(token_pages), active, emitted
    )
    history, total = known.copy(), length.copy()
    for index in range(3):
        own = row[index]
        history[own, length[own] : length[own] + count[index]] = tokens[
            index, : count[index]
        ]
        total[own] += count[index]
    token_pages[page_table] = history.reshape(6, 3, 4)
    np.testing.assert_array_equal(found_pages, token_pages)
    np.testing.assert_array_equal(found.num_tokens, total)
    np.testing.assert_array_equal(found.is_done, np.arange(6) == 4)
    same = {"num_tokens", "is_done"}
    for item in dataclasses.fields(rows):
        if item.name not in same:
            before, after = getattr(rows, item.name), getattr(found, item.name)
            np.testing.assert_array_equal(before, after)


def test_round_is_cut_at_the_first_end():
    check_truncate()


def test_tokens_are_added_to_their_own_rows():
    check_append()

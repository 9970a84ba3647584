"""The step program's bookkeeping in plain Python, and a runner over it.

Keeps in every slot of both models' pages which token was written there, and asserts
before each read that the right one is: a page in two hands, a missing page, a draft
model without keys for what it is asked to continue, all fail at the launch that would
have gone wrong. What each request says is fixed in advance, by `truth`.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.runner import Runner
from jaxspec.program.plan import (
    Admission,
    PlanLayout,
    PoolShape,
    StepPlan,
    StepResult,
    StepShape,
)

JUNK = -7  # what a rejected draft leaves in its slot

Truth = Callable[[tuple[int, int], int], int]


def random_truth(vocab_size: int) -> Truth:
    """A text per seed, without any structure."""

    def token(seed: tuple[int, int], position: int) -> int:
        return zlib.crc32(repr((seed, position)).encode()) % vocab_size

    return token


def repeat_truth(text: list[int]) -> Truth:
    """Everybody says `text`, by absolute position, over and over."""
    return lambda seed, position: text[position % len(text)]


@dataclass
class Row:
    """One admitted request on the device."""

    admission: Admission
    pages: dict[int, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    num_tokens: int = 0
    is_done: bool = False


class FakeDevice:
    """Runs plans in order.

    Attributes:
        has_draft: Whether the program has a draft model.
    """

    def __init__(
        self, pool: PoolShape, truth: Truth, *, has_draft: bool, seed: int = 0
    ):
        self.pool, self.truth, self.has_draft = pool, truth, has_draft
        self.rows: dict[int, Row] = {}
        self.target_kv: dict[int, Any] = {}  # slot -> token
        self.draft_kv: dict[int, Any] = {}
        self.num_accepted = 0
        self.num_proposed = 0
        self._random = np.random.default_rng(seed)

    def run(self, plan: StepPlan, shape: StepShape) -> StepResult:
        """Apply a plan and return what the program would."""
        PlanLayout(shape, self.pool).pack(plan)  # fits, or raises
        assert len(plan.decode) <= shape.num_seqs
        assert len(plan.tiles) <= shape.num_tiles
        for admission in plan.admissions:
            self.rows[admission.row] = Row(admission)
        for row, index, page in plan.pages:
            assert 0 <= page < self.pool.num_pages
            assert index not in self.rows[row].pages
            self.rows[row].pages[index] = page
        decoding = {row for row, _ in plan.decode}
        assert len(decoding) == len(plan.decode), "a row decodes twice"
        assert not decoding & {tile.row for tile in plan.tiles}
        tiles = [self._feed(tile) for tile in plan.tiles]
        tiles += [(0, True)] * (shape.num_tiles - len(tiles))
        width = shape.num_draft_tokens + 1
        result = StepResult(
            tokens=np.zeros((shape.num_seqs, width), np.int32),
            num_emitted=np.zeros(shape.num_seqs, np.int32),
            num_accepted=np.zeros(shape.num_seqs, np.int32),
            is_done=np.ones(shape.num_seqs, bool),
            tile_token=np.array([token for token, _ in tiles], np.int32),
            tile_is_done=np.array([done for _, done in tiles], bool),
        )
        for index, (row, drafts) in enumerate(plan.decode):
            assert 0 <= drafts <= shape.num_draft_tokens
            tokens, accepted = self._round(
                self.rows[row], drafts, shape.num_draft_tokens
            )
            result.tokens[index, : len(tokens)] = tokens
            result.num_emitted[index] = len(tokens)
            result.num_accepted[index] = accepted
            result.is_done[index] = self.rows[row].is_done
        return result

    def _feed(self, tile: Any) -> tuple[int, bool]:
        """One prompt tile, or one that only the draft model needs."""
        row = self.rows[tile.row]
        if not tile.is_draft_only:
            assert len(row.tokens) == tile.start, "a tile is out of order"
            row.tokens += tile.tokens.tolist()
        end = tile.start + len(tile.tokens)
        assert row.tokens[tile.start : end] == tile.tokens.tolist()
        positions = range(tile.start, end)
        if self.has_draft:
            self._check(row, self.draft_kv, tile.start)
            self._write(row, self.draft_kv, positions, tile.tokens)
        if tile.is_draft_only:
            assert self.has_draft
            assert end < row.num_tokens
            return 0, True
        self._check(row, self.target_kv, tile.start)
        self._write(row, self.target_kv, positions, tile.tokens)
        if not tile.is_last:
            return 0, True
        row.num_tokens = end
        (token,) = self._append(row, 1)
        return token, row.is_done

    def _round(self, row: Row, drafts: int, lookahead: int) -> tuple[list[int], int]:
        if row.is_done:
            return [], 0
        known = row.num_tokens
        assert known, "a row decodes before its prompt is in"
        accepted = int(self._random.integers(0, drafts + 1))
        ahead = [self._truth(row, known + i) for i in range(accepted)]
        ahead += [JUNK] * (lookahead - accepted)
        if lookahead:
            if drafts:
                self._check(row, self.draft_kv, known - 2)
            self._write(row, self.draft_kv, range(known - 2, known), row.tokens[-2:])
            later = range(known, known + lookahead - 1)
            self._write(row, self.draft_kv, later, ahead)
        self._check(row, self.target_kv, known - 1)
        written = range(known - 1, known + lookahead)
        self._write(row, self.target_kv, written, [row.tokens[-1], *ahead])
        self._check(row, self.target_kv, min(known + accepted, self._limit(row)))
        tokens = self._append(row, accepted + 1)
        kept = min(accepted, len(tokens))
        self.num_accepted += kept
        self.num_proposed += drafts
        return tokens, kept

    def _limit(self, row: Row) -> int:
        return row.admission.max_total

    def _append(self, row: Row, count: int) -> list[int]:
        """Say `count` more tokens, or fewer if the sequence ends."""
        admission, said = row.admission, []
        while len(said) < count and not row.is_done:
            token = self._truth(row, row.num_tokens)
            is_stop = token in admission.stop_ids
            is_stop &= row.num_tokens >= admission.min_total
            row.tokens.append(token)
            row.num_tokens += 1
            row.is_done = is_stop or row.num_tokens >= admission.max_total
            said.append(token)
        return said

    def _truth(self, row: Row, position: int) -> int:
        return self.truth(row.admission.seed, position)

    def _slot(self, row: Row, position: int) -> int | None:
        index, offset = divmod(position, self.pool.page_size)
        page = row.pages.get(index)
        return None if page is None else page * self.pool.page_size + offset

    def _write(
        self, row: Row, slots: dict[int, Any], positions: range, tokens: Any
    ) -> None:
        for position, token in zip(positions, tokens, strict=False):
            slot = self._slot(row, position)
            if slot is not None and 0 <= position < self.pool.max_model_len:
                slots[slot] = int(token)

    def _check(self, row: Row, slots: dict[int, Any], length: int) -> None:
        """Assert that the first `length` positions hold the row's own tokens."""
        for position in range(length):
            slot = self._slot(row, position)
            assert slot is not None, f"no page for position {position}"
            known = position < len(row.tokens)
            token = row.tokens[position] if known else self._truth(row, position)
            assert slots.get(slot) == token, f"position {position} holds another token"


class FakeRunner(Runner):
    """A runner over a `FakeDevice` that writes down what it is asked, in order."""

    def __init__(self, config: EngineConfig, truth: Truth, *, seed: int = 0):
        pool = PoolShape(
            num_rows=config.max_num_seqs,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_model_len=config.max_model_len,
            vocab_size=config.model_config.vocab_size,
        )
        has_draft = config.speculative is not None
        self.device = FakeDevice(pool, truth, has_draft=has_draft, seed=seed)
        self.events: list[tuple[str, int]] = []
        self.plans: list[tuple[StepPlan, StepShape]] = []
        self.num_launches = self.num_compiles = 0

    def executable(self, shape: StepShape) -> Any:
        self.num_compiles += 1

    def is_compiled(self, shape: StepShape) -> bool:
        return True

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        self.events.append(("launch", self.num_launches))
        self.plans.append((plan, shape))
        self.num_launches += 1
        return self.num_launches - 1, self.device.run(plan, shape)

    def fetch(self, result: Any, shape: StepShape) -> StepResult:
        number, values = result
        self.events.append(("fetch", number))
        return values


def reference_tokens(
    truth: Truth, admission_seed: tuple[int, int], prompt: list[int], request: Any
) -> list[int]:
    """What a request must say: `truth` up to the first end."""
    said: list[int] = []
    position = len(prompt)
    first_stop = len(prompt) + request.params.min_tokens
    while position < request.max_total:
        said.append(truth(admission_seed, position))
        if said[-1] in request.stop_ids and position >= first_stop:
            break
        position += 1
    return said

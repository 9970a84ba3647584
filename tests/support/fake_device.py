"""A fake device: the bookkeeping of step programs in plain Python, and its runner.

For both models, each slot of a page stores a hash of the whole prefix for which its
keys and values were written. The hashes are compared before each read: if a page has
two owners, is shared by sequences with different prefixes, or is missing, or if draft
keys are missing, the launch that would read them fails. The function `truth` fixes the
text of every request in advance.

With local pages, both kinds of pages are in one array, as on the device: a local page
overwrites all pages of its unit.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.runner import Runner, pool_of
from jaxspec.program.plan import (
    NO_TOKEN,
    TILE,
    Admission,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.wire import (
    DraftPrefillResult,
    PlanLayout,
    StepResult,
    TokenLogprobs,
)

LOCAL = 0x5555  # marks the hashes in local pages
JUNK = -7  # token of a rejected draft
NOTHING = 0  # hash of the empty prefix

# (seed, position, hash of all tokens before) -> token
Truth = Callable[[tuple[int, int], int, int], int]


def extend(prefix: int, token: int) -> int:
    """Return the hash of a sequence with one more token."""
    return hash((prefix, token))


def prefix_of(tokens: list[int]) -> int:
    """Return the hash of a whole sequence."""
    prefix = NOTHING
    for token in tokens:
        prefix = extend(prefix, token)
    return prefix


def random_truth(vocab_size: int) -> Truth:
    """Return a random text that depends on the seed and the prompt."""

    def token(seed: tuple[int, int], position: int, prefix: int) -> int:
        return zlib.crc32(repr((seed, position, prefix)).encode()) % vocab_size

    return token


def repeat_truth(text: list[int]) -> Truth:
    """Make every request generate `text` repeatedly, by absolute position."""
    return lambda seed, position, prefix: text[position % len(text)]


class Row:
    """A row of the device: its request, its tokens, and the slots of its pages."""

    def __init__(self, admission: Admission, pool: PoolShape):
        self.admission, self._pool = admission, pool
        self.tokens: list[int] = []
        self.prefixes = np.zeros(pool.max_model_len, np.int64)  # one per token
        self.has_page = np.zeros(pool.table_len, bool)
        # Slot of each position; `num_slots` for positions without a page.
        self.slots = np.full(pool.table_len * pool.page_size, pool_size(pool))
        self.local_slots = self.slots.copy()
        self.num_tokens = 0
        self.is_done = False

    @property
    def prefix(self) -> int:
        """The hash of all tokens."""
        return int(self.prefixes[len(self.tokens) - 1]) if self.tokens else NOTHING

    def add(self, token: int) -> None:
        self.prefixes[len(self.tokens)] = extend(self.prefix, token)
        self.tokens.append(token)

    def add_page(self, index: int, page: int) -> None:
        assert 0 <= page < self._pool.num_pages
        if index >= len(self.has_page):  # the rest of a unit
            assert self._pool.unit_pages is not None
            return
        assert not self.has_page[index]
        self.has_page[index] = True
        self._set_slots(self.slots, index, page)

    def add_local_page(self, index: int, page: int) -> None:
        assert self._pool.unit_pages is not None
        assert page % self._pool.unit_pages == 0
        self._set_slots(self.local_slots, index, page)

    def _set_slots(self, slots: np.ndarray, index: int, page: int) -> None:
        size = self._pool.page_size
        start = index * size
        slots[start : start + size] = np.arange(page * size, (page + 1) * size)


def pool_size(pool: PoolShape) -> int:
    """Return the number of slots of a pool."""
    return pool.num_pages * pool.page_size


class FakeDevice:
    """Runs plans one after the other.

    Attributes:
        has_draft: Whether the program has a draft model; without one, lookups find
            random numbers of drafts.
    """

    def __init__(
        self,
        pool: PoolShape,
        truth: Truth,
        *,
        has_draft: bool,
        seed: int = 0,
        window: int | None = None,
    ):
        self._window = window
        self.pool, self.truth, self.has_draft = pool, truth, has_draft
        self.rows: dict[int, Row] = {}
        # Prefix hashes and tokens by slot; the last entry is for missing pages.
        self.target_kv = np.zeros(pool_size(pool) + 1, np.int64)
        self.draft_kv = np.zeros_like(self.target_kv)
        self.token_pages = np.zeros_like(self.target_kv)
        # A sequence that contains this token computes NaN; no request generates it.
        self.poison: int | None = None
        self.is_draft_broken = False
        self.num_accepted = 0
        self.num_proposed = 0
        self._random = np.random.default_rng(seed)

    def run(self, plan: StepPlan, shape: StepShape) -> StepResult | DraftPrefillResult:
        """Apply a plan and return the program's result."""
        PlanLayout(shape, self.pool).pack(plan)  # raises if the plan does not fit
        assert len(plan.decode) <= shape.num_seqs
        assert len(plan.tiles) <= shape.num_tiles
        if shape.is_draft_prefill:
            return self._draft_prefill(plan, shape)
        rows = [row for row, _ in plan.decode]
        later, rest = [], dataclasses.replace(plan, pages=[], local_pages=[])
        alive = self._alive(rows)
        first = last = self._run_round(plan, shape)
        while len(later) + 1 < plan.num_rounds:
            is_broken = last.is_broken.any() or last.is_draft_broken.any()
            if is_broken or not alive or self._alive(rows) != alive:
                break
            later.append(last := self._run_round(rest, shape))
        return dataclasses.replace(first, later=tuple(later))

    def _alive(self, rows: list[int]) -> list[int]:
        """Return those of `rows` whose sequences have not ended."""
        return [row for row in rows if not self.rows[row].is_done]

    def _run_round(self, plan: StepPlan, shape: StepShape) -> StepResult:
        for admission in plan.admissions:
            self.rows[admission.row] = Row(admission, self.pool)
        for row, index, page in plan.pages:
            self.rows[row].add_page(index, page)
        for row, index, page in plan.local_pages:
            self.rows[row].add_local_page(index, page)
        self._share_tokens(plan)
        decoding = {row for row, _ in plan.decode}
        assert len(decoding) == len(plan.decode), "a row decodes twice"
        assert not decoding & {tile.row for tile in plan.tiles}
        # All keys and values are written before any are read.
        for tile in plan.tiles:
            self._write_tile(tile)
        tiles = [self._run_tile(tile) for tile in plan.tiles]
        tiles += [(0, True)] * (shape.num_tiles - len(tiles))
        width = shape.num_levels + 1
        num_accepted = np.zeros(shape.num_seqs, np.int32)
        result = StepResult(
            tokens=np.zeros((shape.num_seqs, width), np.int32),
            num_emitted=np.zeros(shape.num_seqs, np.int32),
            num_valid_drafts=np.zeros(shape.num_seqs, np.int32),
            num_accepted=num_accepted,
            # Only drafts of the main chain are ever accepted.
            num_accepted_nodes=None if shape.tree.is_chain else num_accepted,
            tree_row=None if shape.tree.is_chain else num_accepted,
            is_done=np.ones(shape.num_seqs, bool),
            is_broken=np.zeros(shape.num_seqs, bool),
            is_draft_broken=np.zeros(shape.num_seqs, bool),
            tile_token=np.array([token for token, _ in tiles], np.int32),
            tile_is_done=np.array([done for _, done in tiles], bool),
            tile_is_broken=self._is_broken([tile.row for tile in plan.tiles], tiles),
            **self._logprobs(shape),
        )
        wanted = [self._wanted(row, drafts, shape) for row, drafts in plan.decode]
        for index, (row, drafts) in enumerate(plan.decode):
            drafts = wanted[index]
            if not self.has_draft:  # a lookup may find fewer
                drafts = self._num_found(self.rows[row], drafts)
            tokens, accepted = self._round(
                self.rows[row],
                drafts,
                shape.num_levels,
                max(drafts for _, drafts in plan.decode),
            )
            result.tokens[index, : len(tokens)] = tokens
            result.num_emitted[index] = len(tokens)
            result.num_valid_drafts[index] = drafts
            result.num_accepted[index] = accepted
            result.is_done[index] = self.rows[row].is_done
            result.is_draft_broken[index] = drafts and self.is_draft_broken
        result.is_broken[: len(plan.decode)] = self._is_broken(
            [row for row, _ in plan.decode], plan.decode
        )
        return result

    def _wanted(self, row: int, drafts: int, shape: StepShape) -> int:
        """Return how many of the planned drafts a sequence has room for."""
        assert 0 <= drafts <= shape.num_levels
        left = self.rows[row].admission.max_total - self.rows[row].num_tokens
        return min(drafts, max(left - 1, 0))

    def _num_found(self, row: Row, wanted: int) -> int:
        """Return how many drafts a lookup finds, a random number."""
        return int(self._random.integers(0, wanted + 1))

    def _num_right(self, row: Row, drafts: int) -> int:
        """Return how many drafts are accepted, a random number."""
        return int(self._random.integers(0, drafts + 1))

    def spoil(self, pages: Sequence[int]) -> None:
        """Overwrite the units of these local pages."""
        if not pages:
            return
        assert self.pool.unit_pages is not None
        size = self.pool.page_size * self.pool.unit_pages
        for page in pages:
            start = page * self.pool.page_size
            for kv in (self.target_kv, self.draft_kv):
                kv[start : start + size] = JUNK

    def forget(self) -> None:
        """Forget all sequences, as when the state is created again."""
        self.rows.clear()
        for values in (self.target_kv, self.draft_kv, self.token_pages):
            values[:] = 0

    def _is_broken(self, rows: list[int], entries: Sequence[Any]) -> np.ndarray:
        """Return for each entry of a launch whether its row has the poison token."""
        is_broken = [self.poison in self.rows[row].tokens for row in rows]
        return np.array([*is_broken, *[False] * (len(entries) - len(rows))], bool)

    def _logprobs(self, shape: StepShape) -> dict[str, Any]:
        """Return logprobs of a uniform distribution, if the shape has logprobs."""
        asked, found = shape.features, dict[str, TokenLogprobs]()
        leading = {
            "logprobs": (shape.num_seqs, shape.num_levels + 1),
            "tile_logprobs": (shape.num_tiles,),
            "prompt_logprobs": (shape.num_tiles, TILE),
        }
        for name, sizes in leading.items():
            is_prompt = name == "prompt_logprobs"
            top = asked.num_prompt_logprobs if is_prompt else asked.num_logprobs
            if top is not None:
                each = np.float32(-np.log(self.pool.vocab_size))
                found[name] = TokenLogprobs(
                    own=np.full(sizes, each),
                    rank=np.ones(sizes, np.int32),
                    top_ids=np.broadcast_to(np.arange(top), (*sizes, top)),
                    top=np.full((*sizes, top), each),
                    chosen=np.full(
                        (*sizes, 0 if is_prompt else asked.num_logprob_token_ids), each
                    ),
                )
        return found

    def _share_tokens(self, plan: StepPlan) -> None:
        """Store the tokens of prompts, and read those of pages with prefix hits."""
        with_tiles = {tile.row for tile in plan.tiles}
        assert all(admission.row in with_tiles for admission in plan.admissions)
        for tile in plan.tiles:
            row = self.rows[tile.row]
            # In the plan's order, because a launch may read a page that it also fills.
            if not row.tokens and tile.start:
                for token in self.token_pages[row.slots[: tile.start]].tolist():
                    row.add(token)
            assert len(row.tokens) == tile.start, "a tile is out of order"
            for position, token in enumerate(tile.tokens.tolist(), tile.start):
                row.add(token)
                self._write_token(row, position)

    def _write_token(self, row: Row, position: int) -> None:
        slot = row.slots[position]
        assert slot < pool_size(self.pool), f"no page for token {position}"
        self.token_pages[slot] = row.tokens[position]

    def _write_tile(self, tile: Tile) -> None:
        row, end = self.rows[tile.row], tile.start + len(tile.tokens)
        assert row.tokens[tile.start : end] == tile.tokens.tolist()
        self._write(row, self.target_kv, tile.start, row.prefixes[tile.start : end])

    def _run_tile(self, tile: Tile) -> tuple[int, bool]:
        """Run a prompt tile; return the sampled token and whether the row has ended."""
        row, end = self.rows[tile.row], tile.start + len(tile.tokens)
        self._check(row, self.target_kv, end, tile.start)
        if not tile.is_last:
            return 0, True
        row.num_tokens = end
        (token,) = self._append(row, 1)
        return token, row.is_done

    def _draft_prefill(self, plan: StepPlan, shape: StepShape) -> DraftPrefillResult:
        """Prefill the draft model; acceptance probabilities are random."""
        assert self.has_draft
        assert not (plan.decode or plan.admissions or plan.pages or plan.local_pages)
        acceptance_probabilities = np.full((shape.num_tiles, TILE), -1, np.float32)
        for tile in plan.tiles:
            row, end = self.rows[tile.row], tile.start + len(tile.tokens)
            assert 0 < end < row.num_tokens
            assert row.tokens[tile.start : end] == tile.tokens.tolist()
            self._write(row, self.draft_kv, tile.start, row.prefixes[tile.start : end])
        for index, tile in enumerate(plan.tiles):
            row, end = self.rows[tile.row], tile.start + len(tile.tokens)
            self._check(row, self.draft_kv, end, tile.start)
            count = len(tile.tokens) - (tile.next_token == NO_TOKEN)
            assert tile.next_token in (NO_TOKEN, row.tokens[end])
            first = TILE - len(tile.tokens)
            acceptance_probabilities[index, first : first + count] = (
                self._random.random(count)
            )
        return DraftPrefillResult(acceptance_probabilities=acceptance_probabilities)

    def _round(
        self, row: Row, drafts: int, lookahead: int, most: int
    ) -> tuple[list[int], int]:
        """Run a round of one row; return its tokens and number of accepted drafts.

        Args:
            lookahead: Number of drafts that the program has room for.
            most: Largest number of drafts of any sequence.
        """
        if row.is_done:
            return [], 0
        known = row.num_tokens
        assert known, "a row decodes before its prompt has been read"
        accepted = self._num_right(row, drafts)
        ahead = self._drafted(row, accepted, lookahead)
        if lookahead and self.has_draft:
            if drafts:
                self._check(row, self.draft_kv, known - 2, known - 2)
            newest = max(known - 2, 0)
            self._write(row, self.draft_kv, newest, row.prefixes[newest:known])
            self._write(row, self.draft_kv, known, ahead[: max(most - 1, 0)])
        self._check(row, self.target_kv, known - 1, known - 1)
        self._write(row, self.target_kv, known - 1, [row.prefix, *ahead])
        tokens = self._append(row, accepted + 1)
        # Accepted drafts have keys and values now; the target's token has none.
        self._check(row, self.target_kv, row.num_tokens - 1, known - 1)
        kept = min(accepted, len(tokens))
        self.num_accepted += kept
        self.num_proposed += drafts
        return tokens, kept

    def _drafted(self, row: Row, accepted: int, lookahead: int) -> list[int]:
        """Return each draft's prefix hash; the first `accepted` drafts are right."""
        prefix, prefixes = row.prefix, []
        for ahead in range(lookahead):
            token = JUNK
            if ahead < accepted:
                token = self.truth(row.admission.seed, row.num_tokens + ahead, prefix)
            prefix = extend(prefix, token)
            prefixes.append(prefix)
        return prefixes

    def _append(self, row: Row, count: int) -> list[int]:
        """Append `count` tokens of the truth, or fewer if the sequence ends."""
        admission, said = row.admission, []
        while len(said) < count and not row.is_done:
            token = self.truth(admission.seed, row.num_tokens, row.prefix)
            is_stop = token in admission.stop_ids
            is_stop &= row.num_tokens >= admission.min_total
            row.add(token)
            self._write_token(row, row.num_tokens)
            row.num_tokens += 1
            row.is_done = is_stop or row.num_tokens >= admission.max_total
            said.append(token)
        return said

    def _write(self, row: Row, kv: np.ndarray, start: int, prefixes: Any) -> None:
        count = max(min(len(prefixes), self.pool.max_model_len - start), 0)
        # As on a device, keys at positions without a page are dropped.
        kv[row.slots[start : start + count]] = prefixes[:count]
        if self._window is not None:
            for slots in self._local(row.local_slots[start : start + count]):
                kv[slots] = np.array(prefixes[:count], np.int64) ^ LOCAL
        kv[-1] = NOTHING

    def _local(self, slots: np.ndarray) -> list[np.ndarray]:
        """Return the slots of each local layer."""
        assert self.pool.unit_pages is not None
        size = self.pool.page_size
        offsets = range(0, self.pool.unit_pages * size, size)
        return [np.minimum(slots + one, pool_size(self.pool)) for one in offsets]

    def _check(self, row: Row, kv: np.ndarray, length: int, query: int) -> None:
        """Assert that the first `length` slots hold hashes of the row's prefixes.

        Args:
            query: Position of the first query: local layers read only its window.
        """
        length = max(length, 0)
        if self._window is not None:
            seen = slice(max(query - self._window + 1, 0), length)
            for slots in self._local(row.local_slots[seen]):
                assert (slots < pool_size(self.pool)).all(), "no local page"
                assert (kv[slots] == row.prefixes[seen] ^ LOCAL).all(), (
                    "a local slot holds other keys and values"
                )
        slots = row.slots[:length]
        assert (slots < pool_size(self.pool)).all(), "a position has no page"
        assert (kv[slots] == row.prefixes[:length]).all(), (
            "a slot holds another sequence's keys and values"
        )


class FakeRunner(Runner):
    """A runner over a `FakeDevice` that records its calls in order."""

    @property
    def skips_padding(self) -> bool:
        return False

    def __init__(self, config: EngineConfig, truth: Truth, *, seed: int = 0):
        has_draft, window = config.draft_model_config is not None, config.local_window
        self.device = FakeDevice(
            pool_of(config), truth, has_draft=has_draft, seed=seed, window=window
        )
        self.events: list[tuple[str, int]] = []
        self.plans: list[tuple[StepPlan, StepShape]] = []
        self.num_launches = 0
        self.compiles_in_background = False
        self.compiler = Compiler(lambda shape: None)
        self.temporary_bytes = self.code_bytes = 0
        self.followers: Any = None
        self.config = config

    def drop_pages(self) -> None:
        self.events.append(("drop_pages", self.num_launches))

    def restore_pages(self) -> None:
        self.device.forget()

    def set_corpora(self, table: Any) -> None:
        self.corpora = table

    def leave_out_drafts(self) -> None:
        self.device.has_draft = False

    def drop_weights(self, *, keep: bool) -> None:
        self.events.append(("drop_weights", int(keep)))

    def restore_weights(self, loaded: Any) -> None:
        self.events.append(("restore_weights", int(loaded is None)))

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
    """Return a request's expected text: `truth` up to its end."""
    said: list[int] = []
    position, prefix = len(prompt), prefix_of(prompt)
    first_stop = len(prompt) + request.params.min_tokens
    while position < request.max_total:
        said.append(truth(admission_seed, position, prefix))
        prefix = extend(prefix, said[-1])
        if said[-1] in request.stop_ids and position >= first_stop:
            break
        position += 1
    return said

"""One launch on the host: its plan, its requests, and its results for them.

`LaunchBuilder` makes it while `Scheduler.apply_plan` applies the plan.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from jaxspec.engine.scheduling.kv_cache import NewPages, PageTables
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.stages import Admitted, Chunk
from jaxspec.engine.speculation.step_times import (
    MAX_RISE,
    RoundKind,
    fill_of,
    num_rows_of,
)
from jaxspec.engine.structured_output import Failure, GrammarState
from jaxspec.program.plan import (
    NO_TOKEN,
    TILE,
    Admission,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.wire import DraftPrefillResult, StepResult, TokenLogprobs


class LaunchError(Exception):
    """A launch or its read failed.

    Attributes:
        reason: The exception that was raised.
    """

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


class AsLaunchErrors:
    """Turn any exception of device work into a `LaunchError`.

    A class, because it is entered twice per round: a `contextlib` generator would take
    five times as long.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, Exception):
            raise LaunchError(error) from error


@dataclass(kw_only=True)
class Launch:
    """A plan, and the requests of its entries.

    Attributes:
        rows: Decoding rows, in the order of the plan.
        owners: `RowTable.owner` of each row when the launch was planned.
        draft_counts: Draft tokens of each decoding row.
        tiled: The request of each of the plan's tiles.
        registered: Pages registered in the prefix cache that this launch fills.
        is_probe: Whether it only measures acceptance probabilities, while no drafts are
            made.
        charged_s: Seconds that `Pacer` has charged for it.
        expected_s: Expected seconds of a round; None if unknown.
        counted_s: Seconds that each round kept the device busy, once it has been read;
            at most `MAX_RISE` times the expected ones, and 0 for a draft prefill whose
            time is unknown.
        round_kind: Its program and K, which determine the time of a round.
    """

    plan: StepPlan
    shape: StepShape
    rows: np.ndarray
    owners: np.ndarray
    draft_counts: np.ndarray
    decoding: list[Request]
    tiled: list[Request]
    registered: list[int]
    is_probe: bool = False
    charged_s: float | None = None
    expected_s: float | None = None
    counted_s: float = 0.0
    round_kind: RoundKind = field(init=False)

    def __post_init__(self) -> None:
        is_drafting = self.shape.num_levels > 0
        num_draft_tokens = int(self.draft_counts.max(initial=0)) if is_drafting else 0
        self.round_kind = RoundKind(self.shape, num_draft_tokens)

    @property
    def fill(self) -> float:
        """Share of its rows that have tokens, if all requested drafts are found."""
        num_rows = num_rows_of(self.shape, self.draft_counts)
        num_prompt_tokens = sum(len(tile.tokens) for tile in self.plan.tiles)
        return fill_of(self.round_kind, num_rows, num_prompt_tokens)

    @property
    def has_drafts(self) -> bool:
        """Whether any row has drafts."""
        return self.round_kind.num_draft_tokens > 0

    def kind_and_fill(
        self, result: StepResult | DraftPrefillResult
    ) -> tuple[RoundKind, float]:
        """Return which rounds a round's time is typical of, and its fill.

        A round whose lookups found no drafts, which is shorter, counts as one without.
        """
        is_round = isinstance(result, StepResult)
        if self.has_drafts and is_round and not result.num_valid_drafts.any():
            plain = RoundKind(self.shape)
            return plain, fill_of(plain, len(self.rows), self.num_prefilled)
        return self.round_kind, self.fill

    def set_times(self, expected_s: float | None, seconds: float) -> None:
        """Set the expected time of a round, and the time that counts."""
        self.expected_s, self.counted_s = expected_s, seconds
        if expected_s is not None:
            self.counted_s = min(seconds, MAX_RISE * expected_s)
        elif self.shape.is_draft_prefill:
            # The first runs of a program take many times as long as later ones. As
            # losses of drafts, they would stop them for seconds.
            self.counted_s = 0.0

    @property
    def num_rounds(self) -> int:
        """Maximum number of rounds that the launch runs."""
        return self.plan.num_rounds

    @property
    def num_prefilled(self) -> int:
        """Number of prompt tokens."""
        if self.shape.is_draft_prefill:
            return 0
        return sum(len(tile.tokens) for tile in self.plan.tiles)


@dataclass(kw_only=True, slots=True)
class Progress:
    """The new tokens of one request in a launch.

    Attributes:
        is_broken: The target's logits are NaN or infinite: the request ends.
        failure: The failure of the grammar: tokens after it are invalid, and the
            request ends.
        num_valid_drafts: As in `StepResult`.
        num_accepted: Accepted drafts of the main chain, the first of `token_ids`.
        num_side_tokens: Accepted drafts of side branches, which follow them.
        logprobs: Of `token_ids`, one entry per token, if the request wants any.
        prompt_logprobs: The same for the next prompt tokens that have none yet, in
            order, from the prompt's second token on.
    """

    request: Request
    token_ids: list[int]
    is_done: bool
    is_broken: bool = False
    failure: Failure | None = None
    num_valid_drafts: int = 0
    num_accepted: int = 0
    num_side_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@dataclass(kw_only=True, slots=True)
class Advance:
    """The new tokens of all requests in a launch.

    Attributes:
        parts: Of requests that return outputs as they run, and of those that end.
        only_final: Other requests with new tokens: see `Request.only_final_output`.
        late: Requests whose masks were late: their new tokens are dropped.
    """

    parts: list[Progress] = field(default_factory=list)
    only_final: list[Request] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)


class LaunchBuilder:
    """Collects a launch's tiles, admissions and new pages while a plan is applied.

    Attributes:
        new_pages: Pages that requests get.
        tiled: The request of each tile.
        registered: Pages registered in the prefix cache.
    """

    def __init__(self, rows: RowTable, tables: PageTables, *, has_draft_model: bool):
        """Begin without tiles.

        Args:
            has_draft_model: It lags behind the prompts until a draft prefill.
        """
        self._rows, self._tables = rows, tables
        self._has_draft_model = has_draft_model
        self.new_pages = NewPages([], [])
        self.tiles: list[Tile] = []
        self.tiled: list[Request] = []
        self.admissions: list[Admission] = []
        self.registered: list[int] = []

    def add_pages(self, new: NewPages) -> None:
        """Add pages that a request got."""
        self.new_pages.pages.extend(new.pages)
        self.new_pages.local_pages.extend(new.local_pages)

    def begin(self, admitted: Admitted, longest: int) -> None:
        """Admit a request with its pages of the prefix cache, and prefill it.

        Args:
            longest: Maximum number of positions that may be written.
        """
        chunk, request = admitted.chunk, admitted.chunk.request
        request.tokens_to_prefill = request.tokens(0, request.num_tokens)
        self._rows.admit(request, longest)
        self.add_pages(
            self._tables.begin(request, admitted.num_found, admitted.first_local)
        )
        self._rows.first_local[request.row] = request.first_local
        wants_drafts = self._has_draft_model and request.max_draft_tokens > 0
        if wants_drafts and self._tables.lacks_local(request):
            self._rows.max_draft_tokens[request.row] = 0
            self._tables.stats.num_given_up += 1
        request.status = Status.PREFILL
        self.admissions.append(_admission(request))
        self.add_pages(self._tables.grow(request, chunk.end + 1))
        self.prefill(chunk)

    def prefill(self, chunk: Chunk) -> None:
        """Add the tiles of a part of a prompt, whose pages are allocated."""
        request, tiles = chunk.request, _prompt_tiles(chunk)
        request.num_prefilled = chunk.end
        if not self._has_draft_model:
            # Without a draft model, no row has a draft lag, and no page lacks the draft
            # model's values.
            request.num_draft_cached = request.num_prefilled
        self.tiles += tiles
        self.tiled += [request] * len(tiles)
        self.registered += self._tables.register(
            request, request.num_prefilled, request.num_draft_cached
        )
        if tiles[-1].is_last:
            request.status = Status.DECODE
            row = np.array([request.row])
            lag = request.num_prefilled - request.num_draft_cached + 1
            self._rows.num_draft_uncached[row] = lag
            self._rows.is_decoding[row] = True
            self._rows.count_launched(row, np.zeros(1, np.int64))

    def launch(
        self,
        shape: StepShape,
        rows: np.ndarray,
        draft_counts: np.ndarray,
        num_rounds: int,
        charged_s: float | None,
    ) -> Launch:
        """Return the launch of the collected tiles and some decoding rows."""
        listed = rows.tolist()
        decoding = self._rows.owners_of(listed)
        grammars = dict[int, GrammarState]()
        if shape.features.has_grammar:
            grammars = {
                request.row: request.grammar
                for request in (*decoding, *self.tiled)
                if request.grammar is not None
            }
        plan = StepPlan(
            decode=list(zip(listed, draft_counts.tolist(), strict=True)),
            tiles=self.tiles,
            admissions=self.admissions,
            pages=self.new_pages.pages,
            local_pages=self.new_pages.local_pages,
            num_rounds=num_rounds,
            grammars=grammars,
        )
        return Launch(
            plan=plan,
            shape=shape,
            rows=rows,
            owners=self._rows.owner[rows],
            draft_counts=draft_counts,
            decoding=decoding,
            tiled=self.tiled,
            registered=self.registered,
            charged_s=charged_s,
        )


def _prompt_tiles(chunk: Chunk) -> list[Tile]:
    request, known, tiles = chunk.request, chunk.request.tokens_to_prefill, []
    for start in range(chunk.start, chunk.end, TILE):
        end = min(start + TILE, chunk.end)
        is_last = end == len(known)
        tiles.append(
            Tile(
                row=request.row,
                start=start,
                tokens=np.array(known[start:end], np.int32),
                is_last=is_last,
                next_token=NO_TOKEN if is_last else known[end],
            )
        )
    return tiles


def _admission(request: Request) -> Admission:
    params = request.params
    return Admission(
        row=request.row,
        num_prompt=request.num_prompt_tokens,
        min_total=request.min_total,
        max_total=request.max_total,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        rule=request.rule,
        salt=salt_words(request.cache_salt),
        stop_ids=request.stop_ids,
        controls=request.controls,
    )


def salt_words(cache_salt: str | None) -> tuple[int, int]:
    """Return the two 32-bit words that identify a salt on the device; 0 for none."""
    if cache_salt is None:
        return 0, 0
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

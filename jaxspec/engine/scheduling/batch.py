"""One launch on the host: how its prefill is cut, its plan, what came of it.

`PrefillBatch` collects tiles, admissions and new pages while a plan is made.
`commit` takes the result into the requests that the launch was about; they may have
ended since, or lost their row.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.rows import RowTable
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.step_times import Round
from jaxspec.engine.structured_output import Failure
from jaxspec.program.plan import (
    NO_TOKEN,
    TILE,
    Admission,
    PageUpdate,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.wire import CaughtUp, StepResult, TokenLogprobs

# A request, and the number of its first tokens that must have pages.
Claim = tuple[Request, int]


class LaunchError(Exception):
    """A launch or its read failed.

    Attributes:
        reason: What was raised.
    """

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


class OnDevice:
    """Turn any exception of device work into a `LaunchError`.

    Entered twice a round, in a fifth of the time that `contextlib` takes.
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
    """A plan, and the requests that its entries are about.

    Attributes:
        rows: Decoding rows, in the order of the plan.
        owners: `RowTable.owner` of each when the launch was planned.
        drafts: Draft tokens of each.
        tiled: The request of each of the plan's tiles.
        registered: Pages registered in the prefix cache that this launch fills.
        is_probe: It asks the draft model what drafts would bring, where none are made.
        charged_s: Seconds that `Pacer` has charged for it.
        expected_s: That a round was expected to take; None where nothing was known.
        seconds: That each round kept the device busy, once it has been read.
        is_measure: They say what such rounds take: the launch before was like it. Else
            the host's work for another one may be in them, and the device may have had
            to wait.
        round: What decides how long a round of it takes.
    """

    plan: StepPlan
    shape: StepShape
    rows: np.ndarray
    owners: np.ndarray
    drafts: np.ndarray
    decoding: list[Request]
    tiled: list[Request]
    registered: list[int]
    is_probe: bool = False
    charged_s: float | None = None
    expected_s: float | None = None
    seconds: float = 0.0
    is_measure: bool = True
    round: Round = field(init=False)

    def __post_init__(self) -> None:
        self.round = Round(self.shape, int(self.drafts.max(initial=0)))

    @property
    def num_rounds(self) -> int:
        """Rounds that it may run."""
        return self.plan.num_rounds

    @property
    def num_prefilled(self) -> int:
        """Tokens of prompts."""
        if self.shape.is_catch_up:
            return 0
        return sum(len(tile.tokens) for tile in self.plan.tiles)


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a launch added to one request.

    Attributes:
        is_broken: The target's logits are NaN or infinite: the request ends.
        failure: Where the grammar failed: tokens from there on mean nothing, and the
            request ends.
        num_accepted: Draft tokens among `token_ids`, the first ones: of the spine.
        num_beside: Those after them, from beside the spine.
        logprobs: Of `token_ids`, one entry per token, where the request wants any.
        prompt_logprobs: The same for the next prompt tokens that have none yet, in
            order, from the prompt's second token on.
    """

    request: Request
    token_ids: list[int]
    is_done: bool
    is_broken: bool = False
    failure: Failure | None = None
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_beside: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@dataclass(kw_only=True, slots=True)
class Advance:
    """What a launch added to all requests.

    Attributes:
        parts: To those whose tokens somebody looks at, and to those that end.
        quiet: The others that have new tokens.
        late: Those whose masks were late: their new tokens are dropped.
    """

    parts: list[Progress] = field(default_factory=list)
    quiet: list[Request] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)


class PrefillBatch:
    """Tiles, admissions and new pages of one plan, while it is made.

    Attributes:
        room: Tiles that still fit.
        has_draft_model: It will have to catch up with the prompts.
        tiled: The request of each tile.
        registered: Pages registered in the prefix cache.
        num_found: Pages that admitted requests begin with.
    """

    def __init__(
        self,
        rows: RowTable,
        tables: PageTables,
        room: int,
        updates: list[PageUpdate],
        *,
        has_draft_model: bool = False,
    ):
        self.rows, self.tables, self.room, self.updates = rows, tables, room, updates
        self.has_draft_model = has_draft_model
        self.tiles: list[Tile] = []
        self.tiled: list[Request] = []
        self.admissions: list[Admission] = []
        self.registered: list[int] = []
        self.num_found = 0

    @property
    def num_controlled(self) -> int:
        """Admissions with controls."""
        return sum(admission.controls is not None for admission in self.admissions)

    def begin(self, request: Request, found: list[int], longest: int) -> None:
        """Admit a request with its pages of the prefix cache, and prefill it.

        Args:
            longest: Positions that may ever be written.
        """
        self.rows.admit(request, longest)
        self.tables.begin(request, found)
        request.status = Status.PREFILL
        self.num_found += len(found)
        self.admissions.append(_admission(request))
        self.updates += [(request.row, i, page) for i, page in enumerate(found)]
        end = next_end(request, self.room)
        self.updates += self.tables.grow(request, end + 1)
        self.prefill(request)

    def prefill(self, request: Request) -> None:
        """Cut as much of a prompt into tiles as there is room; it has the pages."""
        tiles = _prompt_tiles(request, self.room)
        if not self.has_draft_model:
            request.num_drafted = request.num_prefilled
        self._add(request, tiles)
        self.registered += self.tables.register(
            request, request.num_prefilled, request.num_drafted
        )
        if tiles[-1].is_last:
            request.status = Status.DECODE
            row = np.array([request.row])
            lacking = request.num_prefilled - request.num_drafted
            self.rows.num_draft_uncached[row] = lacking + 1
            self.rows.is_decoding[row] = True
            self.rows.launch(row, np.zeros(1, np.int64))

    def _add(self, request: Request, tiles: list[Tile]) -> None:
        self.tiles += tiles
        self.tiled += [request] * len(tiles)
        self.room -= len(tiles)


def next_end(request: Request, room: int) -> int:
    """The position up to which `room` more tiles prefill a prompt."""
    return min(request.num_prefilled + room * TILE, len(request.tokens_to_prefill))


def claims_of(prefilling: list[Request], room: int) -> list[Claim]:
    """Requests whose prefill goes on, and how many of their tokens need pages."""
    claims = []
    for request in prefilling:
        if room > 0:
            end = next_end(request, room)
            room -= -(-(end - request.num_prefilled) // TILE)
            claims.append((request, end + 1))
    return claims


def _prompt_tiles(request: Request, room: int) -> list[Tile]:
    tiles = []
    known = request.tokens_to_prefill
    while request.num_prefilled < len(known) and len(tiles) < room:
        start = request.num_prefilled
        end = request.num_prefilled = next_end(request, 1)
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


def plan_draft_prefill(
    rows: RowTable,
    tables: PageTables,
    lagging: np.ndarray,
    shape: StepShape,
    *,
    is_probe: bool = False,
) -> Launch:
    """Feed the draft model what it has no keys and values for.

    Of pages that requests share, the first to be served feeds them for all.

    Args:
        lagging: Rows of which all unread launches are plain, the first to be served.
        is_probe: Goes into the launch.
    """
    tiles: list[Tile] = []
    tiled: list[Request] = []
    for request in rows.owners_of(lagging.tolist()):
        row, room = request.row, shape.num_tiles - len(tiles)
        gap, unread = int(rows.num_draft_uncached[row]), int(rows.num_unread[row])
        # The newest token stays out: it is the next round's input.
        start = before = request.num_tokens + unread - gap
        end = min(request.num_tokens, request.num_tokens + unread - 1)
        start = max(start, min(tables.num_drafted(request), end))
        end = min(end, start + room * TILE)
        for first in range(start, end, TILE):
            last = min(first + TILE, end)
            known = request.tokens(first, min(last + 1, request.num_tokens))
            has_next = len(known) > last - first
            tiles.append(
                Tile(
                    row=row,
                    start=first,
                    tokens=np.array(known[: last - first], np.int32),
                    is_last=False,
                    next_token=known[-1] if has_next else NO_TOKEN,
                )
            )
            tiled.append(request)
        rows.num_draft_uncached[row] -= max(end - before, 0)
        tables.complete(request, max(end, start))
    return Launch(
        plan=StepPlan(tiles=tiles),
        shape=shape,
        rows=np.zeros(0, np.int64),
        owners=np.zeros(0, np.int64),
        drafts=np.zeros(0, np.int64),
        decoding=[],
        tiled=tiled,
        registered=[],
        is_probe=is_probe,
    )


def commit_draft_prefill(
    launch: Launch, result: CaughtUp, acceptance: AcceptanceRates
) -> None:
    """Note how likely drafts would have been to stay."""
    for request, likeness in zip(launch.tiled, result.likeness, strict=False):
        if request.row >= 0:
            acceptance.record_probabilities(request.row, likeness[likeness >= 0])


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
    """Two words of 32 bits that stand for a salt on the device; zeros for none."""
    if cache_salt is None:
        return 0, 0
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def settle(
    launch: Launch, num_run: int, rows: RowTable, *, has_draft_model: bool
) -> None:
    """Take back the rounds that a launch did not run, before those it ran are read."""
    if launch.num_rounds == 1:
        return
    missing = launch.num_rounds - num_run
    is_there = rows.owner[launch.rows] == launch.owners
    rows.settle(
        launch.rows[is_there],
        launch.drafts[is_there],
        launch.num_rounds,
        missing,
        is_lag=has_draft_model and not launch.shape.num_draft_tokens,
    )
    for request, has_row in zip(launch.decoding, is_there.tolist(), strict=True):
        if not has_row and request.status is not Status.FINISHED:
            request.num_unread -= missing


def commit(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    acceptance: AcceptanceRates,
) -> Advance:
    """Add a round's tokens to requests and bring rows and totals up to date."""
    advance = _commit_rounds(launch, result, rows, stats, acceptance)
    for index, (tile, request) in enumerate(
        zip(launch.plan.tiles, launch.tiled, strict=True)
    ):
        found = _prompt_logprobs(result, index, tile, request)
        part = _commit_first(result, index, request, rows) if tile.is_last else None
        if part is not None:
            stats.num_generated_tokens += len(part.token_ids)
            if request.is_quiet and not part.is_done:
                advance.quiet.append(request)
                continue
            part.prompt_logprobs = found
            advance.parts.append(part)
        elif request.status is not Status.FINISHED:
            if tile.is_last:
                advance.late.append(request)
            if found is not None:
                advance.parts.append(
                    Progress(
                        request=request,
                        token_ids=[],
                        is_done=False,
                        prompt_logprobs=found,
                    )
                )
    return advance


def _commit_rounds(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    acceptance: AcceptanceRates,
) -> Advance:
    count = len(launch.rows)
    is_broken, emitted = result.is_broken[:count], result.num_emitted[:count]
    is_void = is_broken
    if launch.shape.features.has_grammar:
        is_void = is_broken | np.array(
            [request.is_late for request in launch.decoding], bool
        )
    if is_void.any():
        emitted = np.where(is_void, 0, emitted)
    is_there = rows.owner[launch.rows] == launch.owners
    there, planned, new = launch.rows, launch.drafts, emitted
    if not is_there.all():
        there, planned, new = there[is_there], planned[is_there], new[is_there]
    rows.read(there, planned, new)
    drafts = accepted = beside = np.zeros(count, np.int64)
    if launch.round.num_drafts or result.num_kept is not None:
        # A lookup in the sequence may have found fewer than were planned.
        drafts = np.minimum(result.num_draft[:count], launch.drafts)
        drafts = np.where(is_void & ~is_broken, 0, drafts)
        accepted = np.minimum(result.num_accepted[:count], drafts)
        # A sequence that had ended before this round says nothing about its drafts, and
        # one that ends in it nothing about those after the end.
        is_counted = is_there & (emitted > 0)
        judged, wanted = (
            np.where(result.is_done[:count], accepted, some)[is_counted]
            for some in (drafts, launch.drafts)
        )
        acceptance.record(launch.rows[is_counted], judged, accepted[is_counted], wanted)
        if result.num_kept is not None:
            kept = np.minimum(result.num_kept[:count], emitted)
            beside = np.where(is_void, 0, kept - accepted)
            acceptance.record_side_branches(accepted[is_counted], beside[is_counted])
        if result.tree_row is not None:
            goes_on = is_counted & ~result.is_done[:count] & (drafts > 0)
            stats.record_ends(drafts[goes_on], result.tree_row[:count][goes_on])
    columns = zip(
        launch.decoding,
        is_there.tolist(),
        result.tokens[:count].tolist(),
        emitted.tolist(),
        drafts.tolist(),
        accepted.tolist(),
        beside.tolist(),
        result.is_done[:count].tolist(),
        is_broken.tolist(),
        is_void.tolist(),
        strict=True,
    )
    advance = Advance()
    has_ended = []
    logprobs = result.logprobs
    for index, column in enumerate(columns):
        request, has_row, tokens, new, asked, kept, more, done, broken, void = column
        if not has_row:
            if request.status is Status.FINISHED:
                has_ended.append(index)
                continue
            request.num_unread -= 1
        if void and not broken:
            advance.late.append(request)
            continue
        del tokens[new:]
        request.output_token_ids += tokens
        if not new:
            asked = 0
        elif asked and request.spec_metrics is not None:
            request.spec_metrics.record_step(asked, kept)
        failure = request.grammar_failure
        if request.is_quiet and not (done or broken or failure):
            if new:
                advance.quiet.append(request)
            continue
        part = Progress(
            request=request,
            token_ids=tokens,
            is_done=done or broken or failure is not None,
            is_broken=broken,
            failure=failure,
            num_draft_tokens=asked,
            num_accepted=kept,
            num_beside=more,
        )
        if logprobs is not None and request.features.num_logprobs is not None:
            part.logprobs = _pick(logprobs, (index, slice(0, new)))
        advance.parts.append(part)
    if has_ended:
        emitted = emitted.copy()
        emitted[has_ended] = 0  # tokens after the end are dropped
    stats.record_round(drafts, accepted, emitted, beside)
    return advance


def _commit_first(
    result: StepResult, index: int, request: Request, rows: RowTable
) -> Progress | None:
    """Add the first generated token; None if the request has ended or is late."""
    if request.status is Status.FINISHED:
        return None
    token, is_broken = int(result.tile_token[index]), bool(result.tile_is_broken[index])
    if request.row < 0:
        request.num_unread -= 1
    else:
        one = np.array([request.row])
        new = np.array([0 if is_broken or request.is_late else 1])
        rows.read(one, np.zeros(1, np.int64), new)
    if is_broken:
        return Progress(request=request, token_ids=[], is_done=True, is_broken=True)
    if request.is_late:
        return None
    request.output_token_ids.append(token)
    failure = request.grammar_failure
    part = Progress(
        request=request,
        token_ids=[token],
        is_done=bool(result.tile_is_done[index]) or failure is not None,
        failure=failure,
    )
    if request.features.num_logprobs is not None and result.tile_logprobs is not None:
        part.logprobs = _pick(result.tile_logprobs, slice(index, index + 1))
    return part


def _prompt_logprobs(
    result: StepResult, index: int, tile: Tile, request: Request
) -> TokenLogprobs | None:
    """Log-probabilities that a tile has for prompt tokens without any yet."""
    found = result.prompt_logprobs
    if found is None or request.features.num_prompt_logprobs is None:
        return None
    # The entry of position t is about token t + 1; the last is about generated ones.
    end = tile.start + len(tile.tokens)
    first = max(tile.start, request.num_prompt_logprobs)
    last = min(end, request.num_prompt_tokens - 1)
    if first >= last:
        return None
    request.num_prompt_logprobs = last
    # Tokens are right-aligned in their tile.
    return _pick(found, (index, slice(TILE - end + first, TILE - end + last)))


def _pick(found: TokenLogprobs, where: slice | tuple[int, slice]) -> TokenLogprobs:
    return TokenLogprobs(*(values[where] for values in found))

"""Who runs in the next launch: admission, chunked prefill, decoding, preemption.

Plans one launch ahead of what has been read, so it works with bounds on lengths: the
device alone knows how many drafts were accepted. Owns rows, pages and the order of
waiting requests; knows nothing of texts or devices.
"""

import bisect
import functools
import itertools
import math
import operator
import time
from collections.abc import Iterator
from concurrent import futures
from typing import NamedTuple

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.scheduling.batch import (
    Advance,
    Claim,
    Launch,
    PrefillBatch,
    claims_of,
    commit,
    commit_catch_up,
    plan_catch_up,
    settle,
)
from jaxspec.engine.scheduling.controller import Controller
from jaxspec.engine.scheduling.costs import (
    PRIOR_RATE,
    WATCHED_PRIOR_RATE,
    Costs,
    Kind,
    Round,
)
from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.lookups import TELLING_RUNS, Lookups
from jaxspec.engine.scheduling.pacing import Pacer
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.rates import Choice
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.rows import RowTable
from jaxspec.engine.scheduling.shapes import FIRST_CHUNK, Programs, Shapes
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.structured_output import NUM_MASK_THREADS, GrammarState
from jaxspec.program.plan import (
    COUPLED,
    MAX_CONTROLLED,
    TILE,
    Features,
    PageUpdate,
    StepPlan,
    StepShape,
)
from jaxspec.program.wire import CaughtUp, StepResult
from jaxspec.settings.lookups import LookupRule

# Launches that feed the draft model, before the next round, at most.
MAX_IN_A_ROW = 4
# Launches until K is chosen again, once the controller has chosen 0. To look at the
# drafts that every sequence may have, only to choose 0 again, takes the host 25 to 35
# microseconds of a plain round of 650 (the bundled target at batch 1, two cores).
REST_LAUNCHES = 8
# Rounds that what a change costs is spread over, at least and at most.
HORIZON_ROUNDS = 8, 256


class Decode(NamedTuple):
    """The decode part of the next launch, before it has pages.

    Attributes:
        rows: None while the program for them is being compiled.
        wanted: Draft tokens of each row.
        num_draft_tokens: The most of them.
        shape: The program for them, without prompts.
        is_exception: There are no drafts, although as a rule there would be.
    """

    rows: np.ndarray
    wanted: np.ndarray
    num_draft_tokens: int
    shape: StepShape | None
    is_exception: bool


class Scheduler:
    """Waiting and running requests, rows of the device's state, pages."""

    def __init__(
        self,
        config: EngineConfig,
        controller: Controller,
        stats: EngineStats | None = None,
        programs: Programs | None = None,
        costs: Costs | None = None,
        page_events: PageEvents | None = None,
    ):
        self.config, self.controller = config, controller
        self.stats = stats or EngineStats()
        self.costs = costs or make_costs(config, controller)
        self.tables = PageTables(config, self.stats, page_events)
        self.pages = self.tables.pool
        speculative = config.speculative
        longest_drafted = speculative.max_model_len if speculative else None
        longest_drafted = longest_drafted or config.max_model_len
        is_parallel = speculative is not None and speculative.is_parallel
        self.rows = RowTable(
            config.max_num_seqs,
            longest_drafted,
            config.num_draft_tokens if is_parallel else None,
        )
        self._lookups = make_lookups(config, controller)
        self.shapes = Shapes(config, controller, programs)
        # Masks of held rows that are being computed, and the threads that do it.
        self._masks: list[futures.Future[None]] = []
        self._mask_threads = futures.ThreadPoolExecutor(
            NUM_MASK_THREADS, "jaxspec-masks"
        )
        self.waiting = WaitingQueue(config.scheduling_policy)
        self.running: list[Request] = []
        self.pacer = Pacer(self.costs)
        # Program of the launch that was read last, and whether it made drafts.
        self._last_work: tuple[StepShape, bool] | None = None
        # Plain launches before K is chosen again, this one included.
        self._num_resting = 0
        # Bringing the draft model up to date and other launches take turns.
        self._num_caught_up, self._has_put_off = 0, False
        # When most requests waited for it last.
        self._num_admitted_then = 0

    @property
    def _has_draft_model(self) -> bool:
        has_one = self.config.draft_model_config is not None
        return has_one and not self.controller.is_stopped

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.tokens_to_prefill = request.prompt_token_ids
        self.waiting.add(request)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that need a program which is not there yet."""
        num_seqs = min(len(self.running) + 1, self.config.max_num_seqs)
        return sum(
            not self.shapes.with_prompts(num_seqs, 0, self._features_with(one))
            for one in self.waiting
        )

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def reset_prefix_cache(self) -> bool:
        """Forget all pages of ended requests; False while any page is in use."""
        return self.pages.reset()

    def plan(self) -> Launch | None:
        """Plan the next launch; None when nothing can be done before a read."""
        self._num_resting = max(self._num_resting - 1, 0)
        if self.shapes.cannot_catch_up:
            self.controller.stop("the draft model's program could not be compiled")
        if self._is_turn_to_catch_up():
            catch_up = self._plan_catch_up()
            if catch_up is not None:
                return catch_up
        launch = self._plan_round()
        # Nothing else can be launched: catch up out of turn.
        return self._plan_catch_up() if launch is None else launch

    def _plan_round(self) -> Launch | None:
        """Decoding rows, and prompts."""
        decode = self._decodable()
        shapes = self._shapes_with_prompts(decode)
        room, charged_s = self._room(decode, shapes)
        launch = self._plan(decode, shapes, room, charged_s)
        if launch is None and len(decode.rows) and not room:
            # Prefill was deferred to protect decode latency, but no decoding row could
            # get pages: retry with the full prefill budget.
            decode = self._decodable()
            shapes = self._shapes_with_prompts(decode)
            launch = self._plan(decode, shapes, self.shapes.max_tiles, None)
        return launch

    @property
    def _prefilling(self) -> list[Request]:
        if np.count_nonzero(self.rows.is_decoding) == len(self.running):
            return []  # most rounds, and hundreds may run
        return [one for one in self.running if one.status is Status.PREFILL]

    def _decodable(self) -> Decode:
        """The rows that can decode next, in a program that is compiled."""
        self._hold_slow_grammars()
        rows, wanted = self.rows.decodable(0 if self._num_resting else self._limit)
        most = int(wanted.max(initial=0))
        if most and self._can_wait:
            awaits_draft = self.rows.awaits_draft(rows)
            if awaits_draft.any():
                # They decode together soon: their program can be compiled meanwhile.
                self.shapes.find(len(rows), most, 0, self.rows.features(rows))
                rows, wanted = rows[~awaits_draft], wanted[~awaits_draft]
                most = int(wanted.max(initial=0))
        can_draft = bool(most and self.controller.num_drafts)
        features, shape = self.rows.features(rows), None
        if most:
            chosen = self._choose(rows, wanted, features)
            wanted, most = np.minimum(wanted, chosen), min(most, chosen)
            if not most and self._has_draft_model and not self.controller.num_drafts:
                self._num_resting = REST_LAUNCHES
                self.controller.repeat(REST_LAUNCHES - 1)
        if len(rows):
            has_beside = self.controller.has_beside
            has_beside |= self._has_draft_model and not most
            shape = self.shapes.find(
                len(rows), most, 0, features, has_beside=has_beside
            )
            if most and self._has_draft_model:
                wanted[self.rows.lags(rows)] = 0
                most = int(wanted.max())
                if shape is not None and not most:
                    # All rows wait for the draft model, for a round or two. Where the
                    # program with drafts is still compiled the rows wait for it: a
                    # short text would be over before anything was drafted.
                    shape = self.shapes.find(len(rows), 0, 0, features, is_brief=True)
        if shape is None:
            rows, wanted, most = rows[:0], wanted[:0], 0
        return Decode(rows, wanted, most, shape, is_exception=can_draft and not most)

    def _hold_slow_grammars(self) -> None:
        """Hold rows whose next mask takes long, until a thread has computed it.

        Inside a launch, all other rows would wait for it.
        """
        rows = self.rows
        if not np.count_nonzero(rows.has_grammar):
            return  # most rounds
        rows.is_slow[:] = rows.is_held[:] = False
        self._masks.clear()
        for row in np.flatnonzero(rows.has_grammar & rows.is_decoding).tolist():
            (request,) = rows.owners_of([row])
            grammar = request.grammar
            assert grammar is not None
            if not grammar.is_slow:
                continue
            rows.is_slow[row] = rows.is_held[row] = True
            if rows.num_unread[row] > 0:
                continue
            rows.is_held[row] = not grammar.is_ready(
                request.output_token_ids, self._mask_threads
            )
            if rows.is_held[row] and grammar.computing is not None:
                self._masks.append(grammar.computing)

    def wait_for_masks(self, timeout_s: float) -> bool:
        """Wait until a mask of a held row is there; False if none is computed."""
        if not self._masks:
            return False
        futures.wait(self._masks, timeout_s, futures.FIRST_COMPLETED)
        return True

    @property
    def _can_wait(self) -> bool:
        """Whether rows decode only once the draft model has read what they have.

        With a constant K: else it would depend on the launches of others which rounds
        have drafts. While the program for it is compiled nobody waits: that takes
        seconds, and requests go on without drafts.
        """
        if not (self.controller.is_constant and self._has_draft_model and self._limit):
            return False
        return self.shapes.can_catch_up

    @property
    def _limit(self) -> int:
        """Most drafts that a sequence may have now."""
        return self.controller.limit(len(self.running) + bool(self.waiting))

    @property
    def choice(self) -> Choice:
        """K as chosen now, within what so many requests may have."""
        limit = self._limit
        k = min(self.controller.num_drafts, limit)
        gain, has_beside = self.controller.gain, self.controller.has_beside
        return Choice(k, gain if k else 0.0, limit > 0, has_beside)

    def _choose(self, rows: np.ndarray, wanted: np.ndarray, features: Features) -> int:
        """K of the next round."""

        def seconds(*, has_beside: bool = True) -> list[float | None]:
            found: list[float | None] = []
            for k in range(int(wanted.max()) + 1):
                shape = self.shapes.find(
                    len(rows), k, 0, features, has_beside=has_beside
                )
                if shape is None or (k and not has_beside and shape.template):
                    found.append(None)
                else:
                    found.append(self.costs.expected_seconds(Round(shape, k)))
            return found

        def chain_seconds() -> list[float | None] | None:
            return seconds(has_beside=False) if self.shapes.has_chains else None

        return self.controller.choose(
            wanted,
            acceptance=lambda: self._acceptance(rows),
            beside=lambda: self.costs.beside_share,
            seconds=seconds,
            chain_seconds=chain_seconds,
            catch_up_s=lambda: self._catch_up_s(rows),
            can_ask=lambda: (
                self._lookups is not None
                or (self._has_draft_model and not self.costs.is_drawn(rows).any())
            ),
        )

    def _acceptance(self, rows: np.ndarray) -> np.ndarray:
        """By row and position, with what lookups would have brought until now."""
        self._count_foretold()
        return self.costs.acceptance(rows)

    def _count_foretold(self) -> None:
        found = self._lookups and self._lookups.take()
        if found:
            self.costs.record_foretold(*found)

    def _watch(self, launch: Launch, result: StepResult) -> None:
        """Compare what came without drafts with what a lookup would have proposed."""
        lookups, count = self._lookups, len(launch.rows)
        if lookups is None or not count:
            return
        emitted = np.where(result.is_broken[:count], 0, result.num_emitted[:count])
        is_there = (self.rows.owner[launch.rows] == launch.owners) & (emitted > 0)
        if launch.drafts.any():
            drafts = np.minimum(result.num_draft[:count], launch.drafts)
            accepted = result.num_accepted[:count]
            is_kept = (drafts > 0) & (accepted >= drafts)
            runs = np.where(is_kept, accepted, 0)[is_there]
            self.costs.note_runs(launch.rows[is_there], runs)
        elif not self.controller.num_drafts:
            there = np.flatnonzero(is_there & (self.rows.num_draft[launch.rows] > 0))
            runs = [
                lookups.follow(launch.decoding[index], new)
                for index, new in zip(
                    there.tolist(), emitted[there].tolist(), strict=True
                )
            ]
            self.costs.note_runs(launch.rows[there], np.array(runs, np.int64))
            if not set(TELLING_RUNS).isdisjoint(runs):
                self.controller.look()

    def _catch_up_s(self, rows: np.ndarray) -> float:
        """Seconds per round before all rows can have drafts, over what is left."""
        rows = rows[self.rows.lags(rows)]
        if not self._has_draft_model or not len(rows):
            return 0.0
        tiles = self._missing_tiles(rows)
        shape = self.shapes.catch_up(tiles)
        if shape is None:
            return 0.0
        seconds = self.costs.seconds.get(Round(shape), 0.0)
        launches = -(-tiles // shape.num_tiles)
        left = self.rows.max_total[rows] - self.rows.num_tokens[rows]
        return launches * seconds / float(np.clip(left.mean(), *HORIZON_ROUNDS))

    def _missing_tiles(self, rows: np.ndarray) -> int:
        """Tiles that the draft model lacks of some rows."""
        return int((-(-(self.rows.num_draft_uncached[rows] - 1) // TILE)).sum())

    def _is_turn_to_catch_up(self) -> bool:
        """Whether the draft model is brought up to date before anything else.

        In turn with rounds while most sequences have drafts. Else several times in a
        row: of rounds without drafts, those who have caught up would lag again before
        the last have.
        """
        rows = self.rows
        is_due = self._may_catch_up and rows.awaits_draft(rows.decoding).any()
        if not is_due:
            self._num_caught_up = 0  # most rounds
            return False
        most = MAX_IN_A_ROW if self._is_in_a_row() else 1
        if self._num_caught_up >= most or not len(self.rows.lagging()):
            self._num_caught_up = 0
            return False
        # Put off once, so that waiting requests get their first tokens.
        has_newcomers = bool(self.waiting and self.rows.free)
        self._has_put_off = has_newcomers and not self._has_put_off
        return not self._has_put_off

    def _plan_catch_up(self) -> Launch | None:
        """Bring the draft model up to date with rows that may have drafts.

        Prompts, once the target has read them: a first token does not wait for the
        draft model. And what was decoded without drafts. While nothing is drafted one
        row is enough now and then, to learn what drafts would bring.
        """
        if not self._may_catch_up:
            return None
        lagging, is_probe = self.rows.lagging(), self._is_probe
        if is_probe:
            lagging = lagging[~self.costs.is_drawn(lagging)]
            shortest = self.rows.num_draft_uncached[lagging].argsort(kind="stable")
            lagging = lagging[shortest[:1]]
        if not len(lagging):
            return None
        # In the order of admission: later requests do not overtake earlier ones.
        lagging = lagging[self.rows.owner[lagging].argsort()]
        tiles = self._missing_tiles(lagging)
        if self._are_streaming() and not self._is_in_a_row():
            tiles = min(tiles, self._tiles_beside_streams())
        shape = self.shapes.catch_up(tiles)
        if shape is None:
            return None
        self._num_caught_up += 1
        if is_probe:
            self.controller.begin_probe()
        return plan_catch_up(self.rows, self.tables, lagging, shape, is_probe=is_probe)

    @property
    def _is_probe(self) -> bool:
        """Whether the draft model is fed only to learn what drafts would bring."""
        return self.controller.is_adaptive and not self.controller.num_drafts

    @property
    def _may_catch_up(self) -> bool:
        """Whether the draft model is fed at all now, where a sequence lags."""
        if self._num_resting or not self._has_draft_model:
            return False
        if not (self._limit and self.rows.wants_drafts):
            return False
        if self.controller.is_timing_plain:
            return False  # between such rounds it would make them slower
        return not self._is_probe or self.controller.wants_probe()

    def _is_in_a_row(self) -> bool:
        """Whether some wait for the draft model since more than half of all did."""
        rows = self.rows.decoding
        late = rows[self.rows.awaits_draft(rows)]
        if 2 * len(late) > len(rows):
            self._num_admitted_then = self.rows.num_admitted
        return bool((self.rows.owner[late] < self._num_admitted_then).any())

    def _are_streaming(self) -> bool:
        """Whether a streaming request decodes now, without awaiting the draft model."""
        rows = np.flatnonzero(self.rows.is_decoding & self.rows.is_streamed)
        if not self._can_wait:
            return len(rows) > 0
        return not bool(self.rows.awaits_draft(rows).all())

    def _tiles_beside_streams(self) -> int:
        """Tiles of the largest program that they may wait for between two rounds."""
        shapes = self.shapes.catch_ups
        seconds = [self.costs.seconds.get(Round(shape), math.inf) for shape in shapes]
        allowed = [
            shape.num_tiles
            for shape, one in zip(shapes, seconds, strict=True)
            if one <= self.pacer.spare_s
        ]
        return max(allowed, default=shapes[0].num_tiles)

    def _shapes_with_prompts(self, decode: Decode) -> list[StepShape]:
        """Compiled programs for a launch with prompts, from the smallest.

        None is larger than the one that reads all that there is in the least time.
        """
        prefilling = self._prefilling
        if not (prefilling or self.waiting):
            return []
        features, tokens = self.rows.features(decode.rows), 0
        for request in prefilling:
            features |= request.features
            tokens += _tiled(len(request.tokens_to_prefill) - request.num_prefilled)
        num_seqs, num_draft = len(decode.rows), decode.num_draft_tokens
        found = self.shapes.with_prompts(num_seqs, num_draft, features)
        if found and found[-1].num_tiles < self.shapes.max_tiles:
            # A larger program can be had, and is worth it where as many tokens wait.
            tokens += sum(
                _tiled(len(one.tokens_to_prefill)) for one in self._newcomers()
            )
        if tokens:
            self.shapes.request(
                num_seqs,
                num_draft,
                tokens,
                features,
                is_brief=self._is_brief(decode),
            )
        return self._fast(found, num_seqs, num_draft)

    def _fast(
        self, shapes: list[StepShape], num_seqs: int, num_draft: int
    ) -> list[StepShape]:
        """Those up to the largest that reads what there is in the least time.

        Args:
            num_seqs: Sequences that decode.
            num_draft: Drafts that they make.
        """
        if len(shapes) < 2:
            return shapes
        num_tiles = 0
        for request in itertools.chain(self._prefilling, self._newcomers()):
            left = len(request.tokens_to_prefill) - request.num_prefilled
            num_tiles, num_seqs = num_tiles + -(-left // TILE), num_seqs + 1
            if num_tiles >= shapes[-1].num_tiles:
                break
        # A program for few sequences is of no use once those of the launch decode.
        usable = [
            shape
            for shape in shapes
            if shape.num_seqs >= num_seqs - 1 or shape.num_tiles >= num_tiles
        ]
        usable = usable or shapes
        rounds = [Round(shape, num_draft) for shape in usable]
        best = usable[self.pacer.fastest(num_tiles * TILE, rounds)]
        return shapes[: shapes.index(best) + 1]

    def _newcomers(self) -> Iterator[Request]:
        """Waiting requests for which there is a row."""
        return itertools.islice(self.waiting, len(self.rows.free))

    def _is_brief(self, decode: Decode) -> bool:
        """Whether a launch without drafts would have some as a rule."""
        return not len(decode.rows) or bool(self.choice.num_drafts)

    def _room(
        self, decode: Decode, shapes: list[StepShape]
    ) -> tuple[int, float | None]:
        """Tiles of prompts that the launch may take along, and what pacing charges.

        Args:
            shapes: Its programs with prompts, from the smallest chunk.
        """
        most = shapes[-1].num_tiles if shapes else 0
        if not self._prefilling and not self.waiting:
            self.pacer.rest()
            return most, None
        if not self._are_streaming():
            return most, None
        if decode.shape is None or not shapes:
            # Prompts wait for the read.
            return 0, None
        k = decode.num_draft_tokens
        mixed = [Round(shape, k) for shape in shapes]
        tokens, charged_s = self.pacer.chunk(Round(decode.shape, k), mixed)
        return tokens // TILE, charged_s

    def _plan(
        self,
        decode: Decode,
        shapes: list[StepShape],
        room: int,
        charged_s: float | None,
    ) -> Launch | None:
        """Take pages, feed prompts and admit; None if nothing is left to launch."""
        rows, wanted = decode.rows, decode.wanted
        most = shapes[-1].num_tiles if shapes else 0
        room = min(room, most)
        going_on = claims_of(self._prefilling, room)
        num_rounds = self._num_rounds(decode)
        claims = self._growing(decode, num_rounds) + going_on
        updates, sitting_out = self._secure(claims)
        if sitting_out is not None:
            # Drop the rows that were preempted or found no page.
            is_served = (self.rows.owner[rows] >= 0) & ~np.isin(rows, sitting_out)
            rows, wanted = rows[is_served], wanted[is_served]
        work = PrefillBatch(
            self.rows,
            self.tables,
            room,
            updates,
            has_draft_model=self._has_draft_model,
        )
        for request, _ in going_on:
            is_there = request.row >= 0 and request.row not in (sitting_out or ())
            if is_there:
                work.prefill(request)
        # Without any program for prompts, admission requests one.
        while sitting_out is None and (work.room or not shapes) and self._admit(work):
            pass
        if not len(rows) and not work.tiles:
            return None
        shape = decode.shape
        if work.tiles:
            features = self.rows.features(rows)
            for request in work.tiled:
                features |= request.features
            # Pages were taken for all rows: a plan of fewer may not list them.
            num_seqs = len(rows)
            if sitting_out is not None and shape is not None:
                num_seqs = shape.num_seqs
            tokens = len(work.tiles) * TILE
            num_draft = decode.num_draft_tokens
            shape = self.shapes.find(
                num_seqs,
                num_draft,
                tokens,
                features,
                is_brief=self._is_brief(decode),
            )
        assert shape is not None, "rows decode, and prompts come in, where they can"
        return self._launch(rows, wanted, shape, work, charged_s, num_rounds)

    def _num_rounds(self, decode: Decode) -> int:
        """How many rounds of the same sequences the launch may run.

        Several only where the launches after it would be like it, and where nobody
        waits for what the first round brings: a place, a prompt's turn, a token to
        show, a draft model that is up to date. And never at the price of a page that
        somebody else has.
        """
        table, rows, shape = self.rows, decode.rows, decode.shape
        if shape is None or shape.max_rounds == 1 or self.waiting:
            return 1
        # Others prefill, await the draft model, or may have ended.
        is_alone = len(rows) == len(self.running) and not decode.is_exception
        if not is_alone or not table.is_quiet[rows].all() or table.is_slow[rows].any():
            return 1
        if self._has_draft_model and shape.num_draft_tokens and table.lags(rows).any():
            return 1
        round_ = Round(shape, decode.num_draft_tokens)
        count = self.pacer.num_rounds(round_, shape.max_rounds)
        count = min(count, table.rounds_left(rows, decode.wanted))
        while count > 1 and not self._has_pages(self._growing(decode, count)):
            count -= 1
        return count

    def _has_pages(self, claims: list[Claim]) -> bool:
        needed = sum(self.tables.missing(*claim) for claim in claims)
        return needed <= self.pages.num_free

    def _growing(self, decode: Decode, num_rounds: int = 1) -> list[Claim]:
        """Decoding requests that need more pages, and for how many tokens."""
        table, rows = self.rows, decode.rows
        # The draft model writes this many positions whatever the request wants. One
        # more for the target's token, which has a slot but no keys and values yet.
        tree = self.shapes.tree(decode.num_draft_tokens)
        lengths = table.most_tokens(rows) + tree.num_rows
        lengths += (num_rounds - 1) * (decode.wanted + 1)
        lengths = np.minimum(lengths, table.longest[rows])
        requests, size = table.owners_of(rows.tolist()), self.config.page_size
        return [
            (request, length)
            for request, length in zip(requests, lengths.tolist(), strict=True)
            if length > len(request.pages) * size
        ]

    def _secure(self, claims: list[Claim]) -> tuple[list[PageUpdate], list[int] | None]:
        """Allocate pages for all that the launch may write of running requests.

        If the pool has too few, requests are served in order of rank and the last in
        rank are preempted. A request with nobody behind it sits the launch out and
        keeps its pages.

        Returns:
            The new pages, and the rows that sit out; None if there was enough for all.
        """
        is_tight = not self._has_pages(claims)
        if is_tight:
            claims = sorted(claims, key=lambda claim: self.waiting.rank(claim[0]))
        updates: list[PageUpdate] = []
        sitting_out = []
        for request, length in claims:
            if request.row < 0:
                continue  # preempted for a request before it in rank
            if is_tight and not self._make_room(request, length):
                sitting_out.append(request.row)
                continue
            updates += self.tables.grow(request, length)
        return updates, sitting_out if is_tight else None

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        rank = self.waiting.rank
        missing = self.tables.missing(request, num_tokens)
        while missing > self.pages.num_free:
            last = max(self.running, key=rank)
            if rank(last) <= rank(request):
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's row and pages; it keeps its tokens and waits again."""
        self._leave(request)
        request.status = Status.WAITING
        request.stats.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Free row and pages; full pages go to the prefix cache.

        A launch in flight may still write to them; the device runs launches in order,
        so the next request that gets them writes later.
        """
        gap = int(self.rows.num_draft_uncached[request.row])
        if request.status is Status.DECODE:
            # The last token has no keys and values of anybody.
            drafted = request.num_tokens - gap if self._has_draft_model else None
            self.tables.register(request, request.num_tokens - 1, drafted)
        self._count_foretold()
        self.rows.release(request)
        self.running.remove(request)
        self.tables.release(request)

    def _admit(self, work: PrefillBatch) -> bool:
        """Admit the first waiting request, if there is a row and room for its prompt.

        Requests whose program is still compiled are skipped.
        """
        if not self.rows.free:
            return False
        request = next((one for one in self.waiting if self._has_program(one)), None)
        if request is None or request.num_unread:
            return False
        if request.controls is not None and work.num_controlled == MAX_CONTROLLED:
            return False
        # The program may have less room for prompts than that of those before.
        found = self.shapes.with_prompts(
            len(self.running) + 1, 0, self._features_with(request)
        )
        work.room = min(work.room, found[-1].num_tiles - len(work.tiles))
        if work.room <= 0:
            return False
        if request.output_token_ids:
            request.tokens_to_prefill = request.tokens(0, request.num_tokens)
        found = self.tables.find(request)
        # `PlanLayout` has room for the pages of one whole sequence.
        if work.num_found + len(found) > self.config.pages_per_seq:
            return False
        if not self._has_room(request, found):
            return False
        self.waiting.remove(request)
        self.running.append(request)
        tree = self.shapes.tree(self.config.num_draft_tokens)
        longest = request.max_total + tree.num_rows - 1
        work.begin(request, found, min(longest, self.config.max_model_len))
        self.costs.admit(
            request.row,
            kind_of(request),
            is_typical=request.grammar is None and request.controls is None,
        )
        if not self.controller.num_drafts:
            self.controller.look()  # it may be of another kind than those before it
        if self._has_draft_model and self.choice.num_drafts:
            # Once the prompt is in it is missed.
            self.shapes.catch_up(-(-len(request.tokens_to_prefill) // TILE))
        if not request.stats.scheduled_ts:
            request.stats.scheduled_ts = time.monotonic()
        return True

    def _features_with(self, request: Request) -> Features:
        """Features of launches once a request runs beside the running ones."""
        # Of hundreds of requests most want the same, and looking at all comes with each
        # that is admitted.
        distinct = {one.features for one in self.running}
        return functools.reduce(operator.or_, distinct, request.features)

    def _has_program(self, request: Request) -> bool:
        """Whether a compiled program serves a request beside the running ones.

        If not, it is requested, with room for all that wait now.
        """
        features, num_seqs = self._features_with(request), len(self.running) + 1
        if self.shapes.with_prompts(num_seqs, 0, features):
            return True
        waiting = [one for one in self.waiting if features.covers(one.features)]
        most = self.config.max_num_seqs
        num_seqs = min(len(self.running) + len(waiting), most)
        tokens = sum(_tiled(len(one.tokens_to_prefill)) for one in waiting[:most])
        # Until there are others it serves all launches, also those with few tokens.
        tokens = min(tokens, FIRST_CHUNK)
        self.shapes.request(num_seqs, 0, tokens, features, is_brief=True)
        return False

    def _has_room(self, request: Request, found: list[int]) -> bool:
        """Whether a request's tokens fit beside what running requests need next.

        That is the rest of every prompt and one page per decoding request: without
        them, the new request would be the next to be preempted.
        """
        promised = 0
        for other in self.running:
            if other.status is Status.PREFILL:
                length = len(other.tokens_to_prefill) + 1
                promised += self.tables.missing(other, length)
            else:
                promised += 1
        needed = self.tables.count(len(request.tokens_to_prefill) + 1) - len(found)
        revived = sum(self.pages.is_free(page) for page in found)
        return needed + revived + promised <= self.pages.num_free

    def _launch(
        self,
        rows: np.ndarray,
        wanted: np.ndarray,
        shape: StepShape,
        work: PrefillBatch,
        charged_s: float | None,
        num_rounds: int,
    ) -> Launch:
        table = self.rows
        drafts = table.possible_drafts(rows, wanted)
        table.launch(rows, drafts, num_rounds)
        if self._has_draft_model:
            table.draft(rows, drafts, shape.num_draft_tokens, num_rounds)
        self.controller.repeat(num_rounds - 1)
        listed = rows.tolist()
        decoding = table.owners_of(listed)
        plan = StepPlan(
            decode=list(zip(listed, drafts.tolist(), strict=True)),
            tiles=work.tiles,
            admissions=work.admissions,
            pages=work.updates,
            num_rounds=num_rounds,
            grammars=_grammars(decoding, work) if shape.features.has_grammar else {},
        )
        return Launch(
            plan=plan,
            shape=shape,
            rows=rows,
            owners=table.owner[rows],
            drafts=drafts,
            decoding=decoding,
            tiled=work.tiled,
            registered=work.registered,
            charged_s=charged_s,
        )

    def settle(self, launch: Launch, num_run: int) -> None:
        """Note how many rounds a launch has run, before the first is committed."""
        has_model = self._has_draft_model
        settle(launch, num_run, self.rows, has_draft_model=has_model)

    def commit(self, launch: Launch, result: StepResult | CaughtUp) -> Advance:
        """Take a round's result into the requests that have not ended."""
        if isinstance(result, CaughtUp):
            commit_catch_up(launch, result, self.costs)
            self._num_resting = 0  # the draft model has said what drafts would bring
            self.controller.record_catch_up(launch.seconds, is_probe=launch.is_probe)
            return Advance()
        self._record_round(launch, result)
        advance = commit(launch, result, self.rows, self.stats, self.costs)
        self._watch(launch, result)
        for part in advance.parts:
            if part.is_broken:
                # No later request may reuse these pages.
                self.pages.forget(part.request.pages)
        if result.is_draft_broken[: len(launch.rows)].any():
            self.controller.stop("the draft model's numbers are NaN or infinite")
        if self.controller.stop_reason is not None:
            for part in advance.parts:
                if part.request.spec_metrics is not None:
                    part.request.spec_metrics.stop_reason = self.controller.stop_reason
        return advance

    def record_time(self, launch: Launch, seconds: float) -> None:
        """Record how long a round of a launch kept the device busy."""
        shape, launch.seconds = launch.shape, seconds
        self.stats.busy_s += seconds
        launch.expected_s = self.costs.expected_seconds(launch.round)
        # Launches with prompts, and for the draft model, are seldom two in a row.
        is_seldom = shape.is_catch_up or shape.chunk > 0
        work = shape, launch.round.num_drafts > 0
        launch.is_measure = is_seldom or work == self._last_work
        self._last_work = work
        self.pacer.record(
            launch.round, seconds, launch.charged_s, is_measure=launch.is_measure
        )

    def _record_round(self, launch: Launch, result: StepResult) -> None:
        """Have the controller count what a round without prompts has brought."""
        count = len(launch.rows)
        if launch.shape.chunk:
            self.controller.stop_timing()
        if launch.shape.chunk or not count:
            return
        num_drafts, num_emitted, plain_s = launch.round.num_drafts, count, None
        if num_drafts:  # otherwise nothing is compared
            num_emitted = int(result.num_emitted[:count].sum())
            plain = self.shapes.find(count, 0, 0, launch.shape.features)
            plain_s = self.costs.expected_seconds(Round(plain)) if plain else None
        self.controller.record_round(
            count, num_drafts, num_emitted, launch.seconds, plain_s
        )

    def finish(self, request: Request, reason: str, stop: int | str | None) -> None:
        """End a request: its row and pages are free for the next plan."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        if self._lookups is not None:
            self._lookups.finish(request)
        request.page_keys = []
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop

    def restart(self) -> None:
        """Preempt all running requests: the device has lost all pages and launches."""
        for request in list(self.running):
            self._preempt(request)
        for request in self.waiting:
            request.num_unread = 0
        is_forgotten = self.pages.reset()
        assert is_forgotten, "a page is held"

    def check_idle(self) -> None:
        """Assert that ended requests have left only pages of the prefix cache."""
        assert not self.has_unfinished()
        self.pages.check()
        self.rows.check()
        assert self.pages.num_free == self.pages.num_pages, "a page is held"
        assert len(self.rows.free) == self.config.max_num_seqs, "a row is taken"


def _tiled(num_tokens: int) -> int:
    """Room that a prompt takes: its tiles are whole, and nobody else's."""
    return -(-num_tokens // TILE) * TILE


def make_costs(config: EngineConfig, controller: Controller) -> Costs:
    """Nothing measured yet."""
    rate = WATCHED_PRIOR_RATE if controller.can_watch else PRIOR_RATE
    return Costs(config.max_num_seqs, config.num_draft_tokens, rate)


def make_lookups(config: EngineConfig, controller: Controller) -> Lookups | None:
    """What watches texts; None where they do not say what drafts would bring."""
    speculative = config.speculative
    if speculative is None or not controller.can_watch:
        return None
    num_requests = speculative.suffix_decoding_max_cached_requests or 0
    rule, most = LookupRule.of(speculative), config.num_draft_tokens
    return Lookups(rule, config.max_num_seqs, most, num_requests)


def kind_of(request: Request) -> Kind:
    """Which requests its drafts are like."""
    if not request.params.temperature:
        return Kind.GREEDY
    return Kind.SEEDED if request.rule == COUPLED else Kind.SAMPLED


def _grammars(decoding: list[Request], work: PrefillBatch) -> dict[int, GrammarState]:
    """Grammar states of a launch, by row."""
    return {
        request.row: request.grammar
        for request in (*decoding, *work.tiled)
        if request.grammar is not None
    }


class WaitingQueue:
    """Waiting requests, the first to run first.

    By arrival, or by priority and then by arrival. A request that comes back, since
    its pages were taken from it, has kept its place.
    """

    def __init__(self, policy: str):
        self._has_priorities = policy == "priority"
        self._arrivals = itertools.count()
        self._line: list[Request] = []

    def rank(self, request: Request) -> tuple[int, int]:
        """What requests are ordered by, the first to run lowest."""
        return (request.priority if self._has_priorities else 0, request.arrival)

    def add(self, request: Request) -> None:
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        bisect.insort(self._line, request, key=self.rank)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._line, self.rank(request), key=self.rank)
        assert self._line[index] is request, f"{request.request_id} does not wait"
        del self._line[index]

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

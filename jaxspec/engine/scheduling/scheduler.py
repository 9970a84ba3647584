"""Who runs in the next launch: admission, chunked prefill, decoding, preemption.

Plans one launch ahead of what has been read, so it works with bounds on lengths: the
device alone knows how many drafts were accepted. Owns rows, pages and the order of
waiting requests; knows nothing of texts or devices.
"""

import bisect
import functools
import itertools
import operator
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.lookups import LookupRule
from jaxspec.engine.scheduling.batch import (
    Advance,
    Claim,
    Launch,
    PrefillBatch,
    claims_of,
    commit,
    commit_draft_prefill,
    settle,
)
from jaxspec.engine.scheduling.draft_prefill import DraftPrefill
from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.lookup_estimator import TELLING_RUNS, LookupEstimator
from jaxspec.engine.scheduling.pacing import Pacer
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.rows import RowTable
from jaxspec.engine.scheduling.shapes import FIRST_CHUNK, Programs, Shapes
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates, Kind
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.policy import (
    Choice,
    RoundEstimates,
    SpeculationPolicy,
)
from jaxspec.engine.speculation.step_times import Round, StepTimes
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
        policy: SpeculationPolicy,
        stats: EngineStats | None = None,
        programs: Programs | None = None,
        step_times: StepTimes | None = None,
        acceptance: AcceptanceRates | None = None,
        page_events: PageEvents | None = None,
    ):
        self.config, self.policy = config, policy
        self.stats = stats or EngineStats()
        self.step_times = step_times or StepTimes()
        self.acceptance = acceptance or make_acceptance(config, policy)
        self.tables = PageTables(config, self.stats, page_events)
        self.pages = self.tables.pool
        speculative = config.speculative
        longest_drafted = speculative.max_model_len if speculative else None
        longest_drafted = longest_drafted or config.max_model_len
        is_parallel = speculative is not None and speculative.method_info.is_parallel
        self.rows = RowTable(
            config.max_num_seqs,
            longest_drafted,
            config.num_draft_tokens if is_parallel else None,
        )
        self._lookups = make_lookups(config, policy)
        self.shapes = Shapes(config, policy, programs)
        # Masks for which requests wait, and the threads that compute them.
        self._masks: list[futures.Future[None]] = []
        self._mask_threads = futures.ThreadPoolExecutor(
            NUM_MASK_THREADS, "jaxspec-masks"
        )
        self.waiting = WaitingQueue(config.scheduling_policy)
        self.running: list[Request] = []
        self.pacer = Pacer(self.step_times)
        self._draft_prefill = DraftPrefill(
            self.rows,
            self.tables,
            self.shapes,
            policy,
            self.step_times,
            self.acceptance,
        )
        # Program of the launch that was read last, and whether it made drafts.
        self._last_work: tuple[StepShape, bool] | None = None

    @property
    def _has_draft_model(self) -> bool:
        has_one = self.config.draft_model_config is not None
        return has_one and not self.policy.is_stopped

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
        if self.shapes.cannot_catch_up:
            self.policy.stop("the draft model's program could not be compiled")
        has_newcomers = bool(self.waiting and self.rows.free)
        if self._has_draft_model and self._draft_prefill.take_turn(
            self._limit, has_newcomers=has_newcomers
        ):
            launch = self._plan_draft_prefill()
            if launch is not None:
                return launch
        launch = self._plan_round()
        # Nothing else can be launched: draft prefill out of turn.
        return self._plan_draft_prefill() if launch is None else launch

    def _plan_draft_prefill(self) -> Launch | None:
        if not self._has_draft_model:
            return None
        stream_s = self.pacer.spare_s if self._are_streaming() else None
        return self._draft_prefill.plan(self._limit, stream_s)

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
        rows, wanted = self.rows.decodable(0 if self.policy.is_idle else self._limit)
        most = int(wanted.max(initial=0))
        if most and self._can_wait:
            awaits_draft = self.rows.awaits_draft(rows)
            if awaits_draft.any():
                # They decode together soon: their program can be compiled meanwhile.
                self.shapes.find(len(rows), most, 0, self.rows.features(rows))
                rows, wanted = rows[~awaits_draft], wanted[~awaits_draft]
                most = int(wanted.max(initial=0))
        can_draft = bool(most and self.policy.num_drafts)
        features, shape = self.rows.features(rows), None
        if self.policy.is_due(len(rows), most):
            self.policy.choose(self._estimates(rows, wanted, features))
        choice = self.policy.next_choice
        wanted = np.minimum(wanted, choice.num_drafts)
        most = min(most, choice.num_drafts)
        if len(rows):
            has_beside = choice.has_side_branches
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
        self._masks.clear()
        if not np.count_nonzero(rows.has_grammar):
            return  # most rounds
        rows.is_slow[:] = rows.is_held[:] = False
        for row in np.flatnonzero(rows.has_grammar & rows.is_decoding).tolist():
            (request,) = rows.owners_of([row])
            grammar = request.grammar
            assert grammar is not None
            if not grammar.is_slow:
                continue
            rows.is_slow[row] = rows.is_held[row] = True
            if rows.num_unread[row] > 0:
                continue
            rows.is_held[row] = not self._has_mask(request)

    def _has_mask(self, request: Request) -> bool:
        """Whether the next mask of a request is there, if it takes long.

        If not, a thread computes it. No launch of the request may be unread.
        """
        grammar = request.grammar
        if grammar is None or not grammar.is_slow:
            return True
        is_ready = grammar.is_ready(request.output_token_ids, self._mask_threads)
        if not is_ready and grammar.computing is not None:
            self._masks.append(grammar.computing)
        return is_ready

    def wait_for_masks(self, timeout_s: float) -> bool:
        """Wait until a mask of a request is there; False if none is computed."""
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
        if not (self.policy.is_constant and self._has_draft_model and self._limit):
            return False
        return self.shapes.can_catch_up

    @property
    def _limit(self) -> int:
        """Most drafts that a sequence may have now."""
        return self.policy.limit(len(self.running) + bool(self.waiting))

    @property
    def choice(self) -> Choice:
        """K as chosen now, within what so many requests may have."""
        limit = self._limit
        k = min(self.policy.num_drafts, limit)
        choice = self.policy.choice
        gain = choice.gain if k else 0.0
        return replace(choice, num_drafts=k, gain=gain, may_draft=limit > 0)

    def _estimates(
        self, rows: np.ndarray, wanted: np.ndarray, features: Features
    ) -> RoundEstimates:
        """Return what is known about the next round of some rows."""
        self._count_lookups()
        most = int(wanted.max())
        chain_seconds, speculative = None, self.config.speculative
        if self.shapes.has_chains:
            chain_seconds = self._seconds(len(rows), most, features, has_beside=False)
        draft_prefill_s, is_observable = 0.0, self._lookups is not None
        if self._has_draft_model:
            draft_prefill_s = self._draft_prefill.seconds_per_round(rows)
            is_observable |= not self.acceptance.is_unseeded(rows).any()
        return RoundEstimates(
            max_drafts=wanted,
            acceptance=self.acceptance.of_rows(rows),
            seconds=self._seconds(len(rows), most, features),
            chain_seconds=chain_seconds,
            side_tokens=self.acceptance.side_tokens,
            draft_prefill_s=draft_prefill_s,
            is_whole_tree=speculative is not None and speculative.is_one_tree,
            is_observable=is_observable,
        )

    def _seconds(
        self, num_seqs: int, most: int, features: Features, *, has_beside: bool = True
    ) -> list[float | None]:
        """Return the time of a round by K, None where unknown."""
        found: list[float | None] = []
        for k in range(most + 1):
            shape = self.shapes.find(num_seqs, k, 0, features, has_beside=has_beside)
            if shape is None or (k and not has_beside and shape.template):
                found.append(None)
            else:
                found.append(self.step_times.expected(Round(shape, k)))
        return found

    def _count_lookups(self) -> None:
        found = self._lookups and self._lookups.take()
        if found:
            self.acceptance.record_predicted(*found)

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
            self.acceptance.set_match_runs(launch.rows[is_there], runs)
        elif not self.policy.num_drafts:
            there = np.flatnonzero(is_there & (self.rows.num_draft[launch.rows] > 0))
            runs = [
                lookups.follow(launch.decoding[index], new)
                for index, new in zip(
                    there.tolist(), emitted[there].tolist(), strict=True
                )
            ]
            self.acceptance.set_match_runs(launch.rows[there], np.array(runs, np.int64))
            if not set(TELLING_RUNS).isdisjoint(runs):
                self.policy.reconsider()

    def _are_streaming(self) -> bool:
        """Whether a streaming request decodes now, without awaiting the draft model."""
        # A held row waits for its mask anyway: prompts may be processed meanwhile.
        is_waiting = self.rows.is_streamed & ~self.rows.is_held
        rows = np.flatnonzero(self.rows.is_decoding & is_waiting)
        if not self._can_wait:
            return len(rows) > 0
        return not bool(self.rows.awaits_draft(rows).all())

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
        self._count_lookups()
        self.rows.release(request)
        self.running.remove(request)
        self.tables.release(request)

    def _admit(self, work: PrefillBatch) -> bool:
        """Admit the first waiting request, if there is a row and room for its prompt.

        Requests whose program or next mask is not there yet are skipped.
        """
        if not self.rows.free:
            return False
        request = next((one for one in self.waiting if self._can_begin(one)), None)
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
        self.acceptance.admit(
            request.row,
            kind_of(request),
            is_typical=request.grammar is None and request.controls is None,
        )
        if not self.policy.num_drafts:
            self.policy.reconsider()  # the request may be of another kind
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

    def _can_begin(self, request: Request) -> bool:
        is_unread = request.num_unread > 0
        return self._has_program(request) and (is_unread or self._has_mask(request))

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
            commit_draft_prefill(launch, result, self.acceptance)
            self._draft_prefill.commit(launch)
            return Advance()
        self._record_round(launch, result)
        advance = commit(launch, result, self.rows, self.stats, self.acceptance)
        for request in advance.late:
            if request.status is not Status.WAITING:
                self._preempt(request)  # admitted again with its mask
        self._watch(launch, result)
        for part in advance.parts:
            if part.is_broken:
                # No later request may reuse these pages.
                self.pages.forget(part.request.pages)
        if result.is_draft_broken[: len(launch.rows)].any():
            self.policy.stop("the draft model's numbers are NaN or infinite")
        if self.policy.stop_reason is not None:
            for part in advance.parts:
                if part.request.spec_metrics is not None:
                    part.request.spec_metrics.stop_reason = self.policy.stop_reason
        return advance

    def record_time(self, launch: Launch, seconds: float) -> None:
        """Record how long a round of a launch kept the device busy."""
        shape, launch.seconds = launch.shape, seconds
        self.stats.busy_s += seconds
        self.policy.record_time(seconds)
        launch.expected_s = self.step_times.expected(launch.round)
        # Launches with prompts, and for the draft model, are seldom two in a row.
        is_seldom = shape.is_catch_up or shape.chunk > 0
        work = shape, launch.round.num_drafts > 0
        launch.is_measure = is_seldom or work == self._last_work
        self._last_work = work
        self.pacer.record(
            launch.round, seconds, launch.charged_s, is_measure=launch.is_measure
        )

    def _record_round(self, launch: Launch, result: StepResult) -> None:
        """Have the policy count what a round without prompts has brought."""
        count = len(launch.rows)
        if launch.shape.chunk:
            self.policy.end_exploration()
        if launch.shape.chunk or not count:
            return
        num_drafts, num_emitted, plain_s = launch.round.num_drafts, count, None
        if num_drafts:  # otherwise nothing is compared
            num_emitted = int(result.num_emitted[:count].sum())
            plain = self.shapes.find(count, 0, 0, launch.shape.features)
            plain_s = self.step_times.expected(Round(plain)) if plain else None
        self.policy.record_round(
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
        self._draft_prefill.restart()
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


def make_acceptance(config: EngineConfig, policy: SpeculationPolicy) -> AcceptanceRates:
    """Return rates of which nothing is measured yet."""
    prior = CONSTANTS.prior_acceptance
    if policy.can_follow_lookups:
        prior = CONSTANTS.prior_lookup_acceptance
    return AcceptanceRates(config.max_num_seqs, config.num_draft_tokens, prior)


def make_lookups(
    config: EngineConfig, policy: SpeculationPolicy
) -> LookupEstimator | None:
    """Return the lookup estimator; None where the text does not show acceptance."""
    speculative = config.speculative
    if speculative is None or not policy.can_follow_lookups:
        return None
    num_requests = speculative.suffix_decoding_max_cached_requests or 0
    rule, most = LookupRule.of(speculative), config.num_draft_tokens
    return LookupEstimator(rule, config.max_num_seqs, most, num_requests)


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

"""Plans the next launch: rows to decode, prompts to prefill, requests to admit.

A plan is made in stages, each a function of the state and the previous stages:

    select_decode -> budget_prefill -> claim_pages -> admit -> build_launch

They write nothing: not to requests, rows, pages, accounts, the policy or the compiler
(only the hashes that identify pages are cached). `apply_plan` applies the plan. Held
rows and K are updated before the first stage, from the launches that were read; local
pages that no row reads, or that drafts need, are freed between stages. If no program
for prompts and drafts is compiled, launches with prompts are planned without drafts.

One launch is planned before the previous one is read, so lengths are bounds: only the
device knows the number of accepted drafts. Knows nothing of texts or devices.
"""

import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.scheduling.admission import Admitter
from jaxspec.engine.scheduling.commit import commit, settle
from jaxspec.engine.scheduling.decode_selection import DecodeSelector
from jaxspec.engine.scheduling.draft_prefill import DraftPrefill
from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.launch import Advance, Launch, LaunchBuilder
from jaxspec.engine.scheduling.lookup_estimator import TextIndex
from jaxspec.engine.scheduling.page_claims import PageClaimer
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.page_releases import PageReleaser
from jaxspec.engine.scheduling.prefill_budget import REST, Pacer, PrefillPlanner
from jaxspec.engine.scheduling.programs import DRAFTS_AFTER_S, Programs, Shapes
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.round_estimates import RoundEstimator, make_acceptance
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.slow_masks import SlowMasks
from jaxspec.engine.scheduling.stages import (
    Admissions,
    Admitted,
    Candidates,
    Decode,
    LaunchPlan,
    PageClaims,
    PrefillBudget,
)
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.scheduling.waiting_queue import WaitingQueue
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.policy import Choice, SpeculationPolicy
from jaxspec.engine.speculation.step_times import StepTimes
from jaxspec.program.plan import TILE
from jaxspec.program.wire import DraftPrefillResult, StepResult


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
        self._has_configured_model = config.draft_model_config is not None
        self.stats = stats or EngineStats()
        self.step_times = step_times or StepTimes()
        self.acceptance = acceptance or make_acceptance(config, policy)
        self.tables = PageTables(config, self.stats, page_events)
        self.pool = self.tables.pool
        speculative = config.speculative
        own_limit = None if speculative is None else speculative.max_model_len
        is_parallel = speculative is not None and speculative.method_info.is_parallel
        self.rows = RowTable(
            config.max_num_seqs,
            own_limit or config.max_model_len,
            config.max_draft_tokens if is_parallel else None,
        )
        self.shapes = Shapes(config, policy, programs)
        self.masks = SlowMasks(self.rows)
        self.waiting = WaitingQueue(config.scheduling_policy)
        self.running: list[Request] = []
        self.pacer = Pacer(self.step_times)
        self._prefill_planner = PrefillPlanner(self.shapes, self.pacer)
        estimates = self.step_times, self.acceptance
        self._draft_prefill = DraftPrefill(
            self.rows, self.tables, self.shapes, policy, *estimates
        )
        self._selector = DecodeSelector(policy, self.rows, self.shapes)
        self._releaser = PageReleaser(self.rows, self.tables)
        self._claimer = PageClaimer(
            self.rows, self.tables, self.shapes, self.pacer, self.waiting
        )
        self._admitter = Admitter(
            config, self.shapes, self.tables, self.rows, self.waiting, self.masks
        )
        self._estimator = RoundEstimator(
            config, policy, self.rows, self.shapes, self._draft_prefill, *estimates
        )

    @property
    def _has_draft_model(self) -> bool:
        return self._has_configured_model and self.policy.stop_reason is None

    def set_corpora(self, corpora: Mapping[str | None, TextIndex]) -> None:
        """Replace the corpora that acceptance estimates search, by cache salt."""
        self._estimator.set_corpora(corpora)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add(request)

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests whose program is not compiled yet."""
        return sum(
            not self._admitter.has_program(request, self.running)
            for request in self.waiting
        )

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def reset_prefix_cache(self) -> bool:
        """Drop all pages of ended requests; return False while any page is in use."""
        return self.pool.reset()

    @property
    def _max_draft_tokens(self) -> int:
        """Maximum K of a sequence now."""
        return self.policy.max_draft_tokens(len(self.running) + bool(self.waiting))

    @property
    def _may_draft(self) -> bool:
        return self._max_draft_tokens > 0

    @property
    def choice(self) -> Choice:
        """The current choice, with K limited for the number of running requests."""
        max_draft_tokens = self._max_draft_tokens
        k = min(self.policy.num_draft_tokens, max_draft_tokens)
        choice, may_draft = self.policy.choice, max_draft_tokens > 0
        gain = choice.gain if k else 0.0
        return replace(choice, num_draft_tokens=k, gain=gain, may_draft=may_draft)

    @property
    def _prefilling(self) -> list[Request]:
        if np.count_nonzero(self.rows.is_decoding) == len(self.running):
            return []  # the case in most rounds; hundreds of requests may run
        return [request for request in self.running if request.status is Status.PREFILL]

    def plan(self) -> Launch | None:
        """Plan the next launch; return None if one must be read first."""
        launch = None
        if self._has_draft_model and not self.policy.is_idle:
            has_newcomers = bool(self.waiting and self.rows.free)
            turn = self._draft_prefill.next_turn(
                may_draft=self._may_draft, has_newcomers=has_newcomers
            )
            self._draft_prefill.begin_turn(turn)
            if turn.is_first:
                launch = self._next_draft_prefill()
        if launch is None:
            launch = self._next_round()
        # Nothing else can be launched, so draft prefill runs out of turn.
        return self._next_draft_prefill() if launch is None else launch

    def _next_draft_prefill(self) -> Launch | None:
        if not self._has_draft_model:
            return None
        if self.shapes.cannot_draft_prefill:
            self.policy.stop("the draft model's program could not be compiled")
            return None
        stream_s = self.pacer.spare_s if self._is_streaming() else None
        plan = self._draft_prefill.plan(stream_s, may_draft=self._may_draft)
        return None if plan is None else self._draft_prefill.apply_plan(plan)

    def _next_round(self) -> Launch | None:
        """Plan a launch of decoding rows and prompts, and apply the plan."""
        plan = self._plan_round(self._update())
        # Applied even if nothing is launched, as preemptions free pages for the retry.
        launch = self.apply_plan(plan)
        if plan.is_deferred:
            # Prefill was deferred to protect decode latency, but no decoding row could
            # get pages: retry with the full prefill budget.
            plan = self._plan_round(self._update(), is_paced=False)
            launch = self.apply_plan(plan)
        return launch

    def _plan_round(
        self, candidates: Candidates, *, is_paced: bool = True
    ) -> LaunchPlan:
        decode = self.select_decode(candidates)
        budget = self.budget_prefill(decode, is_paced=is_paced)
        if decode.num_draft_tokens and budget.lacks_program:
            # Until that program is compiled, a launch with prompts has no drafts.
            plain = self._selector.without_drafts(decode)
            plain_budget = self.budget_prefill(plain, is_paced=is_paced)
            if plain_budget.num_tiles or plain_budget.is_unmeasured:
                plan = self._plan_launch(plain, plain_budget)
                if plan.has_prompts:
                    return plan.with_request(budget.missing)
                if plain_budget.is_unmeasured:
                    return plan
            budget = budget.with_account_of(plain_budget)
        return self._plan_launch(decode, budget)

    def _plan_launch(self, decode: Decode, budget: PrefillBudget) -> LaunchPlan:
        claims = self.claim_pages(decode, budget)
        # Free pages behind windows only if pages are needed: finding them takes time.
        if self.tables.has_local and (claims.grants or self.waiting):
            has_model = self._has_draft_model
            self._releaser.free_local(self._prefilling, has_draft_model=has_model)
            if claims.is_tight:
                claims = self.claim_pages(decode, budget)
        while claims.is_tight and self._give_up_drafts():
            claims = self.claim_pages(decode, budget)
        admissions = self.admit(budget, claims)
        while self._frees_for(admissions) and self._give_up_drafts():
            admissions = self.admit(budget, claims)
        return self.build_launch(decode, budget, claims, admissions)

    def _update(self) -> Candidates:
        """Update held rows and K; return the rows that may decode."""
        self.masks.update(self.waiting)
        candidates = self._selector.candidates(
            self._max_draft_tokens, has_draft_model=self._has_draft_model
        )
        rows, max_draft_counts = candidates.rows, candidates.max_draft_counts
        if self.policy.is_due(len(rows), candidates.max_draft_tokens):
            features = self.rows.features(rows)
            self._estimator.count_lookups()
            missing = self._estimator.missing(rows, max_draft_counts, features)
            self.shapes.request_compile(*missing)
            self.policy.choose(
                self._estimator.estimate(rows, max_draft_counts, features)
            )
        return candidates

    def _frees_for(self, admissions: Admissions) -> bool:
        """Return whether running requests give up drafts for a waiting one.

        Only if no drafts are made: otherwise it waits for draft prefill.
        """
        is_drafting = self.policy.is_drafting and self._may_draft
        return admissions.lacks_pages and not is_drafting

    def _give_up_drafts(self) -> bool:
        """Free the local pages that one request keeps for the draft model, if any."""
        return self._releaser.give_up_drafts(
            self._prefilling, has_draft_model=self._has_draft_model
        )

    def select_decode(self, candidates: Candidates) -> Decode:
        """Stage 1: the rows that decode, their drafts, and a compiled program."""
        has_model = self._has_draft_model
        return self._selector.select(candidates, has_draft_model=has_model)

    def budget_prefill(self, decode: Decode, *, is_paced: bool = True) -> PrefillBudget:
        """Stage 2: the number of prompt tokens that the launch may include.

        Args:
            is_paced: Limit them while requests stream.
        """
        prefilling = self._prefilling
        if not (prefilling or self.waiting):
            return REST if is_paced else PrefillBudget()
        return self._prefill_planner.budget(
            decode,
            prefilling,
            list(itertools.islice(self.waiting, len(self.rows.free))),
            is_streaming=is_paced and self._is_streaming(),
            may_request_on_demand=self._may_request_on_demand(
                decode, may_draft=self._may_draft
            ),
        )

    def _is_streaming(self) -> bool:
        """Whether a streaming request decodes now, without awaiting the draft model."""
        # A held row waits for its mask anyway: prompts may be prefilled meanwhile.
        is_waiting = self.rows.is_streamed & ~self.rows.is_held
        rows = np.flatnonzero(self.rows.is_decoding & is_waiting)
        if not self._selector.can_wait(
            may_draft=self._may_draft, has_draft_model=self._has_draft_model
        ):
            return len(rows) > 0
        return not bool(self.rows.awaits_draft(rows).all())

    def _may_request_on_demand(self, decode: Decode, *, may_draft: bool) -> bool:
        """Return whether many launches without drafts will follow.

        That is assumed if rows decode and K is 0.
        """
        is_drafting = self.policy.is_drafting and may_draft
        return len(decode.rows) > 0 and not is_drafting

    def claim_pages(self, decode: Decode, budget: PrefillBudget) -> PageClaims:
        """Stage 3: pages for running requests; if there are too few, preemptions."""
        return self._claimer.claim(
            decode,
            budget,
            self.running,
            self._prefilling if budget.num_tiles else [],
            has_draft_model=self._has_draft_model,
        )

    def admit(self, budget: PrefillBudget, claims: PageClaims) -> Admissions:
        """Stage 4: waiting requests that begin to run."""
        return self._admitter.admit(self.running, budget, claims)

    def build_launch(
        self,
        decode: Decode,
        budget: PrefillBudget,
        claims: PageClaims,
        admissions: Admissions,
    ) -> LaunchPlan:
        """Stage 5: the program that runs the results of the stages before."""
        parts = decode, budget, claims, admissions
        if not (claims.chunks or admissions.admitted):
            return LaunchPlan(*parts, decode.shape if len(claims.rows) else None)
        chunks = [*claims.chunks, *(admitted.chunk for admitted in admissions.admitted)]
        features = self.rows.features(claims.rows)
        for chunk in chunks:
            features |= chunk.request.features
        # Pages are allocated for all rows; a smaller program may not list all of them.
        num_seqs = len(claims.rows)
        if claims.is_tight and decode.shape is not None:
            num_seqs = decode.shape.num_seqs
        num_change = len(admissions.admitted) - claims.num_preempted
        is_waiting = len(self.waiting) > num_change
        num_running = len(self.running) + num_change + is_waiting
        may_draft = self.policy.max_draft_tokens(num_running) > 0
        find = functools.partial(
            self.shapes.select,
            num_seqs,
            decode.num_draft_tokens,
            sum(chunk.num_tiles for chunk in chunks) * TILE,
            may_request_on_demand=self._may_request_on_demand(
                decode, may_draft=may_draft
            ),
        )
        shape, missing = find(features)
        if shape is None:
            # With `batch_invariant`, a program serves only the features that it was
            # compiled for, here those of all requests that may be in the launch.
            features |= decode.features
            others = self.running if admissions.admitted else self._prefilling
            for request in others:
                features |= request.features
            shape, _ = find(features)
        assert shape is not None, "no compiled program serves the planned launch"
        return LaunchPlan(*parts, shape, missing)

    def apply_plan(self, plan: LaunchPlan) -> Launch | None:
        """Apply a plan to requests, rows and pages; None if nothing is launched."""
        claims, admissions, table = plan.claims, plan.admissions, self.rows
        decode, budget = plan.decode, plan.budget
        # If no compiled program serves the rows or the prompts, the missing one must
        # not wait. With `batch_invariant`, all programs are programs with drafts.
        self.shapes.request_compile(*decode.missing, may_wait=decode.shape is not None)
        self.shapes.request_compile(budget.missing, may_wait=bool(budget.shapes))
        batch = LaunchBuilder(table, self.tables, has_draft_model=self._has_draft_model)
        for grant in claims.grants:
            for request in grant.preempted:
                self._preempt(request)
            if grant.is_granted:
                batch.add_pages(self.tables.grow(grant.request, grant.num_tokens))
        for chunk in claims.chunks:
            batch.prefill(chunk)
        self.shapes.request_compile(*admissions.missing, may_wait=False)
        for admitted in admissions.admitted:
            self._begin(admitted, batch)
        self.shapes.request_compile(plan.missing)
        if plan.shape is None:
            return None
        if (account := plan.account) is not None:
            self.pacer.begin(account)
        rows, num_rounds = claims.rows, claims.num_rounds
        draft_counts = table.possible_drafts(rows, claims.draft_counts)
        table.count_launched(rows, draft_counts, num_rounds)
        if self._has_draft_model:
            table.update_draft_lag(
                rows, draft_counts, plan.shape.num_levels, num_rounds
            )
        charged_s = None if account is None else account.charged_s
        return batch.launch(plan.shape, rows, draft_counts, num_rounds, charged_s)

    def _begin(self, admitted: Admitted, batch: LaunchBuilder) -> None:
        """Give an admitted request its row and pages."""
        request = admitted.chunk.request
        self.waiting.remove(request)
        self.running.append(request)
        tree = self.shapes.tree(self.config.max_draft_tokens)
        longest = request.max_total + tree.num_rows - 1
        batch.begin(admitted, min(longest, self.config.max_model_len))
        self._estimator.admit(request)
        if not self.policy.is_drafting:
            # Requests that sample in another way have other acceptance rates.
            self.policy.reconsider()
        if self._has_draft_model and (k := self.choice.num_draft_tokens):
            missing = self._admitter.missing_with_drafts(request, self.running, k)
            self.shapes.request_compile(*missing)
        if not request.stats.scheduled_ts:
            request.stats.scheduled_ts = time.monotonic()

    def _preempt(self, request: Request) -> None:
        """Free a request's row and pages; it keeps its tokens and waits again."""
        self._leave(request)
        request.status = Status.WAITING
        request.stats.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Free row and pages; full pages go to the prefix cache."""
        self._releaser.release(request, has_draft_model=self._has_draft_model)
        self._estimator.count_lookups()
        self.rows.release(request)
        self.running.remove(request)

    def settle(self, launch: Launch, num_run: int) -> None:
        """Record the number of rounds that a launch ran, before `commit` of each."""
        has_model = self._has_draft_model
        settle(launch, num_run, self.rows, has_draft_model=has_model)

    def commit(
        self, launch: Launch, result: StepResult | DraftPrefillResult
    ) -> Advance:
        """Add a round's result to the requests that have not ended."""
        if isinstance(result, DraftPrefillResult):
            self._draft_prefill.commit(launch, result)
            return Advance()
        self._estimator.record_round(launch, result)
        advance = commit(launch, result, self.rows, self.stats, self.acceptance)
        for request in advance.late:
            if request.status is not Status.WAITING:
                self._preempt(request)  # admitted again once its mask is computed
        self._estimator.record_runs(launch, result)
        for progress in advance.parts:
            if progress.is_broken:
                # No later request may reuse these pages.
                self.tables.forget(progress.request)
        if result.is_draft_broken[: len(launch.rows)].any():
            self.policy.stop("the draft model's numbers are NaN or infinite")
        if self.policy.stop_reason is not None:
            for progress in advance.parts:
                if progress.request.spec_metrics is not None:
                    progress.request.spec_metrics.stop_reason = self.policy.stop_reason
        return advance

    def record_time(
        self,
        launch: Launch,
        result: StepResult | DraftPrefillResult,
        seconds: float,
    ) -> None:
        """Record how long a round of a launch kept the device busy."""
        round_kind, fill = launch.kind_and_fill(result)
        self.stats.busy_s += seconds
        if self.stats.busy_s >= DRAFTS_AFTER_S:
            self.shapes.release_drafts()
        self.policy.record_time(seconds)
        launch.set_times(self.step_times.expected(round_kind, fill), seconds)
        self.pacer.record(round_kind, seconds, launch.charged_s, fill=fill)

    def finish(self, request: Request, reason: str, stop: int | str | None) -> None:
        """End a request; free its row and pages for the next plan."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            if self.shapes.is_draft_prefill_held and self._may_draft:
                missing = self._draft_prefill.missing(self.rows.decoding)
                self.shapes.request_compile(missing)
            self._leave(request)
        self._estimator.finish(request)
        if not self.has_unfinished():
            self.shapes.release_drafts()
        request.page_keys = []
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop

    def restart(self) -> None:
        """Preempt all running requests, whose pages and launches have been lost."""
        self._draft_prefill.restart()
        for request in list(self.running):
            self._preempt(request)
        for request in self.waiting:
            request.num_unread = 0
        is_forgotten = self.pool.reset()
        assert is_forgotten, "a page is in use"

    def check_idle(self) -> None:
        """Assert that ended requests hold nothing: only cached pages are left."""
        assert not self.has_unfinished()
        self.pool.check()
        self.rows.check()
        assert self.pool.num_free == self.pool.num_units, "a page is in use"
        assert len(self.rows.free) == self.config.max_num_seqs, "a row is taken"

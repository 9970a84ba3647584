"""Who runs in the next launch: admission, chunked prefill, decoding, commitment.

First come, first served. Plans one launch ahead of what has been read, so it works
with bounds on lengths: the device alone knows how many drafts were accepted. Owns rows
and pages; knows nothing of texts or devices.
"""

import operator
import time
from collections import deque
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.controller import Controller
from jaxspec.engine.pages import PagePool
from jaxspec.engine.request import Request, Status
from jaxspec.program.plan import (
    TILE,
    Admission,
    Features,
    StepPlan,
    StepResult,
    StepShape,
    Tile,
)

# Prompt tokens per launch for which executables may be built.
CHUNK_LADDER = (0, 32, 128, 512, 2048)


@dataclass(kw_only=True)
class Launch:
    """A plan, and whom its entries belong to."""

    plan: StepPlan
    shape: StepShape
    decoding: list[Request]
    tiled: list[Request]

    def is_over(self) -> bool:
        """Whether all its requests have ended since it was planned."""
        requests = (*self.decoding, *self.tiled)
        return all(request.status is Status.FINISHED for request in requests)


@dataclass(kw_only=True)
class Progress:
    """What a launch added to one request.

    Attributes:
        logprobs: `plan.TokenLogprobs` of `token_ids`, one entry per token, where the
            request wants any.
        prompt_logprobs: The same for the next prompt tokens of which nothing has been
            told yet, in order, from the prompt's second token on.
    """

    request: Request
    token_ids: list[int]
    is_done: bool
    num_draft_tokens: int = 0
    num_accepted: int = 0
    logprobs: Any = None
    prompt_logprobs: Any = None


class Scheduler:
    """Waiting and running requests, rows of the device's state, pages."""

    def __init__(self, config: EngineConfig, controller: Controller):
        self.config, self.controller = config, controller
        self.pages = PagePool(config.num_pages)
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def plan(self) -> Launch | None:
        """Plan the next launch; None when nothing can be done before a read."""
        limit = self.controller.limit(len(self.running) + bool(self.waiting))
        decoding, drafts = self._plan_decode(limit)
        tiles, tiled, admissions = self._plan_prefill(limit)
        if not decoding and not tiles:
            return None
        num_draft = self.controller.rung(max(drafts, default=0))
        chunk = next(c for c in CHUNK_LADDER if c >= len(tiles) * TILE)
        shape = StepShape(
            num_seqs=_power_of_two(max(len(decoding), 1)),
            num_draft_tokens=num_draft,
            chunk=chunk,
            features=reduce(
                operator.or_, (one.features for one in (*decoding, *tiled)), Features()
            ),
        )
        updates = []
        decode = []
        for request, wanted in zip(decoding, drafts, strict=True):
            # The draft writes num_draft positions whatever the request wants.
            # One more: the target's token has a place there, if no keys and values.
            updates += self._grow(request, request.most_tokens + num_draft + 1)
            left = request.max_total - request.fewest_tokens - 1
            decode.append((request.row, max(0, min(wanted, left))))
            request.in_flight.append(min(wanted, max(left, 0)))
            # A drafting round leaves at most its last draft and the target's token.
            request.draft_gap = 2 if num_draft else request.draft_gap + 1
        for tile, request in zip(tiles, tiled, strict=True):
            end = tile.start + len(tile.tokens)
            updates += self._grow(request, end + tile.is_last)
            if tile.is_last:
                request.in_flight.append(0)
        plan = StepPlan(
            decode=decode,
            tiles=tiles,
            admissions=admissions,
            pages=updates,
            grammars={
                request.row: request.grammar_id
                for request in (*decoding, *tiled)
                if request.grammar_id
            },
        )
        return Launch(plan=plan, shape=shape, decoding=decoding, tiled=tiled)

    def _plan_decode(self, limit: int) -> tuple[list[Request], list[int]]:
        decoding, drafts = [], []
        for request in self.running:
            if request.status is not Status.DECODE:
                continue
            if request.in_flight and request.most_tokens >= request.max_total:
                continue  # it may be over: wait for the read
            wanted = min(limit, request.num_draft_tokens)
            if wanted and request.draft_gap > 2:
                continue  # the draft model must catch up first
            decoding.append(request)
            drafts.append(wanted)
        return decoding, drafts

    def _plan_prefill(
        self, limit: int
    ) -> tuple[list[Tile], list[Request], list[Admission]]:
        budget = self.config.max_num_batched_tokens // TILE
        budget = min(max(budget, 1), CHUNK_LADDER[-1] // TILE)
        tiles: list[Tile] = []
        tiled: list[Request] = []
        admissions: list[Admission] = []

        def feed(request: Request, new: list[Tile]) -> None:
            tiles.extend(new)
            tiled.extend([request] * len(new))

        for request in self.running:
            if request.status is Status.PREFILL:
                feed(request, self._prompt_tiles(request, budget - len(tiles)))
            elif limit and request.num_draft_tokens and not request.in_flight:
                feed(request, self._catch_up_tiles(request, budget - len(tiles)))
        while self.waiting and len(tiles) < budget and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            admissions.append(_admission(request))
            feed(request, self._prompt_tiles(request, budget - len(tiles)))
        return tiles, tiled, admissions

    def _admit(self, request: Request) -> bool:
        needed = _pages_for(self._longest(request), self.config.page_size)
        if not self.free_rows or not self.pages.can_reserve(needed):
            return False
        self.pages.reserve(needed)
        request.num_reserved = needed
        request.row = self.free_rows.pop()
        request.status = Status.PREFILL
        request.stats.scheduled_ts = time.monotonic()
        self.running.append(request)
        return True

    def _longest(self, request: Request) -> int:
        """Positions that may be written for a request, lookahead included."""
        lookahead = self.config.num_draft_tokens
        return min(request.max_total + lookahead, self.config.max_model_len)

    def _prompt_tiles(self, request: Request, room: int) -> list[Tile]:
        tiles = []
        prompt = request.prompt_token_ids
        while request.num_fed < len(prompt) and len(tiles) < room:
            start = request.num_fed
            tokens = np.array(prompt[start : start + TILE], np.int32)
            request.num_fed += len(tokens)
            is_last = request.num_fed == len(prompt)
            tiles.append(
                Tile(row=request.row, start=start, tokens=tokens, is_last=is_last)
            )
        if request.num_fed == len(prompt):
            request.status = Status.DECODE
        return tiles

    def _catch_up_tiles(self, request: Request, room: int) -> list[Tile]:
        """Tokens of rounds that ran without the draft model, for it alone."""
        tiles = []
        while request.draft_gap > 2 and len(tiles) < room:
            start = request.num_tokens - request.draft_gap
            # The last token stays out: it is the next round's input.
            end = min(start + TILE, request.num_tokens - 1)
            tokens = np.array([request.token(i) for i in range(start, end)], np.int32)
            tiles.append(
                Tile(
                    row=request.row,
                    start=start,
                    tokens=tokens,
                    is_last=False,
                    is_draft_only=True,
                )
            )
            request.draft_gap = request.num_tokens - end
        return tiles

    def _grow(self, request: Request, length: int) -> list[tuple[int, int, int]]:
        """Give a sequence the pages of its first `length` positions."""
        length = min(length, self._longest(request))
        have = len(request.pages)
        missing = _pages_for(length, self.config.page_size) - have
        if missing <= 0:
            return []
        taken = self.pages.take(missing)
        request.num_reserved -= missing
        request.pages += taken
        return [(request.row, have + i, page) for i, page in enumerate(taken)]

    def shapes(self, prompt_tokens: int | None = None) -> list[StepShape]:
        """Every shape that `plan` can produce, for prompts up to a length."""
        budget = min(self.config.max_num_batched_tokens, CHUNK_LADDER[-1])
        budget = max(budget // TILE * TILE, TILE)
        wanted = budget if prompt_tokens is None else min(prompt_tokens, budget)
        last = next(c for c in CHUNK_LADDER if c >= wanted)
        most = _power_of_two(self.config.max_num_seqs)
        return [
            StepShape(num_seqs=seqs, num_draft_tokens=draft, chunk=chunk)
            for seqs in (1 << i for i in range(most.bit_length()))
            for draft in self.controller.ladder
            for chunk in CHUNK_LADDER
            if chunk <= last
        ]

    def commit(self, launch: Launch, result: StepResult) -> list[Progress]:
        """Take a launch's result into the requests that still run."""
        progress = []
        for index, request in enumerate(launch.decoding):
            drafts = request.in_flight.pop(0) if request.in_flight else 0
            if request.status is Status.FINISHED:
                continue
            count = int(result.num_emitted[index])
            tokens = result.tokens[index, :count].tolist()
            request.output_token_ids += tokens
            accepted = min(int(result.num_accepted[index]), drafts)
            if drafts and count and request.spec_metrics is not None:
                request.spec_metrics.record_step(drafts, accepted)
            progress.append(
                Progress(
                    request=request,
                    token_ids=tokens,
                    is_done=bool(result.is_done[index]),
                    num_draft_tokens=drafts if count else 0,
                    num_accepted=accepted,
                )
            )
        for index, (tile, request) in enumerate(
            zip(launch.plan.tiles, launch.tiled, strict=True)
        ):
            if not tile.is_last or request.status is Status.FINISHED:
                continue
            request.in_flight.pop(0)
            token = int(result.tile_token[index])
            request.output_token_ids.append(token)
            done = bool(result.tile_is_done[index])
            progress.append(Progress(request=request, token_ids=[token], is_done=done))
        return progress

    def finish(self, request: Request, reason: str, stop: int | str | None) -> None:
        """End a request: its row and pages are free for the next plan.

        A launch in flight may still write to them; the device runs launches in order,
        so whoever gets them next writes later.
        """
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.free_rows.append(request.row)
            self.pages.release(request.pages, request.num_reserved)
        request.pages, request.num_reserved = [], 0
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop


def _admission(request: Request) -> Admission:
    params = request.params
    return Admission(
        row=request.row,
        num_prompt=request.num_prompt_tokens,
        min_total=request.num_prompt_tokens + params.min_tokens,
        max_total=request.max_total,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        rule=request.rule,
        stop_ids=request.stop_ids,
    )


def _pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()

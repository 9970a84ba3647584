"""Prompt tokens that a launch may have while other requests stream their texts.

Prefill makes rounds longer for all decoding requests. Measured times of rounds limit
the prompt tokens: over the rounds of a prefill, the mean time is at most `MAX_SLOWDOWN`
times that of a round without prompts. Draft prefill of a prompt follows between rounds,
in launches within the same limit if a program is small enough. The largest program
for prompts is the largest of those that read all waiting tokens in the least time.

Also limits the rounds of one launch when no request waits: the host's work per launch
is then done once for all of them.
"""

import math
from collections.abc import Sequence

from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stages import Decode, PacedChunk, PrefillBudget
from jaxspec.engine.speculation.step_times import (
    RoundKind,
    StepTimes,
    fill_of,
    num_rows_of,
)
from jaxspec.program.plan import TILE, StepShape

MAX_SLOWDOWN = 1.5
# Factor by which a chunk may exceed the balance, so that rounding errors do not delay
# it.
ROUNDING = 1 + 1e-9
# The budget if there is nothing to prefill: the next prefill starts with a balance of
# zero.
REST = PrefillBudget(account=PacedChunk())
# Maximum number of rounds that a prompt waits, whatever the balance.
MAX_WAIT_ROUNDS = 64
# Maximum seconds of a launch of several rounds; requests that arrive meanwhile wait for
# it.
MAX_LAUNCH_S = 0.03


class Pacer:
    """A balance of device seconds for prefill, kept by measured times.

    Every round of a prefill adds the time it may take and subtracts the time it took.
    A chunk that costs more than one round may take waits until enough is saved. The
    balance is limited to what the smallest chunk needs: a larger one would let a later
    burst of prompts delay all streams.

    Attributes:
        saved_s: The balance.
        spare_s: Seconds of draft prefill allowed after a round without prompts.
    """

    def __init__(self, step_times: StepTimes):
        self.step_times = step_times
        self.saved_s = self.spare_s = 0.0
        self._num_waited = 0

    def record(
        self,
        round_kind: RoundKind,
        seconds: float,
        charged_s: float | None = None,
        *,
        fill: float = 1.0,
    ) -> None:
        """Record the time of a round.

        Args:
            charged_s: Seconds that `chunk` has charged for it.
            fill: As for `StepTimes.record`.
        """
        has_prompts = round_kind.shape.max_prompt_tokens > 0
        expected = charged_s if has_prompts else None
        seconds = self.step_times.record(round_kind, seconds, expected, fill=fill)
        if charged_s is not None:
            # `begin` added half of the expected time of a round without prompts. This
            # makes it half of the measured time: if the difference counted in full,
            # prompts would wait on a busy machine, where the mean exceeds the expected
            # time.
            factor = 1.0 if has_prompts else 1 - MAX_SLOWDOWN
            self.saved_s += factor * (charged_s - seconds)
        if not has_prompts:
            self.spare_s = (MAX_SLOWDOWN - 1) * seconds

    def begin(self, chunk: PacedChunk) -> None:
        """Set the balance to that of `chunk`, once the round is launched."""
        self.saved_s = chunk.saved_s
        self._num_waited = 0 if chunk.num_tokens else chunk.num_waited

    def num_rounds(
        self, round_kind: RoundKind, max_rounds: int, fill: float = 1.0
    ) -> int:
        """Return the number of rounds that a launch may run, up to `max_rounds`.

        Args:
            fill: As for `StepTimes.expected`.
        """
        seconds = self.step_times.expected(round_kind, fill)
        if seconds is None:
            return 1  # measure one round first
        return max(min(int(MAX_LAUNCH_S / seconds), max_rounds), 1)

    def fastest(self, num_tokens: int, rounds: list[RoundKind]) -> int:
        """Return the index of the largest round needed to prefill in the least time.

        A launch computes its program's full size, padding included: two launches of 64
        tokens may take a third of the time of one launch of 512. A round without a
        measured time is assumed to cost as much as the next smaller one, or its share
        of the next larger, so that it is tried where it might be the best.

        Args:
            rounds: From the smallest chunk.
        """
        known = [self.step_times.measured(kind) for kind in rounds]
        chunks = [kind.shape.max_prompt_tokens for kind in rounds]
        measured = [index for index, time_s in enumerate(known) if time_s is not None]
        if not measured:
            return len(rounds) - 1
        programs = []
        for index, chunk in enumerate(chunks):
            nearest = max((i for i in measured if i <= index), default=measured[0])
            seconds = known[nearest]
            assert seconds is not None
            share = chunk / chunks[nearest] if nearest > index else 1.0
            programs.append((chunk, share * seconds))
        return _soonest(num_tokens, programs)[-1]

    def chunk(
        self, plain: RoundKind, mixed: list[RoundKind], num_rows: int | None = None
    ) -> PacedChunk:
        """Return the prompt tokens that the next round may include.

        Args:
            plain: The round without any.
            mixed: The same round with some, from the smallest chunk.
            num_rows: Rows of decoding sequences with tokens; None if all have some.
        """
        base, num_waited = self._measured(plain, num_rows), self._num_waited + 1
        is_overdue = num_waited > MAX_WAIT_ROUNDS
        chunks = [kind.shape.max_prompt_tokens for kind in mixed]
        if base is None:  # measure one round first
            chosen = chunks[0] if is_overdue else 0
            return PacedChunk(chosen, saved_s=self.saved_s, num_waited=num_waited)
        allowance = MAX_SLOWDOWN * base
        costs = self._costs_of(base, mixed, num_rows)
        saved_s = min(self.saved_s, max(costs[0] - allowance, 0.0))
        chosen, cost = 0, base
        for size, seconds in zip(chunks, costs, strict=True):
            if seconds <= (allowance + saved_s) * ROUNDING:
                chosen, cost = size, seconds
        if not chosen and is_overdue:
            chosen, cost = chunks[0], costs[0]
        return PacedChunk(chosen, cost, base, saved_s + allowance - cost, num_waited)

    def _measured(self, round_kind: RoundKind, num_rows: int | None) -> float | None:
        fill = 1.0
        if num_rows is not None:
            num_prompt_tokens = round_kind.shape.max_prompt_tokens
            fill = fill_of(round_kind, num_rows, num_prompt_tokens)
        return self.step_times.measured(round_kind, fill)

    def _costs_of(
        self, base: float, mixed: list[RoundKind], num_rows: int | None
    ) -> list[float]:
        """Return the times of rounds; unknown ones in proportion to the one before.

        If no time is known, only the smallest chunk is tried.
        """
        times = [self._measured(kind, num_rows) for kind in mixed]
        if times[0] is None:
            return [base] + [math.inf] * (len(mixed) - 1)
        chunks = [kind.shape.max_prompt_tokens for kind in mixed]
        costs = [times[0]]
        for index, known in enumerate(times[1:], 1):
            if known is None:
                more = max(costs[-1] - base, 0.0)
                known = base + more * chunks[index] / chunks[index - 1]
            costs.append(known)
        return costs


class PrefillPlanner:
    """Decides which programs a launch with prompts may use, and its prompt tokens."""

    def __init__(self, shapes: Shapes, pacer: Pacer):
        self._shapes, self._pacer = shapes, pacer

    def budget(
        self,
        decode: Decode,
        prefilling: Sequence[Request],
        newcomers: Sequence[Request],
        *,
        is_streaming: bool,
        may_request_on_demand: bool,
    ) -> PrefillBudget:
        """Return the prompt tokens that the next launch may include.

        Args:
            prefilling: Running requests whose prompt is not prefilled yet.
            newcomers: Waiting requests for which there is a row.
            is_streaming: A request streams its text, so prefill is paced.
            may_request_on_demand: As for `Shapes.select`.
        """
        num_seqs, num_draft_tokens = len(decode.rows), decode.num_draft_tokens
        features, tokens = decode.features, 0
        if newcomers and not (num_seqs or prefilling):
            # Nothing runs. With `batch_invariant`, only a program for the features of
            # the first request serves it.
            features = newcomers[0].features
        for request in prefilling:
            features |= request.features
            tokens += _tiles_left(request) * TILE
        compiled = self._shapes.with_prompts(num_seqs, num_draft_tokens, features)
        largest = compiled[-1].num_tiles if compiled else 0
        if largest < self._shapes.max_tiles and (compiled or num_draft_tokens):
            # Request a larger program, or the first that serves prompts and drafts.
            tokens += sum(_tiles_left(one) for one in newcomers) * TILE
        missing = None
        if tokens:
            missing = self._shapes.select(
                num_seqs,
                num_draft_tokens,
                tokens,
                features,
                may_request_on_demand=may_request_on_demand,
            ).missing
        shapes = self._fast(compiled, decode, [*prefilling, *newcomers])
        num_tiles, account = shapes[-1].num_tiles if shapes else 0, None
        if is_streaming:
            num_tiles = 0  # if no row can decode, prompts wait for the next read
            if decode.shape is not None and shapes:
                account = self._account(decode, shapes)
                num_tiles = account.num_tokens // TILE
        lacks_program = not shapes and bool(prefilling or newcomers)
        return PrefillBudget(tuple(shapes), num_tiles, account, missing, lacks_program)

    def _account(self, decode: Decode, shapes: list[StepShape]) -> PacedChunk:
        """Return the account of the next round.

        If rounds with K drafts have no known time, as when lookups find none, the times
        of rounds without drafts are used.
        """
        assert decode.shape is not None
        with_drafts = num_rows_of(decode.shape, decode.draft_counts)
        for k, num_rows in (
            (decode.num_draft_tokens, with_drafts),
            (0, len(decode.rows)),
        ):
            plain, *mixed = (RoundKind(shape, k) for shape in (decode.shape, *shapes))
            account = self._pacer.chunk(plain, mixed, num_rows)
            if account.charged_s is not None:
                break
        return account

    def _fast(
        self, shapes: list[StepShape], decode: Decode, requests: Sequence[Request]
    ) -> list[StepShape]:
        """Return the programs up to the largest needed to prefill in the least time."""
        if len(shapes) < 2:
            return shapes
        num_tiles, num_seqs = 0, len(decode.rows)
        for request in requests:
            num_tiles, num_seqs = num_tiles + _tiles_left(request), num_seqs + 1
            if num_tiles >= shapes[-1].num_tiles:
                break
        # Later launches also decode these requests: smaller programs no longer fit.
        usable = [
            shape
            for shape in shapes
            if shape.num_seqs >= num_seqs - 1 or shape.num_tiles >= num_tiles
        ]
        usable = usable or shapes
        rounds = [RoundKind(shape, decode.num_draft_tokens) for shape in usable]
        best = usable[self._pacer.fastest(num_tiles * TILE, rounds)]
        return shapes[: shapes.index(best) + 1]


def _tiles_left(request: Request) -> int:
    """Return the tiles that the rest of a prompt takes; tiles are not shared."""
    return -(-request.num_left_to_prefill // TILE)


def _soonest(
    num_tokens: int, programs: list[tuple[int, float]]
) -> tuple[float, int, int]:
    """Return the least seconds to prefill `num_tokens`, and the launches for it.

    Args:
        programs: (tokens, seconds) of each program's launch, the smallest first.

    Returns:
        Seconds, number of launches, index of the largest program used.
    """
    if num_tokens <= 0:
        return 0.0, 0, 0
    if not programs:
        return math.inf, 0, 0
    *smaller, (chunk, seconds) = programs
    ways = [_soonest(num_tokens, smaller)]
    for count in (num_tokens // chunk, -(-num_tokens // chunk)):
        if count:
            rest_s, launches, _ = _soonest(num_tokens - count * chunk, smaller)
            ways.append((count * seconds + rest_s, count + launches, len(smaller)))
    # Among equals: the fewest launches, then the smallest program.
    return min(ways)

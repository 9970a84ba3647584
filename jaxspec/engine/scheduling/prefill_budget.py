"""How many prompt tokens a launch may have while other requests stream their texts.

Prefill makes rounds longer for all decoding requests. Measured times of rounds decide
how many tokens go in: over the rounds of a prefill, the mean time is held at
`MAX_SLOWDOWN` of a round without prompts. What the draft model reads of a prompt comes
afterwards, between rounds, in launches that take no longer than that allows where one
is so small. No program is used for prompts that is larger than the largest of those
that read all there is in the least time. And where nobody waits, how many rounds a
launch may run: what the host does for a launch is then done once for all of them. Knows
nothing of requests.
"""

import math
from collections.abc import Sequence

from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stages import Decode, PacedChunk, PrefillBudget
from jaxspec.engine.speculation.step_times import Round, StepTimes
from jaxspec.program.plan import TILE, StepShape

MAX_SLOWDOWN = 1.5
# What was saved for a chunk is enough for it, whatever the last bits say.
ROUNDING = 1 + 1e-9
# Nothing to prefill: the next prefill starts with an even account.
REST = PrefillBudget(account=PacedChunk())
# Prompts wait no longer than this, whatever the account says.
MAX_WAIT_ROUNDS = 64
# Several rounds in one launch take no longer: whoever comes meanwhile waits for them.
MAX_LAUNCH_S = 0.03


class Pacer:
    """An account of seconds, and the measured times that it goes by.

    Every round of a prefill pays in what it may take and pays out what it took. A
    chunk that costs more than one round may take waits until enough is saved; no more
    is saved than the smallest chunk needs, or a later burst would hold up everybody.

    Attributes:
        saved_s: The account's balance.
        spare_s: What a round without prompts may be followed by.
    """

    def __init__(self, step_times: StepTimes):
        self.step_times = step_times
        self.saved_s = self.spare_s = 0.0
        self._num_waited = 0

    def record(
        self,
        round_: Round,
        seconds: float,
        charged_s: float | None = None,
        *,
        is_measure: bool = True,
    ) -> None:
        """Note what a round took.

        Args:
            charged_s: What `chunk` has paid out for it.
            is_measure: As for `StepTimes.record`.
        """
        seconds = self.step_times.record(
            round_, seconds, charged_s, is_measure=is_measure
        )
        if charged_s is not None:
            self.saved_s += charged_s - seconds
        if not round_.shape.chunk:
            self.spare_s = (MAX_SLOWDOWN - 1) * seconds

    def begin(self, chunk: PacedChunk) -> None:
        """Apply the account of a chunk that `chunk` has returned."""
        self.saved_s, self._num_waited = chunk.saved_s, chunk.num_waited

    def num_rounds(self, round_: Round, most: int) -> int:
        """How many such rounds may run in one launch, `most` at most."""
        seconds = self.step_times.expected(round_)
        if seconds is None:
            return 1  # first see what a round takes
        return max(min(int(MAX_LAUNCH_S / seconds), most), 1)

    def fastest(self, num_tokens: int, rounds: list[Round]) -> int:
        """Index of the largest round among those that read prompt tokens soonest.

        A launch computes all that its program has room for: two with room for 64 tokens
        may take a third of one with room for 512. A round that was never timed is tried
        where it might be the best: it is taken to cost what the next smaller one does,
        else its share of the next larger.

        Args:
            rounds: From the smallest chunk.
        """
        known = [self.step_times.seconds.get(one) for one in rounds]
        chunks = [one.shape.chunk for one in rounds]
        measured = [index for index, one in enumerate(known) if one is not None]
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

    def chunk(self, plain: Round, mixed: list[Round]) -> PacedChunk:
        """Return the prompt tokens that the next round may take along.

        Args:
            plain: The round without any.
            mixed: The same round with some, from the smallest chunk.
        """
        base = self.step_times.seconds.get(plain)
        if base is None:  # first see what a round takes
            return PacedChunk(0, None, self.saved_s, self._num_waited)
        allowance = MAX_SLOWDOWN * base
        costs, chunks = self._costs_of(base, mixed), [one.shape.chunk for one in mixed]
        chosen, cost = 0, base
        for size, seconds in zip(chunks, costs, strict=True):
            if seconds <= (allowance + self.saved_s) * ROUNDING:
                chosen, cost = size, seconds
        num_waited = 0 if chosen else self._num_waited + 1
        if num_waited > MAX_WAIT_ROUNDS:
            chosen, cost, num_waited = chunks[0], costs[0], 0
        most = max(costs[0] - allowance, 0.0)
        saved_s = min(self.saved_s + allowance, most + cost) - cost
        return PacedChunk(chosen, cost, saved_s, num_waited)

    def _costs_of(self, base: float, mixed: list[Round]) -> list[float]:
        """Measured times; what is not known is taken as in proportion to the last.

        While nothing is known, the smallest chunk is tried and no other.
        """
        found = [self.step_times.seconds.get(one) for one in mixed]
        if found[0] is None:
            return [base] + [math.inf] * (len(mixed) - 1)
        chunks = [one.shape.chunk for one in mixed]
        costs = [found[0]]
        for index, known in enumerate(found[1:], 1):
            if known is None:
                more = costs[-1] - base
                known = base + more * chunks[index] / chunks[index - 1]
            costs.append(known)
        return costs


class PrefillPlanner:
    """Decides which programs with prompts a launch may use, and how much of them."""

    def __init__(self, shapes: Shapes, pacer: Pacer):
        self._shapes, self._pacer = shapes, pacer

    def budget(
        self,
        decode: Decode,
        prefilling: Sequence[Request],
        newcomers: Sequence[Request],
        *,
        is_streaming: bool,
        is_brief: bool,
    ) -> PrefillBudget:
        """Return the prompt tokens that the next launch may take along.

        Args:
            prefilling: Running requests whose prompt is not in yet.
            newcomers: Waiting requests for which there is a row.
            is_streaming: A request streams its text: prefill may not hold it up.
            is_brief: As for `Shapes.select`.
        """
        num_seqs, num_draft = len(decode.rows), decode.num_draft_tokens
        features, tokens = decode.features, 0
        for request in prefilling:
            features |= request.features
            tokens += _tiles_left(request) * TILE
        compiled = self._shapes.with_prompts(num_seqs, num_draft, features)
        if compiled and compiled[-1].num_tiles < self._shapes.max_tiles:
            # A larger program can be had, and is worth it where as many tokens wait.
            tokens += sum(_tiles_left(one) for one in newcomers) * TILE
        missing = None
        if tokens:
            missing = self._shapes.select(
                num_seqs, num_draft, tokens, features, is_brief=is_brief
            ).missing
        shapes = self._fast(compiled, decode, [*prefilling, *newcomers])
        num_tiles, account = shapes[-1].num_tiles if shapes else 0, None
        if is_streaming:
            num_tiles = 0  # where nothing can decode, prompts wait for the read
            if decode.shape is not None and shapes:
                mixed = [Round(shape, num_draft) for shape in shapes]
                account = self._pacer.chunk(Round(decode.shape, num_draft), mixed)
                num_tiles = account.num_tokens // TILE
        return PrefillBudget(tuple(shapes), num_tiles, account, missing)

    def _fast(
        self, shapes: list[StepShape], decode: Decode, requests: Sequence[Request]
    ) -> list[StepShape]:
        """Those up to the largest that reads all prompts in the least time."""
        if len(shapes) < 2:
            return shapes
        num_tiles, num_seqs = 0, len(decode.rows)
        for request in requests:
            num_tiles, num_seqs = num_tiles + _tiles_left(request), num_seqs + 1
            if num_tiles >= shapes[-1].num_tiles:
                break
        # A program for few sequences is of no use once those of the launch decode.
        usable = [
            shape
            for shape in shapes
            if shape.num_seqs >= num_seqs - 1 or shape.num_tiles >= num_tiles
        ]
        usable = usable or shapes
        rounds = [Round(shape, decode.num_draft_tokens) for shape in usable]
        best = usable[self._pacer.fastest(num_tiles * TILE, rounds)]
        return shapes[: shapes.index(best) + 1]


def _tiles_left(request: Request) -> int:
    """Return the tiles that the rest of a prompt takes; no other shares them."""
    return -(-request.num_left_to_prefill // TILE)


def _soonest(
    num_tokens: int, programs: list[tuple[int, float]]
) -> tuple[float, int, int]:
    """Least seconds to read so many tokens, the launches, and the largest's index.

    Args:
        programs: The tokens that a launch has room for and its seconds, from the
            smallest.
    """
    if num_tokens <= 0:
        return 0.0, 0, 0
    if not programs:
        return math.inf, 0, 0
    *smaller, (chunk, seconds) = programs
    found = [_soonest(num_tokens, smaller)]
    for count in (num_tokens // chunk, -(-num_tokens // chunk)):
        if count:
            rest_s, launches, _ = _soonest(num_tokens - count * chunk, smaller)
            found.append((count * seconds + rest_s, count + launches, len(smaller)))
    # Of equals, the fewest launches, and the smallest of programs.
    return min(found)

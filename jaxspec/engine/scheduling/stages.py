"""Results of the stages of planning a launch: values, without side effects.

In order: `Candidates` -> `Decode` -> `PrefillBudget` -> `PageClaims` -> `Admissions` ->
`LaunchPlan`. A `missing` program serves better than the compiled one: it is requested
when `Scheduler.apply_plan` applies the plan.
"""

from typing import NamedTuple

import numpy as np

from jaxspec.engine.scheduling.request import Request
from jaxspec.program.plan import NO_FEATURES, TILE, Features, StepShape

Missing = tuple[StepShape | None, ...]


class Candidates(NamedTuple):
    """Rows that can decode next.

    Attributes:
        rows: In order.
        max_draft_counts: Maximum number of draft tokens of each row.
        max_draft_tokens: The maximum of `max_draft_counts`.
    """

    rows: np.ndarray
    max_draft_counts: np.ndarray
    max_draft_tokens: int
    missing: StepShape | None = None


class Decode(NamedTuple):
    """The decode part of the launch, before it has pages.

    Attributes:
        rows: Empty while no program for them is compiled.
        draft_counts: Draft tokens of each row.
        num_draft_tokens: K, the maximum of `draft_counts`.
        shape: The program for them, without prompts.
        features: Features that the rows need.
        lacks_drafts: K is above 0, but no row can have drafts in this launch.
    """

    rows: np.ndarray
    draft_counts: np.ndarray
    num_draft_tokens: int = 0
    shape: StepShape | None = None
    features: Features = NO_FEATURES
    lacks_drafts: bool = False
    missing: Missing = ()


class Chunk(NamedTuple):
    """The part of a request's prompt that the launch prefills, `end` excluded."""

    request: Request
    start: int
    end: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return -(-(self.end - self.start) // TILE)


class PacedChunk(NamedTuple):
    """Prompt tokens of a round, and the account once the round is launched.

    Attributes:
        num_tokens: 0 if prompts must wait.
        charged_s: Seconds charged for the round; None if its time is unknown.
        plain_s: Expected seconds of the round without prompts; unused if `charged_s` is
            None.
        saved_s: The balance afterwards.
        num_waited: Rounds in a row without prompt tokens, if this one has none.
    """

    num_tokens: int = 0
    charged_s: float | None = None
    plain_s: float = 0.0
    saved_s: float = 0.0
    num_waited: int = 0

    def without_prompts(self) -> "PacedChunk":
        """Return the account of a launch that has no prompts although it may."""
        chunk = self._replace(num_tokens=0)
        if self.charged_s is None:
            return chunk
        saved_s = self.saved_s + self.charged_s - self.plain_s
        return chunk._replace(charged_s=self.plain_s, saved_s=saved_s)


class PrefillBudget(NamedTuple):
    """The prompt tokens that the launch may include.

    Attributes:
        shapes: Compiled programs for a launch with prompts, from the smallest.
        num_tiles: Maximum number of prompt tiles.
        account: The pacer's account after a launch with `account.num_tokens`; None if
            it does not change.
        lacks_program: Prompts wait, and no compiled program serves them together with
            the decoding rows at this K.
    """

    shapes: tuple[StepShape, ...] = ()
    num_tiles: int = 0
    account: PacedChunk | None = None
    missing: StepShape | None = None
    lacks_program: bool = False

    def with_account_of(self, plain: "PrefillBudget") -> "PrefillBudget":
        """Return the budget with the account of a launch without drafts.

        Its rounds save time for a chunk of prompts, which will run without drafts. A
        missing program is not requested, because the requests may wait for pages or
        other programs, unless no program serves prompts at all.
        """
        missing = None if plain.shapes else self.missing
        return self._replace(account=plain.account, missing=missing)

    @property
    def is_unmeasured(self) -> bool:
        """Whether the time of a round without prompts is needed, and not known."""
        return self.account is not None and self.account.charged_s is None

    @property
    def max_tiles(self) -> int:
        """Prompt tiles of the largest program."""
        return self.shapes[-1].num_tiles if self.shapes else 0


class Grant(NamedTuple):
    """The decision whether a request gets pages for its first tokens.

    Attributes:
        preempted: Requests that are preempted to free pages for this one.
        is_granted: Whether there are enough pages. If not, the request is left out of
            the launch.
    """

    request: Request
    num_tokens: int
    preempted: tuple[Request, ...] = ()
    is_granted: bool = True


class PageClaims(NamedTuple):
    """Pages for all tokens that the launch may write of running requests.

    Attributes:
        grants: In the order in which they are applied.
        rows: Decoding rows that have their pages.
        draft_counts: Draft tokens of each of these rows.
        chunks: Next prompt parts of running requests.
        num_rounds: Maximum number of rounds of the launch.
        is_tight: The pool had too few pages for all requests.
    """

    grants: tuple[Grant, ...]
    rows: np.ndarray
    draft_counts: np.ndarray
    chunks: tuple[Chunk, ...]
    num_rounds: int
    is_tight: bool = False

    @property
    def num_preempted(self) -> int:
        """Number of preempted requests."""
        return sum(len(grant.preempted) for grant in self.grants)


class Admitted(NamedTuple):
    """A waiting request that begins to run.

    Attributes:
        num_found: Number of its pages found in the prefix cache.
        chunk: The part of its prompt that the launch prefills.
        first_local: Index of its first local page.
    """

    num_found: int
    chunk: Chunk
    first_local: int = 0


class Admissions(NamedTuple):
    """Waiting requests that begin to run, in order.

    Attributes:
        lacks_pages: The next request waits only for pages.
    """

    admitted: tuple[Admitted, ...] = ()
    missing: Missing = ()
    lacks_pages: bool = False


class LaunchPlan(NamedTuple):
    """Decisions; `LaunchBuilder` makes the `StepPlan` that is sent to the device.

    Attributes:
        shape: The program; None if there is nothing to launch.
    """

    decode: Decode
    budget: PrefillBudget
    claims: PageClaims
    admissions: Admissions
    shape: StepShape | None = None
    missing: StepShape | None = None

    @property
    def has_prompts(self) -> bool:
        """Whether the launch prefills prompts."""
        return bool(self.claims.chunks or self.admissions.admitted)

    @property
    def account(self) -> PacedChunk | None:
        """The pacer's account after the launch; None if it does not change."""
        account = self.budget.account
        if account is None or self.has_prompts:
            return account
        return account.without_prompts()

    @property
    def is_deferred(self) -> bool:
        """Whether rows could decode, but nothing is launched.

        The budget has no prompt tiles either.
        """
        has_rows = len(self.decode.rows) > 0
        return self.shape is None and has_rows and not self.budget.num_tiles

    def with_request(self, missing: StepShape | None) -> "LaunchPlan":
        """Return the plan with one more program to be requested."""
        decode = self.decode
        return self._replace(decode=decode._replace(missing=(*decode.missing, missing)))

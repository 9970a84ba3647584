"""Host values of the running requests: one numpy array per value.

A plan and a commit touch every running request in every round. With arrays this takes
microseconds. The device may be ahead of these values by the unread launches.
"""

import dataclasses
import functools
import operator

import numpy as np

from jaxspec.engine.scheduling.request import Request
from jaxspec.program.plan import NO_FEATURES, Features
from jaxspec.sampling_params import RequestOutputKind


class RowTable:
    """The host's values for the rows of the device's state, and the rows' requests.

    A draft model lags after prompts and rounds without drafts: it has keys and values
    only for the tokens that its own passes read. The first pass of a round reads at
    most `max_draft_lag` tokens: two, or, if one pass makes all drafts, the most that a
    round can add. A request with a larger lag (`num_draft_uncached`) decodes without
    drafts until a draft prefill. With two:

        launch                 uncached tokens, at most
        prompt of 20 tokens    21  the prompt and the sampled token
        draft prefill          1   the last one, the next round's input
        K = 3                  2   the last draft, the target's token
        K = 0                  3
        K = 0                  4
        draft prefill          1
        K = 3                  2

    Attributes:
        num_admitted: Admissions so far.
        owner: Number of the request's admission; -1 for a free row.
        is_decoding: The whole prompt is prefilled, or is in a launch.
        is_streamed: The caller gets tokens as they are made.
        only_final_output: As for `Request`.
        first_local: `Request.first_local`.
        num_tokens: Tokens whose values the host knows.
        num_unread: Rounds that add tokens and have not been read.
        num_unsure: Unread rounds that the device may not run.
        ahead: Upper bound on the tokens that unread rounds add.
        max_total: Tokens at which the sequence ends.
        longest: Positions that may be written, lookahead included.
        max_draft_tokens: `Request.max_draft_tokens`; 0 if the request has given up its
            drafts, to free local pages.
        num_draft_uncached: Draft lag: upper bound on the newest tokens that the draft
            model has no keys and values for, once all launches have run.
        kind: Index into `kinds`, the features that decoding needs.
        has_grammar: The request has a grammar.
        is_slow: The request's masks take long: it has no drafts.
        is_held: The request's next mask is being computed: it does not decode.
        max_draft_lag: Largest draft lag with which a row has drafts.
    """

    def __init__(
        self,
        num_rows: int,
        longest_drafted: int = 2**31 - 1,
        num_parallel: int | None = None,
    ):
        """Make free rows.

        Args:
            longest_drafted: Sequences of this length or more get no drafts.
            num_parallel: Drafts that one pass of a draft model makes, only for the
                sequences that have drafts. None: a pass makes one draft, and runs for
                all sequences.
        """

        def integers(fill: int = 0) -> np.ndarray:
            return np.full(num_rows, fill, np.int64)

        def flags() -> np.ndarray:
            return np.zeros(num_rows, bool)

        self.requests: list[Request | None] = [None] * num_rows
        self.kinds: list[Features] = []
        self.free = list(range(num_rows - 1, -1, -1))
        self.owner = integers(-1)
        self.is_decoding, self.is_streamed = flags(), flags()
        self.only_final_output = flags()
        self.has_grammar, self.is_slow, self.is_held = flags(), flags(), flags()
        self.first_local = integers()
        self.num_tokens, self.num_unread = integers(), integers()
        self.num_unsure, self.ahead = integers(), integers()
        self.max_total, self.longest = integers(), integers()
        self.max_draft_tokens, self.num_draft_uncached = integers(), integers(1)
        self.kind = integers()
        self._longest_drafted = longest_drafted
        self.max_draft_lag = 2 if num_parallel is None else num_parallel + 1
        self._runs_all_rows = num_parallel is None
        self.num_admitted = 0

    def admit(self, request: Request, longest: int) -> None:
        """Give a request a row."""
        row = request.row = self.free.pop()
        self.requests[row] = request
        self.owner[row] = self.num_admitted
        self.num_admitted += 1
        self.is_decoding[row] = False
        kind = request.params.output_kind
        self.is_streamed[row] = kind is not RequestOutputKind.FINAL_ONLY
        self.only_final_output[row] = request.only_final_output
        self.has_grammar[row] = request.grammar is not None
        self.is_slow[row] = self.is_held[row] = False
        self.num_tokens[row] = request.num_tokens
        self.num_unread[row] = self.num_unsure[row] = self.ahead[row] = 0
        self.max_total[row], self.longest[row] = request.max_total, longest
        self.max_draft_tokens[row] = request.max_draft_tokens
        self.num_draft_uncached[row] = 1
        # Prompt logprobs are not needed once it decodes.
        features = dataclasses.replace(request.features, num_prompt_logprobs=None)
        if features not in self.kinds:
            self.kinds.append(features)
        self.kind[row] = self.kinds.index(features)

    def release(self, request: Request) -> None:
        """Free a request's row; it keeps the count of its unread rounds."""
        row = request.row
        request.num_unread = int(self.num_unread[row])
        self.requests[row] = None
        self.owner[row], self.max_draft_tokens[row] = -1, 0
        self.is_decoding[row] = self.has_grammar[row] = False
        self.free.append(row)
        request.row = -1

    @property
    def decoding(self) -> np.ndarray:
        """Rows that decode, in order."""
        return self.is_decoding.nonzero()[0]  # `np.flatnonzero` takes 7 times as long

    @property
    def wants_drafts(self) -> bool:
        """Whether any request wants drafts."""
        return bool(np.count_nonzero(self.max_draft_tokens))

    def owners_of(self, rows: list[int]) -> list[Request]:
        """Return the requests in these rows."""
        requests = self.requests
        owners = [request for row in rows if (request := requests[row]) is not None]
        assert len(owners) == len(rows), f"of rows {rows} some are free"
        return owners

    def features(self, rows: np.ndarray) -> Features:
        """Return the program features that a launch of these decoding rows needs."""
        kinds = [self.kinds[kind] for kind in set(self.kind[rows].tolist())]
        return functools.reduce(operator.or_, kinds) if kinds else NO_FEATURES

    def most_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return an upper bound on each row's tokens once all launches have run."""
        known = self.num_tokens[rows] + self.ahead[rows]
        return np.minimum(known, self.max_total[rows])

    def fewest_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return a lower bound on the tokens of each row once all launches have run.

        It holds for sequences that have not ended.
        """
        known = self.num_tokens[rows] + self.num_unread[rows] - self.num_unsure[rows]
        return np.minimum(known, self.max_total[rows])

    def oldest_query(self, rows: np.ndarray, *, has_draft_model: bool) -> np.ndarray:
        """Return a lower bound on the positions that later launches compute.

        The first pass of a draft model computes its newest `max_draft_lag` tokens. If
        it lags more, a draft prefill computes all that it lacks.

        Args:
            has_draft_model: Whether rows with drafts may need a draft prefill.
        """
        back = self.max_draft_lag
        if has_draft_model:
            has_drafts = self.max_draft_tokens[rows] > 0
            has_drafts &= self.num_tokens[rows] < self._longest_drafted
            lag = np.where(has_drafts, self.num_draft_uncached[rows], 0)
            back = np.maximum(lag, back)
        return self.fewest_tokens(rows) - back

    def decodable(self, max_draft_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that can decode now, and the maximum K of each.

        A row that may have reached its last token is left out until the launches are
        read.

        Args:
            max_draft_tokens: Maximum number of drafts of any row.
        """
        rows = self.decoding
        max_tokens = self.most_tokens(rows)
        can_decode = (max_tokens < self.max_total[rows]) | (self.num_unread[rows] <= 0)
        can_decode &= ~self.is_held[rows]
        if np.count_nonzero(can_decode) < len(rows):
            rows, max_tokens = rows[can_decode], max_tokens[can_decode]
        if not max_draft_tokens:
            return rows, np.zeros(len(rows), np.int64)
        max_draft_counts = np.minimum(max_draft_tokens, self.max_draft_tokens[rows])
        max_draft_counts[(max_tokens >= self._longest_drafted) | self.is_slow[rows]] = 0
        return rows, max_draft_counts

    def lags(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows need a draft prefill before they can have drafts."""
        return self.num_draft_uncached[rows] > self.max_draft_lag

    def awaits_draft(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows lag and can still use drafts."""
        is_lagging = self.lags(rows)
        if not np.count_nonzero(is_lagging):
            return is_lagging  # the case in most rounds
        is_lagging &= self.max_draft_tokens[rows] > 0
        is_lagging &= self.num_tokens[rows] < self._longest_drafted
        return is_lagging & (self.max_total[rows] - self.fewest_tokens(rows) > 1)

    def lagging(self) -> np.ndarray:
        """Return the rows whose draft prefill can be planned now.

        None of their unread launches has drafts, so the length of the sequence is
        known.
        """
        rows = self.decoding
        is_ready = self.awaits_draft(rows) & (self.num_unread == self.ahead)[rows]
        return rows[is_ready]

    def possible_drafts(self, rows: np.ndarray, draft_counts: np.ndarray) -> np.ndarray:
        """Limit the drafts of each row to the room that its sequence has."""
        if not np.count_nonzero(draft_counts):
            return draft_counts
        left = self.max_total[rows] - self.fewest_tokens(rows) - 1
        # The device knows where a sequence ends, and drops drafts after it.
        is_long = self.max_total[rows] > self._longest_drafted
        if np.count_nonzero(is_long):
            room = self._longest_drafted - self.most_tokens(rows)
            left = np.where(is_long, np.minimum(left, room), left)
        return np.minimum(draft_counts, np.maximum(left, 0))

    def rounds_left(self, rows: np.ndarray, draft_counts: np.ndarray) -> int:
        """Return the rounds until the first row may end, or may exceed the draft limit.

        That limit is the longest sequence for which drafts are made.

        Args:
            draft_counts: Maximum number of drafts of each row in a round.
        """
        max_tokens, longest = self.most_tokens(rows), self._longest_drafted
        each = draft_counts + 1
        left = -(-(self.max_total[rows] - max_tokens) // each)
        is_short = (draft_counts > 0) & (self.max_total[rows] > longest)
        left[is_short] = np.minimum(left, (longest - max_tokens + 1) // each)[is_short]
        return max(int(left.min(initial=2**31)), 1)

    def count_launched(
        self, rows: np.ndarray, draft_counts: np.ndarray, num_rounds: int = 1
    ) -> None:
        """Count rounds that add at most `draft_counts[i] + 1` tokens to row `rows[i]`.

        The first of them always runs.
        """
        self.num_unread[rows] += num_rounds
        if num_rounds > 1:
            self.num_unsure[rows] += num_rounds - 1
        self.ahead[rows] += num_rounds * (draft_counts + 1)

    def update_draft_lag(
        self,
        rows: np.ndarray,
        draft_counts: np.ndarray,
        num_levels: int,
        num_rounds: int = 1,
    ) -> None:
        """Update the draft model's lag for a launch.

        Args:
            draft_counts: Draft tokens of each row.
            num_levels: Levels of drafts of the program.
        """
        lag = self.num_draft_uncached[rows]
        if num_levels:
            # After a drafting round, the lag is at most the last draft and the target's
            # token, or all new tokens. A larger lag is not reduced by it.
            is_read = lag <= self.max_draft_lag
            if not self._runs_all_rows:
                is_read &= draft_counts > 0
            self.num_draft_uncached[rows] = np.where(
                is_read, self.max_draft_lag, lag + num_rounds
            )
        else:
            self.num_draft_uncached[rows] = lag + num_rounds

    def settle(
        self,
        rows: np.ndarray,
        draft_counts: np.ndarray,
        num_rounds: int,
        num_missing: int,
        *,
        is_lag: bool,
    ) -> None:
        """Undo the last rounds of a launch, which did not run.

        Args:
            num_rounds: Rounds that `count_launched` counted.
            num_missing: Rounds of those that did not run.
            is_lag: `update_draft_lag` added them to the draft lag as well.
        """
        self.num_unread[rows] -= num_missing
        self.num_unsure[rows] -= num_rounds - 1
        self.ahead[rows] -= num_missing * (draft_counts + 1)
        if is_lag:
            self.num_draft_uncached[rows] -= num_missing

    def count_read(
        self, rows: np.ndarray, draft_counts: np.ndarray, emitted: np.ndarray
    ) -> None:
        """Count a round that has been read."""
        self.num_tokens[rows] += emitted
        self.num_unread[rows] -= 1
        self.ahead[rows] -= draft_counts + 1

    def check(self) -> None:
        """Assert that every running request's values are possible."""
        taken = np.flatnonzero(self.owner >= 0)
        assert sorted([*taken.tolist(), *self.free]) == list(range(len(self.owner)))
        assert (self.num_tokens[taken] <= self.max_total[taken]).all()
        # The draft model never has keys and values for the last token.
        assert (self.num_draft_uncached[taken] >= 1).all()
        assert (self.num_unsure[taken] >= 0).all()
        assert (self.num_unread[taken] >= self.num_unsure[taken]).all()
        assert (self.ahead[taken] >= self.num_unread[taken]).all()
        for row in taken.tolist():
            (request,) = self.owners_of([row])
            request.check()
            assert request.row == row
            assert self.num_tokens[row] == request.num_tokens

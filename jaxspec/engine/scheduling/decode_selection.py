"""Selects the rows that decode next, their drafts, and a compiled program."""

import numpy as np

from jaxspec.engine.scheduling.draft_prefill import can_draft
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.stages import Candidates, Decode
from jaxspec.engine.speculation.policy import SpeculationPolicy


class DecodeSelector:
    """Decides which rows decode, and their numbers of drafts; writes nothing.

    Methods take `has_draft_model`: whether drafts come from a draft model that is in
    use.
    """

    def __init__(self, policy: SpeculationPolicy, rows: RowTable, shapes: Shapes):
        self._policy, self._rows, self._shapes = policy, rows, shapes

    def candidates(self, max_draft_tokens: int, *, has_draft_model: bool) -> Candidates:
        """Return the rows that may decode.

        Args:
            max_draft_tokens: Maximum K of a sequence now.
        """
        if self._policy.is_idle:
            max_draft_tokens = 0
        rows, max_draft_counts = self._rows.decodable(max_draft_tokens)
        if max_draft_tokens:
            max_draft_tokens = int(max_draft_counts.max(initial=0))
        has_constant = self._policy.is_constant and has_draft_model
        if not (max_draft_tokens and has_constant):
            return Candidates(rows, max_draft_counts, max_draft_tokens)
        is_lagging = self._rows.awaits_draft(rows)
        if not np.count_nonzero(is_lagging) or not self.can_wait(
            may_draft=True, has_draft_model=has_draft_model
        ):
            return Candidates(rows, max_draft_counts, max_draft_tokens)
        # All rows will decode together soon: request the program for that now.
        features = self._rows.features(rows)
        missing = self._shapes.select(len(rows), max_draft_tokens, 0, features).missing
        rows, max_draft_counts = rows[~is_lagging], max_draft_counts[~is_lagging]
        max_draft_tokens = int(max_draft_counts.max(initial=0))
        return Candidates(rows, max_draft_counts, max_draft_tokens, missing)

    def can_wait(self, *, may_draft: bool, has_draft_model: bool) -> bool:
        """Return whether lagging rows wait for a draft prefill instead of decoding.

        Rows wait only if K is constant. With a variable K, waiting would make the
        rounds that have drafts depend on other requests' launches. While the draft
        prefill program or the one with drafts is being compiled, which takes seconds,
        no row waits: requests decode without drafts.

        Args:
            may_draft: Rounds may have drafts now.
        """
        if not (self._policy.is_constant and has_draft_model):
            return False
        if not (may_draft and self._shapes.can_draft_prefill):
            return False
        return can_draft(self._policy, self._rows, self._shapes)

    def select(self, candidates: Candidates, *, has_draft_model: bool) -> Decode:
        """Return the decode part of the launch."""
        rows, draft_counts = candidates.rows, candidates.max_draft_counts
        if not len(rows):
            return Decode(rows, draft_counts, missing=(candidates.missing,))
        choice, k = self._policy.next_choice, candidates.max_draft_tokens
        wants_drafts = k > 0 and self._policy.is_drafting
        if k > choice.num_draft_tokens:
            k = choice.num_draft_tokens
            draft_counts = np.minimum(draft_counts, k)
        features = self._rows.features(rows)
        # While no plain program is compiled, plain rounds run in a program with drafts:
        # the one with side branches, as estimates take the time of K = 0 from there.
        is_plain = has_draft_model and not k
        has_side_branches = choice.has_side_branches or is_plain
        shape, better = self._shapes.select(
            len(rows), k, 0, features, has_side_branches=has_side_branches
        )
        missing = candidates.missing, better
        if k and shape is None:
            # Decode without drafts until the program with drafts is compiled. The one
            # without is compiled first: the text may be short.
            k, draft_counts = 0, np.zeros_like(draft_counts)
            shape, plain = self._shapes.select(
                len(rows), 0, 0, features, may_request_on_demand=False
            )
            missing = *missing, plain
        if k and has_draft_model:
            lags = self._rows.lags(rows)
            if np.count_nonzero(lags):
                draft_counts = np.where(lags, 0, draft_counts)
                k = int(draft_counts.max())
            if not k:
                # All rows await the draft model, for a round or two.
                shape, better = self._shapes.select(
                    len(rows), 0, 0, features, may_request_on_demand=False
                )
                missing = *missing, better
        if shape is None:
            return Decode(
                rows[:0], draft_counts[:0], lacks_drafts=wants_drafts, missing=missing
            )
        lacks_drafts = wants_drafts and not k
        return Decode(rows, draft_counts, k, shape, features, lacks_drafts, missing)

    def without_drafts(self, decode: Decode) -> Decode:
        """Return the decode part without drafts; unchanged if no program serves it."""
        shape, better = self._shapes.select(
            len(decode.rows), 0, 0, decode.features, may_request_on_demand=False
        )
        if shape is None:
            return decode
        return decode._replace(
            draft_counts=np.zeros_like(decode.draft_counts),
            num_draft_tokens=0,
            shape=shape,
            lacks_drafts=True,
            missing=(*decode.missing, better),
        )

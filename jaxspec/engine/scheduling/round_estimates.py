"""Estimates for the choice of K: builds `RoundEstimates`, and records results."""

from collections.abc import Mapping

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.lookups import LookupRule
from jaxspec.engine.scheduling.draft_prefill import DraftPrefill
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.lookup_estimator import (
    RECONSIDER_RUNS,
    LookupEstimator,
    TextIndex,
)
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.speculation.acceptance import AcceptanceRates, Kind
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.policy import RoundEstimates, SpeculationPolicy
from jaxspec.engine.speculation.step_times import RoundKind, StepTimes
from jaxspec.program.plan import COUPLED, Features, StepShape
from jaxspec.program.wire import StepResult


def make_acceptance(config: EngineConfig, policy: SpeculationPolicy) -> AcceptanceRates:
    """Return the acceptance rates before any measurement."""
    prior = CONSTANTS.prior_acceptance
    if policy.can_follow_lookups and config.draft_model_config is None:
        prior = CONSTANTS.prior_lookup_acceptance
    return AcceptanceRates(config.max_num_seqs, config.max_draft_tokens, prior)


def make_lookups(
    config: EngineConfig, policy: SpeculationPolicy
) -> LookupEstimator | None:
    """Return the lookup estimator; None if text alone cannot show acceptance."""
    speculative = config.speculative
    if speculative is None or not policy.can_follow_lookups:
        return None
    num_requests = speculative.suffix_decoding_max_cached_requests or 0
    return LookupEstimator(
        LookupRule.of(speculative),
        config.max_num_seqs,
        config.max_draft_tokens,
        num_requests,
        has_fallback=config.draft_model_config is not None,
    )


def kind_of(request: Request) -> Kind:
    """Return how a request samples."""
    if not request.params.temperature:
        return Kind.GREEDY
    return Kind.SEEDED if request.rule == COUPLED else Kind.SAMPLED


class RoundEstimator:
    """Estimates of rounds: times, acceptance, draft lag.

    Attributes:
        acceptance: Rates by request and position.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SpeculationPolicy,
        rows: RowTable,
        shapes: Shapes,
        draft_prefill: DraftPrefill,
        step_times: StepTimes,
        acceptance: AcceptanceRates,
    ):
        self._policy, self._rows, self._shapes = policy, rows, shapes
        self._draft_prefill, self._step_times = draft_prefill, step_times
        self.acceptance = acceptance
        self._has_draft_model = config.draft_model_config is not None
        speculative = config.speculative
        self._is_whole_tree = speculative is not None and speculative.is_one_tree
        self._lookups = make_lookups(config, policy)

    def admit(self, request: Request) -> None:
        """Start the acceptance rates of a newly admitted request."""
        is_typical = request.grammar is None and request.controls is None
        self.acceptance.admit(request.row, kind_of(request), is_typical=is_typical)

    def finish(self, request: Request) -> None:
        """Add the answer of a finished request to the lookup estimator."""
        if self._lookups is not None:
            self._lookups.finish(request)

    def set_corpora(self, corpora: Mapping[str | None, TextIndex]) -> None:
        """Replace the corpora that lookup estimates search, by cache salt."""
        if self._lookups is not None:
            self._lookups.corpora = corpora

    def count_lookups(self) -> None:
        """Add the acceptance estimated by lookups since the last call."""
        predicted = self._lookups and self._lookups.take()
        if predicted:
            self.acceptance.record_predicted(*predicted)

    def missing(
        self, rows: np.ndarray, max_draft_counts: np.ndarray, features: Features
    ) -> list[StepShape | None]:
        """Return the missing programs, without which choices cannot be compared.

        The one without drafts is the last, to be compiled first: it is the smallest,
        and runs the rounds until the others are compiled.
        """
        values_of_k = sorted({0, int(max_draft_counts.max())}, reverse=True)
        missing = list[StepShape | None]()
        for has_side_branches in (False, True):
            if has_side_branches or self._shapes.has_chains:
                missing += [
                    self._shapes.select(
                        len(rows), k, 0, features, has_side_branches=has_side_branches
                    ).missing
                    for k in values_of_k
                ]
            if not has_side_branches and self._has_draft_model:
                missing.append(self._draft_prefill.missing(rows))
        return missing

    def estimate(
        self, rows: np.ndarray, max_draft_counts: np.ndarray, features: Features
    ) -> RoundEstimates:
        """Return the estimates for the next round of some rows."""
        max_draft_tokens, chain_seconds = int(max_draft_counts.max()), None
        if self._shapes.has_chains:
            chain_seconds = self._seconds(
                len(rows), max_draft_tokens, features, has_side_branches=False
            )
        draft_prefill_s, is_observable = 0.0, self._lookups is not None
        num_left = self._rows.max_total[rows] - self._rows.num_tokens[rows]
        if self._has_draft_model:
            draft_prefill_s = self._draft_prefill.seconds_left(rows)
            # Of the draft model, whether or not lookups are followed.
            is_observable = not self.acceptance.is_unseeded(rows).any()
        return RoundEstimates(
            max_draft_counts=max_draft_counts,
            acceptance=self.acceptance.of_rows(rows),
            seconds=self._seconds(
                len(rows), max_draft_tokens, features, has_side_branches=True
            ),
            chain_seconds=chain_seconds,
            side_tokens=self.acceptance.side_tokens,
            draft_prefill_s=draft_prefill_s,
            num_rounds_left=max(float(num_left.mean()), 1.0),
            is_whole_tree=self._is_whole_tree,
            is_observable=is_observable,
            is_probed=self._has_draft_model and is_observable,
        )

    def _seconds(
        self,
        num_seqs: int,
        max_draft_tokens: int,
        features: Features,
        *,
        has_side_branches: bool,
    ) -> list[float | None]:
        """Return the seconds of a round for each K from 0 on; None where unknown."""
        seconds: list[float | None] = []
        for k in range(max_draft_tokens + 1):
            shape = self._shapes.find(
                num_seqs, k, 0, features, has_side_branches=has_side_branches
            )
            if shape is None or (k and not has_side_branches and shape.template):
                seconds.append(None)
            else:
                fill = num_seqs / shape.num_seqs
                seconds.append(self._step_times.expected(RoundKind(shape, k), fill))
        return seconds

    def record_runs(self, launch: Launch, result: StepResult) -> None:
        """Record the number of newest tokens that a lookup predicted in a row."""
        lookups, count = self._lookups, len(launch.rows)
        if lookups is None or not count:
            return
        emitted = np.where(result.is_broken[:count], 0, result.num_emitted[:count])
        is_counted = (self._rows.owner[launch.rows] == launch.owners) & (emitted > 0)
        if launch.draft_counts.any():
            draft_counts = np.minimum(
                result.num_valid_drafts[:count], launch.draft_counts
            )
            accepted = result.num_accepted[:count]
            is_whole = (draft_counts > 0) & (accepted >= draft_counts)
            if self._has_draft_model:
                is_whole[:] = False  # perhaps they were the draft model's
            runs = np.where(is_whole, accepted, 0)[is_counted]
            self.acceptance.set_match_runs(launch.rows[is_counted], runs)
        elif not (self._policy.is_drafting or self._policy.is_stopped):
            followed = np.flatnonzero(
                is_counted & (self._rows.max_draft_tokens[launch.rows] > 0)
            )
            runs = [
                lookups.follow(launch.decoding[index], new)
                for index, new in zip(
                    followed.tolist(), emitted[followed].tolist(), strict=True
                )
            ]
            self.acceptance.set_match_runs(
                launch.rows[followed], np.array(runs, np.int64)
            )
            if not set(RECONSIDER_RUNS).isdisjoint(runs):
                self._policy.reconsider()

    def record_round(self, launch: Launch, result: StepResult) -> None:
        """Pass the tokens and time of a round without prompts to the policy."""
        count = len(launch.rows)
        if launch.shape.max_prompt_tokens:
            self._policy.end_exploration()
        if launch.shape.max_prompt_tokens or not count:
            return
        num_draft_tokens = launch.round_kind.num_draft_tokens
        num_emitted, plain_s = count, None
        if num_draft_tokens:  # otherwise nothing is compared
            num_emitted = int(result.num_emitted[:count].sum())
            plain = self._shapes.select(count, 0, 0, launch.shape.features)
            self._shapes.request_compile(plain.missing)
            if plain.shape is not None:
                fill = count / plain.shape.num_seqs
                plain_s = self._step_times.expected(RoundKind(plain.shape), fill)
        self._policy.record_round(
            count, num_draft_tokens, num_emitted, launch.counted_s, plain_s
        )

"""The estimator predicts the drafts of lookups, and K follows its estimate."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config.engine import SpeculativeConfig
from jaxspec.config.lookups import LookupRule
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.scheduling import lookup_estimator
from jaxspec.engine.scheduling.lookup_estimator import (
    ANSWER_MATCH,
    MANY,
    MAX_COMPARED,
    MAX_SALTS,
    Answers,
    LookupEstimator,
    TextIndex,
    index_corpora,
)
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.round_estimates import kind_of
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.program.propose.ngram import NGram
from jaxspec.program.wire import DraftPrefillResult, StepResult
from tests.support.fake_device import (
    FakeDevice,
    Row,
    Truth,
    extend,
    random_truth,
    repeat_truth,
)
from tests.support.lookups import search_ngram, search_suffix
from tests.support.loops import Loop, make_config, make_requests

MOST = 6
ONE_OR_MORE = [pytest.param(1, marks=pytest.mark.slow), 3]
SUFFIX = SpeculativeConfig(
    method="suffix", num_speculative_tokens=MOST, **SUFFIX_DEFAULTS
)
RULE = LookupRule.of(SUFFIX)
LIMITS = (24, SUFFIX_DEFAULTS["suffix_decoding_max_spec_factor"])


def brute_force(
    tokens: list[int], newest: list[int], longest: int, shortest: int
) -> tuple[int, list[int]]:
    """Return the positions of the longest matches by brute force, latest first."""
    last = len(tokens) - (newest is tokens) - 1
    lengths = {}
    for end in range(last, -1, -1):
        length = 0
        while (
            length < min(longest, end + 1, len(newest))
            and tokens[end - length] == newest[-1 - length]
        ):
            length += 1
        lengths[end] = length
    best = max(lengths.values(), default=0)
    places = [end for end, length in lengths.items() if length == best]
    return (best, places) if best >= shortest else (shortest, [])


TEXT = st.integers(2, 5).flatmap(
    lambda vocab: st.lists(st.integers(0, vocab), min_size=1, max_size=MAX_COMPARED)
)


@given(
    text=TEXT,
    other=TEXT,
    key=st.integers(1, 4),
    more=st.integers(0, 8),
    cut=st.integers(0, 32),
)
def test_longest_matches_equal_brute_force(text, other, key, more, cut):
    index = TextIndex(key, 8)  # few buckets: different tokens share some
    index.extend(text[:cut])
    for token in text[cut:]:
        index.append(token)
    for newest in (index.tokens, other):
        expected = 0, []
        if len(newest) >= key:
            expected = brute_force(index.tokens, newest, key + more, key)
        assert index.find(newest, key + more) == expected


@pytest.mark.parametrize("key", [1, 2, 4, 9])
def test_adding_many_tokens_equals_one_by_one(key):
    random = np.random.default_rng(key)
    one, many = TextIndex(key, 256), TextIndex(key, 256)
    for length in (1, 2, MANY, 3, MANY + 1, 400):
        new = random.integers(0, 40, length).tolist()
        many.extend(new)
        for token in new:
            one.append(token)
        assert vars(one) == vars(many)


def test_only_the_latest_positions_are_compared():
    index = TextIndex(2, 64)
    index.extend([1, 2] * (4 * MAX_COMPARED))
    length, places = index.find(index.tokens, 8)
    assert length == 8
    assert len(places) == MAX_COMPARED


def make_request(prompt: list[int], **changes: Any) -> Request:
    """Return a request in row 0 that has only its prompt."""
    (request,) = make_requests(
        make_config(),
        1,
        prompt_token_ids=prompt,
        max_total=1000,
        max_draft_tokens=MOST,
        **changes,
    )
    request.row = 0
    return request


def say(watching: LookupEstimator, request: Request, tokens: list[int]) -> int:
    """Record tokens decoded without drafts; return the length of the last match."""
    run = 0
    for token in tokens:
        request.output_token_ids.append(token)
        run = watching.follow(request, 1)
    return run


def replay(
    propose, text: list[int], start: int, *, has_fallback: bool
) -> tuple[Any, ...]:
    """Return `PredictedRounds` of a text, counted with brute-force proposals.

    Only known tokens count: the last round may be unfinished. With a draft model as
    fallback, rounds without matches say nothing about lookups.
    """
    reached, accepted = np.zeros((2, MOST))
    rounds = compared = 0
    place = start
    while place < len(text):
        drafts, count = propose(text[:place]), 0
        if has_fallback and not drafts:
            place += 1
            continue
        while count < len(drafts) and place + count < len(text):
            if drafts[count] != text[place + count]:
                break
            count += 1
        is_over = place + count < len(text)
        accepted[:count] += 1
        reached[: min(count + is_over, MOST)] += 1
        compared += min(count + is_over, len(drafts))
        rounds += is_over
        place += count + 1
    return reached, accepted, rounds, compared


NGRAM = SpeculativeConfig(
    method="ngram",
    num_speculative_tokens=MOST,
    prompt_lookup_max=3,
    prompt_lookup_min=2,
)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@given(prompt=TEXT, answer=TEXT, has_fallback=st.booleans())
def test_counts_equal_simulated_rounds(method, prompt, answer, has_fallback):
    """A request that had the row before has no influence."""
    if method == "suffix":
        rule = RULE

        def propose(tokens: list[int]) -> list[int]:
            return search_suffix(
                tokens, LIMITS, shortest=rule.shortest, num_draft_tokens=MOST
            )
    else:
        rule = LookupRule.of(NGRAM)

        def propose(tokens: list[int]) -> list[int]:
            return search_ngram(tokens, NGram(3, 2), MOST)

    # The text is so short that the estimator compares all positions.
    prompt, answer = prompt[: MAX_COMPARED // 2], answer[: MAX_COMPARED // 2]
    watching = LookupEstimator(rule, 1, MOST, has_fallback=has_fallback)
    say(watching, make_request(answer), prompt)
    watching.take()
    say(watching, make_request(prompt), answer)
    found = watching.take()
    reached, accepted, rounds, compared = replay(
        propose, prompt + answer, len(prompt), has_fallback=has_fallback
    )
    if found is None:
        assert has_fallback and not (rounds or reached.any())
        return
    assert found.rows.tolist() == [0]
    assert found.reached[0].tolist() == reached.tolist()
    assert found.accepted[0].tolist() == accepted.tolist()
    assert (found.num_rounds[0], found.num_compared) == (rounds, compared)
    assert watching.take() is None


def test_rounds_with_drafts_are_not_counted_twice():
    watching, request = LookupEstimator(RULE, 1, MOST), make_request([1, 2, 3, 4] * 3)
    assert say(watching, request, [1, 2, 3]) == 3
    first = watching.take()
    assert first is not None
    assert first.accepted[0].tolist() == [1, 1, 1, 0, 0, 0]
    assert first.num_rounds[0] == 0  # the round has not ended yet
    request.output_token_ids += [4, 1, 2, 3]
    assert say(watching, request, [4]) == 1
    second = watching.take()
    assert second is not None
    assert second.accepted[0].tolist() == [1, 0, 0, 0, 0, 0]


def test_run_continues_over_rounds_and_ends_with_a_miss():
    watching, request = LookupEstimator(RULE, 1, MOST), make_request([1, 2, 3, 4] * 3)
    # The seventh token comes after all drafts of its round, so no draft predicted it.
    assert say(watching, request, [1, 2, 3, 4, 1, 2, 3]) == MOST
    assert say(watching, request, [4]) == MOST + 1
    assert say(watching, request, [9]) == 0


def test_past_answer_is_found_only_with_its_cache_salt():
    answer = list(range(20, 40))
    for salt, found in ((None, 7), ("a", 0)):
        watching = LookupEstimator(RULE, 1, MOST, num_requests=4)
        first = make_request([1, 2, 3, 4])
        say(watching, first, answer)
        watching.finish(first)
        watching.take()
        again = make_request([1, 2, 3, 4], cache_salt=salt)
        assert say(watching, again, answer[:8]) == found


def test_past_answers_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(lookup_estimator, "ANSWER_LENGTH", 16)
    answers = Answers(num_requests=4)
    for number in range(30):
        request = make_request([7] * 5, cache_salt=str(number % 3))
        request.output_token_ids = list(range(number, number + 10))
        answers.add(request)
        assert answers.num_tokens <= 64
        length, texts = answers.find(request, list(range(number, number + 4)), RULE)
        assert length == ANSWER_MATCH
        assert texts[0] == request.output_token_ids[4:][:MOST]
    long = make_request([7] * 5)
    long.output_token_ids = list(range(500))
    answers.add(long)
    assert 0 < answers.num_tokens <= 64


def test_many_salts_of_short_answers_take_bounded_memory():
    """The indices of many salts take bounded memory: the oldest salts are evicted.

    With short answers, the indices of all salts would take more memory than the tokens.
    """
    answers, answer = Answers(num_requests=4096), list(range(20, 28))
    for number in range(3 * MAX_SALTS):
        request = make_request([7], cache_salt=str(number))
        request.output_token_ids = list(answer)
        answers.add(request)
    found = [
        answers.find(make_request([7], cache_salt=str(number)), answer[:4], RULE)[0]
        for number in range(3 * MAX_SALTS)
    ]
    assert found == [0] * 2 * MAX_SALTS + [ANSWER_MATCH] * MAX_SALTS


class LookupDevice(FakeDevice):
    """A fake device that looks up drafts in the text, as the compiled program does."""

    def _search(self, row: Row) -> list[int]:
        return search_suffix(
            row.tokens, LIMITS, shortest=RULE.shortest, num_draft_tokens=MOST
        )

    def _num_found(self, row: Row, wanted: int) -> int:
        return min(len(self._search(row)), wanted)

    def _num_right(self, row: Row, drafts: int) -> int:
        prefix, count = row.prefix, 0
        for draft in self._search(row)[:drafts]:
            position = len(row.tokens) + count
            if self.truth(row.admission.seed, position, prefix) != draft:
                break
            prefix, count = extend(prefix, draft), count + 1
        return count


class UselessDraftDevice(LookupDevice):
    """The same with a draft model that is always wrong."""

    def _draft_prefill(self, plan: StepPlan, shape: StepShape) -> DraftPrefillResult:
        found = super()._draft_prefill(plan, shape).acceptance_probabilities
        return DraftPrefillResult(acceptance_probabilities=np.minimum(found, 0))


class CostlyDrafts(Loop):
    """A loop in which rounds with drafts take 2.5 times as long as those without."""

    def cost(self, launch) -> float:
        return 2.5e-3 if launch.shape.num_levels else 1e-3


def watched(
    truth: Truth, length: int, *, has_draft: bool = False, **changes: Any
) -> CostlyDrafts:
    """Return a loop that knows the times of rounds, after it has decoded requests."""
    method = "suffix+draft_model" if has_draft else "suffix"
    keys: dict[str, Any] = {"method": method, **SUFFIX_DEFAULTS}
    speculative = SpeculativeConfig(
        model="draft" if has_draft else None,
        num_speculative_tokens=MOST,
        controller=ADAPTIVE,
        **keys,
    )
    config = make_config(
        num_draft_tokens=MOST if has_draft else 0,
        speculative=speculative,
        max_model_len=480,
        num_pages=400,
        **changes,
    )
    loop = CostlyDrafts(config, seed=0)
    loop.truth = truth
    device = UselessDraftDevice if has_draft else LookupDevice
    loop.device = device(loop.pool, truth, has_draft=has_draft)
    for shape in loop.scheduler.shapes.all(with_on_demand=True):
        if not shape.max_prompt_tokens:
            for k in {1, MOST} if shape.num_levels else {0}:
                loop.scheduler.step_times.seed(
                    RoundKind(shape, k), 2.5e-3 if k else 1e-3
                )
    prompt = list(np.random.default_rng(0).permutation(60))
    requests = make_requests(
        config,
        2 * config.max_num_seqs,
        prompt_token_ids=[int(token) for token in prompt],
        max_total=60 + length,
        max_draft_tokens=MOST,
        features=Features(all_greedy=True),
    )
    loop.run(requests)
    loop.check_ended(requests)
    return loop


def test_rounds_whose_lookups_find_nothing_do_not_make_drafts_look_cheap():
    loop = watched(random_truth(4096), 60, max_num_seqs=1)
    scheduler, [launch, *_] = loop.scheduler, loop.launches
    times = scheduler.step_times
    shapes = scheduler.shapes.all(with_on_demand=True)
    shape = next(one for one in shapes if RoundKind(one, MOST) in times.seconds)
    drafted = dataclasses.replace(
        launch,
        shape=shape,
        rows=np.zeros(1, np.int64),
        draft_counts=np.full(1, MOST),
        tiled=[],
        plan=StepPlan(decode=[(0, MOST)]),
    )
    result = loop.device.run(StepPlan(), shape)
    assert isinstance(result, StepResult)
    before = times.measured(RoundKind(shape, MOST))
    for _ in range(30):
        scheduler.record_time(drafted, result, 1e-3)
    assert times.measured(RoundKind(shape, MOST)) == before
    assert times.measured(RoundKind(shape)) == pytest.approx(1e-3, rel=0.1)
    result.num_valid_drafts[0] = 1
    for _ in range(30):
        scheduler.record_time(drafted, result, 4e-3)
    assert times.measured(RoundKind(shape, MOST)) == pytest.approx(4e-3, rel=0.1)


@pytest.mark.parametrize("num_seqs", ONE_OR_MORE)
def test_no_drafts_without_repetition(num_seqs):
    loop = watched(random_truth(4096), 200, max_num_seqs=num_seqs)
    assert sum(launch.draft_counts.any() for launch in loop.launches) == 0
    kind = kind_of(loop.finished[0])
    assert loop.scheduler.acceptance.mean(kind)[0] < 0.05


@pytest.mark.parametrize("num_seqs", ONE_OR_MORE)
def test_copy_gets_drafts_within_a_few_tokens(num_seqs):
    """All requests copy their prompt, beginning at its 20th token."""
    prompt = [int(one) for one in np.random.default_rng(0).permutation(60)]
    loop = watched(repeat_truth(prompt), 200, max_num_seqs=num_seqs)
    decoding = [launch for launch in loop.launches if len(launch.rows)]
    first = next(i for i, one in enumerate(decoding) if one.draft_counts.any())
    # A match takes two tokens, several more show that it continues, and one launch is
    # already in flight.
    assert first <= 2 + 5 + 1
    drafted = [bool(one.draft_counts.any()) for one in decoding[first:]]
    assert np.mean(drafted) > 0.9
    assert loop.device.num_accepted > 0.9 * loop.device.num_proposed


@pytest.mark.parametrize("num_seqs", ONE_OR_MORE)
def test_copy_gets_drafts_although_the_draft_model_is_useless(num_seqs):
    """After 100 new tokens, all requests copy their text from its 20th token on."""
    text = [int(one) for one in np.random.default_rng(0).permutation(160)]
    loop = watched(repeat_truth(text), 260, has_draft=True, max_num_seqs=num_seqs)
    assert loop.scheduler.acceptance.prior == CONSTANTS.prior_acceptance
    decoding = [launch for launch in loop.launches if len(launch.rows)]
    drafted = [bool(one.draft_counts.any()) for one in decoding]
    # In the first texts and in the copies of both batches, but not in between.
    assert 0.05 < np.mean(drafted) < 0.5
    assert loop.device.num_accepted > 0.5 * loop.device.num_proposed


@pytest.mark.usefixtures("unchecked_types")  # parts of a launch and its result
@pytest.mark.parametrize("has_draft", [False, True])
def test_accepted_drafts_count_as_a_match_only_without_a_draft_model(has_draft):
    """With one, the drafts may have been the draft model's."""
    loop = watched(random_truth(64), 8, has_draft=has_draft, max_num_seqs=1)
    rows, counts = np.zeros(1, np.int64), np.full(1, 3)
    launch: Any = SimpleNamespace(
        rows=rows, owners=loop.scheduler.rows.owner[rows], draft_counts=counts
    )
    result: Any = SimpleNamespace(
        is_broken=np.zeros(1, bool),
        num_emitted=counts + 1,
        num_valid_drafts=counts,
        num_accepted=counts,
    )
    loop.scheduler._estimator.record_runs(launch, result)
    assert loop.scheduler.acceptance._run[0] == (0 if has_draft else 3)


def test_corpus_is_found_only_with_its_cache_salt():
    answer = list(range(20, 40))
    for salt, found in ((None, 7), ("a", 0)):
        watching = LookupEstimator(RULE, 1, MOST)
        other = np.arange(100, 100 + MANY)
        texts = [(None, other), (None, np.array([9, *answer])), ("b", other)]
        watching.corpora = index_corpora(texts)
        again = make_request([1, 2, 9], cache_salt=salt)
        assert say(watching, again, answer[:11]) == found

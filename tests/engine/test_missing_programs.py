"""While better programs are compiled, requests run in others and get the same texts."""

from typing import Any

import numpy as np
import pytest

from jaxspec.config.speculation import ADAPTIVE, FIXED
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.program.plan import Features, StepShape
from jaxspec.sampling_params import RequestOutputKind
from tests.support.loops import (
    Loop,
    SomePrograms,
    make_config,
    make_request,
    make_requests,
)

LOGPROBS = Features(num_logprobs=3)
GRAMMAR = Features(has_grammar=True)
PROMPTS = Features(num_logprobs=2, num_prompt_logprobs=2)
KINDS = (Features(all_greedy=True), Features(), LOGPROBS, GRAMMAR, PROMPTS)


class ComingPrograms(SomePrograms):
    """Compiles each requested program some plans later, the latest request first."""

    def __init__(self, pause: int):
        super().__init__()
        self.pause, self._left = pause, pause

    def request(self, shape: StepShape) -> None:
        if shape not in self.asked and shape not in self.there:
            super().request(shape)

    def tick(self) -> None:
        self._left -= 1
        if self._left <= 0 and self.asked:
            self.add(self.asked.pop())
            self._left = self.pause


def run(loop: Loop, programs: ComingPrograms, requests: list[Request]) -> None:
    loop.add(requests)
    for _ in range(20_000):
        if not loop.step():
            break
        launched = loop.launches[-1].shape if loop.launches else None
        assert launched is None or launched in programs
        programs.tick()
    assert len(loop.finished) == len(requests)
    loop.check_ended(requests)


@pytest.mark.parametrize(
    ("pause", "num_draft_tokens"),
    [
        *((1, 0), (1, 3), (7, 3), (60, 3)),
        *(pytest.param(n, 0, marks=pytest.mark.slow) for n in (7, 60)),
    ],
)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_texts_do_not_depend_on_compiled_programs(seed, pause, num_draft_tokens):
    """There are pages for half of the requests, so some are also preempted."""
    config = make_config(
        max_num_seqs=4, num_pages=60, num_draft_tokens=num_draft_tokens
    )
    random = np.random.default_rng(seed)
    requests = [make_request(number, random, config) for number in range(14)]
    for request in requests:
        request.features = KINDS[int(random.integers(len(KINDS)))]
        if request.features.num_prompt_logprobs is not None:
            request.can_read_prefix_cache = False
    programs = ComingPrograms(pause)
    loop = Loop(config, seed, programs=programs)
    run(loop, programs, requests)
    if pause < 10:
        assert len({launch.shape for launch in loop.launches}) > 1


def test_only_a_request_whose_features_have_no_program_waits():
    """Earlier requests continue, and later ones are admitted first."""
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=128)
    first, special, last = make_requests(config, 3)
    special.features = LOGPROBS
    programs = ComingPrograms(pause=10**9)
    loop = Loop(config, 0, programs=programs)
    for shape in loop.scheduler.shapes.all(with_on_demand=True):
        programs.add(shape)
    loop.scheduler.add(first)
    while first.status is not Status.DECODE:
        loop.step()
    loop.scheduler.add(special)
    loop.scheduler.add(last)
    said = len(first.output_token_ids)
    loop.steps(6)
    assert special.status is Status.WAITING
    assert last.status is Status.DECODE
    assert len(first.output_token_ids) >= said + 5
    form = loop.scheduler.shapes.form(LOGPROBS)
    assert {shape.features for shape in programs.asked} == {form}
    programs.add(loop.scheduler.shapes.all(features=[LOGPROBS])[0])
    loop.run()
    for request in (first, special, last):
        loop.assert_said_the_truth(request)


def test_a_request_decodes_without_drafts_until_their_program_is_compiled():
    """To compile it may take minutes; the program without drafts comes first."""
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=128)
    (request,) = make_requests(config, 1, max_draft_tokens=3)
    request.prompt_token_ids, request.max_total = [2] * 20, 60
    request.features = Features(all_greedy=True)
    programs = ComingPrograms(pause=10**9)
    loop = Loop(config, 0, programs=programs)
    assert not loop.step() or not loop.launches, "nothing is there"
    loop.scheduler.add(request)
    loop.step()
    assert not loop.launches
    (prompt,) = programs.asked
    assert (prompt.num_levels, prompt.max_prompt_tokens > 0) == (0, True)
    programs.asked.clear()
    programs.add(prompt)
    loop.steps(6)
    assert len(request.output_token_ids) > 3
    assert {launch.shape for launch in loop.launches} == {prompt}
    # The last one is compiled first.
    own, draft_prefill, plain = programs.asked
    assert draft_prefill == loop.scheduler.shapes.draft_prefills[0]
    assert (own.num_seqs, own.num_levels, own.max_prompt_tokens) == (1, 3, 0)
    assert (plain.num_seqs, plain.num_levels, plain.max_prompt_tokens) == (1, 0, 0)
    programs.add(draft_prefill)
    programs.add(own)
    count = len(loop.launches)
    loop.run()
    used = [launch.shape for launch in loop.launches[count:]]
    assert used[used.index(draft_prefill) + 1 :].count(own) > 2
    loop.assert_said_the_truth(request)


def drafting_loop(
    controller: str, **changes: Any
) -> tuple[Loop, ComingPrograms, Request, Request]:
    """Return a loop with a stream that drafts, its programs, and both requests.

    The second request is not added yet. No program serves prompts and drafts together;
    all others are compiled.
    """
    config = make_config(
        max_num_seqs=4, max_num_batched_tokens=128, controller=controller, **changes
    )
    stream, other = make_requests(config, 2, max_draft_tokens=3)
    stream.params.output_kind = RequestOutputKind.DELTA
    stream.prompt_token_ids, stream.max_total = list(range(10)), 95
    programs = ComingPrograms(pause=10**9)
    loop = Loop(config, 0, programs=programs)
    for shape in loop.scheduler.shapes.all(with_on_demand=True):
        if not (shape.num_levels and shape.max_prompt_tokens):
            programs.add(shape)
    loop.scheduler.add(stream)
    while not (loop.launches and loop.launches[-1].has_drafts):
        loop.step()
    programs.asked.clear()
    return loop, programs, stream, other


@pytest.mark.parametrize(("length", "has_times"), [(20, True), (80, True), (20, False)])
@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
def test_a_prompt_does_not_wait_for_a_program_with_prompts_and_drafts(
    controller, length, has_times
):
    """Until it is compiled, launches with prompts have no drafts, the others do.

    Without known times, some rounds with neither are measured first.
    """
    loop, programs, stream, other = drafting_loop(controller, num_pages=400)
    other.prompt_token_ids, other.max_total = list(range(length)), 90
    loop.prompt_token_s = 1 / 32
    for shape in programs.there if has_times else ():
        seconds = 1.0 + shape.max_prompt_tokens / 32
        loop.scheduler.step_times.seed(RoundKind(shape), seconds)
    count = len(loop.launches)
    loop.scheduler.add(other)
    while other.status is not Status.DECODE and loop.step():
        pass
    assert stream.status is Status.DECODE
    for launch in loop.launches[count:]:
        assert not (launch.has_drafts and launch.num_prefilled)
    if has_times:
        largest = max(shape.num_tiles for shape in programs.asked)
        assert largest == (1 if length == 20 else 4)
    loop.run()
    assert sum(launch.has_drafts for launch in loop.launches[count:]) > 3
    for request in (stream, other):
        loop.assert_said_the_truth(request)


@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
@pytest.mark.parametrize("reason", ["pages", "features"])
def test_drafts_continue_while_a_prompt_waits_for_something_else(reason, controller):
    """The program with prompts and drafts is not requested."""
    num_pages = 30 if reason == "pages" else 400
    loop, programs, stream, other = drafting_loop(controller, num_pages=num_pages)
    other.prompt_token_ids, other.max_total = [3] * 85, 90
    if reason == "features":
        other.prompt_token_ids, other.features = [3] * 20, LOGPROBS
    while len(stream.output_token_ids) < 30:
        loop.step()
    programs.asked.clear()
    count = len(loop.launches)
    loop.scheduler.add(other)
    while stream.status is not Status.FINISHED:
        loop.step()
    rounds = [launch for launch in loop.launches[count:] if launch.decoding]
    # A few rounds without drafts are measured.
    assert sum(not launch.has_drafts for launch in rounds) <= 4 < len(rounds) / 2
    if reason == "features":
        form = loop.scheduler.shapes.form(LOGPROBS)
        assert {shape.features for shape in programs.asked} == {form}


@pytest.mark.parametrize(("round_s", "num_before"), [(0.001, 0), (0.1, 2)])
def test_programs_with_drafts_wait_until_a_short_request_ends(round_s, num_before):
    """Rounds are slower while programs are loaded; see `DRAFTS_AFTER_S`."""
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=128)
    (request,) = make_requests(config, 1, max_draft_tokens=3)
    request.prompt_token_ids, request.max_total = [2] * 20, 60
    request.features = Features(all_greedy=True)
    programs = ComingPrograms(pause=1)
    loop = Loop(config, 0, programs=programs)
    loop.fastest_s, loop.prompt_token_s = round_s, 0.0
    loop.scheduler.shapes.hold_drafts()
    loop.scheduler.add(request)
    num_drafting = 0
    while loop.scheduler.has_unfinished():
        num_drafting = count_drafting(programs)
        loop.step()
        programs.tick()
    assert num_drafting == num_before
    assert count_drafting(programs) >= 2


def add_request(
    programs: SomePrograms, controller: str, num_tokens: int, *, is_held: bool = True
) -> tuple[Loop, Request]:
    """Return a loop with one request, whose rounds take little of `DRAFTS_AFTER_S`."""
    config = make_config(
        max_num_seqs=4, num_pages=200, max_num_batched_tokens=128, controller=controller
    )
    (request,) = make_requests(config, 1, max_draft_tokens=3)
    request.prompt_token_ids, request.max_total = [2] * 20, num_tokens
    loop = Loop(config, 0, programs=programs)
    loop.fastest_s, loop.prompt_token_s = 1e-6, 0.0
    if is_held:
        loop.scheduler.shapes.hold_drafts()
    loop.scheduler.add(request)
    return loop, request


def test_draft_prefill_is_not_planned_while_its_programs_wait(monkeypatch):
    """Choosing K and planning it make the first request a sixth slower."""
    programs, num_choices = ComingPrograms(pause=1), 0
    loop, _ = add_request(programs, ADAPTIVE, 90)
    choose = loop.scheduler.policy.choose

    def count(estimates):
        nonlocal num_choices
        num_choices += 1
        choose(estimates)

    monkeypatch.setattr(loop.scheduler.policy, "choose", count)
    # Raises if draft prefill is planned.
    monkeypatch.delattr("jaxspec.engine.scheduling.row_table.RowTable.lagging")
    while loop.scheduler.has_unfinished():
        loop.step()
        programs.tick()
    # Of the 70 rounds, one in eight, and one after each new program.
    assert 1 < num_choices < 70 / 4


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
def test_draft_prefill_is_requested_in_the_size_that_is_needed(controller, is_held):
    """Until it is compiled, the request decodes without drafts, so that more lacks."""
    programs, asked = ComingPrograms(pause=1), []
    loop, _ = add_request(programs, controller, 60, is_held=is_held)
    small, large = loop.scheduler.shapes.draft_prefills
    while loop.scheduler.has_unfinished():
        asked.append({shape for shape in programs.asked if shape.is_draft_prefill})
        loop.step()
        for shape in set(programs.asked) - {small, large}:
            programs.asked.remove(shape)
            programs.add(shape)
    assert {small, large} <= set(programs.asked)
    assert asked[-1] == (set() if is_held else {small, large})


@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
def test_compiled_programs_with_drafts_do_not_wait(controller):
    loop, request = add_request(programs := SomePrograms(), controller, 60)
    for shape in loop.scheduler.shapes.all(with_on_demand=True):
        programs.add(shape)
    for _ in range(200):
        loop.step()
    loop.check_ended([request])
    assert sum(bool(launch.draft_counts.any()) for launch in loop.launches) > 2


@pytest.mark.parametrize("is_prefilling", [False, True])
def test_programs_that_requests_lack_do_not_wait(is_prefilling):
    """With `batch_invariant`, all programs have drafts, and none replaces another.

    The second request is admitted in the program of the first. When that one ends, the
    second decodes, or its prompt is not prefilled yet.
    """
    config = make_config(
        max_num_seqs=4, num_pages=200, max_num_batched_tokens=32, batch_invariant=True
    )
    first, second = make_requests(config, 2)
    first.features = GRAMMAR
    first.prompt_token_ids, first.max_total = [2] * 20, 24
    programs = ComingPrograms(pause=1)
    loop = Loop(config, 0, programs=programs)
    loop.fastest_s, loop.prompt_token_s = 1e-6, 0.0
    loop.scheduler.shapes.hold_drafts()
    loop.scheduler.add(first)
    while first.status is not Status.DECODE:
        loop.step()
        programs.tick()
    loop.scheduler.add(second)
    status = Status.PREFILL if is_prefilling else Status.DECODE
    while second.status is not status:
        loop.step()
        programs.tick()
    if is_prefilling:
        loop.scheduler.finish(first, "abort", None)
    for _ in range(200):
        loop.step()
        programs.tick()
    loop.check_ended([second])


def test_launch_of_some_running_requests_has_a_program():
    """With `batch_invariant`, that for the features of these alone may be missing."""
    config = make_config(
        max_num_seqs=4, num_pages=200, num_draft_tokens=0, batch_invariant=True
    )
    ending, decoding, newcomer = requests = make_requests(config, 3)
    ending.features, ending.max_total = PROMPTS, 75
    decoding.features, newcomer.features = LOGPROBS, GRAMMAR
    programs = SomePrograms()
    loop = Loop(config, 0, programs=programs)
    for features in (LOGPROBS, PROMPTS, PROMPTS | GRAMMAR):
        programs.add(loop.scheduler.shapes.all(features=[features])[0])
    loop.add([ending, decoding])
    while ending.status is not Status.DECODE or is_decodable(loop, ending):
        loop.step()
    assert ending in loop.scheduler.running, "its last round is in flight"
    loop.add([newcomer])
    loop.step()
    assert newcomer in loop.scheduler.running
    own = loop.scheduler.shapes.all(features=[LOGPROBS | GRAMMAR])[0]
    assert programs.asked == [own]
    programs.add(own)
    programs.add(loop.scheduler.shapes.all(features=[GRAMMAR])[0])
    loop.run()
    loop.check_ended(requests)


def is_decodable(loop: Loop, request: Request) -> bool:
    return request.row in loop.scheduler.rows.decodable(0)[0]


def count_drafting(programs: ComingPrograms) -> int:
    known = {*programs.asked, *programs.there}
    return sum(shape.num_levels > 0 or shape.is_draft_prefill for shape in known)

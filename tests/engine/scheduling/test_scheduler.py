"""For any traffic, every plan is valid for the device, and all requests end.

`FakeDevice` fails if a plan reads a slot that holds something else, drafts without the
draft model's keys and values, writes into another row's page, or prefills out of order.
This tests the stages too: `admission`, `decode_selection`, `draft_prefill`.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import ADAPTIVE, FIXED
from jaxspec.engine.scheduling.draft_prefill import MAX_IN_A_ROW, DraftPrefillPlan
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.stages import LaunchPlan
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.loss_budget import LossBudget
from jaxspec.engine.speculation.policy import Choice, SpeculationPolicy
from jaxspec.program.plan import MAX_CONTROLLED, TILE, Features, TokenControls
from jaxspec.sampling_params import RequestOutputKind
from tests.support.fake_device import FakeDevice
from tests.support.loops import (
    MODEL,
    Loop,
    SomePrograms,
    make_config,
    make_request,
    make_requests,
    run_random_traffic,
    run_traffic,
)

FINAL_ONLY, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
CONFIGS = {
    "base": {},
    "one_row": dict(max_num_seqs=1),
    "many_rows_few_pages": dict(max_num_seqs=8, num_pages=30),
    "one_sequence_fits": dict(num_pages=24),
    "long_drafts": dict(num_draft_tokens=8),
    "odd_drafts": dict(num_draft_tokens=7),
    "plain": dict(num_draft_tokens=0),
    "big_pages": dict(page_size=32, num_pages=12),
    "pages_of_one": dict(page_size=1, num_pages=200),
    "switching": dict(max_num_seqs=4, disable_by_batch_size=2),
    "switching_one_tile": dict(
        max_num_seqs=8, disable_by_batch_size=2, max_num_batched_tokens=32
    ),
    "many_tiles": dict(max_num_seqs=8, max_num_batched_tokens=512, num_pages=200),
    "tight_length": dict(max_model_len=75),
    "priorities": dict(scheduling_policy="priority", max_num_seqs=8, num_pages=30),
    "short_drafts": dict(longest_drafted=20, max_num_seqs=4, num_pages=40),
    "without_cache": dict(enable_prefix_caching=False, max_num_seqs=8, num_pages=30),
    "windows": dict(window=8, num_pages=60),
    "windows_plain": dict(window=5, num_local=5, num_pages=34, num_draft_tokens=0),
    "windows_few_pages": dict(window=13, num_local=3, max_num_seqs=8, num_pages=34),
    "windows_big_pages": dict(window=8, num_local=2, page_size=16, num_pages=14),
    "windows_tight": dict(
        window=6, max_num_seqs=8, num_pages=43, max_num_batched_tokens=32
    ),
    "windows_lagging": dict(
        window=8,
        num_local=4,
        max_num_seqs=8,
        num_pages=38,
        disable_by_batch_size=3,
        num_scheduler_steps=3,
        max_num_batched_tokens=32,
    ),
    "windows_of_one": dict(window=1, page_size=1, num_local=2, num_pages=160),
    "windows_switching": dict(
        window=6, num_local=5, max_num_seqs=8, disable_by_batch_size=2, num_pages=60
    ),
    "windows_without_cache": dict(
        window=9, num_local=2, enable_prefix_caching=False, num_pages=42
    ),
}


# Their parts are in other configs, so only `make test-all` runs them.
COMBINED = {
    *("long_drafts", "switching", "windows", "windows_plain", "windows_tight"),
    *("windows_switching", "windows_without_cache"),
}


# Engines use depth 1: one launch runs ahead of the results that they have read.
@pytest.mark.parametrize(
    ("name", "depth", "num_seeds"),
    [
        *(
            pytest.param(name, 1, 1, marks=pytest.mark.slow if name in COMBINED else ())
            for name in CONFIGS
        ),
        ("base", 0, 1),
        *(
            pytest.param(name, depth, 3, marks=pytest.mark.slow)
            for name, depth in itertools.product(CONFIGS, (0, 1))
        ),
    ],
)
def test_random_traffic_finishes(name, depth, num_seeds):
    for seed in range(num_seeds):
        run_random_traffic(Loop(make_config(**CONFIGS[name]), seed, depth), seed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("base", marks=pytest.mark.slow),
        *("switching_one_tile", "many_rows_few_pages", "windows_few_pages"),
    ],
)
@pytest.mark.parametrize("num_seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_requests_can_be_dropped_at_any_time(name, num_seeds):
    for seed in range(num_seeds):
        loop = Loop(make_config(**CONFIGS[name]), seed)
        run_random_traffic(loop, seed, drop_share=0.1)


def freeze(value: Any) -> Any:
    """Return a copy that compares by value; requests themselves compare by id."""
    match value:
        case np.ndarray():
            return value.tolist()
        case Request():
            return value.request_id
        case LossBudget():
            return freeze(vars(value))
        case dict():
            return [(freeze(key), freeze(one)) for key, one in value.items()]
        case list() | tuple() | set():
            return [freeze(one) for one in value]
    return repr(value)


def state_of(loop: Loop, programs: SomePrograms) -> list[Any]:
    """Return all scheduler state that a plan depends on, except the keys of pages."""
    scheduler = loop.scheduler
    requests = [*scheduler.running, *scheduler.waiting]
    known = [vars(one) | {"page_keys": None} for one in requests]
    parts = (
        scheduler.rows,
        scheduler.pool,
        scheduler.pacer,
        scheduler.policy,
        scheduler.acceptance,
        scheduler.step_times,
        scheduler.stats,
        scheduler.masks,
        scheduler._draft_prefill,
    )
    known += [vars(one) for one in parts]
    return freeze([*known, requests, programs.asked])


STAGES = ("select_decode", "budget_prefill", "claim_pages", "admit", "build_launch")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(CONFIGS["many_rows_few_pages"], marks=pytest.mark.slow),
        CONFIGS["priorities"],
        dict(controller=ADAPTIVE, max_num_seqs=4, num_pages=60),
        pytest.param(CONFIGS["windows_tight"], marks=pytest.mark.slow),
    ],
)
def test_planning_stages_change_no_state(changes, monkeypatch):
    """Stages run with and without draft prefill, and request no missing programs."""
    config, random = make_config(**changes), np.random.default_rng(0)
    serving = SomePrograms()
    loop = Loop(config, seed=0, programs=serving)
    loop.prompt_token_s = 1 / 16  # slow prompts, which the prefill budget defers
    first = loop.scheduler.shapes.all()[0]
    plain = dataclasses.replace(first, max_prompt_tokens=0)
    serving.there |= {first, plain, *loop.scheduler.shapes.draft_prefills}
    plans = list[Any]()

    def check(owner: Any, name: str) -> None:
        plan = getattr(owner, name)

        def planned(*values: Any, **options: Any) -> Any:
            before = state_of(loop, serving)
            plans.append(plan(*values, **options))
            assert state_of(loop, serving) == before
            return plans[-1]

        monkeypatch.setattr(owner, name, planned)

    # Between stages, local pages are freed.
    for name in STAGES if "window" in changes else ("_plan_round",):
        check(loop.scheduler, name)
    check(loop.scheduler._draft_prefill, "plan")
    check(loop.scheduler._draft_prefill, "next_turn")
    for number in range(10):
        request = make_request(number, random, config)
        request.params.output_kind = DELTA
        loop.scheduler.add(request)
    loop.run()
    rounds = [one for one in plans if isinstance(one, LaunchPlan)]
    assert any(one.admissions.admitted for one in rounds)
    accounts = [one.budget.account for one in rounds if one.budget.account]
    assert any(one.num_waited for one in accounts)
    assert any(isinstance(one, DraftPrefillPlan) for one in plans)
    assert serving.asked, "nothing was missing"
    is_tight = any(one.claims.num_preempted for one in rounds)
    assert is_tight == (loop.scheduler.stats.num_preemptions > 0)
    loop.assert_idle()


def run_together(config: EngineConfig, count: int, **changes: Any) -> Loop:
    """Run `count` equal requests, with 4 prompt tokens and 12 to generate."""
    values: dict[str, Any] = dict(
        prompt_token_ids=[1, 2, 3, 4],
        max_total=16,
        max_draft_tokens=config.max_draft_tokens,
    )
    return run_traffic(config, make_requests(config, count, **(values | changes)))


def start(count: int, changes: dict[str, Any], **config: Any) -> Loop:
    """Return a loop to which `count` requests with these changes were added."""
    loop = Loop(make_config(**config), seed=0)
    loop.add(make_requests(loop.config, count, **changes))
    return loop


def step_until_drafts(loop: Loop) -> None:
    while not (loop.launches and loop.launches[-1].draft_counts.any()):
        loop.step()


# K is variable, and all pages fit.
VARIABLE: dict[str, Any] = dict(
    controller=ADAPTIVE, max_model_len=400, num_pages=200, max_num_seqs=2
)


def test_decoding_does_not_wait_for_prompts():
    """Running requests decode in the launches that prefill a long prompt."""
    loop = Loop(make_config(num_draft_tokens=0, max_num_batched_tokens=32), seed=0)
    random = np.random.default_rng(0)
    first = make_request(0, random, loop.config)
    first.max_total, first.stop_ids = 90, ()
    loop.scheduler.add(first)
    while first.status is not Status.DECODE:
        loop.step()
    second = make_request(1, random, loop.config)
    second.prompt_token_ids, second.max_total = [1] * 90, 95
    loop.scheduler.add(second)
    # First, a round without prompts must be timed.
    loop.steps(4)
    assert second.status is Status.PREFILL
    before = len(loop.launches) - 1
    while second.status is not Status.DECODE:
        loop.step()
    both = loop.launches[before : before + 3]
    assert [len(launch.plan.tiles) for launch in both] == [1, 1, 1]
    assert [launch.decoding for launch in both] == [[first]] * 3


def test_many_prompts_request_and_fill_a_larger_program(monkeypatch):
    monkeypatch.setattr("jaxspec.engine.scheduling.programs.FIRST_CHUNK", 2 * TILE)
    config = make_config(
        num_draft_tokens=0,
        max_num_seqs=8,
        num_pages=200,
        max_num_batched_tokens=6 * TILE,
    )
    programs = SomePrograms()
    loop = Loop(config, seed=0, programs=programs)
    for shape in loop.scheduler.shapes.all():
        programs.add(shape)
    # Each prompt has one tile, without prefix hits.
    requests = make_requests(config, 8, max_total=40)
    for number, request in enumerate(requests):
        request.prompt_token_ids = [number] * 20
    loop.add(requests[:2])
    loop.step()
    assert not programs.asked  # all prompts fit into one launch
    loop.add(requests[2:])
    loop.step()
    assert [len(launch.plan.tiles) for launch in loop.launches] == [2, 2]
    [larger] = {shape for shape in programs.asked if shape.max_prompt_tokens}
    assert larger.max_prompt_tokens == 6 * TILE
    programs.add(larger)
    loop.step()
    assert len(loop.launches[-1].plan.tiles) == 4
    assert loop.launches[-1].shape == larger
    loop.run()
    loop.check_ended(requests)


def test_sequences_decode_during_draft_prefill():
    """If draft prefill takes several launches, rows that lack it decode plainly."""
    loop = start(
        4,
        dict(prompt_token_ids=[1] * 5, max_draft_tokens=3, max_total=390),
        max_num_seqs=4,
        num_pages=400,
        max_model_len=400,
        disable_by_batch_size=2,
        model_config=dataclasses.replace(MODEL, max_position_embeddings=512),
    )
    loop.steps(200)
    begun = len(loop.launches)
    for request in loop.scheduler.running[2:]:
        loop.scheduler.finish(request, "abort", None)
    loop.run()
    launches = loop.launches[begun:]
    turns = [launch.shape.is_draft_prefill for launch in launches]
    # Two rows lack the draft keys of 400 tokens each, and a launch prefills up to 64.
    assert 6 <= sum(turns) <= 9
    runs = [len([*run]) for is_turn, run in itertools.groupby(turns) if is_turn]
    assert max(runs) == MAX_IN_A_ROW
    last = len(turns) - 1 - turns[::-1].index(True)
    between = [
        set(one.draft_counts.tolist()) for one in launches[:last] if one.decoding
    ]
    assert {0, 3} in between, "both waited for the slower one"
    assert all(
        set(one.draft_counts.tolist()) != {0} for one in launches[last + 1 : last + 9]
    )
    loop.check_ended(loop.finished)
    assert len(loop.finished) == 2


@pytest.mark.parametrize("kind", [FINAL_ONLY, DELTA])
def test_first_token_does_not_wait_for_the_draft_prefill(kind):
    """The draft model prefills a prompt one launch later; then all rows get drafts."""
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=64)
    requests = make_requests(config, 2, max_draft_tokens=3, max_total=90)
    for token, request in enumerate(requests, 1):
        request.prompt_token_ids, request.params.output_kind = [token] * 60, kind
    loop = run_traffic(config, requests)
    # The second prompt is prefilled in one launch, before the rest of the first one.
    assert [one.num_prefilled for one in loop.launches[:2]] == [60, 60]
    if kind is DELTA:
        return  # draft prefill is limited while texts are streamed
    is_draft_prefill = [one.shape.is_draft_prefill for one in loop.launches[:4]]
    assert is_draft_prefill == [False, False, True, True]
    drafts = [
        one.draft_counts.tolist() for one in loop.launches[3:8] if len(one.draft_counts)
    ]
    assert all(3 in one for one in drafts)


def test_shared_pages_are_draft_prefilled_once():
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=64)
    requests = make_requests(config, 4, max_draft_tokens=3)
    loop = run_traffic(config, requests)
    reading = [one for one in loop.launches if one.shape.is_draft_prefill]
    read = sum(len(tile.tokens) for one in reading for tile in one.plan.tiles)
    # Of 70 tokens, 68 lie in full pages.
    assert read == 70 + 3 * 2


def test_draft_prefill_follows_admission_order():
    """Later short prompts do not overtake a long one."""
    config = make_config(
        max_num_seqs=4, num_pages=200, max_model_len=400, max_num_batched_tokens=64
    )
    requests = make_requests(config, 4, max_draft_tokens=3)
    for token, request in enumerate(requests):
        length = 40 if token else 300
        request.prompt_token_ids, request.max_total = [token] * length, length + 20
    loop = run_traffic(config, requests)
    reading = [one for one in loop.launches if one.shape.is_draft_prefill]
    read = [request for launch in reading for request in launch.tiled]
    num_tiles = -(-300 // TILE)
    assert read[:num_tiles] == [requests[0]] * num_tiles
    assert len(read) == num_tiles + 3 * 2


@pytest.mark.parametrize("kind", [FINAL_ONLY, DELTA])
def test_all_rows_get_drafts_soon_after_plain_rounds(kind):
    """Else the first rows would need draft prefill again before the last have it."""
    loop = start(
        16,
        dict(prompt_token_ids=[1] * 5, max_draft_tokens=3, max_total=390),
        max_num_seqs=16,
        num_pages=1000,
        max_model_len=400,
        max_num_batched_tokens=512,
        disable_by_batch_size=15,
    )
    for request in loop.scheduler.waiting:
        request.params.output_kind = kind
    loop.steps(100)
    assert not any(launch.draft_counts.any() for launch in loop.launches)
    begun = len(loop.launches)
    loop.scheduler.finish(loop.scheduler.running[0], "abort", None)
    loop.steps(20)
    launches = loop.launches[begun:]
    rounds = [one for one in launches if not one.shape.is_draft_prefill]
    # 15 rows lack four tiles of draft prefill each, and a launch has room for 16 tiles.
    assert len(launches) - len(rounds) <= 6
    assert all((one.draft_counts == 3).all() for one in rounds[4:])
    # Until all rows have it, launches use no programs with room for drafts.
    idle = [one for one in rounds if not one.draft_counts.any()]
    assert not any(one.shape.num_levels for one in idle)


def test_draft_prefill_does_not_delay_streams():
    config = make_config(
        max_num_seqs=4, num_pages=200, max_model_len=500, max_num_batched_tokens=512
    )
    loop = Loop(config, seed=0)
    loop.prompt_token_s = 1 / 256  # 64 tokens take 1/4 round, 512 two
    stream, late = make_requests(config, 2, max_draft_tokens=3)
    stream.prompt_token_ids, stream.max_total = [1] * 20, 400
    stream.params.output_kind = DELTA
    late.prompt_token_ids, late.max_total = [2] * 400, 440
    loop.scheduler.add(stream)
    loop.steps(8)
    before = len(loop.launches)
    loop.run([late])
    sizes = [
        one.shape.max_prompt_tokens
        for one in loop.launches[before:]
        if one.shape.is_draft_prefill
    ]
    assert sizes == [64] * 7


@pytest.mark.parametrize("num_slow", [10, 1000])
def test_drafts_stop_if_rounds_stay_slow_but_not_for_a_suspension(num_slow):
    config = make_config(
        max_num_seqs=1, num_pages=200, max_model_len=500, controller=ADAPTIVE
    )
    loop, slow = Loop(config, seed=0), list[Launch]()

    def cost(launch: Launch) -> float:
        is_slow = launch.has_drafts and 40 < len(loop.launches)
        if not is_slow or len(slow) == num_slow:
            return 1.1 if launch.has_drafts else 1.0
        slow.append(launch)
        return 9.0

    loop.cost = cost
    plain, request = make_requests(config, 2, max_draft_tokens=3)
    plain.max_draft_tokens, request.max_total = 0, 490
    loop.run([plain])
    loop.run([request])
    newest = {launch.has_drafts for launch in loop.launches[-20:]}
    if num_slow == 10:
        assert len(slow) == 10 and newest == {True}
        assert not loop.scheduler.policy.num_stops
    else:
        assert len(slow) <= 40 and newest == {False}
    loop.assert_said_the_truth(request)


def test_no_draft_prefill_for_requests_that_get_no_drafts():
    changes = dict(prompt_token_ids=[1] * 60, max_draft_tokens=3, max_total=62)
    loop = run_together(make_config(num_pages=200), 1, **changes)
    assert not any(launch.shape.is_draft_prefill for launch in loop.launches)


def time_plain_rounds(policy: SpeculationPolicy) -> None:
    policy._explored = Choice(num_draft_tokens=0)
    policy._explore_left = CONSTANTS.explore_rounds


def test_plain_rounds_are_timed_in_consecutive_launches():
    """No draft prefill runs between timed rounds."""
    loop = start(1, dict(max_draft_tokens=3, max_total=300), **VARIABLE)
    policy = loop.scheduler.policy
    step_until_drafts(loop)
    time_plain_rounds(policy)
    begin = len(loop.launches)
    while policy.is_timing_plain:
        loop.step()
    timed = loop.launches[begin:-1]  # the newest launch has not been read
    assert len(timed) == CONSTANTS.explore_rounds
    assert not any(
        one.shape.is_draft_prefill or one.draft_counts.any() for one in timed
    )
    loop.step()
    assert loop.launches[-1].shape.is_draft_prefill


def test_idle_policy_is_evaluated_once_in_some_rounds(monkeypatch):
    """While K is 0, the policy chooses K anew only in one of several rounds.

    It also does so at once after a probe of the draft model, or when a request is
    admitted.
    """
    loop = start(1, dict(max_draft_tokens=3, max_total=390), **VARIABLE)
    for request in loop.scheduler.waiting:
        request.params.temperature = 0.0
    num_rounds = 32
    policy, chosen_at, probed_at = loop.scheduler.policy, list[int](), list[int]()
    choose, begin_probe = policy.choose, policy.begin_probe

    def choose_none(known) -> None:
        choose(known)
        policy.choice, policy._explored = Choice(num_draft_tokens=0), None
        policy._rounds_left = num_rounds
        chosen_at.append(len(loop.launches))

    def note_probe() -> None:
        begin_probe()
        probed_at.append(len(loop.launches))

    monkeypatch.setattr(policy, "choose", choose_none)
    monkeypatch.setattr(
        policy, "can_probe", lambda: len(loop.launches) > 200 and not probed_at
    )
    monkeypatch.setattr(policy, "begin_probe", note_probe)
    draft_prefill, num_turns = loop.scheduler._draft_prefill, 0
    next_turn = draft_prefill.next_turn

    def count_turns(**values: bool) -> Any:
        nonlocal num_turns
        num_turns += 1
        return next_turn(**values)

    monkeypatch.setattr(draft_prefill, "next_turn", count_turns)
    while len(loop.launches) < 200:
        loop.step()
    assert num_turns < 20
    assert set(np.diff(chosen_at[2:]).tolist()) == {num_rounds}
    assert not probed_at
    while not probed_at:
        loop.step()
    assert probed_at[0] <= 201 + num_rounds
    while len(loop.launches) < probed_at[0] + 5:
        loop.step()
    # K is chosen before the result of the probe is read, and again as soon as it is
    # read.
    assert sum(probed_at[0] <= at for at in chosen_at) == 2
    assert policy.is_idle
    [other] = make_requests(loop.config, 1, max_draft_tokens=3, max_total=300)
    loop.scheduler.add(other)
    loop.step()
    assert other.row >= 0 and not policy.is_idle


def test_prompts_end_the_timing_of_plain_rounds():
    """With constant arrivals, waiting for a gap would prolong the timing forever."""
    loop = start(1, dict(max_draft_tokens=3, max_total=390), **VARIABLE)
    step_until_drafts(loop)
    policy = loop.scheduler.policy
    time_plain_rounds(policy)
    others = make_requests(loop.config, 8, max_draft_tokens=3, max_total=71)
    for number, request in enumerate(others):
        request.prompt_token_ids = [number] * 70
    loop.add(others)
    while (
        loop.launches[-1].draft_counts.any()
        or not loop.launches[-1].shape.max_prompt_tokens
    ):
        loop.step()
    loop.step()
    assert loop.scheduler.waiting and not policy.is_timing_plain
    while not loop.launches[-1].draft_counts.any():
        loop.step()
    assert loop.scheduler.waiting, "there are drafts before all prompts are in"


def test_k_is_at_most_the_largest_requested():
    loop = run_together(make_config(num_draft_tokens=8), 2, max_draft_tokens=2)
    drafts = {int(launch.draft_counts.max(initial=0)) for launch in loop.launches}
    assert drafts <= {0, 1, 2}
    assert 2 in drafts
    loop = run_together(make_config(num_draft_tokens=8), 2, max_draft_tokens=0)
    decoding = [launch for launch in loop.launches if launch.decoding]
    assert {int(launch.draft_counts.max()) for launch in decoding} == {0}
    alone = [launch.shape for launch in decoding if not launch.plan.tiles]
    assert {shape.num_levels for shape in alone} == {0}


def test_no_drafts_are_planned_past_the_end_of_a_text():
    """The last token of a text needs no draft, because the target samples it."""
    loop = run_together(make_config(num_draft_tokens=8), 1)
    entries = [entry for launch in loop.launches for entry in launch.plan.decode]
    # At first, there are four prompt tokens and one generated token; then each round
    # adds at least one.
    for known, (_, drafts) in enumerate(entries, 5):
        assert drafts <= 16 - known - 1


@pytest.mark.parametrize("longest", [10, 11, 12])
def test_sequences_beyond_the_drafts_length_limit_get_no_drafts(monkeypatch, longest):
    """Beyond the draft model's length limit, rounds are plain."""
    known, run = [], FakeDevice.run

    def note(device, plan, shape):
        known.extend(len(device.rows[row].tokens) for row, _ in plan.decode)
        return run(device, plan, shape)

    monkeypatch.setattr(FakeDevice, "run", note)
    loop = run_together(make_config(num_draft_tokens=3, longest_drafted=longest), 1)
    rounds = [
        (drafts, launch.shape.num_levels)
        for launch in loop.launches
        for _, drafts in launch.plan.decode
    ]
    for tokens, (drafts, width) in zip(known, rounds, strict=True):
        assert tokens + drafts <= max(longest, tokens)
        assert width == 3 or tokens + 3 + 1 >= longest  # its result is not read yet
        assert width == 0 or tokens < longest
    assert {width for _, width in rounds} == {0, 3}
    loop.assert_said_the_truth(loop.finished[0])


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_latest_request_is_preempted_when_pages_run_out(num_draft_tokens):
    config = make_config(
        max_num_seqs=4,
        num_pages=30,
        max_model_len=96,
        num_draft_tokens=num_draft_tokens,
    )
    requests = make_requests(config, 4)
    for number, request in enumerate(requests):
        request.prompt_token_ids = [number] * 20
    loop = run_traffic(config, requests)
    counts = [request.stats.num_preemptions for request in requests]
    assert sum(counts) == loop.scheduler.stats.num_preemptions > 0
    # The first request is never preempted, so at least one always continues.
    assert counts[0] == 0
    ends = [int(request.request_id) for request in loop.finished]
    assert ends == sorted(ends)


def test_pages_behind_windows_are_freed_once_pages_are_needed(monkeypatch):
    """Their computation takes the host time, so most rounds of one request skip it."""
    loop = Loop(make_config(window=8, num_draft_tokens=0), seed=0)
    compute, counted = loop.scheduler.rows.oldest_query, []
    monkeypatch.setattr(
        loop.scheduler.rows,
        "oldest_query",
        lambda *args, **given: counted.append(1) or compute(*args, **given),
    )
    (request,) = make_requests(loop.config, 1, max_total=96)
    loop.run([request])
    num_rounds = 96 - len(request.prompt_token_ids)
    assert len(counted) <= num_rounds / loop.config.page_size + 2
    # The window, and the pages that the next launches write.
    assert loop.num_freed >= (96 - 8) / loop.config.page_size - 2


def test_plan_lists_all_allocated_pages():
    """A plan also lists pages of a row that is not in the launch."""
    config = make_config(
        num_draft_tokens=8, num_pages=13, max_num_seqs=2, max_model_len=52
    )
    num_sat_out = 0
    for num_prompt in range(20, 36):
        loop = Loop(config, seed=0)
        requests = make_requests(config, 2, stop_ids=(), can_read_prefix_cache=False)
        for request, drafts in zip(requests, (0, 8), strict=True):
            request.prompt_token_ids = [drafts + 1] * (5 if drafts else num_prompt)
            request.max_total = request.num_prompt_tokens + 12
            request.max_draft_tokens = drafts
            loop.scheduler.add(request)
        while loop.step():
            rows = loop.scheduler.rows
            num_sat_out += int(rows.is_decoding.sum()) > len(loop.launches[-1].rows)
        loop.check_ended(requests)
    assert num_sat_out


def test_preempted_request_finds_its_own_pages():
    """Pages of a preempted request that were not reused since are prefix hits."""
    config = make_config(max_num_seqs=2, num_pages=30, num_draft_tokens=0)
    requests = make_requests(config, 2)
    for number, request in enumerate(requests):
        request.prompt_token_ids = [number] * 40
    loop = run_traffic(config, requests)
    assert requests[1].stats.num_preemptions >= 1
    starts = [
        next(tile.start for tile in launch.plan.tiles if tile.row == admission.row)
        for launch in loop.launches
        for admission in launch.plan.admissions
        if admission.seed == requests[1].seed
    ]
    assert starts[0] == 0
    assert min(starts[1:]) > 0


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", [3, 2, 1, 0]), ("fcfs", [0, 1, 2, 3])]
)
def test_priorities_decide_admission_and_preemption(policy, order):
    config = make_config(
        max_num_seqs=2, num_pages=30, scheduling_policy=policy, num_draft_tokens=0
    )
    requests = make_requests(config, 4)
    for number, request in enumerate(requests):
        request.prompt_token_ids, request.priority = [number] * 40, -number
    loop = run_traffic(config, requests)
    assert [int(request.request_id) for request in loop.finished] == order
    assert requests[order[0]].stats.num_preemptions == 0


def test_launch_has_features_of_all_its_requests():
    config = make_config(max_num_seqs=2, num_pages=200, num_draft_tokens=0)
    requests = make_requests(config, 2, max_total=80)
    most = config.num_logprobs
    asked = Features(num_logprobs=most, num_prompt_logprobs=most)
    requests[1].features, requests[1].max_total = asked, 75
    requests[1].can_read_prefix_cache = False
    loop = run_traffic(config, requests)
    for launch in loop.launches:
        expected = Features()
        if requests[1] in launch.tiled:
            expected = asked
        elif requests[1] in launch.decoding:
            expected = Features(num_logprobs=most)  # without prompt logprobs
        form = loop.scheduler.shapes.form(expected)
        assert launch.shape.features == form
        assert launch.shape in loop.scheduler.shapes.all(features=[form])


def test_admissions_with_controls_are_limited():
    config = make_config(max_num_seqs=16, num_pages=400, max_num_batched_tokens=512)
    controls = TokenControls(presence_penalty=1.0)
    features = Features(has_controls=True)
    requests = make_requests(
        config, 10, controls=controls, features=features, can_read_prefix_cache=False
    )
    loop = run_traffic(config, requests)
    plans = [launch.plan for launch in loop.launches if launch.plan.admissions]
    admitted = [len(plan.admissions) for plan in plans]
    assert admitted[:3] == [MAX_CONTROLLED, MAX_CONTROLLED, 2]


@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
def test_draft_prefill_waits_for_the_program_with_drafts(controller):
    """Without it, every round would be followed by a draft prefill in vain."""
    config = make_config(num_pages=200, max_model_len=400, controller=controller)
    serving = SomePrograms()
    loop = Loop(config, seed=0, programs=serving)
    shapes = loop.scheduler.shapes
    drafting = {one for one in shapes.all(with_on_demand=True) if one.num_levels}
    plain = set(shapes.all(with_on_demand=True)) - drafting
    serving.there |= plain | set(shapes.draft_prefills)
    for request in make_requests(config, 3, max_draft_tokens=3, max_total=370):
        loop.scheduler.add(request)
    while len(loop.launches) < 40:
        loop.step()
    assert not any(launch.shape.is_draft_prefill for launch in loop.launches)
    assert drafting & set(serving.asked)
    for shape in drafting:
        serving.add(shape)
    loop.run()
    assert any(launch.shape.is_draft_prefill for launch in loop.launches)
    assert sum(launch.draft_counts.any() for launch in loop.launches) > 20


def test_slow_first_draft_prefill_does_not_stop_drafts(monkeypatch):
    """The first run of each program takes 60 plain rounds, and later ones one."""
    config = make_config(num_pages=200, max_model_len=400, controller=ADAPTIVE)
    loop, has_run = Loop(config, seed=0), set()

    def cost(launch: Launch) -> float:
        is_first = launch.shape not in has_run
        has_run.add(launch.shape)
        return 0.06 if launch.shape.is_draft_prefill and is_first else 0.001

    monkeypatch.setattr(loop, "cost", cost)
    loop.run(make_requests(config, 4, max_draft_tokens=3, max_total=370))
    assert sum(shape.is_draft_prefill for shape in has_run) >= 1
    assert loop.scheduler.policy.num_stops == 0
    assert sum(launch.draft_counts.any() for launch in loop.launches) > 20


def test_draft_model_is_probed_once_at_a_time(monkeypatch):
    """While K is 0, the draft model is probed; one launch later the result is read."""
    config = make_config(num_pages=200, max_model_len=400, controller=ADAPTIVE)
    loop = Loop(config, seed=0)
    loop.fastest_s, loop.prompt_token_s = 1e-4, 1e-7
    policy, in_flight = loop.scheduler.policy, 0
    policy.choice = Choice(num_draft_tokens=0)
    monkeypatch.setattr(policy, "is_due", lambda *_: False)
    begin_probe, record = policy.begin_probe, policy.record_draft_prefill

    def begin() -> None:
        nonlocal in_flight
        assert not in_flight
        in_flight += 1
        begin_probe()

    def end(seconds: float, *, is_probe: bool) -> None:
        nonlocal in_flight
        in_flight -= is_probe
        record(seconds, is_probe=is_probe)

    monkeypatch.setattr(policy, "begin_probe", begin)
    monkeypatch.setattr(policy, "record_draft_prefill", end)
    requests = make_requests(config, 2, max_draft_tokens=3, max_total=370)
    for request in requests:
        request.params.temperature = 0.0  # otherwise acceptance cannot be estimated
    loop.run(requests)
    assert policy.num_probes >= 3
    loop.check_ended(requests)

"""Prefill makes the rounds of running streams at most 50 % longer on average."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.speculation import FIXED, SpeculativeConfig
from jaxspec.engine.scheduling.prefill_budget import (
    MAX_LAUNCH_S,
    MAX_SLOWDOWN,
    MAX_WAIT_ROUNDS,
    REST,
    Pacer,
)
from jaxspec.engine.scheduling.request import Status
from jaxspec.engine.scheduling.stages import (
    Admissions,
    Chunk,
    Decode,
    LaunchPlan,
    PacedChunk,
    PrefillBudget,
)
from jaxspec.engine.speculation.step_times import RoundKind, StepTimes
from jaxspec.program.plan import StepShape
from jaxspec.sampling_params import RequestOutputKind
from tests.support.loops import MODEL, Loop, make_config, make_requests

CHUNKS = (32, 128, 512, 2048)


def round_of(chunk: int) -> RoundKind:
    return RoundKind(StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=chunk), 3)


PLAIN = round_of(0)
NO_ROWS = Decode(np.zeros(0, np.int64), np.zeros(0, np.int64))
ROUNDS = [round_of(chunk) for chunk in CHUNKS]


def make_pacer() -> Pacer:
    return Pacer(StepTimes())


def begin_chunk(pacer: Pacer, mixed: list[RoundKind]) -> tuple[int, float | None]:
    before = pacer.saved_s
    chunk = pacer.chunk(PLAIN, mixed)
    assert pacer.saved_s == before and pacer.chunk(PLAIN, mixed) == chunk
    pacer.begin(chunk)
    return chunk.num_tokens, chunk.charged_s


def run(costs: dict[int, float], rounds: int) -> list[int]:
    """Run rounds, each timed before the next is planned; return their chunk sizes."""
    pacer, chosen = make_pacer(), []
    for _ in range(rounds):
        chunk, charged = begin_chunk(pacer, ROUNDS)
        chosen.append(chunk)
        pacer.record(round_of(chunk), costs[chunk], charged)
    return chosen


@settings(max_examples=40)
@given(
    base=st.floats(1e-4, 1.0),
    extra=st.lists(st.floats(0.0, 20.0), min_size=4, max_size=4),
)
def test_mean_round_time_is_within_the_allowance(base, extra):
    """The bound holds for any times of chunks, once each chunk has been tried."""
    costs, total = {0: base}, 0.0
    for chunk, more in zip(CHUNKS, extra, strict=True):
        total += more
        costs[chunk] = base * (1 + total)
    chosen = run(costs, 600)
    # In addition to the allowed time, each chunk may be tried twice.
    spent = sum(costs[chunk] for chunk in chosen)
    tried = sum(2 * costs[chunk] for chunk in CHUNKS)
    assert spent <= MAX_SLOWDOWN * base * len(chosen) + tried
    assert any(chosen), "no prompt token was prefilled"


def test_allowance_is_of_the_rows_that_have_tokens():
    times = StepTimes(fixed_rows=16)
    times.seed(PLAIN, 1.0)
    times.seed(ROUNDS[0], 2.0)
    pacer = Pacer(times)
    # 4 of 16 rows have tokens: a plain round takes 0.625 s, not 1 s.
    chunk = pacer.chunk(PLAIN, ROUNDS[:1], num_rows=4)
    size = ROUNDS[0].shape.max_prompt_tokens
    charged_s = 2.0 * (16 + 4 + size) / (16 + 16 + size)
    assert chunk.num_tokens == 0 and chunk.charged_s == 0.625
    assert chunk.saved_s == pytest.approx(0.625 * (MAX_SLOWDOWN - 1))
    pacer.saved_s = 2.0
    chunk = pacer.chunk(PLAIN, ROUNDS[:1], num_rows=4)
    assert chunk.charged_s == pytest.approx(charged_s)


def test_cheap_chunks_grow_and_expensive_chunks_alternate():
    cheap = run({0: 1.0, 32: 1.01, 128: 1.02, 512: 1.05, 2048: 1.2}, 40)
    assert cheap[-20:] == [2048] * 20
    assert [chunk for chunk in cheap if chunk][0] == 32
    dear = run({0: 1.0, 32: 2.0, 128: 5.0, 512: 20.0, 2048: 80.0}, 60)
    # Rounds may take 0.5 longer on average. A chunk takes 1.0 longer, so every second
    # round has one.
    assert sorted(dear[-20:]) == [0] * 10 + [32] * 10


def test_saved_time_is_dropped_when_prefill_ends():
    pacer = make_pacer()
    pacer.saved_s = 5.0
    assert REST.account is not None
    pacer.begin(REST.account)
    assert pacer.saved_s == 0.0


@pytest.mark.parametrize("stalled", [0, 32])
def test_one_stall_of_the_machine_does_not_block_prompts(stalled):
    """One round takes as long as a thousand, as if the machine had been suspended."""
    costs = {0: 0.010, 32: 0.012}
    pacer, chosen = make_pacer(), []
    for number in range(200):
        chunk, charged = begin_chunk(pacer, ROUNDS[:1])
        chosen.append(chunk)
        seconds = costs[chunk]
        if chunk == stalled and number > 20 and stalled is not None:
            seconds, stalled = 10.0, None
        pacer.record(round_of(chunk), seconds, charged)
    assert stalled is None or stalled == 0
    assert chosen[:20].count(32) >= 15
    assert chosen[60:].count(32) >= 135


def test_prompt_wait_is_bounded_after_a_stall_at_the_start():
    """If a chunk's first measured time is a stall, only more chunks can correct it."""
    pacer, chosen = make_pacer(), []
    costs = {0: 0.010, 32: 0.012}
    for _ in range(3):
        pacer.record(PLAIN, costs[0])
    pacer.step_times.seed(round_of(32), 1000.0)
    for _ in range(4000):
        chunk, charged = begin_chunk(pacer, ROUNDS[:1])
        chosen.append(chunk)
        pacer.record(round_of(chunk), costs[chunk], charged)
    first = chosen.index(32)
    assert first == MAX_WAIT_ROUNDS
    waits = "".join(" " if one else "." for one in chosen).split()
    assert max(map(len, waits)) == MAX_WAIT_ROUNDS
    assert chosen[-10:] == [32] * 10


@pytest.mark.parametrize("seed", range(3))
def test_prompts_do_not_wait_longer_on_a_busy_machine(seed):
    """The machine's speed varies.

    A round with a chunk takes four times as long as one without.
    """
    random, pacer, costs = np.random.default_rng(seed), make_pacer(), {0: 1.0, 32: 4.0}
    num_chunks, spent, without_prompts = 0, 0.0, 0.0
    for slowness in random.lognormal(0.0, 0.7, 3000):
        chunk, charged = begin_chunk(pacer, ROUNDS[:1])
        seconds = slowness * costs[chunk]
        pacer.record(round_of(chunk), seconds, charged)
        num_chunks += chunk > 0
        spent, without_prompts = spent + seconds, without_prompts + slowness
    # If all rounds take the usual time, one in six has a chunk.
    assert 3000 / 8 < num_chunks < 3000 / 5
    assert spent < MAX_SLOWDOWN * without_prompts


def test_prompts_wait_a_bounded_number_of_rounds_that_are_never_measured():
    """No round's time is recorded."""
    pacer, waits = make_pacer(), []
    pacer.saved_s = -1.0
    for _ in range(3 * (MAX_WAIT_ROUNDS + 1)):
        chunk = pacer.chunk(PLAIN, ROUNDS)
        assert chunk.saved_s == -1.0
        pacer.begin(chunk)
        waits.append(not chunk.num_tokens)
        assert chunk.num_tokens in (0, CHUNKS[0]) and chunk.charged_s is None
    assert waits == ([True] * MAX_WAIT_ROUNDS + [False]) * 3


@pytest.mark.parametrize("drafts_s", [1.3, 2.0])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_prompts_do_not_wait_for_lookups_that_seldom_find_drafts(share, drafts_s):
    """Rounds are expected to have drafts; those without are shorter."""
    random, pacer, num_chunks = np.random.default_rng(0), make_pacer(), 0
    for _ in range(20):
        pacer.record(PLAIN, drafts_s)
    for has_drafts in random.random(1000) < share:
        chunk, charged = begin_chunk(pacer, ROUNDS[:1])
        shape = round_of(chunk).shape
        seconds = (drafts_s if has_drafts else 1.0) + (1.5 if chunk else 0.0)
        pacer.record(RoundKind(shape, 3 if has_drafts else 0), seconds, charged)
        num_chunks += chunk > 0
    assert num_chunks > 250


def test_a_chunk_that_no_prompt_uses_is_not_charged():
    """The next request may wait for pages or for its program."""
    pacer = make_pacer()
    pacer.step_times.seed(PLAIN, 1.0)
    pacer.step_times.seed(ROUNDS[0], 4.0)
    for number in range(100):
        chunk = pacer.chunk(PLAIN, ROUNDS[:1])
        assert (chunk.num_tokens > 0) == (number >= 5)
        chunk = chunk.without_prompts()
        assert (chunk.num_tokens, chunk.charged_s) == (0, 1.0)
        pacer.begin(chunk)
        pacer.record(PLAIN, 1.0, chunk.charged_s)


def test_launch_without_prompts_is_charged_as_such():
    loop = Loop(make_config(), seed=0)
    (request,) = make_requests(loop.config, 1)
    account = PacedChunk(num_tokens=32, charged_s=4.0, plain_s=1.0)
    for chunks in ((), (Chunk(request, 0, 32),)):
        claims = loop.scheduler.claim_pages(NO_ROWS, PrefillBudget())
        plan = LaunchPlan(
            NO_ROWS,
            PrefillBudget(account=account),
            claims._replace(chunks=chunks),
            Admissions(),
        )
        assert plan.account is not None
        assert plan.account.charged_s == (4.0 if chunks else 1.0)


@pytest.mark.parametrize("is_measured", [True, False])
def test_an_overdue_chunk_that_no_prompt_uses_is_offered_again(is_measured):
    pacer, offered = make_pacer(), 0
    pacer.saved_s = -1000.0
    if is_measured:
        pacer.step_times.seed(PLAIN, 1.0)
    for _ in range(MAX_WAIT_ROUNDS + 10):
        chunk = pacer.chunk(PLAIN, ROUNDS)
        offered += chunk.num_tokens > 0
        pacer.begin(chunk.without_prompts())
    assert offered == 10


def test_larger_chunks_cost_no_less_than_a_round_without_prompts():
    """The smallest chunk seems to be faster than a round without any."""
    pacer = make_pacer()
    pacer.step_times.seed(PLAIN, 2.0)
    pacer.step_times.seed(ROUNDS[0], 1.8)
    chunk = pacer.chunk(PLAIN, ROUNDS)
    assert chunk.charged_s == 2.0


@pytest.mark.parametrize("num_found", [0, 3])
@pytest.mark.parametrize("fixed_rows", [16, None])
def test_prompts_do_not_wait_for_drafts_that_lookups_do_not_find(
    monkeypatch, fixed_rows, num_found
):
    """Rounds whose lookups find nothing are measured as rounds without drafts."""
    lookup = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_max=3,
        prompt_lookup_min=2,
        controller=FIXED,
    )
    config = make_config(
        max_num_seqs=16, num_pages=400, draft_model_config=None, speculative=lookup
    )
    loop = Loop(config, seed=0)
    loop.scheduler.step_times._fixed_rows = fixed_rows
    loop.prompt_token_s = 1 / 16
    monkeypatch.setattr(loop.device, "_num_found", lambda _, k: min(k, num_found))
    *streams, other = make_requests(config, 6, max_draft_tokens=3)
    for stream in streams:
        stream.params.output_kind = RequestOutputKind.DELTA
        stream.prompt_token_ids, stream.max_total = [1] * 8, 90
        loop.scheduler.add(stream)
    loop.steps(6)
    other.prompt_token_ids, other.max_total = [2] * 40, 50
    loop.scheduler.add(other)
    count = len(loop.launches)
    while other.status is not Status.DECODE and loop.step():
        pass
    assert all(stream.status is Status.DECODE for stream in streams)
    rounds = [one for one in loop.launches[count:] if one.decoding]
    assert sum(map(loop.cost, rounds)) / len(rounds) < 1.6 * loop.fastest_s
    charged = [one.charged_s for one in rounds if one.charged_s and not one.tiled]
    assert charged[-1] == pytest.approx(loop.fastest_s, rel=0.05)


def streaming_rounds(loop: Loop, prompt_tokens: int) -> list[float]:
    """Return the seconds of each round of a stream while a long prompt is prefilled."""
    config = loop.config
    first, second = make_requests(config, 2, stop_ids=())
    for request in (first, second):
        request.max_draft_tokens = 0
        request.params.output_kind = RequestOutputKind.DELTA
    first.prompt_token_ids, first.max_total = [1] * 8, config.max_model_len
    second.prompt_token_ids = [2] * prompt_tokens
    second.max_total = prompt_tokens + 2
    loop.scheduler.add(first)
    loop.steps(12)
    loop.scheduler.add(second)
    before = len(loop.launches)
    while second.status is not Status.FINISHED:
        loop.step()
    return [
        loop.cost(launch)
        for launch in loop.launches[before:]
        if any(request is first for request in launch.decoding)
    ]


@pytest.mark.parametrize(
    "prompt_token_s",
    [1 / 512, 1 / 16]
    + [pytest.param(one, marks=pytest.mark.slow) for one in (1 / 4000, 1 / 64)],
)
def test_long_prompt_does_not_delay_streams(prompt_token_s):
    config = make_config(
        model_config=dataclasses.replace(MODEL, max_position_embeddings=8192),
        max_model_len=8192,
        num_pages=2048,
        page_size=16,
        max_num_batched_tokens=2048,
        num_draft_tokens=0,
    )
    loop = Loop(config, seed=0)
    loop.prompt_token_s = prompt_token_s
    rounds = streaming_rounds(loop, 4000)
    mean = sum(rounds) / len(rounds)
    assert mean <= 1.5 * loop.fastest_s * 1.02
    # Nearly all of the allowed time is used: otherwise the prompt would wait
    # needlessly.
    if prompt_token_s >= 1 / 512:
        assert mean >= 1.2 * loop.fastest_s


def test_deferred_prompt_continues_when_no_stream_gets_pages():
    """The stream needs pages that a prompt with a higher rank holds."""
    config = make_config(
        model_config=dataclasses.replace(MODEL, max_position_embeddings=704),
        max_model_len=704,
        num_pages=45,
        page_size=16,
        num_draft_tokens=0,
        scheduling_policy="priority",
    )
    loop = Loop(config, seed=0)
    loop.prompt_token_s = 1 / 4
    stream, urgent = make_requests(config, 2, stop_ids=())
    stream.params.output_kind = RequestOutputKind.DELTA
    stream.prompt_token_ids, stream.max_total = [1] * 8, 400
    urgent.prompt_token_ids, urgent.max_total = [2] * 640, 642
    urgent.priority = -1
    loop.scheduler.add(stream)
    loop.steps(12)
    loop.scheduler.add(urgent)
    is_running = True
    while is_running:
        num_launches, has_one_to_read = len(loop.launches), bool(loop.launched)
        is_running = loop.step()
        # With no launch in flight, the prompt runs even if the allowed time is used up.
        assert has_one_to_read or len(loop.launches) > num_launches
    assert stream.stats.num_preemptions == 1
    assert loop.finished == [urgent, stream]
    loop.assert_idle()


def test_prompts_prefill_at_full_speed_without_streams():
    config = make_config(max_num_seqs=8, num_pages=200, max_num_batched_tokens=512)
    requests = make_requests(config, 8, can_read_prefix_cache=False)
    loop = Loop(config, seed=0)
    loop.prompt_token_s = 1.0
    loop.scheduler.add(requests[0])
    loop.steps(4)
    loop.add(requests[1:])
    loop.step()
    assert len(loop.launches[-1].plan.tiles) == 16


def test_prompts_use_the_launches_with_the_least_total_time():
    """A launch computes the full size of its program, even if it has fewer tokens."""
    pacer = make_pacer()
    for kind, seconds in zip(ROUNDS, (0.02, 0.05, 0.16, 0.7), strict=True):
        pacer.step_times.seed(kind, seconds)
    reads = {1: 32, 32: 32, 64: 32, 65: 128, 128: 128, 384: 128, 416: 512, 512: 512}
    # One launch has 512 tokens, and smaller launches have the rest.
    reads |= {544: 512, 1024: 512, 1600: 512, 9999: 512}
    for num_tokens, chunk in reads.items():
        assert CHUNKS[pacer.fastest(num_tokens, ROUNDS)] == chunk, num_tokens


@pytest.mark.parametrize(
    ("known", "chunk"),
    [
        ({}, 2048),
        # The smaller program may take proportionally less time, so it is tried too.
        ({512: 0.16}, 32),
        ({512: 0.16, 32: 0.02}, 128),
        ({512: 0.16, 128: 0.05, 32: 0.1}, 128),
        # The larger program may take no longer, so it is tried as well.
        ({32: 0.02}, 128),
        ({32: 0.02, 2048: 0.64}, 128),
        ({32: 0.02, 512: 0.16, 2048: 0.64}, 128),
    ],
)
def test_untimed_programs_are_tried(known, chunk):
    pacer = make_pacer()
    for size, seconds in known.items():
        pacer.step_times.seed(round_of(size), seconds)
    assert CHUNKS[pacer.fastest(96, ROUNDS)] == chunk


def last_chunks(loop: Loop, num_prompts: int) -> list[int]:
    """Run the same prompts four times; return the chunk sizes of the last time."""
    first = 0
    for _ in range(4):
        first = len(loop.launches)
        loop.run(make_requests(loop.config, num_prompts, can_read_prefix_cache=False))
    shapes = [one.shape for one in loop.launches[first:]]
    return [
        one.max_prompt_tokens
        for one in shapes
        if one.max_prompt_tokens and not one.is_draft_prefill
    ]


def test_last_tokens_of_prompts_use_a_small_program():
    """A program with room for 512 tokens is not used for the last 160."""
    config = make_config(max_num_seqs=8, num_pages=200, max_num_batched_tokens=512)
    loop = Loop(config, seed=0)
    loop.prompt_token_s = 1 / 32
    # Seven prompts of three tiles each have 672 tokens in all. The program for 128
    # tokens has one decoding row, which suffices: no request decodes yet.
    assert last_chunks(loop, 7) == [512, 128, 64]


def test_single_sequence_program_is_not_used_if_more_requests_wait():
    """After the program's first launch several requests decode, but it has one row."""
    config = make_config(max_num_seqs=8, num_pages=200, max_num_batched_tokens=512)
    loop = Loop(config, seed=0)
    costs = {64: 1.0, 128: 1.2, 512: 4.0}
    loop.cost = lambda launch: costs.get(launch.shape.max_prompt_tokens, 0.5)
    # Three launches of 128 tokens would take 3.6 seconds for the 384 tokens.
    assert last_chunks(loop, 4) == [512]


def test_several_rounds_fit_the_longest_launch():
    pacer = make_pacer()
    assert pacer.num_rounds(PLAIN, 8) == 1  # no times are known
    for seconds in (MAX_LAUNCH_S / 100, MAX_LAUNCH_S / 3.5, 2 * MAX_LAUNCH_S):
        pacer.step_times.seed(PLAIN, seconds)
        count = pacer.num_rounds(PLAIN, 8)
        assert 1 <= count <= 8
        assert count == 1 or count * seconds <= MAX_LAUNCH_S
        assert count == 8 or (count + 1) * seconds > MAX_LAUNCH_S

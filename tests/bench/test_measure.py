"""Measured runs on a fake device, whose tokens and launches are known."""

from typing import Any

import pytest

from jaxspec.bench.measure import Batch, Bench, run_batch
from jaxspec.bench.report import BenchError
from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.program.plan import StepShape
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_engines import PROMPT, assert_idle, make_fake_engine, said


def batch_of(
    size: int, *, count: int = 12, drafts: int = 3, is_streamed: bool = True
) -> Batch:
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(
        max_tokens=count,
        ignore_eos=True,
        temperature=0,
        output_kind=kind,
        extra_args={"num_speculative_tokens": drafts},
    )
    return Batch(prompts=[PROMPT] * size, params=[params] * size)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
def test_run_has_all_tokens_and_times(is_streamed, drafts):
    engine, runner = make_fake_engine(num_draft_tokens=3)
    run_batch(engine, batch_of(3, drafts=drafts))  # so the counts do not start at 0
    before = runner.num_launches
    run = run_batch(engine, batch_of(3, drafts=drafts, is_streamed=is_streamed))
    assert run.token_ids == [said(12)] * 3
    assert (run.num_output_tokens, run.num_prompt_tokens) == (36, 9)
    assert run.output_tokens_per_s == 36 / run.elapsed_s
    assert len(run.first_token_s) == len(run.per_token_s) == 3
    assert 0 < max(run.first_token_s) < run.elapsed_s
    assert max(run.per_token_s) * 11 <= run.elapsed_s
    assert bool(run.inter_token_s) == is_streamed
    decode = run.decode
    assert decode is not None
    assert decode.num_seqs == (3 if is_streamed else None)
    assert 0 < decode.num_rounds < runner.num_launches - before
    assert 0 < decode.num_tokens < 36
    assert 0 < decode.host_s <= decode.seconds < run.elapsed_s
    assert decode.tokens_per_s == decode.num_tokens / decode.seconds
    drafted = run.acceptance
    assert bool(drafted.num_drafts) == bool(drafts)
    if drafts:
        assert drafted.num_accepted <= drafted.num_draft_tokens
        assert drafted.num_drafts * 3 >= drafted.num_draft_tokens
    assert_idle(engine)


def test_plain_decoding_has_one_token_per_round():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    decode = run_batch(engine, batch_of(3, drafts=0)).decode
    assert decode is not None
    # By the time of the prefill, the first request has some tokens: prefill is delayed
    # for streams.
    assert decode.num_tokens == 3 * decode.num_rounds
    assert 5 < decode.num_rounds <= 11
    decode = run_batch(engine, batch_of(1, drafts=0, is_streamed=False)).decode
    assert decode is not None
    assert (decode.num_tokens, decode.num_rounds) == (11, 11)
    # Queued requests have no full batch, and single tokens no decode span.
    run = run_batch(engine, batch_of(5, drafts=0))
    assert run.token_ids == [said(12)] * 5
    assert run.decode is not None and run.decode.num_seqs is None
    run = run_batch(engine, batch_of(1, count=1, drafts=0))
    assert (run.token_ids, run.per_token_s, run.decode) == ([said(1)], [], None)


def test_failed_or_earlier_runs_change_nothing():
    engine, runner = make_fake_engine(num_draft_tokens=0)
    patched: Any = runner

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    patched.launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, batch_of(2, drafts=0))
    del patched.launch
    assert run_batch(engine, batch_of(2, drafts=0)).token_ids == [said(12)] * 2
    # An earlier run leaves no cached pages.
    prompt = list(range(2, 14)) * 4
    params = batch_of(1, drafts=0).params
    for _ in range(2):
        run_batch(engine, Batch(prompts=[prompt], params=params))
    assert engine.stats.num_prefix_queries > 0
    assert engine.stats.num_prefix_hits == 0


def compiling(engine: LLMEngine, launches: set[int] | None) -> None:
    """Make the launches with these numbers compile a program; None means all."""
    runner: Any = engine.runner
    launch = runner.launch

    def slow(*arguments: Any) -> Any:
        runner.compiler.num_made += launches is None or runner.num_launches in launches
        return launch(*arguments)

    runner.launch = slow


def test_modes_alternate():
    engine, runner = make_fake_engine(num_draft_tokens=3)
    modes = {"plain": batch_of(1, drafts=0), "speculative": batch_of(1, drafts=3)}
    done: list[int] = []
    bench = Bench(engine=engine, num_iters=3, advance=lambda: done.append(1))
    runner.plans.clear()
    found = bench.alternate(modes)
    assert (found.num_discarded, len(done)) == (0, 6)
    assert {name: len(runs) for name, runs in found.runs.items()} == {
        "plain": 3,
        "speculative": 3,
    }
    assert not any(run.acceptance.num_drafts for run in found.runs["plain"])
    assert all(run.acceptance.num_drafts for run in found.runs["speculative"])
    # The plans show the order: the first launch of a request has its prompt.
    order, drafted = [], []
    for plan, shape in runner.plans:
        if plan.admissions:
            order.append(False)
        order[-1] |= bool(shape.num_levels and plan.decode)
    drafted = ["speculative" if is_drafted else "plain" for is_drafted in order]
    a, b = "plain", "speculative"
    assert drafted == [a, b, *(a, b), *(b, a), *(a, b)], "warm-ups, then alternately"


def test_new_programs_are_timed_before_a_run_with_chosen_k(monkeypatch):
    """Otherwise the first such run would include the time that this takes."""
    engine, runner = make_fake_engine(
        num_draft_tokens=3, controller=ADAPTIVE, num_pages=200, max_model_len=512
    )
    shape = StepShape(num_seqs=1, num_levels=3, max_prompt_tokens=0)
    runner.compiler.get(shape)
    timed = list[RoundKind]()

    def time_round(kind: RoundKind, *_: Any) -> float:
        assert not engine.has_unfinished_requests()
        timed.append(kind)
        return 0.01

    monkeypatch.setattr(runner, "time_round", time_round)
    params = [SamplingParams(max_tokens=9)]
    for chooses_k in (False, True):
        run_batch(engine, Batch(prompts=[PROMPT], params=params, chooses_k=chooses_k))
        assert (RoundKind(shape, 3) in timed) == chooses_k


def test_runs_that_compile_do_not_count():
    engine, runner = make_fake_engine(num_draft_tokens=0)
    run_batch(engine, batch_of(1, drafts=0))
    per_run = runner.num_launches
    engine, _ = make_fake_engine(num_draft_tokens=0)
    # The launches of the first warm-up run, and of the second timed run.
    compiling(engine, {0, 3 * per_run})
    found = Bench(engine=engine, num_iters=2).alternate({"one": batch_of(1, drafts=0)})
    assert len(found.runs["one"]) == 2
    assert found.num_discarded == 1
    assert engine.runner.num_launches == 5 * per_run
    engine, _ = make_fake_engine(num_draft_tokens=0)
    compiling(engine, None)
    with pytest.raises(BenchError, match="compiled in 32 warm-up runs"):
        Bench(engine=engine).alternate({"one": batch_of(1, count=1, drafts=0)})

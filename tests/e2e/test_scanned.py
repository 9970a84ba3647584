"""Scanned layers do not change an engine's texts.

XLA:CPU fuses operations differently inside a loop, so the last bits of logits may
differ. Texts are equal token for token, because the prompts here cause no near ties.
"""

import dataclasses
import functools
from typing import Any

import jax
import pytest

from jaxspec import LLM
from jaxspec.engine import loader
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.step import lower_step
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.writing import write_checkpoint
from jaxspec_kernels import native
from tests.checkpoints.models import write_tiny
from tests.support import pair
from tests.support.engines import (
    OneGreedyProgramRunner,
    OneProgramRunner,
    OneShapeRunner,
    QuickRunner,
    generate,
    make_engine,
    tokens_of,
)
from tests.support.oracles import make_hf_model
from tests.support.programs import READERS_COMPILER
from tests.support.rounds import at_most, constant_times
from tests.support.step_programs import SHARDED, materialized, num_bytes, num_parameters

NUM_DRAFT = 3
NUM_ROUNDS = 4  # maximum number of rounds per launch
STEM = [5, 9, 33, 41, 8, 60, 17, 22, 7, 54, 12, 40, 31, 9, 28, 3]
SHARED = [[*STEM, 6, 50], [*STEM, 11], [*STEM[:13], 44], [*STEM, 6, 50]]
CHUNKED = pair.prompts(4, longest=40)  # longer than the prompt tokens of one launch


@functools.cache
def target() -> Any:
    return pair.make_model(2, num_hidden_layers=4)


@functools.cache
def draft() -> Any:
    """Return a draft model with two periods of layer kinds, which is often right."""
    return pair.add_noise(pair.make_model(2, num_hidden_layers=4))


def make(scan_layers: bool, **changes: Any) -> LLMEngine:
    settings = pair.settings(runner=OneProgramRunner, max_num_seqs=3, num_pages=40)
    return make_engine(target(), scan_layers=scan_layers, **(settings | changes))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return greedy and seeded requests with every K.

    Texts of unseeded requests would depend on their rounds, so there are none.
    """
    prompts, params = [], []
    for number, prompt in enumerate([*SHARED, *CHUNKED, *SHARED]):
        values: dict[str, Any] = dict(max_tokens=30, ignore_eos=True, logprobs=2)
        kinds: list[dict[str, Any]] = [
            dict(temperature=0.0),
            dict(temperature=1.0, seed=number),
            dict(temperature=0.9, top_p=0.9, seed=number),
        ]
        values |= kinds[number % 3]
        values["extra_args"] = {"num_speculative_tokens": (3, 1, 0, 2)[number % 4]}
        prompts.append(prompt)
        params.append(SamplingParams(**values))
    return prompts, params


def with_logprobs(outputs: list[Any]) -> list[Any]:
    """Return each token with its logprob and those of the most probable tokens."""
    return [
        [
            (token, {rival: one.logprob for rival, one in among.items()})
            for token, among in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ]
        for output in outputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param(dict(num_draft_tokens=NUM_DRAFT, draft="model"), id="draft model"),
        pytest.param(dict(num_draft_tokens=NUM_DRAFT, lookup=(3, 1)), id="n-gram"),
    ],
)
def test_texts_and_log_probabilities_are_equal(drafts):
    """Run more requests than rows, with preemption and shared prefixes.

    The engine with separate layers runs without drafts: no text depends on drafts, and
    programs of separate layers take long to compile.
    """
    if "draft" in drafts:
        drafts = drafts | {"draft": draft()}
    found, stats = [], []
    for scan_layers, kind in ((False, {}), (True, drafts)):
        # There are so few pages that 3 requests are preempted without drafts, 5 with.
        engine = make(scan_layers, **kind, num_pages=34, max_model_len=88)
        prompts, params = requests()
        if not kind:
            for own in params:
                own.extra_args = None
        with constant_times():
            found.append(with_logprobs(generate(engine, prompts, params)))
        engine.scheduler.check_idle()
        stats.append(engine.stats)
    for one, other in zip(*found, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        for (_, among), (_, rivals) in zip(one, other, strict=True):
            # Reading a wrong page or layer would change logprobs by tenths.
            assert among == pytest.approx(rivals, abs=1e-4)
    assert all(one.num_preemptions > 0 for one in stats)
    assert all(one.num_prefix_hits > 0 for one in stats)
    assert stats[1].acceptance_rate > 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_multi_round_launches_equal_single_rounds(kind):
    """The loop over rounds then contains loops over layers and over drafts."""
    prompts = pair.prompts(2, longest=20)
    values: dict[str, Any] = dict(max_tokens=30, ignore_eos=True)
    values |= dict(output_kind=RequestOutputKind.FINAL_ONLY)
    values |= dict(temperature=0.0) if kind == "greedy" else dict(seed=5)
    params = SamplingParams(**values)

    def texts(scan_layers: bool, num_rounds: int) -> list[list[int]]:
        engine = make(
            scan_layers,
            draft=draft(),
            num_draft_tokens=NUM_DRAFT,
            num_scheduler_steps=num_rounds,
            runner=OneShapeRunner,
            max_num_seqs=2,
        )
        with at_most(engine, num_rounds) as ran:
            found = tokens_of(generate(engine, prompts, params))
        assert max(run for _, run in ran) == num_rounds
        assert engine.stats.num_accepted_tokens > 0
        engine.scheduler.check_idle()
        return found

    found = texts(True, NUM_ROUNDS)
    if kind == "seeded":
        assert found == texts(False, 1)
        return
    for both in zip(prompts, found, strict=True):
        assert pair.greedy_margin(*both, model=target()) > pair.MIN_MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("draft_shards", [2, 8])
def test_eight_devices_equal_huggingface(draft_shards):
    sizes = SHARDED | dict(num_hidden_layers=4)
    model = make_hf_model(seed=3, **sizes)
    engine = make_engine(
        model,
        model,
        num_draft_tokens=NUM_DRAFT,
        tensor_parallel_size=8,
        draft_tensor_parallel_size=draft_shards,
        runner=OneGreedyProgramRunner,
        scan_layers=True,
        **pair.settings(max_num_seqs=3),
    )
    (stack, *_) = engine.runner.state.target_pages
    assert isinstance(stack, jax.Array)
    assert stack.addressable_shards[0].data.shape[2] * 8 == stack.shape[2]
    prompts = pair.prompts(4)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    said = tokens_of(generate(engine, prompts, params))
    for both in zip(prompts, said, strict=True):
        assert pair.greedy_margin(*both, model=model) > pair.MIN_MARGIN
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("kind", [pytest.param("hf", marks=pytest.mark.slow), "orbax"])
def test_scanned_engine_loads_checkpoints_sleeps_and_wakes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(loader, "Runner", QuickRunner)
    write_tiny(tmp_path / "hf", family="2b", num_hidden_layers=4, vocab_size=8192)
    folder = tmp_path / kind
    if kind != "hf":
        source = open_checkpoint(tmp_path / "hf")
        write_checkpoint(source, folder, to=kind, progress=False)
    options: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2, dtype="float32")
    options |= dict(max_num_batched_tokens=32)
    prompts = [[2, 5, 6, 7], [2, 9]]
    # Greedy texts of these weights repeat one token, so this request samples.
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)

    def texts(llm: LLM) -> list[list[int]]:
        return tokens_of(llm.generate(prompts, params, use_tqdm=False))

    with LLM(str(tmp_path / "hf"), **options) as llm:
        expected = texts(llm)
    assert all(len(set(tokens)) > 2 for tokens in expected)
    with LLM(str(folder), scan_layers=True, **options) as llm:
        # The local and the global layers share one array.
        assert len(llm.llm_engine.runner.state.target_pages) == 1
        assert texts(llm) == expected
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert texts(llm) == expected


def drafting_engine(scan_layers: bool) -> LLMEngine:
    return make(scan_layers, runner=None, draft=draft(), num_draft_tokens=NUM_DRAFT)


ROUND = StepShape(num_seqs=2, num_levels=NUM_DRAFT, max_prompt_tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize("max_rounds", [1, NUM_ROUNDS])
def test_pools_are_updated_in_place_and_no_stack_is_copied(max_rounds):
    """With users' compile options, programs also take few arrays as arguments."""
    runner: Any = drafting_engine(True).runner
    runner.compiler_options = READERS_COMPILER
    executable = runner.executable(dataclasses.replace(ROUND, max_rounds=max_rounds))
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(runner.state)
    pools = (*runner.state.target_pages, *jax.tree.leaves(runner.state.proposers))
    assert {leaf.shape for leaf in pools} == {(2 * 40, 4, 2, 8)}
    kept = {(2 * 40, 4, 2, 8), (2 * 40 * 4, 2, 8)}
    for model in runner.params[0], *runner.params[1]:
        leaves = jax.tree.leaves(model["layers"])
        kept |= {leaf.shape for leaf in leaves if leaf.ndim > 2}
    program = executable.as_text()
    assert materialized(program, kept) == []
    # Each model has one stacked array for every parameter of its two kinds of layers,
    # and one array of pages, which both kinds share.
    given = len(jax.tree.leaves((runner.params, runner.state)))
    assert num_parameters(program) == given + 1
    each: Any = drafting_engine(False).runner
    stacks = runner.params[0]["layers"]["0"]
    # Arrays that only separate layers have: those of two layers of each model, and the
    # pages of the second pair of layers.
    fewer = 2 * (2 * len(jax.tree.leaves(stacks)) + 1)
    assert given + fewer == len(jax.tree.leaves((each.params, each.state)))


@functools.cache
def num_operations(scan_layers: bool, num_layers: int) -> int:
    """Return the number of operations in a plain round's program."""
    model = pair.make_model(2, num_hidden_layers=num_layers)
    runner: Any = make_engine(model, scan_layers=scan_layers, **pair.SETTINGS).runner
    shape = StepShape(
        num_seqs=2,
        num_levels=0,
        max_prompt_tokens=0,
        features=Features(all_greedy=True),
    )
    arguments = (*runner.params, runner.state)
    return lower_step(runner.program, shape, arguments).as_text().count("stablehlo.")


def test_program_size_is_independent_of_depth(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, native.OFF)  # many operations per layer
    assert num_operations(True, 4) == num_operations(True, 6)
    assert num_operations(False, 4) > num_operations(True, 4) + 2 * 200

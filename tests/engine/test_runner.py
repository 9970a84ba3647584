"""The device side: kept executables, one launch and one copy each way a round."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine import program_cache
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.runner import build_mesh, choose_dtype
from jaxspec.errors import ConfigError
from jaxspec.models import cpu
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.program.wire import StepResult
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.e2e import pair
from tests.engines import (
    OneProgramRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
)
from tests.loops import make_config
from tests.oracles import model_config

TRAFFIC = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9),
    SamplingParams(temperature=1.0, seed=4, max_tokens=14, min_tokens=3),
    SamplingParams(temperature=0.6, top_k=7, max_tokens=5, stop_token_ids=[45]),
]


def run_traffic(engine) -> None:
    prompts = pair.prompts(8, seed=1)
    generate(engine, prompts, TRAFFIC * 2)


def test_a_round_is_one_launch():
    engine = pair.engine()
    before = engine.runner.num_launches
    with pair.recorded(engine) as rounds:
        run_traffic(engine)
    launched = engine.runner.num_launches - before
    assert launched == len(rounds) == engine.stats.num_rounds > 10


def test_nothing_is_copied_during_a_round():
    """But the plan, which goes by an explicit `device_put`."""
    engine = pair.engine()
    run_traffic(engine)
    launch, launches = engine.runner.launch, []

    def guarded(plan, shape):
        with jax.transfer_guard("disallow"):
            launches.append(shape)
            return launch(plan, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "launch", guarded)
        run_traffic(engine)
    assert len(launches) > 10
    # The guard does see an array that is handed over by the way.
    double = jax.jit(lambda values: values * 2)
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(Exception, match="Disallowed host-to-device"),
    ):
        double(np.arange(3))


def test_the_same_traffic_compiles_nothing_the_second_time():
    engine = pair.engine(seed=1)
    run_traffic(engine)
    compiles = engine.runner.num_compiles
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        del duration_secs
        if "compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run_traffic(pair.engine(seed=1))
        assert engine.runner.num_compiles == compiles
        assert seen == []
        jax.jit(lambda values: values * 3)(jnp.arange(5))
        assert seen, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up():
    target = make_micro()
    engine = make_engine(
        target,
        make_draft_of(target),
        num_draft_tokens=2,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        draft_sample_method="greedy",  # smaller programs
    )
    engine.warm_up()
    compiles = engine.runner.num_compiles
    assert compiles == len(engine.scheduler.shapes.all(with_late=True))
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 16, count).tolist() for count in range(1, 60, 4)]
    params = [
        SamplingParams(
            temperature=float(number % 3) / 2,
            max_tokens=1 + number,
            ignore_eos=True,
            extra_args={"num_speculative_tokens": number % 3},
        )
        for number in range(len(prompts))
    ]
    generate(engine, prompts, params)
    assert engine.runner.num_compiles == compiles


def test_an_empty_plan_leaves_the_state_alone():
    engine = pair.engine()
    run_traffic(engine)
    before = jax.tree.map(np.array, engine.runner.state)
    shape = StepShape(num_seqs=2, num_draft_tokens=3, chunk=0)
    result = engine.runner.launch(StepPlan(), shape)
    fetched = engine.runner.fetch(result, shape)
    assert isinstance(fetched, StepResult)
    assert fetched.num_emitted.tolist() == [0, 0]
    assert fetched.is_done.tolist() == [True, True]
    after = jax.tree.map(np.array, engine.runner.state)
    same = jax.tree.map(np.array_equal, before, after)
    assert all(jax.tree.leaves(same))


def test_pages_have_the_pools_shape_and_the_weights_type():
    for dtype, stored in (("float32", jnp.float32), ("bfloat16", jnp.uint16)):
        engine = make_engine(
            pair.target(),
            pair.draft("noisy"),
            num_draft_tokens=3,
            dtype=dtype,
            **pair.SETTINGS,
        )
        state = engine.runner.state
        layers = model_config(pair.target()).num_layers
        (draft_pages,) = state.proposers
        assert len(state.target_pages) == len(draft_pages) == layers
        for pages in (*state.target_pages, *draft_pages):
            assert pages.shape == (pair.SETTINGS["num_pages"], 4, 2, 8)
            assert pages.dtype == stored
        assert engine.runner.params[0]["embedding"].dtype == engine.runner.dtype
        assert engine.runner.dtype == jnp.dtype(dtype)
        assert engine.runner.num_compiles == 0


@pytest.mark.parametrize(
    ("has_instructions", "chosen"), [(True, "bfloat16"), (False, "float32")]
)
def test_dtype_auto_asks_the_processor(has_instructions, chosen, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "has_bfloat16", lambda: has_instructions)
    caplog.set_level(logging.INFO)
    mesh = build_mesh(make_config())
    assert choose_dtype("auto", mesh) == jnp.dtype(chosen)
    # The choice is said, since it changes the text in the last digits.
    assert f"dtype=auto: {chosen} on cpu" in caplog.text
    assert choose_dtype("float32", mesh) == jnp.float32
    assert choose_dtype("bfloat16", mesh) == jnp.bfloat16


def test_more_shards_than_devices_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size=16, but 8 cpu"):
        build_mesh(make_config(tensor_parallel_size=16))


def test_grammars_need_the_cpu_backend_beside_an_accelerators(monkeypatch):
    def devices(platform: str) -> None:
        raise RuntimeError(f"Unknown backend {platform}")

    engine = pair.engine()
    monkeypatch.setattr(jax, "devices", devices)
    form = StructuredOutputsParams(choice=["a", "b"])
    special = SamplingParams(structured_outputs=form)
    for refused in (
        lambda: engine.runner.check_features(Features(has_grammar=True)),
        lambda: engine.add_request("a", [5], special),
        lambda: engine.warm_up(4, [special]),
    ):
        with pytest.raises(ConfigError, match="add ',cpu' to it"):
            refused()
    assert not engine.has_unfinished_requests()
    engine.runner.check_features(Features(has_controls=True, num_logprobs=3))


@pytest.mark.parametrize("num_draft", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_start_compiles_nothing_but_grammars(num_draft, tmp_path, monkeypatch):
    target = make_micro(num_hidden_layers=1)
    prompts = [[2, 5, 7], [2, 9]]
    plain = SamplingParams(max_tokens=9, seed=3)
    form = StructuredOutputsParams(choice=["ab", "ba"])
    formed = SamplingParams(max_tokens=9, structured_outputs=form)
    compiled = []

    def start() -> list[list[int]]:
        engine = make_engine(
            target,
            make_draft_of(target) if num_draft else None,
            num_draft_tokens=num_draft,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            runner=OneProgramRunner,
        )
        engine.runner.cache = ProgramCache(tmp_path)
        compiled.clear()
        return tokens_of(generate(engine, prompts, [plain, formed]))

    def lower_step(program, shape, *others, **options):
        compiled.append(shape)
        return original(program, shape, *others, **options)

    original = program_cache.lower_step
    monkeypatch.setattr(program_cache, "lower_step", lower_step)
    first, both = start(), list(compiled)
    second = start()
    assert second == first
    assert {shape.features.has_grammar for shape in compiled} == {True}
    assert 0 < len(compiled) < len(both)
    kept = {shape for shape in both if not shape.features.has_grammar}
    assert len(kept) == len(list(tmp_path.iterdir())) > 0

"""The device side: executables, one launch and one copy each way per round."""

import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, call

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.hosts import HostsConfig
from jaxspec.engine import program_cache, runner
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.multihost.channel import Followers, shape_values
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.runner import build_mesh, choose_dtype
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.errors import ConfigError
from jaxspec.models import cpu
from jaxspec.program.grammar import native_masks
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.program.wire import StepResult
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support import pair
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
)
from tests.support.loops import make_config
from tests.support.oracles import make_hf_model, model_config

TRAFFIC = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9),
    SamplingParams(temperature=1.0, seed=4, max_tokens=14, min_tokens=3),
    SamplingParams(temperature=0.6, top_k=7, max_tokens=5, stop_token_ids=[45]),
]


def run_traffic(engine) -> None:
    prompts = pair.prompts(8, seed=1)
    generate(engine, prompts, TRAFFIC * 2)


def test_a_round_is_one_launch_and_copies_only_its_plan_and_result():
    engine = pair.engine()
    run_traffic(engine)
    launched, rounds = engine.runner.num_launches, engine.stats.num_rounds
    launch, fetch, get = engine.runner.launch, engine.runner.fetch, Compiler.get
    launches, plans = [], []

    @jax.transfer_guard("disallow")
    def guarded(plan, shape):
        launches.append(shape)
        return launch(plan, shape)

    def watched(compiler, shape):
        step, layout = get(compiler, shape)

        def call(*arguments):
            # The guard does not check copies of the call's own arguments, so check them
            # here.
            leaves = jax.tree.leaves(arguments)
            (plan,) = (x for x in leaves if not isinstance(x, jax.Array))
            assert isinstance(plan, np.ndarray)
            assert plan.shape == (layout.size,)
            plans.append(plan)
            assert all(x.committed for x in leaves if isinstance(x, jax.Array))
            return step(*arguments)

        return call, layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "launch", guarded)
        patch.setattr(engine.runner, "fetch", jax.transfer_guard("disallow")(fetch))
        patch.setattr(Compiler, "get", watched)
        run_traffic(engine)
    assert len(launches) == len(plans) > 10
    assert engine.runner.num_launches - launched == len(launches)
    assert engine.stats.num_rounds - rounds == len(launches)
    # Proof that the guard works: an array that is copied separately raises.
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
        assert seen, "the listener receives nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_program_is_timed_as_it_runs_in_an_engine(monkeypatch):
    """Launches are timed in sequence, because the device runs one at a time."""
    engine = make_engine(pair.target(), max_num_seqs=1)
    timed, now, begun = engine.runner, [0.0], list[float]()
    took = iter([50.0, 9.0, 9.0, 9.0, 2.0, 3.0, 4.0])
    start = timed._start

    def note(vector: np.ndarray, shape: StepShape) -> jax.Array:
        now[0] += next(took)
        begun.append(now[0])
        return start(vector, shape)

    monkeypatch.setattr(timed, "_start", note)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(runner, "time", clock)
    rows = timed.state.rows
    shape = StepShape(num_seqs=1, num_levels=0, max_prompt_tokens=0)
    # The first run also waited for earlier work, and the first timed row was disturbed.
    assert timed.time_round(RoundKind(shape, 0), [0, 1, 2, 3], 8) == 3.0
    assert len(begun) == 7
    same = jax.tree.map(lambda one, other: one is other, timed.state.rows, rows)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "kind", [{"lookup": (3, 2)}, pytest.param({"suffix": {}}, marks=pytest.mark.slow)]
)
def test_timed_rounds_of_lookups_find_all_drafts(monkeypatch, kind):
    """Otherwise the time of rounds with drafts would be underestimated."""
    settings: dict[str, Any] = dict(pair.SETTINGS, num_draft_tokens=3, **kind)
    engine = make_engine(make_hf_model(seed=2, **pair.SIZES), **settings)
    timed, found = engine.runner, list[Any]()
    start = timed._start

    def note(vector: np.ndarray, shape: StepShape) -> jax.Array:
        result = start(vector, shape)
        found.append(timed.fetch(result, shape))
        return result

    monkeypatch.setattr(timed, "_start", note)
    shape = StepShape(num_seqs=2, num_levels=3, max_prompt_tokens=0)
    # Tokens of other texts are kept.
    tokens = np.arange(timed.state.token_pages.size).reshape(
        timed.state.token_pages.shape
    )
    timed.state = dataclasses.replace(
        timed.state, token_pages=jnp.asarray(tokens, jnp.int32)
    )
    pages = list(range(8))
    timed.time_round(RoundKind(shape, 3), pages, 20)
    assert len(found) == 7
    assert all((one.num_valid_drafts == 3).all() for one in found)
    kept = np.array(timed.state.token_pages)
    assert (kept[8:] == tokens[8:]).all()


def test_empty_plan_does_not_change_the_state():
    engine = pair.engine()
    run_traffic(engine)
    before = jax.tree.map(np.array, engine.runner.state)
    shape = StepShape(num_seqs=2, num_levels=3, max_prompt_tokens=0)
    result = engine.runner.launch(StepPlan(), shape)
    fetched = engine.runner.fetch(result, shape)
    assert isinstance(fetched, StepResult)
    assert fetched.num_emitted.tolist() == [0, 0]
    assert fetched.is_done.tolist() == [True, True]
    after = jax.tree.map(np.array, engine.runner.state)
    same = jax.tree.map(np.array_equal, before, after)
    assert all(jax.tree.leaves(same))


def test_pages_are_not_allocated_twice_after_an_interrupt():
    """A plain call donates all pages except those of the draft model."""
    engine = pair.engine()
    runner = engine.runner
    (pages,) = runner.state.proposers
    for leaf in jax.tree.leaves(dataclasses.replace(runner.state, proposers=())):
        leaf.delete()
    shape = StepShape(num_seqs=2, num_levels=0, max_prompt_tokens=0)
    runner.launch(StepPlan(), shape)
    assert all(one.is_deleted() for one in pages)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner.state))


def test_a_shutdown_releases_the_compiled_programs():
    engine = make_engine(make_micro())
    engine.runner.cache = ProgramCache(None)
    shape = StepShape(num_seqs=1, num_levels=0, max_prompt_tokens=0)
    program = weakref.ref(engine.runner.executable(shape))
    gc.collect()
    assert program() is not None
    engine.shutdown()
    gc.collect()
    assert program() is None


def test_a_dropped_engine_is_freed_without_a_collection():
    engine = make_engine(make_micro())
    pages = weakref.ref(engine.runner.state.target_pages[0])
    gc.collect()
    gc.disable()
    try:
        del engine
        assert pages() is None
    finally:
        gc.enable()


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
        # A local and a global layer share an array.
        arrays = model_config(pair.target()).num_layers // 2
        (draft_pages,) = state.proposers
        assert len(state.target_pages) == len(draft_pages) == arrays
        for pages in (*state.target_pages, *draft_pages):
            assert pages.shape == (pair.SETTINGS["num_pages"], 4, 2, 8)
            assert pages.dtype == stored
        assert engine.runner.params[0]["embedding"].dtype == engine.runner.dtype
        assert engine.runner.dtype == jnp.dtype(dtype)
        assert engine.runner.num_compiles == 0


@pytest.mark.parametrize(
    ("has_instructions", "chosen"), [(True, "bfloat16"), (False, "float32")]
)
def test_dtype_auto_depends_on_the_processor(
    has_instructions, chosen, monkeypatch, caplog
):
    monkeypatch.setattr(cpu, "has_bfloat16", lambda: has_instructions)
    caplog.set_level(logging.INFO)
    mesh = build_mesh(make_config())
    assert choose_dtype("auto", mesh) == jnp.dtype(chosen)
    # The choice is logged, because it changes the last digits of results.
    assert f"dtype=auto: {chosen} on cpu" in caplog.text
    assert choose_dtype("float32", mesh) == jnp.float32
    assert choose_dtype("bfloat16", mesh) == jnp.bfloat16
    with pytest.raises(ConfigError, match="tensor_parallel_size=16, but 8 cpu"):
        build_mesh(make_config(tensor_parallel_size=16))


def test_grammars_need_the_cpu_backend_with_an_accelerator(monkeypatch):
    def devices(platform: str) -> None:
        raise RuntimeError(f"Unknown backend {platform}")

    engine = pair.engine()
    monkeypatch.setattr(jax, "devices", devices)
    form = StructuredOutputsParams(choice=["A", "B"])
    special = SamplingParams(structured_outputs=form)
    for refused in (
        lambda: engine.runner.check_features(Features(has_grammar=True)),
        lambda: engine.add_request("a", [5], special),
        lambda: engine.warm_up(4, [special]),
    ):
        with pytest.raises(ConfigError, match="add ',cpu'"):
            refused()
    assert not engine.has_unfinished_requests()
    engine.runner.check_features(Features(has_controls=True, num_logprobs=3))


@pytest.mark.parametrize(
    "num_draft_tokens", [0, pytest.param(2, marks=pytest.mark.slow)]
)
def test_second_start_compiles_no_saved_program(
    num_draft_tokens, tmp_path, monkeypatch
):
    target = make_micro(num_hidden_layers=1)
    prompts = [[2, 5, 7], [2, 9]]
    plain = SamplingParams(max_tokens=9, seed=3)
    form = StructuredOutputsParams(choice=["()", ")("])
    formed = SamplingParams(max_tokens=9, structured_outputs=form)
    compiled, by_name = [], list[bool]()

    def start() -> list[list[int]]:
        engine = make_engine(
            target,
            make_draft_of(target) if num_draft_tokens else None,
            num_draft_tokens=num_draft_tokens,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            runner=OneProgramRunner,
        )
        engine.runner.cache = ProgramCache(tmp_path)
        by_name.append(engine.runner.program.mask_source is native_masks)
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
    # With native masks, programs with grammars are saved as well.
    assert all(shape.features.has_grammar for shape in compiled)
    assert bool(compiled) != by_name[-1]
    kept = {shape for shape in both if by_name[-1] or not shape.features.has_grammar}
    assert len(kept) == len(list(tmp_path.iterdir())) > 0


@pytest.fixture
def leading() -> Iterator[tuple[LLMEngine, MagicMock]]:
    """Yield an idle engine that leads fake followers, and these followers."""
    engine = pair.engine()
    followers = engine.runner.followers = MagicMock(spec=Followers)
    yield engine, followers
    engine.runner.followers = None


def test_followers_get_launches_before_the_leader_runs_them(leading):
    engine, followers = leading
    start, before = engine.runner._start, engine.runner.num_launches
    events = list[str]()
    followers.send.side_effect = lambda name, *_: events.append(name)

    def started(vector, shape):
        events.append("started")
        return start(vector, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "_start", started)
        generate(engine, [[2, 5, 6]], [TRAFFIC[0]])
    count = engine.runner.num_launches - before
    # Missing programs were compiled in between.
    launches = [name for name in events if name in ("launch", "started")]
    assert launches[: 2 * count] == ["launch", "started"] * count


def test_followers_get_compiles_and_are_awaited(leading):
    engine, followers = leading
    shape = StepShape(num_seqs=2, num_levels=0, max_prompt_tokens=0)
    engine.runner.compiler.clear()
    followers.send.return_value = 7
    engine.runner.executable(shape)
    assert followers.mock_calls == [
        call.send("compile", shape_values(shape)),
        call.wait(7),
    ]


def test_followers_sleep_and_wake_up_with_the_leader():
    engine = pair.own_engine()
    followers = engine.runner.followers = MagicMock(spec=Followers)
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.wake_up()
    assert followers.mock_calls == [
        call.send("sleep", {"level": 1}, None),
        call.send("wake_up", {"tags": ["weights"]}, None),
        call.send("wake_up", {"tags": ["weights", "kv_cache"]}, None),
    ]


def test_followers_are_ended_if_the_leader_fails(leading):
    engine, followers = leading
    with pytest.raises(ZeroDivisionError):
        with engine.runner.together("launch", {}):
            raise ZeroDivisionError("at the device")
    reason = "The leader failed in 'launch': ZeroDivisionError('at the device')"
    followers.break_off.assert_called_once_with(reason, may_be_loss=True)


def test_a_target_over_hosts_takes_all_devices_in_order():
    class Device(NamedTuple):
        process_index: int
        id: int

    devices = [Device(1, 2), Device(0, 1), Device(1, 3), Device(0, 0)]
    hosts = HostsConfig(
        nnodes=2,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=1,
        headless=False,
        secret_file="",
    )
    two, config = (make_config(tensor_parallel_size=count) for count in (2, 4))
    with pytest.raises(ConfigError, match="2 processes have 4 devices .*set it to 4"):
        runner._hosts_devices(two, hosts, devices)
    found = runner._hosts_devices(config, hosts, devices)
    assert found == [Device(0, 0), Device(0, 1), Device(1, 2), Device(1, 3)]
    other = dataclasses.replace(hosts, node_rank=1, headless=True)
    with pytest.raises(ConfigError, match="node_rank=1, but this host.* process 0"):
        runner._hosts_devices(config, other, devices)

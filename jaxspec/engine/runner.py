"""Owns parameters, device state and executables; launches plans and fetches results.

The only module of `engine` that touches jax.
"""

import dataclasses
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.config.engine import EngineConfig
from jaxspec.config.hosts import HostsConfig
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.memory.plan import (
    DEFAULT_UTILIZATION,
    MemoryPlan,
    shown_bytes,
)
from jaxspec.engine.multihost.channel import HEARTBEAT_S, Followers, shape_values
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.scheduling.programs import EveryProgram, Programs
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.engine.structured_output import TokenMasks, answer_masks
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.jax_settings import find_devices, own_settings
from jaxspec.models import cpu
from jaxspec.models.network import are_rows_independent
from jaxspec.models.params import Params
from jaxspec.program.executable_args import Arrays
from jaxspec.program.grammar import MaskSource, has_native_masks, native_masks
from jaxspec.program.plan import (
    TILE,
    Features,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.propose import Suffix, proposers_of
from jaxspec.program.propose.answer_cache import corpus_buckets, fill_table
from jaxspec.program.rows import dummy_rows, init_rows
from jaxspec.program.state import EngineState, init_token_pages, init_zeros, page_forms
from jaxspec.program.step_context import ProgramConfig
from jaxspec.program.wire import DraftPrefillResult, PlanLayout, StepResult
from jaxspec.sharding import (
    TARGET_MESH_AXES,
    make_mesh,
    own_devices,
    put,
    replicated,
)
from jaxspec_kernels import native

_log = logging.getLogger(__name__)

# Environment variables that set the share of GPU memory that jax reserves: the current
# name, and the name that is to replace it.
POOL_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# Minimum compute capability of GPUs for which Pallas compiles kernels: Ampere.
MIN_CAPABILITY = 8.0


class Runner:
    """Device state and programs of one engine.

    Attributes:
        compiler: Compiles the programs, in its own thread.
        compiles_in_background: Whether launches use other programs while one is being
            compiled. If not, every launch waits for its best program.
        dtype: The type of both models' weights.
        num_launches: Programs launched so far.
        token_masks: Host callback that computes grammar masks for the programs.
        cache: Compiled programs on disk.
        followers: Processes of other hosts, which run the same commands.
        memory: Memory plan of the devices; None if there is none.
        temporary_bytes: Temporaries of the largest program on one device, as compiled;
            0 if the plan has no limit.
        code_bytes: Bytes of the code of all programs on one device.
    """

    def __init__(
        self,
        config: EngineConfig,
        mesh: Mesh,
        target_params: Params,
        draft_params: Params | None,
        followers: Followers | None = None,
    ):
        self.config, self.mesh, self.followers = config, mesh, followers
        self.dtype = resolve_dtype(config.dtype, mesh)
        self.token_masks = TokenMasks(config.model_config.vocab_size)
        self._plan_placement = replicated(mesh)
        self.pool = pool_of(config)
        mask_source: MaskSource = self.token_masks
        if has_native_masks(mesh):
            native.masks.answer_with(answer_masks)
            mask_source = native_masks
        self.program = program_of(config, mesh, mask_source)
        self._corpora: np.ndarray | None = None
        params = target_params, proposer_params(self.program, draft_params)
        self._arrays = Arrays(self.program.proposers, params, self._init_state())
        self.compiler = _make_compiler(self)
        self.compiles_in_background = True
        self.num_launches = 0
        self.compiler_options = options_of(config, mesh)
        self.cache = ProgramCache(None)
        self.memory: MemoryPlan | None = None
        self.temporary_bytes = self.code_bytes = 0
        self._has_warned = False
        self._host_params: Any = None

    @own_settings()
    def _init_state(self) -> EngineState:
        rows, token_pages = put(
            (init_rows(self.pool), init_token_pages(self.pool)), replicated(self.mesh)
        )
        state = EngineState(
            rows=rows,
            token_pages=token_pages,
            **init_zeros(device_forms(self.program, self.dtype)),
            forced_acceptance=self._forced_acceptance(),
        )
        return self._with_corpora(state)

    def corpora_table(
        self, texts: Sequence[tuple[tuple[int, int], np.ndarray]]
    ) -> np.ndarray:
        """Make the table for `set_corpora`: about a second per million tokens.

        Args:
            texts: The salt (`salt_words`) and the token ids of each text.
        """
        speculative = self.config.speculative
        assert speculative is not None and speculative.suffix_decoding_max_corpus_tokens
        size = speculative.suffix_decoding_max_corpus_tokens
        return fill_table(corpus_buckets(size), texts)

    def set_corpora(self, table: np.ndarray) -> None:
        """Replace the table of corpora that suffix drafts search.

        If the device raises an error, the previous table remains.
        """
        before = self.corpora_table(()) if self._corpora is None else self._corpora
        self._corpora = table
        if self._arrays.is_state_consumed:
            return
        try:
            self.state = self._with_corpora(self.state)
        except BaseException:
            self._corpora = before
            self.state = self._with_corpora(self.state)
            raise

    @own_settings()
    def _with_corpora(self, state: EngineState) -> EngineState:
        if self._corpora is None:
            return state
        proposers = list(state.proposers)
        for index, one in enumerate(self.program.proposers):
            if isinstance(one, Suffix) and one.num_corpus_tokens:
                # The old table first: memory is planned for one. If a launch still
                # reads it, its memory is freed at the end of the launch.
                one.tables(proposers[index])[-1].delete()
                # A copy: on a CPU the device may use the host's memory, and state is
                # donated.
                table = put(self._corpora.copy(), replicated(self.mesh))
                # An allocation that fails raises its error here, not in a launch.
                table.block_until_ready()
                proposers[index] = one.with_corpora(proposers[index], table)
        return dataclasses.replace(state, proposers=tuple(proposers))

    def _forced_acceptance(self) -> jax.Array | None:
        speculative = self.config.speculative
        rates = speculative and speculative.forced_acceptance
        if not rates:
            return None
        return put(np.array(rates, np.float32), replicated(self.mesh))

    @property
    def skips_padding(self) -> bool:
        """Whether rounds leave out padding rows: with products in C++."""
        return are_rows_independent(self.params[0])

    @property
    def params(self) -> tuple[Params, tuple[Params | None, ...]]:
        """The target's parameters, and those of each proposer."""
        return self._arrays.params

    @params.setter
    def params(self, params: tuple[Params, tuple[Params | None, ...]]) -> None:
        self._arrays = Arrays(self.program.proposers, params, self.state)

    @property
    def state(self) -> EngineState:
        """Device state between launches."""
        return self._arrays.state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._arrays = Arrays(self.program.proposers, self.params, state)

    @property
    def num_compiles(self) -> int:
        """Executables made so far; constant after warm-up."""
        return self.compiler.num_made

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling, mostly in the background."""
        return self.compiler.made_s

    @property
    def programs(self) -> Programs:
        """The programs that launches may use."""
        return self.compiler if self.compiles_in_background else EveryProgram()

    def executable(self, shape: StepShape) -> Callable[..., Any]:
        """Return the compiled program of a shape; build it now if it is missing."""
        return self.compiler.get(shape)[0]

    def _make(self, shape: StepShape) -> tuple[Callable[..., Any], PlanLayout]:
        layout, number = PlanLayout(shape, self.pool), 0
        if self.followers is not None:
            number = self.followers.send("compile", shape_values(shape))
        arguments = (*self.params, self.state)
        built = self.cache.build(self.program, shape, arguments, self.compiler_options)
        self._compare_with_plan(built.executable)
        if self.followers is not None:
            # Wait for the followers: otherwise a launch would wait for them, and its
            # time would count as slow.
            self.followers.wait(number)
        return built.executable, layout

    def _compare_with_plan(self, executable: Any) -> None:
        """Add up the memory of programs; warn once if it is more than planned."""
        plan = self.memory
        if plan is None or plan.left_bytes is None:
            return
        analysis = executable.memory_analysis()
        if analysis is None:
            return
        self.temporary_bytes = max(self.temporary_bytes, analysis.temp_size_in_bytes)
        self.code_bytes += analysis.generated_code_size_in_bytes
        num_bytes = self.temporary_bytes + self.code_bytes
        if num_bytes > plan.workspace_bytes and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Compiled programs take %s of a device's memory, more than the "
                "planned %s; %s are free. If memory runs out, lower "
                "max_num_seqs=%d, or gpu_memory_utilization.",
                shown_bytes(num_bytes),
                shown_bytes(plan.workspace_bytes),
                shown_bytes(plan.left_bytes),
                plan.sizes.num_seqs,
            )

    def check_features(self, features: Features) -> None:
        """Reject features that are not available on these devices.

        Raises:
            ConfigError: jax's CPU backend is missing, through which a program gets the
                masks of structured outputs from the host.
        """
        if not features.has_grammar:
            return
        try:
            jax.devices("cpu")
        except RuntimeError as error:
            named = jax.config.values["jax_platforms"]
            raise ConfigError(
                "structured_outputs need jax's CPU backend in addition to the "
                f"accelerator's, but JAX_PLATFORMS={named!r} excludes it: add ',cpu'.",
                parameter="structured_outputs",
                value=named,
            ) from error

    def launch(self, plan: StepPlan, shape: StepShape) -> jax.Array:
        """Start a program; return its result vector, which is not yet computed."""
        _, layout = self.compiler.get(shape)
        for state in plan.grammars.values():
            self.token_masks.add(state)
        vector = layout.pack(plan)
        if self.followers is None:
            return self.launch_vector(vector, shape)
        with self.together("launch", shape_values(shape), vector):
            return self.launch_vector(vector, shape)

    def launch_vector(self, vector: np.ndarray, shape: StepShape) -> jax.Array:
        """Start a program with a packed plan; see `launch`."""
        result = self._start(vector, shape)
        self.num_launches += 1
        return result

    @contextmanager
    def together(
        self, name: str, values: Mapping[str, Any], vector: np.ndarray | None = None
    ) -> Iterator[None]:
        """Have the followers, if any, run the command of this block as well.

        The command is sent before the block runs, because a collective waits for all
        processes. If the block fails, the followers are ended: they would wait forever.

        Raises:
            EngineDeadError: A follower has ended.
        """
        if self.followers is None:
            yield
            return
        try:
            self.followers.send(name, values, vector)
            yield
        except BaseException as error:
            self.followers.break_off(
                f"The leader failed in {name!r}: {error!r}",
                may_be_loss=isinstance(error, Exception),
            )
            raise

    def leave(self) -> None:
        """End the followers' processes, and leave the cluster of processes."""
        if self.followers is not None:
            self.followers.end()
            leave()

    def _start(self, vector: np.ndarray, shape: StepShape) -> jax.Array:
        step, _ = self.compiler.get(shape)
        if self._arrays.is_state_consumed:
            # An interrupt hit a call after its donation. The engine has ended all
            # requests, so an empty state is correct. A plain call does not donate the
            # draft model's pages: free them first, or they would exist twice.
            self.drop_pages()
            self.state = self._init_state()
        plan, placement = vector, self._plan_placement
        if not placement.is_fully_addressable:
            plan = put(vector, placement)
        # The plan is the only copy to the devices. If all devices belong to this
        # process, the compiled call copies the plan: `jax.device_put` would take a
        # fifth of a small model's host time (0.13 of 0.64 ms, the bundled target on two
        # cores). These are the settings of `own_settings` that calls read; setting all
        # of them would take 20 us.
        with (
            jax.transfer_guard_host_to_device("allow"),
            jax.disable_jit(False),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            return self._arrays.call(step, shape, plan)

    def time_round(
        self,
        round_kind: RoundKind,
        pages: Sequence[int],
        context: int,
        num_runs: int = 3,
    ) -> float:
        """Return the seconds of a round, measured while the engine is idle.

        As in serving, each round starts before the previous one has ended, so that host
        time is hidden. With lookups, each round begins in a text of equal tokens, where
        they find drafts in every row: a round in which they find none is shorter.

        Args:
            pages: Pages to write to, with room for some tokens more than `context`.
            num_runs: Consecutive rounds of one measurement; the faster of two
                measurements counts.
        """
        values = dict(
            shape=shape_values(round_kind.shape),
            num_draft_tokens=round_kind.num_draft_tokens,
            pages=list(map(int, pages)),
            context=context,
            num_runs=num_runs,
        )
        with self.together("time_round", values):
            return self._time_round(round_kind, pages, context, num_runs)

    @own_settings()
    def _time_round(
        self, round_kind: RoundKind, pages: Sequence[int], context: int, num_runs: int
    ) -> float:
        shape, pool = round_kind.shape, self.pool
        saved_rows = self.state.rows
        temperature = 0.0 if shape.features.all_greedy else 1.0
        dummies = dummy_rows(pool, pages, context, temperature)
        speculative = self.config.speculative
        has_lookup = speculative is not None and bool(speculative.method_info.lookup)
        if has_lookup:
            tokens = self.state.token_pages.at[np.array(pages)].set(0)
            self.state = dataclasses.replace(self.state, token_pages=tokens)

        def begin() -> None:
            rows = put(dummies, replicated(self.mesh))
            self.state = dataclasses.replace(self.state, rows=rows)

        def start_one() -> jax.Array:
            if has_lookup:
                begin()
            return self._start(vector, shape)

        begin()
        tile = Tile(row=0, start=0, tokens=np.zeros(TILE, np.int32), is_last=False)
        plan = StepPlan(
            decode=[
                (row, round_kind.num_draft_tokens) for row in range(shape.num_seqs)
            ],
            tiles=[tile] * shape.num_tiles,
        )
        vector = self.compiler.get(shape)[1].pack(plan)
        seconds = []
        try:
            # The first run may wait for earlier launches.
            for count in (1, num_runs, num_runs):
                start = time.perf_counter()
                results = [start_one() for _ in range(count)]
                jax.block_until_ready((results, self.state))
                seconds.append((time.perf_counter() - start) / count)
        finally:
            self.state = dataclasses.replace(self.state, rows=saved_rows)
        return min(seconds[1:])

    def fetch(
        self, result: jax.Array, shape: StepShape
    ) -> StepResult | DraftPrefillResult:
        """Wait for a launch and read its result: the only copy to the host."""
        # `jax.device_get` does the same through a tree, in 0.06 ms.
        with jax.transfer_guard_device_to_host("allow"):
            vector = np.asarray(result)
        kind = DraftPrefillResult if shape.is_draft_prefill else StepResult
        return kind.unpack(vector, shape)

    def drop_pages(self) -> None:
        """Free the memory of the pages, whose contents are lost."""
        jax.tree.map(lambda array: array.delete(), self.state)

    def restore_pages(self) -> None:
        """Allocate empty pages again."""
        self.state = self._init_state()

    def leave_out_drafts(self) -> None:
        """Use only programs without drafts from now on; free the proposers' state."""
        # A compile that has begun holds references to the arrays: delete their memory.
        jax.tree.map(lambda array: array.delete(), self.state.proposers)
        self.program = dataclasses.replace(self.program, proposers=())
        params, state = (self.params[0], ()), self.state
        self._arrays = Arrays((), params, dataclasses.replace(state, proposers=()))
        self.compiler.clear()

    def drop_weights(self, *, keep: bool) -> None:
        """Free the weights' memory on the devices; `keep` leaves them on the host."""
        self._host_params = jax.tree.map(_to_host, self.params) if keep else None
        jax.tree.map(lambda array: array.delete(), self.params)

    @own_settings()
    def restore_weights(self, loaded: tuple[Params, Params | None] | None) -> None:
        """Restore the weights: the ones passed, or (None) those on the host."""
        if loaded is None:
            assert self._host_params is not None, "no weights are on the host"
            # Deleted arrays still have their sharding.
            self.params = jax.tree.map(_from_host, self.params, self._host_params)
        else:
            target, draft = loaded
            self.params = target, proposer_params(self.program, draft)
        self._host_params = None

    def start_profile(self, folder: str) -> None:
        """Record a device profile for TensorBoard or Perfetto in a folder."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """Write the recorded profile."""
        jax.profiler.stop_trace()


def _make_compiler(runner: Runner) -> Compiler:
    """Make the compiler of a runner, with a weak reference to the runner.

    A strong reference would be a cycle: an engine dropped without `shutdown` would keep
    its weights, pages and programs until Python's next full garbage collection.
    """
    owner = weakref.ref(runner)

    def make(shape: StepShape) -> Any:
        runner = owner()
        if runner is None:
            raise EngineDeadError(f"{shape.name} is not compiled: its engine is gone")
        return runner._make(shape)

    compiler = Compiler(make)
    weakref.finalize(runner, _end_compiler, compiler).atexit = False
    return compiler


def _end_compiler(compiler: Compiler) -> None:
    compiler.stop()
    compiler.clear()


def _to_host(array: jax.Array) -> "_HostParts":
    """Copy this process's parts of an array, each part once."""
    parts = {}
    for shard in array.addressable_shards:
        place = _place(shard.index)
        if place not in parts:
            parts[place] = np.asarray(shard.data)
    return _HostParts(parts)


def _from_host(array: jax.Array, saved: "_HostParts") -> jax.Array:
    """Restore a deleted array with its placement."""
    return jax.make_array_from_callback(
        array.shape, array.sharding, lambda index: saved.parts[_place(index)]
    )


@dataclasses.dataclass(frozen=True)
class _HostParts:
    """Parts of an array by their places: a leaf of a tree."""

    parts: dict[Any, np.ndarray]


def _place(
    index: tuple[slice, ...] | None,
) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index or ())


def options_of(config: EngineConfig, mesh: Mesh) -> dict[str, str | bool] | None:
    """Return XLA's compiler options; None for its defaults."""
    kind = mesh.devices.flat[0].platform
    if kind == "cpu":
        return cpu.compiler_options()
    if config.batch_invariant and kind == "gpu":
        return {
            # With 0, the default, XLA splits the sum of a product into a number of
            # parts that depends on the number of rows.
            "xla_gpu_experimental_force_split_k": "1",
            "xla_gpu_exclude_nondeterministic_ops": True,
        }
    return None


def pool_of(config: EngineConfig) -> PoolShape:
    """Return the sizes of an engine's state."""
    return PoolShape(
        num_rows=config.max_num_seqs,
        num_pages=config.num_pages * (config.unit_pages or 1),
        page_size=config.page_size,
        max_model_len=config.max_model_len,
        vocab_size=config.model_config.vocab_size,
        kv_cache_dtype=config.kv_cache_dtype,
        unit_pages=config.unit_pages,
    )


def program_of(
    config: EngineConfig, mesh: Mesh, mask_source: MaskSource | None = None
) -> ProgramConfig:
    """Return the configuration that all programs of an engine share."""
    return ProgramConfig(
        target=config.model_config,
        proposers=proposers_of(config),
        pool=pool_of(config),
        mesh=mesh,
        mask_source=mask_source,
        max_draft_tokens=config.max_draft_tokens,
    )


def proposer_params(
    program: ProgramConfig, draft_params: Params | None
) -> tuple[Params | None, ...]:
    """Return parameters by proposer; None for proposers without."""
    return tuple(draft_params if one.has_params else None for one in program.proposers)


def device_forms(program: ProgramConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """Return shapes and placement of the target's pages and the proposers' state."""
    pool, mesh = program.pool, program.mesh
    return dict(
        target_pages=page_forms(program.target, dtype, pool, mesh, TARGET_MESH_AXES),
        proposers=tuple(
            one.state_forms(dtype, pool, mesh) for one in program.proposers
        ),
    )


def build_mesh(config: EngineConfig) -> Mesh:
    """Return the mesh of an engine configuration.

    If jax is not initialized yet, it will reserve the share of a GPU's memory that the
    configuration sets, instead of jax's default.

    Raises:
        ConfigError: There are too few devices, jax finds none, or, with several hosts,
            not all devices are used.
    """
    is_set = any(os.environ.get(name) for name in POOL_VARIABLES)
    if has_cuda_plugin() and not is_set:
        share = pool_share(config.given and config.given.gpu_memory_utilization)
        os.environ[POOL_VARIABLES[0]] = f"{share:g}"
    draft = config.speculative and config.speculative.draft_tensor_parallel_size
    devices = find_devices()
    if config.hosts is not None:
        devices = _hosts_devices(config, config.hosts, devices)
    return make_mesh(
        config.tensor_parallel_size, draft or None, devices_of(config, devices)
    )


def join(hosts: HostsConfig) -> None:
    """Initialize jax with the devices of all hosts; must run before any device use.

    Raises:
        ConfigError: The leader's port is in use, or a process did not connect.
    """
    # The service's handler of SIGTERM would replace the server's.
    jax.config.update("jax_enable_preemption_service", False)
    where = f"{hosts.master_addr}:{hosts.master_port}"
    try:
        jax.distributed.initialize(
            where,
            hosts.nnodes,
            hosts.node_rank,
            cluster_detection_method="deactivate",
            # By default, jax would listen on all networks of the host.
            coordinator_bind_address=where,
            initialization_timeout=hosts.timeout_s,
            # A process counts as lost after two missed heartbeats.
            heartbeat_timeout_seconds=2 * HEARTBEAT_S,
            shutdown_timeout_seconds=3 * HEARTBEAT_S,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"jax.distributed cannot start at {where}: {error}. master_port must be "
            "free on that host, and all processes must be able to reach it.",
            parameter="master_port",
            value=hosts.master_port,
        ) from error


def leave() -> None:
    """Undo `join`: every process waits for all others, and may then exit.

    Without it, the remaining processes would report an exiting one as lost.
    """
    jax.distributed.shutdown()


def _hosts_devices(
    config: EngineConfig, hosts: HostsConfig, devices: Sequence[Any]
) -> list[Any]:
    """Return all devices, sorted by process, the leader's first.

    A grammar's program gets masks from the first device's process. With this order, a
    draft model with the devices of one host does not communicate between hosts.
    """
    if jax.process_index() != hosts.node_rank:
        raise ConfigError(
            f"node_rank={hosts.node_rank}, but this host's devices belong to process "
            f"{jax.process_index()}: on TPUs, node_rank must be the host's number in "
            "its slice (TPU_WORKER_ID).",
            parameter="node_rank",
            value=hosts.node_rank,
        )
    if config.tensor_parallel_size != len(devices):
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}, but the "
            f"{hosts.nnodes} processes have {len(devices)} devices together, and all "
            f"of them must be used: set it to {len(devices)}.",
            parameter="tensor_parallel_size",
            value=config.tensor_parallel_size,
        )
    return sorted(devices, key=lambda one: (one.process_index, one.id))


def devices_of(config: EngineConfig, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the devices of an engine, by its data parallel rank.

    Raises:
        ConfigError: There are too few devices for all engines, or they are GPUs for
            which no kernels can be compiled.
    """
    found = own_devices(
        devices,
        config.tensor_parallel_size,
        config.data_parallel_size,
        config.data_parallel_rank,
    )
    capability = str(getattr(found[0], "compute_capability", None))
    is_nvidia = re.fullmatch(r"\d+\.\d+", capability) is not None
    if is_nvidia and float(capability) < MIN_CAPABILITY:
        raise ConfigError(
            f"This GPU ({found[0].device_kind}) has compute capability {capability}, "
            f"but the kernels need at least {MIN_CAPABILITY}, as an A100 or L4 has. "
            "JAX_PLATFORMS=cpu runs on the CPU instead.",
            parameter="device",
            value=found[0].device_kind,
        )
    return found


def has_cuda_plugin() -> bool:
    """Return whether jax's plugin for NVIDIA GPUs is installed."""
    if find_spec("jax_plugins") is None:
        return False
    return any(find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13))


def pool_share(utilization: float | None) -> float:
    """Return the share of a GPU's memory that jax reserves for all arrays.

    A share that the user has set for jax has priority. Otherwise it is somewhat more
    than the engine plans with: compilers try out kernels in it, and memory fragments.
    The rest is for libraries with their own allocations.
    """
    for name in POOL_VARIABLES:
        if os.environ.get(name):
            return float(os.environ[name])
    return _own_pool_share(utilization)


def _own_pool_share(utilization: float | None) -> float:
    return min((utilization or DEFAULT_UTILIZATION) + 0.05, 0.95)


def most_pool_share(utilization: float | None) -> float:
    """Return the share that jax would reserve for an engine that uses all of a GPU.

    A share that the user has set for jax has priority. `build_mesh` sets the same
    variable, so a value that equals our own default is not taken for the user's.
    """
    share = pool_share(utilization)
    is_own = f"{share:g}" == f"{_own_pool_share(utilization):g}"
    return _own_pool_share(1.0) if is_own else share


def choose_dtype(name: str, mesh: Mesh) -> jnp.dtype:
    """Resolve `dtype="auto"`, and log the result."""
    chosen = resolve_dtype(name, mesh)
    if name == "auto":
        _log.info("dtype=auto: %s on %s", chosen, mesh.devices.flat[0].platform)
    return chosen


def resolve_dtype(name: str, mesh: Mesh) -> jnp.dtype:
    """Return the type of weights; "auto" is bfloat16 if a CPU supports it."""
    if name != "auto":
        return jnp.dtype(name)
    is_slow = mesh.devices.flat[0].platform == "cpu" and not cpu.has_bfloat16()
    return jnp.dtype(jnp.float32 if is_slow else jnp.bfloat16)

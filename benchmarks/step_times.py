"""Measures the step program alone: plain steps, rounds, prompts, the target's pass.

No engine and no text are involved: sequences start after a context that was never
prefilled, and launches do not wait for the results of earlier ones. Times do not depend
on the values of weights or pages, nor on the number of accepted drafts. Therefore
weights are random and acceptance is forced.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.kernels.clock import Spread
from jaxspec.bench.parts import accept_part, verify_part
from jaxspec.config.engine import ModelConfig
from jaxspec.engine.runner import device_forms
from jaxspec.models.params import Params
from jaxspec.models.weights import abstract_params, random_params
from jaxspec.program.executable_args import Arrays
from jaxspec.program.plan import (
    TILE,
    Features,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
)
from jaxspec.program.propose import DraftModel, Proposal
from jaxspec.program.propose.draft_model import TreeModel
from jaxspec.program.rows import Rows, dummy_rows
from jaxspec.program.state import EngineState, init_token_pages, init_zeros
from jaxspec.program.step import lower_step
from jaxspec.program.step_context import ProgramConfig
from jaxspec.program.tree.tree import Tree
from jaxspec.program.wire import PlanLayout, StepResult
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh, replicated

PAGE_SIZE = 16
# Number of programs to compile at once: XLA uses one or two cores for each.
MAX_COMPILES = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of the runs.

    Attributes:
        context: Known tokens per sequence at the start of each run.
        steps: Launches per run.
        repeats: Runs; the median is reported.
        compiler_options: XLA flags by name.
    """

    context: int = 1024
    steps: int = 24
    repeats: int = 5
    dtype: str = "bfloat16"
    compiler_options: dict[str, str | bool] | None = None

    def pool(self, seqs: int, vocab_size: int, tokens_per_step: int) -> PoolShape:
        """Return the shape of a pool that holds the context and the tokens of a run.

        Args:
            tokens_per_step: Largest number of slots that a launch fills per sequence.
        """
        longest = self.context + (self.steps + 1) * tokens_per_step
        table = -(-longest // PAGE_SIZE)
        return PoolShape(
            num_rows=seqs,
            num_pages=seqs * table,
            page_size=PAGE_SIZE,
            max_model_len=table * PAGE_SIZE,
            vocab_size=vocab_size,
        )


@dataclass(kw_only=True)
class Timed:
    """Result of one program.

    Attributes:
        step_s: Seconds per launch: median and spread over the runs.
        tokens: New tokens per launch and sequence, over all runs.
        accepted, drafted: Numbers of draft tokens, over all runs.
    """

    step_s: Spread
    tokens: float
    accepted: int = 0
    drafted: int = 0


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and optionally its draft, on one device.

    Parameters may be shapes without values: their programs can be compiled, not run.
    """

    target: ModelConfig
    target_params: Params
    draft: ModelConfig | None = None
    draft_params: Params | None = None
    setting: Setting
    mesh: Mesh

    @classmethod
    def random(
        cls, target: ModelConfig, draft: ModelConfig, setting: Setting
    ) -> "Models":
        """Make random weights on the first device."""
        mesh, dtype = make_mesh(1), jnp.dtype(setting.dtype)
        make = functools.partial(random_params, dtype=dtype, mesh=mesh)
        return cls(
            target=target,
            target_params=make(target, seed=0),
            draft=draft,
            draft_params=make(draft, seed=1, mesh_axes=DRAFT_MESH_AXES),
            setting=setting,
            mesh=mesh,
        )

    @classmethod
    def abstract(
        cls, target: ModelConfig, draft: ModelConfig, setting: Setting, mesh: Mesh
    ) -> "Models":
        """Make abstract weights, to compile for a device that need not be present."""
        dtype = jnp.dtype(setting.dtype)
        form: Any = functools.partial(abstract_params, dtype=dtype, mesh=mesh)
        return cls(
            target=target,
            target_params=form(target),
            draft=draft,
            draft_params=form(draft, mesh_axes=DRAFT_MESH_AXES),
            setting=setting,
            mesh=mesh,
        )

    def draft_alone(self) -> "Models":
        """Return the draft model as a target."""
        assert self.draft is not None
        assert self.draft_params is not None
        return Models(
            target=self.draft,
            target_params=self.draft_params,
            setting=self.setting,
            mesh=self.mesh,
        )

    @property
    def num_values(self) -> int:
        """Values of the target's weights."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.target_params))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights, which a plain step reads once."""
        leaves = jax.tree.leaves(self.target_params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def kv_bytes(self, seqs: int) -> int:
        """Return bytes of the target's KV that a plain step reads at the start."""
        config, context = self.target, self.setting.context
        dtype_bytes = jnp.dtype(self.setting.dtype).itemsize
        layer_bytes = config.kv_bytes_per_token(dtype_bytes) // config.num_layers
        windows = map(config.window, range(config.num_layers))
        tokens = sum(min(context, one or context) for one in windows)
        return seqs * tokens * layer_bytes


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The form of a launch.

    Attributes:
        seqs: Decoding sequences.
        num_drafts: Levels of drafts; 0 is plain decoding.
        acceptance: Forced acceptance probability of each draft; None: not forced.
        tree: Drafts of a sequence; None is a chain.
        features: Optional parts of the program.
        temperature: Of all sequences; 0 takes the argmax.
        max_rounds: Rounds of a launch.
        prompt_tokens: Tokens of a prompt that the launch reads; nothing is decoded.
    """

    seqs: int = 1
    num_drafts: int = 0
    acceptance: tuple[float, ...] | None = None
    tree: Tree | None = None
    features: Features = Features()
    temperature: float = 0.0
    max_rounds: int = 1
    prompt_tokens: int = 0

    @property
    def shape(self) -> StepShape:
        """The static sizes of its program."""
        return StepShape(
            num_seqs=self.seqs,
            num_levels=self.num_drafts,
            max_prompt_tokens=self.prompt_tokens,
            features=self.features,
            max_rounds=self.max_rounds,
            template=self.tree,
        )

    @property
    def num_slots(self) -> int:
        """Slots that a sequence may fill in a launch."""
        return self.max_rounds * self.shape.num_slots

    def proposers(self, draft: ModelConfig | None) -> tuple[DraftModel, ...]:
        """Return the proposers of its program."""
        if draft is None:
            return ()
        has_paths = self.tree is not None and self.tree.has_side_paths
        return ((TreeModel if has_paths else DraftModel)(config=draft),)

    def plan(self) -> StepPlan:
        """Return the plan: all sequences decode, or the first one reads its prompt."""
        if self.prompt_tokens:
            tokens = np.full(TILE, 5, np.int32)
            starts = range(0, self.prompt_tokens, TILE)
            tiles = [
                Tile(row=0, start=start, tokens=tokens, is_last=False)
                for start in starts
            ]
            return StepPlan(tiles=tiles)
        decode = [(row, self.num_drafts) for row in range(self.seqs)]
        return StepPlan(decode=decode, num_rounds=self.max_rounds)


class _Setup:
    """Sequences with a context, and pages for the tokens of a run.

    Args:
        draft: The model whose pages are allocated next to the target's, if any.

    Attributes:
        params: Parameters of the program, or their shapes.
        forms: Shapes and placement of the donated state's arrays.
    """

    def __init__(self, models: Models, launch: Launch, draft: ModelConfig | None):
        self.models, self.launch = models, launch
        setting, vocab_size = models.setting, models.target.vocab_size
        self.pool = setting.pool(launch.seqs, vocab_size, launch.num_slots)
        self._whole = replicated(models.mesh)
        proposers = launch.proposers(draft)
        self._config = ProgramConfig(
            target=models.target, proposers=proposers, pool=self.pool, mesh=models.mesh
        )
        self.params = (models.target_params, (models.draft_params,) * len(proposers))
        self.forms = self._make_forms()

    def _make_forms(self) -> EngineState:
        """Return the state's shapes and placement."""
        small = jax.eval_shape(lambda: self._small(self.launch.acceptance))
        rows, token_pages, forced = placed_forms(small, self.models.mesh)
        forms: Any = EngineState  # shapes instead of arrays
        return forms(
            rows=rows,
            token_pages=token_pages,
            **device_forms(self._config, jnp.dtype(self.models.setting.dtype)),
            forced_acceptance=forced,
        )

    def _small(self, acceptance: tuple[float, ...] | None) -> tuple[Any, ...]:
        """Return the state without the pages of the models."""
        forced = None if acceptance is None else jnp.array(acceptance, jnp.float32)
        context, temperature = self.models.setting.context, self.launch.temperature
        rows = begun_rows(self.pool, context, temperature)
        return rows, init_token_pages(self.pool), forced

    def _make_state(self, acceptance: tuple[float, ...] | None) -> EngineState:
        forms: Any = self.forms
        rows, token_pages, forced = jax.device_put(self._small(acceptance), self._whole)
        return EngineState(
            rows=rows,
            token_pages=token_pages,
            target_pages=init_zeros(forms.target_pages),
            proposers=init_zeros(forms.proposers),
            forced_acceptance=forced,
        )


class Program(_Setup):
    """The compiled step of one launch, and its state.

    Attributes:
        lower_s, compile_s: Seconds to trace and lower it, and to compile it.
    """

    def __init__(self, models: Models, launch: Launch | None = None, **changes: Any):
        launch = dataclasses.replace(launch or Launch(), **changes)
        super().__init__(models, launch, models.draft if launch.num_drafts else None)
        self.shape = launch.shape
        start = time.monotonic()
        lowered = lower_step(self._config, self.shape, (*self.params, self.forms))
        lowered_ts = time.monotonic()
        self.compiled = lowered.compile(models.setting.compiler_options)
        self.lower_s = lowered_ts - start
        self.compile_s = time.monotonic() - lowered_ts

    def _make_plan(self) -> jax.Array:
        vector = PlanLayout(self.shape, self.pool).pack(self.launch.plan())
        return jax.device_put(vector, self._whole)

    def run(
        self, acceptance: tuple[float, ...] | None = None, *, repeats: int | None = None
    ) -> Timed:
        """Launch the steps of each repeat in order, and wait for the last.

        Args:
            acceptance: Overrides the forced acceptance.
            repeats: Overrides the setting.
        """
        setting = self.models.setting
        repeats = setting.repeats if repeats is None else repeats
        acceptance = self.launch.acceptance if acceptance is None else acceptance
        state, plan = self._make_state(acceptance), self._make_plan()
        rows = jax.device_get(state.rows)
        seconds, emitted, accepted, drafted = [], 0, 0, 0
        for repeat in range(repeats + 1):
            state = dataclasses.replace(state, rows=jax.device_put(rows, self._whole))
            arrays = Arrays(self._config.proposers, self.params, state)
            jax.block_until_ready(state)
            start, results = time.perf_counter(), []
            for _ in range(setting.steps):
                results.append(arrays.call(self.compiled, self.shape, plan))
            jax.block_until_ready(results[-1])
            took_s = time.perf_counter() - start
            state = arrays.state
            if not repeat:
                continue  # the first run warms caches and clocks
            seconds.append(took_s / setting.steps)
            for result in jax.device_get(results):
                launched = StepResult.unpack(np.asarray(result), self.shape)
                for step in launched.rounds:
                    assert not step.is_broken.any(), (
                        "the random weights produced NaN or infinity"
                    )
                    emitted += int(step.num_emitted.sum())
                    accepted += int(step.num_accepted.sum())
                    drafted += int(step.num_valid_drafts.sum())
            # A new seed, so that each repeat draws different random numbers.
            rows = dataclasses.replace(rows, seed=rows.seed + np.uint32(1))
        count = repeats * setting.steps * self.launch.seqs
        return Timed(
            step_s=Spread.of(seconds),
            tokens=emitted / count,
            accepted=accepted,
            drafted=drafted,
        )


def begun_rows(pool: PoolShape, context: int, temperature: float = 0.0) -> Rows:
    """Make rows of sequences with a context and pages of their own."""
    count = pool.num_rows
    table = np.arange(count * pool.table_len).reshape(count, pool.table_len)
    seed = np.arange(2 * count, dtype=np.uint32).reshape(count, 2) + 17
    rows = dummy_rows(pool, table, context, temperature)
    return dataclasses.replace(rows, seed=seed)


def placed_forms(shapes: Any, mesh: Mesh) -> Any:
    """Replicate shapes on all devices of the mesh."""
    whole = replicated(mesh)
    return jax.tree.map(
        lambda form: jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=whole),
        shapes,
    )


def compile_all(makers: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Compile programs in parallel threads; XLA releases the GIL meanwhile."""
    with ThreadPoolExecutor(MAX_COMPILES) as threads:
        futures = {name: threads.submit(make) for name, make in makers.items()}
        return {name: future.result() for name, future in futures.items()}


class TargetPass(_Setup):
    """The target's part of a round with K drafts; K = 0 is plain decoding."""

    def __init__(self, models: Models, *, seqs: int = 1, num_drafts: int = 0):
        launch = Launch(seqs=seqs, num_drafts=num_drafts)
        super().__init__(models, launch, draft=None)
        form = jax.ShapeDtypeStruct((seqs, num_drafts + 1), jnp.int32)
        lowered = jax.jit(self._verify, donate_argnums=1).lower(
            self.params, self.forms, placed_forms(form, models.mesh)
        )
        self.compiled = lowered.compile(models.setting.compiler_options)

    def _verify(
        self, params: Any, state: EngineState, tokens: Any
    ) -> tuple[EngineState, Any]:
        seqs, num_drafts = self.launch.seqs, self.launch.num_drafts
        rows = jnp.arange(seqs, dtype=jnp.int32)
        tree = Tree.chain(num_drafts)
        given = self._config, tree, params
        proposal = None
        if num_drafts:
            drafts = jnp.full(seqs, num_drafts, jnp.int32)
            proposal = Proposal(tokens[:, :-1], drafts)
        state, logits = verify_part(*given, state, rows, proposal)
        state, (_, _, emitted) = accept_part(*given, state, rows, (proposal, logits))
        # The output is the next call's input, so calls run one after the other. All
        # tokens are returned, also the unused one of a plain pass: if a result were
        # unused, XLA would drop the last layer and the LM head.
        return state, emitted.tokens

    def run(self) -> Spread:
        """Run the number of calls that the setting gives, one after the other."""
        setting, state = self.models.setting, self._make_state(None)
        shape = self.launch.seqs, self.launch.num_drafts + 1
        tokens = jax.device_put(jnp.zeros(shape, jnp.int32), self._whole)
        seconds = []
        for _ in range(setting.repeats + 1):  # the first warms caches and clocks
            start = time.perf_counter()
            for _ in range(setting.steps):
                state, tokens = self.compiled(self.params, state, tokens)
            jax.block_until_ready((state, tokens))
            seconds.append((time.perf_counter() - start) / setting.steps)
        return Spread.of(seconds[1:])

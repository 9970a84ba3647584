"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` of the package. Static: the shapes and model configs. Donated: the
engine's state. The host passes one plan vector and reads one result vector.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import build_network
from jaxspec.models.params import Params
from jaxspec.program import controls, grammar, logprobs
from jaxspec.program.active import Active, gather
from jaxspec.program.apply import Tiles, apply_plan, read_tiles, unpack
from jaxspec.program.commit import Emitted, append, truncate
from jaxspec.program.judge import choose_next
from jaxspec.program.plan import (
    DONE,
    DRAFT_BROKEN,
    TARGET_BROKEN,
    PlanLayout,
    PoolShape,
    StepShape,
)
from jaxspec.program.propose import Proposal, draft_model, ngram
from jaxspec.program.region import make_region
from jaxspec.program.round import Judged, Round
from jaxspec.program.state import EngineState, Rows
from jaxspec.sharding import DRAFT_MESH_AXES, TARGET_MESH_AXES, replicated
from jaxspec_kernels.dispatch import implementation_for


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What all executables of an engine share; `draft` None is plain decoding.

    Attributes:
        has_greedy_draft: Drafts are the argmax whatever the request samples.
        lookup: Drafts come from the sequence itself first; None for the model alone.
        mesh: The devices, whose platform chooses the kernels.
        mask_source: Whom shapes with grammars ask for masks.
    """

    target: ModelConfig
    draft: ModelConfig | None
    pool: PoolShape
    has_greedy_draft: bool = False
    lookup: ngram.Lookup | None = None
    mesh: Mesh
    mask_source: grammar.MaskSource | None = None

    def backend(self, mesh_axes: tuple[str, ...]) -> Backend:
        """Where a model runs whose heads are split over these axes."""
        platform = self.mesh.devices.flat[0].platform
        return Backend(
            implementation=implementation_for(platform),
            mesh=self.mesh,
            mesh_axes=mesh_axes,
        )


def speculative_step(
    target_params: Params,
    draft_params: Params | None,
    state: EngineState,
    plan: Int[Array, " plan"],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[EngineState, Int[Array, " result"]]:
    """Run one round.

    Decoding sequences get K drafts, one target pass over K + 1 positions, a verdict
    and up to K + 1 tokens; prompt tiles ride in the same passes and, where a prompt
    ends, sample its first token. Rejected keys and values stay in their slots and are
    overwritten: only lengths say what is visible.

    Args:
        plan: `PlanLayout.pack` of this shape.

    Returns:
        The new state, and what `StepResult.unpack` reads.
    """
    launch = _read_plan(state, plan, config.pool, shape)
    active = launch.active
    proposal, num_draft, draft_pages = _propose(
        draft_params, state.draft_pages, launch, config=config, shape=shape
    )
    judged = _judge(
        target_params,
        state.target_pages,
        launch,
        proposal,
        num_draft,
        forced_acceptance=state.forced_acceptance,
        config=config,
        shape=shape,
    )
    emitted = truncate(judged.tokens, judged.num_accepted + 1, active)
    rows, token_pages = append(launch.rows, launch.token_pages, active, emitted)
    result = [_pack_result(emitted, judged, proposal, num_draft), *judged.told]
    if shape.chunk:
        rows, token_pages, first = _finish_prompts(
            rows,
            token_pages,
            launch.tiles,
            judged,
            launch.fields,
            config=config,
            shape=shape,
        )
        result += first
    state = EngineState(
        rows=rows,
        token_pages=token_pages,
        target_pages=judged.pages,
        draft_pages=draft_pages,
        forced_acceptance=state.forced_acceptance,
    )
    return state, jnp.concatenate([part.reshape(-1) for part in result])


class _Launch(NamedTuple):
    """The state once the plan has been applied, and who takes part."""

    fields: dict[str, Array]
    tiles: Tiles
    rows: Rows
    token_pages: Int[Array, "page page_size"]
    active: Active

    def batch(self, pool: PoolShape, *, is_draft: bool) -> TokenBatch:
        """The prompt tiles, for one of the two models."""
        tiles = self.tiles
        page_table = self.rows.page_table.at[tiles.row].get(mode="clip")
        is_row = tiles.row < pool.num_rows
        is_written = tiles.is_token & is_row[:, None]
        if not is_draft:
            is_written &= ~tiles.is_draft_only[:, None]
        kv_len = jnp.where(is_row, tiles.start + tiles.length, 0)
        return make_region(tiles.tokens, kv_len, page_table, is_written, pool)


def _read_plan(
    state: EngineState, plan: Int[Array, " plan"], pool: PoolShape, shape: StepShape
) -> _Launch:
    fields = unpack(plan, PlanLayout(shape, pool))
    tiles = read_tiles(fields)
    rows, token_pages = apply_plan(state.rows, state.token_pages, fields, tiles, pool)
    active = gather(
        rows,
        token_pages,
        fields["decode_row"],
        is_greedy=shape.features.is_greedy,
    )
    return _Launch(fields, tiles, rows, token_pages, active)


def _propose(
    params: Params | None,
    pages: tuple[Array, ...],
    launch: _Launch,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Proposal | None, Int[Array, " seq"], tuple[Array, ...]]:
    """Drafts, how many of each sequence count, and the draft model's pages."""
    count, active = shape.num_draft_tokens, launch.active
    # The host may not have read how near the end is; a draft beyond it is none.
    room = jnp.maximum(active.max_total - active.num_tokens - 1, 0)
    num_draft, found = jnp.minimum(launch.fields["decode_draft"], room), None
    if config.lookup is not None and count:
        found = ngram.look_up(
            active, launch.token_pages, config.lookup, num_draft_tokens=count
        )
    if config.draft is None:
        if found is None:
            return None, num_draft, pages
        return found.proposal, jnp.minimum(num_draft, found.num_found), pages
    if not count and not shape.chunk:
        return None, num_draft, pages
    assert params is not None, "a draft config came without parameters"
    model = build_network(config.draft, params, config.backend(DRAFT_MESH_AXES))
    batch = launch.batch(config.pool, is_draft=True) if shape.chunk else None
    if not count:
        assert batch is not None
        return None, num_draft, draft_model.prefill(model, pages, batch)
    proposal, pages = draft_model.propose(
        model,
        pages,
        active,
        batch,
        num_draft_tokens=count,
        pool=config.pool,
        is_greedy=config.has_greedy_draft,
        found=found,
        adjust=_adjuster(
            launch.rows,
            launch.token_pages,
            active,
            launch.fields,
            DRAFT_MESH_AXES,
            config=config,
            shape=shape,
        ),
    )
    if proposal.is_broken is not None:
        num_draft = jnp.where(proposal.is_broken, 0, num_draft)
    return proposal, num_draft, pages


def _judge(
    params: Params,
    pages: tuple[Array, ...],
    launch: _Launch,
    proposal: Proposal | None,
    num_draft: Int[Array, " seq"],
    *,
    forced_acceptance: Float[Array, " chance"] | None,
    config: ProgramConfig,
    shape: StepShape,
) -> Judged:
    backend, pool = config.backend(TARGET_MESH_AXES), config.pool
    this = Round(
        target=build_network(config.target, params, backend),
        active=launch.active,
        num_draft=num_draft,
        may_be_plain=config.draft is None,
        prompts=launch.batch(pool, is_draft=False) if shape.chunk else None,
        after_prompts=launch.fields.get("tile_next_token"),
        adjust=_adjuster(
            launch.rows,
            launch.token_pages,
            launch.active,
            launch.fields,
            TARGET_MESH_AXES,
            config=config,
            shape=shape,
        ),
        backend=backend,
        pool=pool,
        shape=shape,
        forced_acceptance=forced_acceptance,
    )
    return this.judge(proposal, pages)


def _pack_result(
    emitted: Emitted,
    judged: Judged,
    proposal: Proposal | None,
    num_draft: Int[Array, " seq"],
) -> Int[Array, "seq field"]:
    # A sequence that ends inside an accepted run keeps only the drafts before the end.
    accepted = jnp.minimum(judged.num_accepted, emitted.num_emitted)
    status = jnp.where(judged.is_broken, TARGET_BROKEN, 0)
    if proposal is not None and proposal.is_broken is not None:
        status += jnp.where(proposal.is_broken, DRAFT_BROKEN, 0)
    status += jnp.where(emitted.is_done, DONE, 0)
    columns = [emitted.num_emitted, num_draft, accepted, status]
    return jnp.concatenate([emitted.tokens, jnp.stack(columns, axis=1)], axis=1)


def _pack_first(
    first: Emitted, is_broken: Bool[Array, " tile"]
) -> Int[Array, "tile 2"]:
    status = jnp.where(first.is_done, DONE, 0)
    status += jnp.where(is_broken, TARGET_BROKEN, 0)
    return jnp.stack([first.tokens[:, 0], status], axis=1)


def _finish_prompts(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    tiles: Tiles,
    judged: Judged,
    fields: dict[str, Array],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Rows, Int[Array, "page page_size"], list[Int[Array, "..."]]]:
    """Sample the first token of every prompt whose last tile has come in.

    Returns:
        Rows and tokens with them, and their parts of the result vector.
    """
    num_rows = rows.num_tokens.shape[0]
    row = jnp.where(tiles.is_last, tiles.row, num_rows)
    active = gather(
        rows,
        token_pages,
        row,
        num_tokens=tiles.start + tiles.length,
        is_greedy=shape.features.is_greedy,
    )
    adjust = _adjuster(
        rows,
        token_pages,
        active,
        fields,
        TARGET_MESH_AXES,
        config=config,
        shape=shape,
    )
    logits = judged.tile_logits
    token = choose_next(logits, active, adjust=adjust)
    emitted = truncate(token[:, None], jnp.ones_like(token), active)
    backend = config.backend(TARGET_MESH_AXES)
    told = logprobs.tell_some(logits, emitted.tokens, shape=shape, backend=backend)
    result = [_pack_first(emitted, judged.is_tile_broken), *told]
    return *append(rows, token_pages, active, emitted), result


def _adjuster(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    active: Active,
    fields: dict[str, Array],
    mesh_axes: tuple[str, ...],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> controls.Adjust | None:
    """What the launch's requests ask of single tokens: controls, then grammars."""
    vocab_size, backend = config.pool.vocab_size, config.backend(mesh_axes)
    adjust = None
    if shape.features.has_controls:
        adjust = controls.adjuster(
            rows.controls, token_pages, active, vocab_size=vocab_size, backend=backend
        )
    if shape.features.has_grammar:
        assert config.mask_source is not None, "nobody knows the grammars"
        adjust = grammar.adjuster(
            config.mask_source,
            fields["grammar_id"],
            token_pages,
            active,
            inner=adjust,
            backend=backend,
        )
    return adjust


def lower_step(
    config: ProgramConfig,
    shape: StepShape,
    arguments: tuple[Params, Params | None, EngineState],
    *,
    name: str = "step",
) -> jax.stages.Lowered:
    """Trace one program ahead of time; `compile` makes an executable of it.

    Args:
        arguments: The parameters and the state (or their abstract forms), whose
            placement the executable keeps.
        name: What profiles call it. To jax's cache, programs of two names are two.
    """
    size = PlanLayout(shape, config.pool).size
    whole = replicated(config.mesh)
    plan = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    def run(target_params, draft_params, state, plan):
        return speculative_step(
            target_params, draft_params, state, plan, config=config, shape=shape
        )

    run.__name__ = name
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        arguments,
    )
    placement = jax.tree.map(lambda leaf: leaf.sharding, abstract[2])
    step = jax.jit(run, donate_argnums=(2,), out_shardings=(placement, whole))
    return step.lower(*abstract, plan)

"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` of the package. Static: the shapes and model configs. Donated: the
engine's state. The host passes one plan vector and reads one result vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.weights import Params, bind
from jaxspec.program import controls, grammar, logprobs
from jaxspec.program.active import Active, gather
from jaxspec.program.apply import Tiles, apply_plan, read_tiles, unpack
from jaxspec.program.commit import Emitted, append, truncate
from jaxspec.program.judge import choose_next
from jaxspec.program.plan import PlanLayout, PoolShape, StepShape
from jaxspec.program.propose import Proposal, draft_model, ngram
from jaxspec.program.region import make_region
from jaxspec.program.round import Round
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
    """Run one round; returns the new state, and what `StepResult.unpack` reads.

    Decoding sequences get K drafts, one target pass over K + 1 positions, a verdict
    and up to K + 1 tokens; prompt tiles ride in the same passes and, where a prompt
    ends, sample its first token. Rejected keys and values stay in their slots and are
    overwritten: only lengths say what is visible. The plan is `PlanLayout.pack`'s.
    """
    pool = config.pool
    fields = unpack(plan, PlanLayout(shape, pool))
    tiles = read_tiles(fields)
    rows, token_pages = apply_plan(state.rows, state.token_pages, fields, tiles, pool)
    active = gather(rows, token_pages, fields["decode_row"])
    found = _look_up(active, token_pages, config=config, shape=shape)
    adjuster = partial(
        _adjuster, rows, token_pages, active, fields, config=config, shape=shape
    )
    proposal, draft_pages = _propose(
        draft_params,
        state.draft_pages,
        active,
        rows,
        tiles,
        found=found,
        adjust=adjuster(DRAFT_MESH_AXES),
        config=config,
        shape=shape,
    )
    num_draft = _num_drafted(fields["decode_draft"], found, config)
    backend = config.backend(TARGET_MESH_AXES)
    judged = Round(
        target=bind(config.target, target_params, backend),
        active=active,
        num_draft=num_draft,
        may_be_plain=config.draft is None,
        prompts=_tile_batch(rows, tiles, pool, is_draft=False) if shape.chunk else None,
        after_prompts=fields.get("tile_next_token"),
        adjust=adjuster(TARGET_MESH_AXES),
        backend=backend,
        pool=pool,
        shape=shape,
    ).judge(proposal, state.target_pages)
    emitted = truncate(judged.tokens, judged.num_accepted + 1, active)
    rows, token_pages = append(rows, token_pages, active, emitted)
    result = [_pack_result(emitted, judged.num_accepted, num_draft), *judged.told]
    rows, token_pages, first = _finish_prompts(
        rows, token_pages, tiles, judged.tile_logits, fields, config=config, shape=shape
    )
    pages = {"target_pages": judged.pages, "draft_pages": draft_pages}
    state = EngineState(rows=rows, token_pages=token_pages, **pages)
    return state, jnp.concatenate([part.reshape(-1) for part in result + first])


def _look_up(
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> ngram.Found | None:
    if config.lookup is None or not shape.num_draft_tokens:
        return None
    count = shape.num_draft_tokens
    return ngram.look_up(active, token_pages, config.lookup, num_draft_tokens=count)


def _num_drafted(
    wanted: Int[Array, " seq"], found: ngram.Found | None, config: ProgramConfig
) -> Int[Array, " seq"]:
    if found is None or config.draft is not None:
        return wanted
    return jnp.minimum(wanted, found.num_found)


def _propose(
    params: Params | None,
    pages: tuple[Array, ...],
    active: Active,
    rows: Rows,
    tiles: Tiles,
    *,
    found: ngram.Found | None,
    adjust: controls.Adjust | None,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Proposal | None, tuple[Array, ...]]:
    if config.draft is None and found is not None:
        return found.proposal, pages
    if config.draft is None or (not shape.num_draft_tokens and not shape.chunk):
        return None, pages
    assert params is not None, "a draft config came without parameters"
    model = bind(config.draft, params, config.backend(DRAFT_MESH_AXES))
    batch = None
    if shape.chunk:
        batch = _tile_batch(rows, tiles, config.pool, is_draft=True)
    if not shape.num_draft_tokens:
        assert batch is not None
        return None, draft_model.feed_prompt(model, pages, batch)
    return draft_model.propose(
        model,
        pages,
        active,
        batch,
        num_draft_tokens=shape.num_draft_tokens,
        pool=config.pool,
        is_greedy=config.has_greedy_draft,
        found=found,
        adjust=adjust,
    )


def _tile_batch(
    rows: Rows, tiles: Tiles, pool: PoolShape, *, is_draft: bool
) -> TokenBatch:
    page_table = rows.page_table.at[tiles.row].get(mode="clip")
    is_row = tiles.row < pool.num_rows
    is_written = tiles.is_token & is_row[:, None]
    if not is_draft:
        is_written &= ~tiles.is_draft_only[:, None]
    kv_len = jnp.where(is_row, tiles.start + tiles.length, 0)
    return make_region(tiles.tokens, kv_len, page_table, is_written, pool)


def _pack_result(
    emitted: Emitted, num_accepted: Int[Array, " seq"], num_draft: Int[Array, " seq"]
) -> Int[Array, "seq field"]:
    # A sequence that ends inside an accepted run keeps only the drafts before the end.
    accepted = jnp.minimum(num_accepted, emitted.num_emitted)
    is_done = emitted.is_done.astype(jnp.int32)
    columns = [emitted.num_emitted, num_draft, accepted, is_done]
    return jnp.concatenate([emitted.tokens, jnp.stack(columns, axis=1)], axis=1)


def _pack_first(first: Emitted) -> Int[Array, "tile 2"]:
    is_done = first.is_done.astype(jnp.int32)
    return jnp.stack([first.tokens[:, 0], is_done], axis=1)


def _finish_prompts(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    tiles: Tiles,
    logits: Float[Array, "tile vocab"],
    fields: dict[str, Array],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Rows, Int[Array, "page page_size"], list[Int[Array, "..."]]]:
    """Sample the first token of every prompt whose last tile has come in.

    Returns:
        Rows and tokens with them, and their parts of the result vector.
    """
    if not shape.chunk:
        return rows, token_pages, []
    num_rows = rows.num_tokens.shape[0]
    row = jnp.where(tiles.is_last, tiles.row, num_rows)
    active = gather(rows, token_pages, row, num_tokens=tiles.start + tiles.length)
    adjust = _adjuster(
        rows,
        token_pages,
        active,
        fields,
        TARGET_MESH_AXES,
        config=config,
        shape=shape,
    )
    token = choose_next(logits, active, adjust=adjust)
    emitted = truncate(token[:, None], jnp.ones_like(token), active)
    backend = config.backend(TARGET_MESH_AXES)
    told = logprobs.tell_some(logits, emitted.tokens, shape=shape, backend=backend)
    result = [_pack_first(emitted), *told]
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


def compile_step(
    config: ProgramConfig,
    shape: StepShape,
    arguments: tuple[Params, Params | None, EngineState],
) -> Callable[..., tuple[EngineState, Array]]:
    """Compile one executable ahead of time.

    Args:
        arguments: The parameters and the state (or their abstract forms), whose
            placement the executable keeps.
    """
    size = PlanLayout(shape, config.pool).size
    whole = replicated(config.mesh)
    plan = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    def run(target_params, draft_params, state, plan):
        return speculative_step(
            target_params, draft_params, state, plan, config=config, shape=shape
        )

    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        arguments,
    )
    placement = jax.tree.map(lambda leaf: leaf.sharding, abstract[2])
    step = jax.jit(run, donate_argnums=(2,), out_shardings=(placement, whole))
    return step.lower(*abstract, plan).compile()

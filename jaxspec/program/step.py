"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` of the package. Static: the shapes and model configs. Donated: the
engine's state. The host passes one plan vector and reads one result vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
from jaxspec.program.judge import choose_next, judge, logits_of, place_next
from jaxspec.program.plan import PlanLayout, PoolShape, StepShape
from jaxspec.program.propose import Proposal, draft_model, ngram
from jaxspec.program.region import join, make_region
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
    pool = config.pool
    fields = unpack(plan, PlanLayout(shape, pool))
    tiles = read_tiles(fields)
    rows, token_pages = apply_plan(state.rows, state.token_pages, fields, tiles, pool)
    active = gather(rows, token_pages, fields["decode_row"])

    adjuster = partial(
        _adjuster, rows, token_pages, active, fields, config=config, shape=shape
    )
    found = _look_up(active, token_pages, config=config, shape=shape)
    proposal, draft_pages = _propose(
        draft_params,
        state.draft_pages,
        active,
        rows,
        tiles,
        adjust=adjuster(DRAFT_MESH_AXES),
        found=found,
        config=config,
        shape=shape,
    )
    num_draft = fields["decode_draft"]
    if found is not None and config.draft is None:
        num_draft = jnp.minimum(num_draft, found.num_found)
    judged = _judge_round(
        target_params,
        state.target_pages,
        proposal,
        active,
        num_draft,
        prompts=_tile_batch(rows, tiles, pool, is_draft=False) if shape.chunk else None,
        after_prompts=fields.get("tile_next_token"),
        adjust=adjuster(TARGET_MESH_AXES),
        config=config,
        shape=shape,
    )
    emitted = truncate(judged.tokens, judged.num_accepted + 1, active)
    rows, token_pages = append(rows, token_pages, active, emitted)
    result = [_pack_result(emitted, judged.num_accepted, num_draft), *judged.told]
    if shape.chunk:
        rows, token_pages, first = _finish_prompts(
            rows,
            token_pages,
            tiles,
            judged.tile_logits,
            fields,
            config=config,
            shape=shape,
        )
        result += first
    state = EngineState(
        rows=rows,
        token_pages=token_pages,
        target_pages=judged.pages,
        draft_pages=draft_pages,
    )
    return state, jnp.concatenate([part.reshape(-1) for part in result])


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


def _propose(
    params: Params | None,
    pages: tuple[Array, ...],
    active: Active,
    rows: Rows,
    tiles: Tiles,
    *,
    adjust: controls.Adjust | None,
    found: ngram.Found | None,
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
        adjust=adjust,
        found=found,
    )


class _Judged(NamedTuple):
    """What the target made of a round; with K + 1 tokens, however many were fed."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]
    tile_logits: Float[Array, "tile vocab"]
    told: list[Int[Array, "..."]]  # of the result vector: log-probabilities
    pages: tuple[Array, ...]


def _judge_round(
    params: Params,
    pages: tuple[Array, ...],
    proposal: Proposal | None,
    active: Active,
    num_draft: Int[Array, " seq"],
    *,
    prompts: TokenBatch | None,
    after_prompts: Int[Array, " tile"] | None,
    adjust: controls.Adjust | None,
    config: ProgramConfig,
    shape: StepShape,
) -> _Judged:
    """One target pass over the newest tokens, their drafts and the prompt tiles."""
    backend = config.backend(TARGET_MESH_AXES)
    known = active.last_tokens[:, 1:]

    def look(pages: tuple[Array, ...], proposal: Proposal | None) -> _Judged:
        target = bind(config.target, params, backend)
        drafts = known[:, :0] if proposal is None else proposal.tokens
        tokens = jnp.concatenate([known, drafts], axis=1)
        seqs, width = tokens.shape
        is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
        kv_len = active.num_tokens + width - 1
        batches = [
            make_region(tokens, kv_len, active.page_table, is_written, config.pool)
        ]
        if prompts is not None:
            batches.append(prompts)
        hidden, pages = target.hidden(join(batches), pages)
        logits, tile_logits = logits_of(target, hidden, seqs * width)
        verdict = judge(proposal, logits, num_draft, active, backend, adjust=adjust)
        tokens = place_next(drafts, verdict, shape.num_draft_tokens + 1)
        told = logprobs.tell_some(logits, tokens, shape=shape, backend=backend)
        if prompts is not None and after_prompts is not None:
            told += logprobs.tell_prompt(
                target,
                hidden[seqs * width :],
                prompts.tokens,
                after_prompts,
                shape=shape,
                backend=backend,
            )
        return _Judged(tokens, verdict.num_accepted, tile_logits, told, pages)

    has_one_form = config.draft is not None or proposal is None or prompts is not None
    if has_one_form or shape.features.num_logprobs is not None:
        return look(pages, proposal)
    # Where nothing was found, the round is a plain one and costs no more than that.
    return jax.lax.cond(
        (num_draft > 0).any(),
        lambda pages: look(pages, proposal),
        lambda pages: look(pages, None),
        pages,
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
    columns = jnp.stack(columns, axis=1)
    return jnp.concatenate([emitted.tokens, columns], axis=1)


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

"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` of the package. Static: the shapes and model configs. Donated: the
engine's state. The host passes one plan vector and reads one result vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma2 import Gemma2
from jaxspec.models.weights import Params, bind
from jaxspec.program import randomness
from jaxspec.program.accept import accept
from jaxspec.program.active import Active, gather
from jaxspec.program.apply import Tiles, apply_plan, read_tiles, unpack
from jaxspec.program.choose import choose_token, forbid_early_stop
from jaxspec.program.commit import Emitted, append, truncate
from jaxspec.program.plan import TILE, PlanLayout, PoolShape, StepShape
from jaxspec.program.propose import Proposal, draft_model, ngram
from jaxspec.program.region import join, make_region
from jaxspec.program.state import EngineState, Rows
from jaxspec.sharding import DRAFT_MESH_AXES, TARGET_MESH_AXES, replicated
from jaxspec_kernels.dispatch import implementation_for
from jaxspec_kernels.rejection_sampling import Verdict


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What all executables of an engine share; `draft` None is plain decoding.

    Attributes:
        has_greedy_draft: Drafts are the argmax whatever the request samples.
        lookup: Drafts come from the sequence itself first; None for the model alone.
        mesh: The devices, whose platform chooses the kernels.
    """

    target: ModelConfig
    draft: ModelConfig | None
    pool: PoolShape
    has_greedy_draft: bool = False
    lookup: ngram.Lookup | None = None
    mesh: Mesh

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

    found = _look_up(active, token_pages, config=config, shape=shape)
    proposal, draft_pages = _propose(
        draft_params,
        state.draft_pages,
        active,
        rows,
        tiles,
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
        config=config,
        shape=shape,
    )
    emitted = truncate(judged.tokens, judged.num_accepted + 1, active)
    rows, token_pages = append(rows, token_pages, active, emitted)
    result = [_pack_result(emitted, judged.num_accepted, num_draft)]
    if shape.chunk:
        rows, token_pages, first = _finish_prompts(
            rows, token_pages, tiles, judged.tile_logits
        )
        result.append(_pack_first(first))
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
        found=found,
    )


class _Judged(NamedTuple):
    """What the target made of a round; with K + 1 tokens, however many were fed."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]
    tile_logits: Float[Array, "tile vocab"]
    pages: tuple[Array, ...]


def _judge_round(
    params: Params,
    pages: tuple[Array, ...],
    proposal: Proposal | None,
    active: Active,
    num_draft: Int[Array, " seq"],
    *,
    prompts: TokenBatch | None,
    config: ProgramConfig,
    shape: StepShape,
) -> _Judged:
    """One target pass over the newest tokens, their drafts and the prompt tiles."""
    backend = config.backend(TARGET_MESH_AXES)

    def judge(
        proposal: Proposal | None, tokens: Array, pages: tuple[Array, ...]
    ) -> _Judged:
        target = bind(config.target, params, backend)
        seqs, width = tokens.shape
        is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
        kv_len = active.num_tokens + width - 1
        batches = [
            make_region(tokens, kv_len, active.page_table, is_written, config.pool)
        ]
        if prompts is not None:
            batches.append(prompts)
        hidden, pages = target.hidden(join(batches), pages)
        logits, tile_logits = _logits(target, hidden, seqs * width)
        verdict = _verdict(proposal, logits, num_draft, active, backend)
        drafts = tokens[:, 1:]
        tokens = _place_next(drafts, verdict, shape.num_draft_tokens + 1)
        return _Judged(tokens, verdict.num_accepted, tile_logits, pages)

    tokens = active.last_tokens[:, 1:]
    if proposal is not None:
        tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
    if config.draft is not None or proposal is None or prompts is not None:
        return judge(proposal, tokens, pages)

    # Where nothing was found, the round is a plain one and costs no more than that.
    def wide(judged: _Judged) -> _Judged:
        return judge(proposal, judged.tokens, judged.pages)

    def plain(judged: _Judged) -> _Judged:
        return judge(None, judged.tokens[:, :1], judged.pages)

    has_drafts = (num_draft > 0).any()
    no_logits = jnp.zeros((0, config.target.vocab_size), jnp.float32)
    judged = _Judged(tokens, jnp.zeros_like(num_draft), no_logits, pages)
    return _run_if(~has_drafts, plain, _run_if(has_drafts, wide, judged))


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


def _logits(
    model: Gemma2, hidden: Float[Array, "token model"], num_decode: int
) -> tuple[Float[Array, "decode vocab"], Float[Array, "tile vocab"]]:
    """Logits of all decode rows and of the last row of every tile."""
    last = hidden[num_decode:].reshape(-1, TILE, hidden.shape[1])[:, -1]
    logits = model.logits(jnp.concatenate([hidden[:num_decode], last]))
    return logits[:num_decode], logits[num_decode:]


def _verdict(
    proposal: Proposal | None,
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
    backend: Backend,
) -> Verdict:
    if proposal is not None:
        return accept(proposal, logits, num_draft, active, backend)
    logits = forbid_early_stop(logits, active.num_tokens, active)
    token, _ = choose_token(logits, active.num_tokens, active, role=randomness.SAMPLE)
    return Verdict(jnp.zeros_like(token), token)


def _run_if(
    is_wanted: Bool[Array, ""], function: Callable[[_Judged], _Judged], value: _Judged
) -> _Judged:
    """`function(value)` where that is wanted, else `value`: a loop of one turn or none.

    Not `cond`: XLA copies what both of its branches write to in place.
    """

    def turn(carry: tuple[Array, _Judged]) -> tuple[Array, _Judged]:
        return jnp.zeros_like(is_wanted), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (is_wanted, value))[1]


def _place_next(
    drafts: Int[Array, "seq draft"], verdict: Verdict, width: int
) -> Int[Array, "seq width"]:
    """Accepted drafts, then the target's token, then pads."""
    seqs, count = drafts.shape
    padded = jnp.pad(drafts, ((0, 0), (0, width - count)))
    row = jnp.arange(seqs, dtype=jnp.int32)
    return padded.at[row, verdict.num_accepted].set(verdict.next_token)


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
) -> tuple[Rows, Int[Array, "page page_size"], Emitted]:
    """Sample the first token of every prompt whose last tile has come in."""
    num_rows = rows.num_tokens.shape[0]
    row = jnp.where(tiles.is_last, tiles.row, num_rows)
    active = gather(rows, token_pages, row, num_tokens=tiles.start + tiles.length)
    logits = forbid_early_stop(logits, active.num_tokens, active)
    token, _ = choose_token(logits, active.num_tokens, active, role=randomness.SAMPLE)
    emitted = truncate(token[:, None], jnp.ones_like(token), active)
    return *append(rows, token_pages, active, emitted), emitted


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

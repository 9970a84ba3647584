"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` of the package. Static: the shapes and model configs. Donated: the
engine's state. The host passes one plan vector and reads one result vector.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma2 import Gemma2
from jaxspec.models.weights import Params, bind
from jaxspec.program import grammar, randomness
from jaxspec.program.accept import accept
from jaxspec.program.active import Active, gather
from jaxspec.program.apply import Tiles, apply_plan, read_tiles, unpack
from jaxspec.program.choose import choose_token, forbid_early_stop
from jaxspec.program.commit import Emitted, append, truncate
from jaxspec.program.plan import TILE, PlanLayout, PoolShape, StepShape
from jaxspec.program.propose import Proposal, draft_model
from jaxspec.program.region import join, make_region
from jaxspec.program.state import EngineState, Rows
from jaxspec.sharding import DRAFT_MESH_AXES, TARGET_MESH_AXES, replicated
from jaxspec_kernels.dispatch import implementation_for
from jaxspec_kernels.rejection_sampling import Verdict

Masks = UInt32[Array, "seq width word"]


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What all executables of an engine share; `draft` None is plain decoding.

    Attributes:
        has_greedy_draft: Drafts are the argmax whatever the request samples.
        mesh: The devices, whose platform chooses the kernels.
        mask_source: Whom shapes with grammars ask for masks.
    """

    target: ModelConfig
    draft: ModelConfig | None
    pool: PoolShape
    has_greedy_draft: bool = False
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

    proposal, draft_pages = _propose(
        draft_params, state.draft_pages, active, rows, tiles, config=config, shape=shape
    )
    backend = config.backend(TARGET_MESH_AXES)
    target = bind(config.target, target_params, backend)
    known = active.last_tokens[:, 1:]
    drafts = known[:, :0] if proposal is None else proposal.tokens
    round_tokens = jnp.concatenate([known, drafts], axis=1)
    seqs, width = round_tokens.shape
    is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
    kv_len = active.num_tokens + width - 1
    batches = [make_region(round_tokens, kv_len, active.page_table, is_written, pool)]
    if shape.chunk:
        batches.append(_tile_batch(rows, tiles, pool, is_draft=False))
    hidden, target_pages = target.hidden(join(batches), state.target_pages)
    logits, tile_logits = _logits(target, hidden, seqs * width)

    masks = _masks(config, fields, active, token_pages, drafts)
    verdict = _verdict(
        proposal, logits, fields["decode_draft"], active, backend, masks=masks
    )
    tokens = _place_next(drafts, verdict)
    emitted = truncate(tokens, verdict.num_accepted + 1, active)
    rows, token_pages = append(rows, token_pages, active, emitted)
    result = [_pack_result(emitted, verdict)]
    if shape.chunk:
        rows, token_pages, first = _finish_prompts(
            rows, token_pages, tiles, tile_logits, config=config, fields=fields
        )
        result.append(_pack_first(first))
    state = EngineState(
        rows=rows,
        token_pages=token_pages,
        target_pages=target_pages,
        draft_pages=draft_pages,
    )
    return state, jnp.concatenate([part.reshape(-1) for part in result])


def _propose(
    params: Params | None,
    pages: tuple[Array, ...],
    active: Active,
    rows: Rows,
    tiles: Tiles,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Proposal | None, tuple[Array, ...]]:
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
    *,
    masks: Masks | None,
) -> Verdict:
    if proposal is not None:
        return accept(proposal, logits, num_draft, active, backend, masks=masks)
    token = _choose_one(logits, active, masks)
    return Verdict(jnp.zeros_like(token), token)


def _choose_one(
    raw: Float[Array, "seq vocab"], active: Active, masks: Masks | None
) -> Int[Array, " seq"]:
    """The next token of every sequence, without drafts."""
    logits = forbid_early_stop(raw, active.num_tokens, active)
    if masks is not None:
        logits = grammar.restrict(logits, raw, masks[:, 0])
    token, _ = choose_token(logits, active.num_tokens, active, role=randomness.SAMPLE)
    return token


def _masks(
    config: ProgramConfig,
    fields: dict[str, Array],
    active: Active,
    token_pages: Int[Array, "page page_size"],
    drafts: Int[Array, "seq draft"],
) -> Masks | None:
    """What grammars allow after known tokens and drafts; None in other shapes."""
    if "grammar_id" not in fields:
        return None
    assert config.mask_source is not None, "nobody knows the grammars"
    return grammar.ask(
        config.mask_source,
        fields["grammar_id"].at[active.row].get(mode="clip"),
        active,
        token_pages,
        drafts,
        vocab_size=config.pool.vocab_size,
    )


def _place_next(drafts: Array, verdict: Verdict) -> Int[Array, "seq width"]:
    """Accepted drafts, then the target's token: `[seq, K + 1]`."""
    seqs = drafts.shape[0]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    row = jnp.arange(seqs, dtype=jnp.int32)
    return padded.at[row, verdict.num_accepted].set(verdict.next_token)


def _pack_result(emitted: Emitted, verdict: Verdict) -> Int[Array, "seq field"]:
    # A sequence that ends inside an accepted run keeps only the drafts before the end.
    accepted = jnp.minimum(verdict.num_accepted, emitted.num_emitted)
    is_done = emitted.is_done.astype(jnp.int32)
    columns = jnp.stack([emitted.num_emitted, accepted, is_done], axis=1)
    return jnp.concatenate([emitted.tokens, columns], axis=1)


def _pack_first(first: Emitted) -> Int[Array, "tile 2"]:
    is_done = first.is_done.astype(jnp.int32)
    return jnp.stack([first.tokens[:, 0], is_done], axis=1)


def _finish_prompts(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    tiles: Tiles,
    logits: Float[Array, "tile vocab"],
    *,
    config: ProgramConfig,
    fields: dict[str, Array],
) -> tuple[Rows, Int[Array, "page page_size"], Emitted]:
    """Sample the first token of every prompt whose last tile has come in."""
    num_rows = rows.num_tokens.shape[0]
    row = jnp.where(tiles.is_last, tiles.row, num_rows)
    active = gather(rows, token_pages, row, num_tokens=tiles.start + tiles.length)
    no_drafts = jnp.zeros((row.shape[0], 0), jnp.int32)
    masks = _masks(config, fields, active, token_pages, no_drafts)
    token = _choose_one(logits, active, masks)
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

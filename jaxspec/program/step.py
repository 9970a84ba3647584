"""THE program: propose, target forward, verify and commit, as one executable.

The only `jax.jit` that requests run in. Static: the shapes and model configs. Donated:
the engine's state. The host passes one plan vector and reads one result vector.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.config.engine import ModelConfig
from jaxspec.jax_settings import own_settings
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import FREE_ROWS, build_network
from jaxspec.models.params import Params
from jaxspec.program import controls, grammar, logprobs
from jaxspec.program.call import Arguments, flat, taken
from jaxspec.program.forward import Verified, forward
from jaxspec.program.plan import NO_TOKEN, TILE, PoolShape, StepShape
from jaxspec.program.propose.proposal import (
    Context,
    Observer,
    Proposal,
    Proposer,
    Seen,
)
from jaxspec.program.region import make_region
from jaxspec.program.rows import (
    Active,
    Emitted,
    Rows,
    Tiles,
    append,
    apply_plan,
    gather,
    read_tiles,
    truncate,
)
from jaxspec.program.state import EngineState
from jaxspec.program.tree import Tree
from jaxspec.program.verify import force_one, verify
from jaxspec.program.wire import PlanLayout, result_layout
from jaxspec.sharding import TARGET_MESH_AXES, replicated
from jaxspec_kernels.bits import KvPools
from jaxspec_kernels.dispatch import implementation_for

# State, results by round, rounds run, whether no more may follow.
_Turn = tuple[EngineState, Array, Array, Array]

# Drafts of a narrow round: with the newest token, as many rows as take no longer than
# the one row of a plain round.
FEW = FREE_ROWS - 1


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What all executables of an engine share.

    Attributes:
        proposers: Make the drafts, each given what those before it proposed. Empty is
            plain decoding.
        mesh: The devices, whose platform chooses the kernels.
        mask_source: Host callback that returns grammar masks; None without grammars.
    """

    target: ModelConfig
    proposers: tuple[Proposer, ...] = ()
    pool: PoolShape
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
    proposer_params: tuple[Params | None, ...],
    state: EngineState,
    plan: Int[Array, " plan"],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[EngineState, Int[Array, " result"]]:
    """Run one round, or several of the same sequences.

    Decoding sequences get K drafts, one target pass over K + 1 positions, a verdict
    and up to K + 1 tokens; prompt tiles ride in the target's pass and, where a prompt
    ends, sample its first token. A catch-up launch feeds the draft models alone, with
    prompts and whatever else the target has seen without them. Rejected keys and values
    stay in their slots and are overwritten: only lengths say what is visible.

    Args:
        proposer_params: A draft model's for each proposer that has some, else None; and
            for those that rest (`call.taken`), whose state is None as well.
        plan: `PlanLayout.pack` of this shape.

    Returns:
        The new state, and what `StepResult.unpack` reads.
    """
    launch = _read_plan(state, plan, config.pool, shape)
    if shape.is_catch_up:
        return _catch_up(proposer_params, state, launch, config=config, shape=shape)
    state = dataclasses.replace(state, rows=launch.rows, token_pages=launch.token_pages)
    run = functools.partial(
        _run_round, target_params, proposer_params, config=config, shape=shape
    )
    if shape.max_rounds > 1:
        return _run_rounds(run, state, launch, shape)
    state, result = run(state, launch)
    return state, jnp.concatenate(result_layout(shape).flatten(result))


class _Launch(NamedTuple):
    """The state once the plan has been applied, and who takes part."""

    fields: dict[str, Array]
    tiles: Tiles
    rows: Rows
    token_pages: Int[Array, "page page_size"]
    active: Active

    def batch(self, pool: PoolShape) -> TokenBatch:
        """The prompt tiles, for a model."""
        tiles = self.tiles
        page_table = self.rows.page_table.at[tiles.row].get(mode="clip")
        is_row = tiles.row < pool.num_rows
        is_written = tiles.is_token & is_row[:, None]
        kv_len = jnp.where(is_row, tiles.start + tiles.length, 0)
        return make_region(tiles.tokens, kv_len, page_table, is_written, pool)


def _run_round(
    target_params: Params,
    proposer_params: tuple[Params | None, ...],
    state: EngineState,
    launch: _Launch,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[EngineState, dict[str, Array]]:
    """One round; the state after it, and the parts of its result."""
    active = launch.active
    proposal, num_draft, proposers = _propose(
        target_params,
        proposer_params,
        state.proposers,
        launch,
        config=config,
        shape=shape,
    )
    verified = _verify(
        target_params,
        state.target_pages,
        launch,
        proposal,
        num_draft,
        forced_acceptance=state.forced_acceptance,
        config=config,
        shape=shape,
    )
    tokens = verified.tokens
    if verified.row is not None:
        tokens = tokens[:, : shape.tree.max_emitted]
    emitted = truncate(tokens, verified.num_kept + 1, active)
    rows, token_pages = append(launch.rows, launch.token_pages, active, emitted)
    result = _result(emitted, verified, proposal, num_draft)
    if shape.chunk:
        rows, token_pages, first = _finish_prompts(
            rows,
            token_pages,
            launch.tiles,
            verified,
            launch.fields,
            config=config,
            shape=shape,
        )
        result |= first
    proposers = _observe(
        target_params,
        proposer_params,
        proposers,
        # Tokens of before lie where they lay. Whoever read them where nothing has been
        # added would make XLA keep a copy of all pages.
        launch._replace(token_pages=token_pages),
        verified,
        result.get("tile_token"),
        config=config,
        shape=shape,
    )
    state = EngineState(
        rows=rows,
        token_pages=token_pages,
        target_pages=verified.pages,
        proposers=proposers,
        forced_acceptance=state.forced_acceptance,
    )
    return state, result


def _run_rounds(
    run: Callable[[EngineState, _Launch], tuple[EngineState, dict[str, Array]]],
    state: EngineState,
    launch: _Launch,
    shape: StepShape,
) -> tuple[EngineState, Int[Array, " result"]]:
    """As many rounds as the plan says, or up to the first in which a sequence ends.

    Each is what a launch of its own would be. The host has to hear of an end, and of
    broken numbers, before it can say who takes part in the next.
    """
    assert not shape.chunk, "prompts come in once"
    layout, fields = result_layout(shape), launch.fields

    def turn(carry: _Turn) -> _Turn:
        state, results, index, _ = carry
        active = gather(
            state.rows,
            state.token_pages,
            fields["decode_row"],
            is_greedy=shape.features.is_greedy,
        )
        now = launch._replace(
            rows=state.rows, token_pages=state.token_pages, active=active
        )
        state, result = run(state, now)
        part = jnp.concatenate(layout.flatten(result))
        results = jax.lax.dynamic_update_index_in_dim(results, part, index, 0)
        has_news = result["is_done"] | result["is_broken"] | result["is_draft_broken"]
        is_over = (has_news & active.is_active).any() | ~active.is_active.any()
        return state, results, index + 1, is_over

    state, results, num_rounds, _ = jax.lax.while_loop(
        lambda carry: (carry[2] < fields["num_rounds"]) & ~carry[3],
        turn,
        (
            state,
            jnp.zeros((shape.max_rounds, layout.size), jnp.int32),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        ),
    )
    return state, jnp.concatenate([num_rounds[None], results.reshape(-1)])


def _read_plan(
    state: EngineState, plan: Int[Array, " plan"], pool: PoolShape, shape: StepShape
) -> _Launch:
    fields = PlanLayout(shape, pool).read(plan)
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
    target: Params,
    params: tuple[Params | None, ...],
    states: tuple[Any, ...],
    launch: _Launch,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Proposal | None, Int[Array, " seq"], tuple[Any, ...]]:
    """Drafts, how many of each sequence count, and the state of every proposer."""
    active, tree = launch.active, shape.tree
    context = _context(launch, target, config=config, shape=shape)
    proposal, kept = None, []
    for proposer, own, state in zip(config.proposers, params, states, strict=True):
        if tree.num_nodes:
            proposal, state = proposer.propose(own, state, context, proposal)
        kept.append(state)
    # The host may not have read how near the end is; a draft beyond it is none.
    room = jnp.maximum(active.max_total - active.num_tokens - 1, 0)
    num_draft = jnp.minimum(launch.fields["decode_draft"], room)
    if proposal is not None:
        num_draft = jnp.minimum(num_draft, proposal.num_drafts)
    return proposal, num_draft, tuple(kept)


def _context(
    launch: _Launch, target: Params | None, *, config: ProgramConfig, shape: StepShape
) -> Context:
    """What proposers see of a launch."""
    return Context(
        active=launch.active,
        token_pages=launch.token_pages,
        tree=shape.tree,
        wanted=launch.fields["decode_draft"],
        pool=config.pool,
        prompts=launch.batch(config.pool) if shape.chunk else None,
        backend=config.backend,
        adjuster=lambda axes: _adjuster(
            launch.rows,
            launch.token_pages,
            launch.active,
            launch.fields,
            axes,
            config=config,
            shape=shape,
        ),
        target=target,
    )


def _catch_up(
    params: tuple[Params | None, ...],
    state: EngineState,
    launch: _Launch,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[EngineState, Int[Array, " result"]]:
    """Feed the draft models alone, and ask how likely their drafts would have stayed.

    The first proposer with a model says; the others only take the tokens in.
    """
    context = _context(launch, None, config=config, shape=shape)
    tiles, rows = launch.tiles, launch.rows
    following = jnp.concatenate(
        [tiles.tokens[:, 1:], launch.fields["tile_next_token"][:, None]], axis=1
    )
    is_known = tiles.is_token & (following != NO_TOKEN)
    is_known &= (tiles.row < config.pool.num_rows)[:, None]
    # What follows a token of the prompt is the user's choice, but for the last one.
    num_prompt = rows.num_prompt.at[tiles.row].get(mode="clip")
    is_known &= tiles.position + 1 >= num_prompt[:, None]
    active = gather(rows, launch.token_pages, tiles.row).repeat(TILE)
    is_known &= active.is_active.reshape(is_known.shape)
    active = dataclasses.replace(active, num_tokens=tiles.position.reshape(-1) + 1)
    following = jnp.where(is_known, following, NO_TOKEN).reshape(-1)
    likeness, kept = None, []
    for proposer, own, before in zip(
        config.proposers, params, state.proposers, strict=True
    ):
        after, found = proposer.catch_up(own, before, context, active, following)
        likeness = found if likeness is None else likeness
        kept.append(after)
    assert likeness is not None, "nobody has a model to catch up"
    if state.forced_acceptance is not None:
        likeness = (force_one(state.forced_acceptance, active)).astype(jnp.float32)
    likeness = jnp.where(is_known.reshape(-1), likeness, -1.0).reshape(is_known.shape)
    state = dataclasses.replace(
        state, rows=rows, token_pages=launch.token_pages, proposers=tuple(kept)
    )
    result = result_layout(shape).flatten({"likeness": likeness})
    return state, jnp.concatenate(result)


def _verify(
    params: Params,
    pages: KvPools,
    launch: _Launch,
    proposal: Proposal | None,
    num_draft: Int[Array, " seq"],
    *,
    forced_acceptance: Float[Array, " chance"] | None,
    config: ProgramConfig,
    shape: StepShape,
) -> Verified:
    backend, pool = config.backend(TARGET_MESH_AXES), config.pool
    return forward(
        build_network(config.target, params, backend),
        pages,
        launch.active,
        proposal,
        num_draft,
        narrower=_narrower(config.proposers, shape.tree),
        target_layers=frozenset().union(
            *(
                one.target_layers
                for one in config.proposers
                if isinstance(one, Observer)
            )
        ),
        prompts=launch.batch(pool) if shape.chunk else None,
        after_prompts=(
            None
            if shape.features.num_prompt_logprobs is None
            else launch.fields["tile_next_token"]
        ),
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
        chosen=logprobs.chosen_ids(launch.rows.controls, launch.active, shape=shape),
        forced_acceptance=forced_acceptance,
    )


def _narrower(proposers: tuple[Proposer, ...], tree: Tree) -> tuple[int, ...]:
    """Numbers of drafts, fewer than the tree's, for which the round has narrower forms.

    A form is as much of a program as the whole: there are as few as are worth it.
    """
    if not all(one.may_find_none for one in proposers):
        return ()
    has_few = any(one.may_find_few for one in proposers) and tree.num_nodes > 2 * FEW
    # The first nodes of a tree are a chain, which lacks what the tree is for.
    return (0, FEW) if has_few and tree.is_chain else (0,)


def _observe(
    target: Params,
    params: tuple[Params | None, ...],
    states: tuple[Any, ...],
    launch: _Launch,
    verified: Verified,
    first_tokens: Int[Array, " tile"] | None,
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Any, ...]:
    """Show proposers that look into the target what it has made; what all keep.

    Args:
        first_tokens: Sampled after each tile, where it ends its prompt.
    """
    context, kept = _context(launch, target, config=config, shape=shape), []
    tiles, next_tile_tokens, first_row = launch.tiles, None, None
    if first_tokens is not None:
        after = jnp.where(tiles.is_last, first_tokens, launch.fields["tile_next_token"])
        next_tile_tokens = jnp.concatenate([tiles.tokens[:, 1:], after[:, None]], 1)
        first_row = jnp.where(tiles.is_last, tiles.row, config.pool.num_rows)
    for proposer, own, state in zip(config.proposers, params, states, strict=True):
        if isinstance(proposer, Observer):
            layers = proposer.target_layers
            seen = Seen(
                tuple(verified.streams[layer] for layer in layers),
                tuple(verified.tile_streams[layer] for layer in layers)
                if shape.chunk
                else None,
                shape.tree,
                verified.num_kept,
                verified.row,
                verified.tokens,
                next_tile_tokens,
                first_row,
            )
            state = proposer.observe(own, state, context, seen)
        kept.append(state)
    return tuple(kept)


def _result(
    emitted: Emitted,
    verified: Verified,
    proposal: Proposal | None,
    num_draft: Int[Array, " seq"],
) -> dict[str, Array]:
    is_draft_broken = None if proposal is None else proposal.is_broken
    if is_draft_broken is None:
        is_draft_broken = jnp.zeros_like(verified.is_broken)
    result = {
        "tokens": emitted.tokens,
        "num_emitted": emitted.num_emitted,
        "num_draft": num_draft,
        # A sequence that ends inside an accepted run keeps only the drafts before it.
        "num_accepted": jnp.minimum(verified.num_accepted, emitted.num_emitted),
        "is_done": emitted.is_done,
        "is_broken": verified.is_broken,
        "is_draft_broken": is_draft_broken,
    }
    if verified.row is not None:
        result["num_kept"] = verified.num_kept
        result["tree_row"] = verified.row
    if verified.logprobs is not None:
        result["logprobs"] = verified.logprobs
    if verified.prompt_logprobs is not None:
        result["prompt_logprobs"] = verified.prompt_logprobs
    return result


def _finish_prompts(
    rows: Rows,
    token_pages: Int[Array, "page page_size"],
    tiles: Tiles,
    verified: Verified,
    fields: dict[str, Array],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[Rows, Int[Array, "page page_size"], dict[str, Array]]:
    """Sample the first token of every prompt whose last tile has come in.

    Returns:
        Rows and tokens with them, and their parts of the result.
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
    logits = verified.tile_logits
    backend = config.backend(TARGET_MESH_AXES)
    none = jnp.zeros_like(row)
    plain = Tree.chain(0)
    token = verify(
        None, logits, none, active, backend, tree=plain, adjust=adjust
    ).next_token
    emitted = truncate(token[:, None], jnp.ones_like(token), active)
    result = {
        "tile_token": token,
        "tile_is_done": emitted.is_done,
        "tile_is_broken": verified.is_tile_broken,
    }
    chosen = logprobs.chosen_ids(rows.controls, active, shape=shape)
    told = logprobs.tell_some(
        logits, token[:, None], chosen, shape=shape, backend=backend
    )
    if told is not None:
        result["tile_logprobs"] = told[:, 0]
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


@own_settings()
def lower_step(
    config: ProgramConfig,
    shape: StepShape,
    arguments: Arguments,
    *,
    name: str = "step",
) -> jax.stages.Lowered:
    """Trace one program ahead of time; `compile` makes an executable of it.

    The executable is called with a plan behind the two lists that `call.flat` makes of
    what the program takes. It gives back the new state, in the order of the second
    list, and the result.

    Args:
        arguments: The parameters and the state (or their abstract forms), whose
            placement the executable keeps.
        name: What profiles call it. To jax's cache, programs of two names are two.
    """
    size = PlanLayout(shape, config.pool).size
    whole = replicated(config.mesh)
    plan = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    abstract: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        taken(config.proposers, shape, arguments),
    )
    of_params, of_state = map(jax.tree.structure, (abstract[:2], abstract[2]))

    def run(params, state, plan):
        target_params, proposer_params = jax.tree.unflatten(of_params, params)
        state = jax.tree.unflatten(of_state, state)
        state, result = speculative_step(
            target_params, proposer_params, state, plan, config=config, shape=shape
        )
        leaves, structure = jax.tree.flatten(state)
        assert structure == of_state, "the state has another form"
        return leaves, result

    run.__name__ = name
    params, state = flat(abstract)
    placement = [leaf.sharding for leaf in state]
    step = jax.jit(run, donate_argnums=(1,), out_shardings=(placement, whole))
    return step.lower(params, state, plan)

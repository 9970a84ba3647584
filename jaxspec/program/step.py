"""The step program: propose, run and verify the target, append; one executable.

The only `jax.jit` that requests run in. Static: the shapes and model configs. Donated:
the engine's state. The host passes one plan vector and reads one result vector.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.jax_settings import own_settings
from jaxspec.models.params import Params
from jaxspec.program import logprobs
from jaxspec.program.executable_args import Arguments, flatten, used_arguments
from jaxspec.program.plan import NO_TOKEN, TILE, StepShape
from jaxspec.program.propose.proposal import Observer, Proposal, Seen
from jaxspec.program.rows import Emitted, append, gather, truncate
from jaxspec.program.state import EngineState
from jaxspec.program.step_context import ProgramConfig, StepContext
from jaxspec.program.target_pass import TargetPass, Verified, fewer_drafts
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import force_one, verify
from jaxspec.program.wire import PlanLayout, result_layout
from jaxspec.sharding import replicated

ProposerParams = tuple[Params | None, ...]
# State, results by round, rounds run, whether the launch has ended.
_Loop = tuple[EngineState, Array, Array, Array]


def speculative_step(
    target_params: Params,
    proposer_params: ProposerParams,
    state: EngineState,
    plan: Int[Array, " plan"],
    *,
    config: ProgramConfig,
    shape: StepShape,
) -> tuple[EngineState, Int[Array, " result"]]:
    """Run one round, or several rounds of the same sequences.

    Decoding sequences get K drafts, one target pass over K + 1 positions, a verdict
    and up to K + 1 tokens. Prompt tiles share the target's pass; where a prompt ends,
    its first token is sampled. A draft-prefill launch runs the draft models alone, over
    prompts and other tokens that only the target has read. Rejected keys and values
    remain in their slots and are overwritten later: attention sees only the slots below
    a sequence's length.

    Args:
        proposer_params: Those of each proposer; None for one without, and in programs
            that do not use them (`used_arguments`), where its state is None as well.
        plan: `PlanLayout.pack` of this shape.

    Returns:
        The new state, and the vector that `StepResult.unpack` reads.
    """
    context = StepContext.read(config, shape, state, plan)
    if shape.is_draft_prefill:
        return _draft_prefill(context, proposer_params, state)
    state = dataclasses.replace(
        state, rows=context.rows, token_pages=context.token_pages
    )
    run = functools.partial(_run_round, target_params, proposer_params)
    if shape.max_rounds > 1:
        return _run_rounds(run, state, context)
    state, result = run(state, context)
    return state, jnp.concatenate(result_layout(shape).flatten(result))


def _run_round(
    target_params: Params,
    proposer_params: ProposerParams,
    state: EngineState,
    context: StepContext,
) -> tuple[EngineState, dict[str, Array]]:
    """Run one round; return the state after it, and the parts of its result."""
    active, shape = context.active, context.shape
    proposal, num_valid_drafts, proposers = _propose(
        context, target_params, proposer_params, state.proposers
    )
    target = TargetPass.of(context, target_params, state, num_valid_drafts)
    inputs = active.last_tokens[:, 1:]
    if proposal is not None:
        inputs = jnp.concatenate([inputs, proposal.tokens], axis=1)
    fewer = fewer_drafts(context.config.proposers, shape)
    if proposal is not None and fewer:
        verified = target.run_narrowest(fewer, proposal, inputs, state.target_pages)
    else:
        verified = target.run_and_verify(proposal, inputs, state.target_pages)

    new_tokens = verified.tokens
    if verified.tree_row is not None:
        new_tokens = new_tokens[:, : shape.tree.max_emitted]
    emitted = truncate(new_tokens, verified.num_accepted_nodes + 1, active)
    rows, token_pages = append(context.rows, context.token_pages, active, emitted)
    # Use only the new `token_pages` below: a later read of the old ones would force XLA
    # to copy the pool.
    context = dataclasses.replace(context, rows=rows, token_pages=token_pages)
    result = _result(emitted, verified, proposal, num_valid_drafts)
    if shape.max_prompt_tokens:
        context, first = _finish_prompts(context, verified)
        result |= first
    proposers = _observe(
        context,
        target_params,
        proposer_params,
        proposers,
        verified,
        result.get("tile_token"),
    )
    state = EngineState(
        rows=context.rows,
        token_pages=context.token_pages,
        target_pages=verified.pages,
        proposers=proposers,
        forced_acceptance=state.forced_acceptance,
    )
    return state, result


def _run_rounds(
    run: Callable[[EngineState, StepContext], tuple[EngineState, dict[str, Array]]],
    state: EngineState,
    context: StepContext,
) -> tuple[EngineState, Int[Array, " result"]]:
    """Run the plan's number of rounds, or up to the first that ends a sequence.

    Each round is the same as a launch of its own. The host must read the end of a
    sequence, or a NaN, before it can plan the next round.
    """
    shape, num_rounds = context.shape, context.fields["num_rounds"]
    assert not shape.max_prompt_tokens, "prompts need launches of one round"
    layout = result_layout(shape)

    def run_next(carry: _Loop) -> _Loop:
        state, results, index, _ = carry
        now = context.next_round(state)
        state, result = run(state, now)
        part = jnp.concatenate(layout.flatten(result))
        results = jax.lax.dynamic_update_index_in_dim(results, part, index, 0)
        has_news = result["is_done"] | result["is_broken"] | result["is_draft_broken"]
        is_active = now.active.is_active
        is_over = (has_news & is_active).any() | ~is_active.any()
        return state, results, index + 1, is_over

    state, results, num_run, _ = jax.lax.while_loop(
        lambda carry: (carry[2] < num_rounds) & ~carry[3],
        run_next,
        (
            state,
            jnp.zeros((shape.max_rounds, layout.size), jnp.int32),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        ),
    )
    return state, jnp.concatenate([num_run[None], results.reshape(-1)])


def _propose(
    context: StepContext,
    target: Params,
    params: ProposerParams,
    states: tuple[Any, ...],
) -> tuple[Proposal | None, Int[Array, " seq"], tuple[Any, ...]]:
    """Return the drafts, the number of valid ones, and the proposers' states."""
    active, proposer_context = context.active, context.for_proposers(target)
    proposal, new_states = None, []
    for proposer, own_params, state in zip(
        context.config.proposers, params, states, strict=True
    ):
        if context.shape.tree.num_nodes:
            proposal, state = proposer.propose(
                own_params, state, proposer_context, proposal
            )
        new_states.append(state)
    # The host may not know yet how few tokens are left before the maximum length:
    # drafts past it are padding.
    room = jnp.maximum(active.max_total - active.num_tokens - 1, 0)
    num_valid_drafts = jnp.minimum(context.fields["decode_wanted_levels"], room)
    if proposal is not None:
        num_valid_drafts = jnp.minimum(num_valid_drafts, proposal.num_valid_drafts)
    return proposal, num_valid_drafts, tuple(new_states)


def _draft_prefill(
    context: StepContext, params: ProposerParams, state: EngineState
) -> tuple[EngineState, Int[Array, " result"]]:
    """Prefill the draft models, and estimate the acceptance probability of drafts.

    The first proposer with a model gives the estimate; the others only prefill.
    """
    proposer_context = context.for_proposers(None)
    tiles, rows, num_rows = context.tiles, context.rows, context.pool.num_rows
    next_tokens = jnp.concatenate(
        [tiles.tokens[:, 1:], context.fields["tile_next_token"][:, None]], axis=1
    )
    is_known = tiles.is_token & (next_tokens != NO_TOKEN)
    is_known &= (tiles.row < num_rows)[:, None]
    # The user chose the tokens of the prompt, so they say nothing about acceptance:
    # only tokens after the prompt count.
    num_prompt = rows.num_prompt.at[tiles.row].get(mode="clip")
    is_known &= tiles.position + 1 >= num_prompt[:, None]
    active = gather(rows, context.token_pages, tiles.row).repeat(TILE)
    is_known &= active.is_active.reshape(is_known.shape)
    active = dataclasses.replace(active, num_tokens=tiles.position.reshape(-1) + 1)
    next_tokens = jnp.where(is_known, next_tokens, NO_TOKEN).reshape(-1)
    acceptance, new_states = None, []
    for proposer, own_params, state_before in zip(
        context.config.proposers, params, state.proposers, strict=True
    ):
        new_state, estimated = proposer.draft_prefill(
            own_params, state_before, proposer_context, active, next_tokens
        )
        acceptance = estimated if acceptance is None else acceptance
        new_states.append(new_state)
    assert acceptance is not None, "no proposer has a draft model"
    if state.forced_acceptance is not None:
        acceptance = force_one(state.forced_acceptance, active).astype(jnp.float32)
    acceptance = jnp.where(is_known.reshape(-1), acceptance, -1.0)
    state = dataclasses.replace(
        state,
        rows=rows,
        token_pages=context.token_pages,
        proposers=tuple(new_states),
    )
    result = {"acceptance_probabilities": acceptance.reshape(is_known.shape)}
    return state, jnp.concatenate(result_layout(context.shape).flatten(result))


def _observe(
    context: StepContext,
    target: Params,
    params: ProposerParams,
    states: tuple[Any, ...],
    verified: Verified,
    first_tokens: Int[Array, " tile"] | None,
) -> tuple[Any, ...]:
    """Pass the target's hidden states to the proposers that read them.

    Args:
        first_tokens: The token sampled after each tile that ends its prompt.

    Returns:
        The states of all proposers.
    """
    proposer_context, new_states = context.for_proposers(target), []
    shape = context.shape
    tiles, next_tile_tokens, first_row = context.tiles, None, None
    if first_tokens is not None:
        next_token = context.fields["tile_next_token"]
        next_token = jnp.where(tiles.is_last, first_tokens, next_token)
        next_tile_tokens = jnp.concatenate(
            [tiles.tokens[:, 1:], next_token[:, None]], 1
        )
        first_row = jnp.where(tiles.is_last, tiles.row, context.pool.num_rows)
    for proposer, own_params, state in zip(
        context.config.proposers, params, states, strict=True
    ):
        if isinstance(proposer, Observer):
            layers = proposer.target_layers
            seen = Seen(
                tuple(verified.streams[layer] for layer in layers),
                tuple(verified.tile_streams[layer] for layer in layers)
                if shape.max_prompt_tokens
                else None,
                shape.tree,
                verified.num_accepted_nodes,
                verified.tree_row,
                verified.tokens,
                next_tile_tokens,
                first_row,
            )
            state = proposer.observe(own_params, state, proposer_context, seen)
        new_states.append(state)
    return tuple(new_states)


def _result(
    emitted: Emitted,
    verified: Verified,
    proposal: Proposal | None,
    num_valid_drafts: Int[Array, " seq"],
) -> dict[str, Array]:
    is_draft_broken = None if proposal is None else proposal.is_broken
    if is_draft_broken is None:
        is_draft_broken = jnp.zeros_like(verified.is_broken)
    result = {
        "tokens": emitted.tokens,
        "num_emitted": emitted.num_emitted,
        "num_valid_drafts": num_valid_drafts,
        # A sequence that ends inside an accepted run keeps only the drafts before it.
        "num_accepted": jnp.minimum(verified.num_accepted, emitted.num_emitted),
        "is_done": emitted.is_done,
        "is_broken": verified.is_broken,
        "is_draft_broken": is_draft_broken,
    }
    if verified.tree_row is not None:
        result |= {
            "num_accepted_nodes": verified.num_accepted_nodes,
            "tree_row": verified.tree_row,
        }
    if verified.logprobs is not None:
        result["logprobs"] = verified.logprobs
    if verified.prompt_logprobs is not None:
        result["prompt_logprobs"] = verified.prompt_logprobs
    return result


def _finish_prompts(
    context: StepContext, verified: Verified
) -> tuple[StepContext, dict[str, Array]]:
    """Sample the first token of every prompt whose last tile has been read.

    Returns:
        The launch with these tokens, and their parts of the result.
    """
    tiles, rows, token_pages = context.tiles, context.rows, context.token_pages
    row = jnp.where(tiles.is_last, tiles.row, rows.num_tokens.shape[0])
    active = gather(
        rows,
        token_pages,
        row,
        num_tokens=tiles.start + tiles.length,
        all_greedy=context.shape.features.all_greedy,
    )
    ending = dataclasses.replace(context, active=active)
    adjust, backend = ending.adjuster(), context.backend
    logits = verified.tile_logits
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
    chosen = ending.logprob_ids()
    token_logprobs = logprobs.maybe_logprobs(
        logits, token[:, None], chosen, shape=context.shape, backend=backend
    )
    if token_logprobs is not None:
        result["tile_logprobs"] = token_logprobs[:, 0]
    rows, token_pages = append(rows, token_pages, active, emitted)
    context = dataclasses.replace(context, rows=rows, token_pages=token_pages)
    return context, result


@own_settings()
def lower_step(
    config: ProgramConfig,
    shape: StepShape,
    arguments: Arguments,
    *,
    name: str = "step",
) -> jax.stages.Lowered:
    """Trace one program ahead of time; `compile` makes an executable of it.

    The executable takes the two lists that `flatten` makes of its arguments, then the
    plan. It returns the new state, in the order of the second list, and the result.

    Args:
        arguments: The parameters and the state (or their abstract forms), whose
            placement the executable keeps.
        name: Shown in profiles, and part of the key of jax's cache.
    """
    size = PlanLayout(shape, config.pool).size
    whole = replicated(config.mesh)
    plan = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    abstract: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        used_arguments(config.proposers, shape, arguments),
    )
    of_params, of_state = map(jax.tree.structure, (abstract[:2], abstract[2]))

    def run(params, state, plan):
        target_params, proposer_params = jax.tree.unflatten(of_params, params)
        state = jax.tree.unflatten(of_state, state)
        state, result = speculative_step(
            target_params, proposer_params, state, plan, config=config, shape=shape
        )
        leaves, structure = jax.tree.flatten(state)
        assert structure == of_state, "the structure of the state changed"
        return leaves, result

    run.__name__ = name
    params, state = flatten(abstract)
    placement = [leaf.sharding for leaf in state]
    step = jax.jit(run, donate_argnums=(1,), out_shardings=(placement, whole))
    return step.lower(params, state, plan)

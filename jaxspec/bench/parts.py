"""Owns what the parts of a round cost on the device: drafts, target pass, verdict.

A round is one program, which nobody can stop half way. So its parts are compiled by
themselves and run over an engine's own state in the middle of decoding, with the same
functions that the round calls. They move no length, hence disturb nothing: what they
write lies behind the lengths, where the next round writes too. What a program costs
that only hands the state back is taken off.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.bench.measure import Batch
from jaxspec.config.engine import kv_widths
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import UnsupportedError
from jaxspec.jax_settings import own_settings
from jaxspec.models.network import build_network
from jaxspec.models.trimmed import EMBEDDING, HEAD, TOKEN_IDS
from jaxspec.program.forward import logits_of
from jaxspec.program.path import keep_path
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.region import make_region
from jaxspec.program.rows import Active, append, gather, truncate
from jaxspec.program.state import EngineState
from jaxspec.program.step import ProgramConfig
from jaxspec.program.tree import Tree, template_of
from jaxspec.program.walk import decide
from jaxspec.sharding import TARGET_MESH_AXES

# Tokens that every sequence has beyond its prompt when parts are timed.
FIRST_TOKENS = 4
CALLS = 20

Params = tuple[Any, Any]
# From parameters, state, rows and what earlier parts made.
Part = Callable[..., tuple[EngineState, Any]]
_request_ids = (f"parts-{number}" for number in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds that the parts of one round take.

    Attributes:
        num_draft_tokens: K, drafts one after the other; 0 is a plain round.
        num_nodes: Drafts fed to the target; more than K where some stand beside others.
        draft_s: The K passes of the draft model, and the lookup in the text.
        verify_s: The target's pass over the newest token and drafts of every sequence,
            to logits.
        accept_s: The verdict, its tokens written into the state, and keys and values
            moved where drafts from beside the chain have stayed.
        num_bytes: Weights, keys and values that these passes read.
        num_flops: Operations of their products with weights.
    """

    num_seqs: int
    num_draft_tokens: int
    num_nodes: int
    draft_s: float
    verify_s: float
    accept_s: float
    num_bytes: int
    num_flops: int

    @property
    def device_s(self) -> float:
        return self.draft_s + self.verify_s + self.accept_s

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity: below a device's ridge the memory sets the pace."""
        return self.num_flops / self.num_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "num_seqs": self.num_seqs,
            "num_draft_tokens": self.num_draft_tokens,
            "num_nodes": self.num_nodes,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "accept_s": self.accept_s,
            "num_bytes": self.num_bytes,
            "num_flops": self.num_flops,
            "bytes_per_s": self.num_bytes / max(self.device_s, 1e-9),
        }


@own_settings()
def measure_parts(
    engine: LLMEngine, batch: Batch, ladder: Sequence[int], *, calls: int = CALLS
) -> list[Parts]:
    """Time the parts of rounds with so many drafts, over all of a batch at once.

    Args:
        engine: Is idle, and is so again afterwards.
        batch: As many requests as can run at a time, at most.
        ladder: Values of K; 0 is a plain round.

    Raises:
        UnsupportedError: Several hosts have the model.
    """
    if engine.runner.followers is not None:
        raise UnsupportedError(
            "The parts of a round are programs beside the engine's, of which processes "
            "on other hosts do not hear: with nnodes above 1 they cannot be timed.",
            parameter="nnodes",
            value=len(engine.runner.followers) + 1,
        )
    ids = list(itertools.islice(_request_ids, len(batch.prompts)))
    try:
        for name, prompt, params in zip(ids, batch.prompts, batch.params, strict=True):
            # No request may end before the last one has begun: it may wait for a
            # program.
            endless = params.clone()
            endless.max_tokens, endless.ignore_eos = None, True
            engine.add_request(name, {"prompt_token_ids": prompt}, endless)
        running = engine.scheduler.running
        while engine.has_unfinished_requests():
            engine.step()
            least = min((r.stats.num_generation_tokens for r in running), default=0)
            if len(running) == len(ids) and least >= FIRST_TOKENS:
                break
        assert len(running) == len(ids), "requests ended before they could be timed"
        engine.wait_for_programs()  # they would share the processor
        rows = jnp.asarray([request.row for request in running], jnp.int32)
        kv_len = sum(
            one.num_prompt_tokens + one.stats.num_generation_tokens for one in running
        )
        return [_parts(engine, rows, k, kv_len=kv_len, calls=calls) for k in ladder]
    finally:
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()


def _parts(
    engine: LLMEngine, rows: Array, count: int, *, kv_len: int, calls: int
) -> Parts:
    config, timer = engine.runner.program, _Timer(engine, rows, calls)
    tree = tree_of(engine, count)
    empty_s, _ = timer.time(lambda params, state, rows: (state, rows))
    draft_s, proposal = empty_s, None
    if count:
        draft_s, proposal = timer.time(functools.partial(_draft, config, tree))
    verify = functools.partial(verify_part, config, tree)
    verify_s, logits = timer.time(verify, proposal)
    accept = functools.partial(accept_part, config, tree)
    accept_s, _ = timer.time(accept, (proposal, logits))
    return Parts(
        num_seqs=len(rows),
        num_draft_tokens=count,
        num_nodes=tree.num_nodes,
        draft_s=max(draft_s - empty_s, 0.0),
        verify_s=max(verify_s - empty_s, 0.0),
        accept_s=max(accept_s - empty_s, 0.0),
        num_bytes=round_bytes(engine, count, kv_len),
        num_flops=round_flops(engine, tree, len(rows)),
    )


def tree_of(engine: LLMEngine, num_draft_tokens: int) -> Tree:
    """The drafts of a round: the engine's tree where it is as deep, else a chain."""
    tree = template_of(engine.config.speculative)
    if tree is not None and tree.num_levels == num_draft_tokens:
        return tree
    return Tree.chain(num_draft_tokens)


def round_bytes(engine: LLMEngine, num_draft_tokens: int, kv_len: int) -> int:
    """Bytes that a round must read: each model's weights, keys and values, per pass.

    Args:
        kv_len: Positions of all sequences together.
    """
    target, proposers = engine.runner.params
    passes: list[tuple[Any, Any, int]] = [(engine.config.model_config, target, 1)]
    draft = engine.config.draft_model_config or engine.config.head_config
    speculative = engine.config.speculative
    has_one_pass = speculative is not None and speculative.method_info.has_one_pass
    drafted = min(num_draft_tokens, 1) if has_one_pass else num_draft_tokens
    passes += [(draft, own, drafted) for own in proposers if own is not None]
    widths = kv_widths(engine.config.kv_cache_dtype, engine.runner.dtype.itemsize)
    total = 0
    for model, params, count in passes:
        weights = sum(matrix.nbytes for matrix in _matrices(params))
        total += count * (weights + kv_len * model.kv_bytes_per_token(*widths))
    return total


def round_flops(engine: LLMEngine, tree: Tree, num_seqs: int) -> int:
    """Operations of a round: two for every weight and token, without attention."""
    target, proposers = engine.runner.params
    drafted = tree.num_levels
    if tree.has_side_paths and drafted:
        # Each pass after the first takes the whole tree.
        drafted = 1 + (drafted - 1) * tree.num_rows
    passes = [(target, tree.num_rows * num_seqs)]
    passes += [(own, drafted * num_seqs) for own in proposers if own is not None]
    return sum(
        2 * math.prod(matrix.shape) * tokens
        for params, tokens in passes
        for matrix in _matrices(params)
    )


def _matrices(params: Any) -> list[Any]:
    """What a pass multiplies by; of an embedding beside a head it reads single rows."""
    if {EMBEDDING, HEAD} <= params.keys():
        unread = EMBEDDING, TOKEN_IDS
        params = {name: one for name, one in params.items() if name not in unread}
    return jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "nbytes"))


def cost_ratio(engine: LLMEngine) -> float:
    """Bytes of a draft pass by bytes of a target pass: c where memory sets the pace."""
    target = round_bytes(engine, 0, 0)
    return (round_bytes(engine, 1, 0) - target) / target


class _Timer:
    """Runs parts over an engine's state."""

    def __init__(self, engine: LLMEngine, rows: Array, calls: int):
        self._runner, self._rows, self._calls = engine.runner, rows, calls

    def time(self, part: Part, *made: Any) -> tuple[float, Any]:
        """Median seconds of a part until the device has done it, and what it made.

        Args:
            made: By the parts before it.
        """
        runner, seconds, result = self._runner, [], None
        # The state is donated, as in a round: copies of all pages would be timed too.
        lowered = jax.jit(part, donate_argnums=(1,)).lower(
            runner.params, runner.state, self._rows, *made
        )
        program = lowered.compile(runner.compiler_options)
        for _ in range(self._calls + 1):
            jax.block_until_ready(runner.state)
            start = time.perf_counter()
            given = runner.params, runner.state, self._rows, *made
            runner.state, result = program(*given)
            jax.block_until_ready((runner.state, result))
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:]), result  # the first call of a program is slower


def _active(state: EngineState, rows: Array) -> Active:
    return gather(state.rows, state.token_pages, rows)


def _draft(
    config: ProgramConfig, tree: Tree, params: Any, state: EngineState, rows: Array
) -> tuple[EngineState, Proposal]:
    context = Context(
        active=_active(state, rows),
        token_pages=state.token_pages,
        tree=tree,
        wanted=jnp.full(rows.shape, tree.num_levels, jnp.int32),
        pool=config.pool,
        prompts=None,
        backend=config.backend,
        adjuster=lambda axes: None,
        target=params[0],
    )
    proposal, kept = None, []
    for one, own, before in zip(
        config.proposers, params[1], state.proposers, strict=True
    ):
        proposal, after = one.propose(own, before, context, proposal)
        kept.append(after)
    assert proposal is not None, "nobody proposes"
    return dataclasses.replace(state, proposers=tuple(kept)), proposal


def verify_part(
    config: ProgramConfig,
    tree: Tree,
    params: Params,
    state: EngineState,
    rows: Array,
    proposal: Proposal | None,
) -> tuple[EngineState, Array]:
    """The target's pass over the newest tokens and drafts, to logits."""
    active = _active(state, rows)
    tokens = active.last_tokens[:, 1:]
    if proposal is not None:
        tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
    region = make_region(
        tokens,
        active.num_tokens + tokens.shape[1] - 1,
        active.page_table,
        jnp.broadcast_to(active.is_active[:, None], tokens.shape),
        config.pool,
        tree=tree,
    )
    target = build_network(config.target, params[0], config.backend(TARGET_MESH_AXES))
    hidden, pages = target.hidden(region, state.target_pages)
    logits, _ = logits_of(target, hidden.rows, tokens.size)
    return dataclasses.replace(state, target_pages=pages), logits


def accept_part(
    config: ProgramConfig,
    tree: Tree,
    params: Params,
    state: EngineState,
    rows: Array,
    made: tuple[Proposal | None, Array],
) -> tuple[EngineState, Any]:
    """The verdict on drafts, its tokens written; the lengths that follow, and those."""
    proposal, logits = made
    active, backend = _active(state, rows), config.backend(TARGET_MESH_AXES)
    fed = active.last_tokens[:, 1:]
    if proposal is not None:
        fed = jnp.concatenate([fed, proposal.tokens], axis=1)
    decision = decide(
        tree,
        proposal,
        fed,
        logits,
        jnp.full_like(rows, tree.num_levels),
        active,
        backend,
        adjust=None,
        forced_acceptance=state.forced_acceptance,
        max_model_len=config.pool.max_model_len,
    )
    pages = keep_path(
        config.target,
        state.target_pages,
        tree,
        decision.row,
        active,
        config.pool,
        backend,
    )
    num_kept = jnp.asarray(tree.depths)[decision.row]
    emitted = truncate(decision.tokens, num_kept + 1, active)
    moved, token_pages = append(state.rows, state.token_pages, active, emitted)
    # The lengths that it would move to are told and forgotten.
    told = moved.num_tokens, moved.is_done, emitted
    state = dataclasses.replace(state, token_pages=token_pages, target_pages=pages)
    return state, told

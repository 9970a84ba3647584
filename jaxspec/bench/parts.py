"""Time the parts of a round on the device: drafting, target pass, verification.

A round is one program. Here its parts are compiled separately, from the functions that
the round calls, and run on an engine's state in the middle of decoding. The parts do
not change the lengths of sequences, so the next round overwrites what they wrote. The
time of a program that only returns the state is subtracted.
"""

import dataclasses
import functools
import itertools
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
from jaxspec.program.propose.proposal import Proposal, ProposerContext
from jaxspec.program.rows import Active, append, gather, truncate
from jaxspec.program.state import EngineState
from jaxspec.program.step_context import ProgramConfig
from jaxspec.program.target_pass import logits_of
from jaxspec.program.token_batch import make_token_batch
from jaxspec.program.tree.compact_kv import compact_kv
from jaxspec.program.tree.side_branches import follow_branches
from jaxspec.program.tree.tree import Tree, template_of
from jaxspec.program.verify import verify
from jaxspec.sharding import TARGET_MESH_AXES

# Minimum generated tokens of every sequence when parts are timed.
FIRST_TOKENS = 4
CALLS = 20
# Bytes to copy when bandwidth is measured: more than the caches of a CPU, a fraction of
# an accelerator's memory.
COPIED_BYTES = 256 * 2**20
COPY_REPEATS = 8

Params = tuple[Any, Any]
# A function of parameters, state, rows and the results of earlier parts.
Part = Callable[..., tuple[EngineState, Any]]
_request_ids = (f"parts-{number}" for number in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of the parts of one round.

    Attributes:
        num_draft_tokens: Depth of the draft (K); 0 means a plain round.
        num_nodes: Draft tokens per sequence; more than K with side branches.
        draft_s: Seconds of the proposers' passes and lookups.
        verify_s: Seconds of the target's pass, up to logits.
        accept_s: Seconds of acceptance, and of the update of the state.
        num_bytes: Bytes of weights, keys and values that these passes read.
    """

    num_seqs: int
    num_draft_tokens: int
    num_nodes: int
    draft_s: float
    verify_s: float
    accept_s: float
    num_bytes: int

    @property
    def device_s(self) -> float:
        return self.draft_s + self.verify_s + self.accept_s

    def as_json(self) -> dict[str, Any]:
        return {
            "num_seqs": self.num_seqs,
            "num_draft_tokens": self.num_draft_tokens,
            "num_nodes": self.num_nodes,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "accept_s": self.accept_s,
            "num_bytes": self.num_bytes,
            "bytes_per_s": self.num_bytes / max(self.device_s, 1e-9),
        }


@own_settings()
def measure_parts(
    engine: LLMEngine, batch: Batch, draft_lengths: Sequence[int], *, calls: int = CALLS
) -> list[Parts]:
    """Time the parts of rounds of each draft length (K), over a whole batch.

    Args:
        engine: Idle, before and after.
        batch: At most `max_num_seqs` requests.

    Raises:
        UnsupportedError: The engine spans several hosts.
    """
    if engine.runner.followers is not None:
        raise UnsupportedError(
            "Parts of a round cannot be timed with nnodes above 1: give --no-parts.",
            parameter="nnodes",
            value=len(engine.runner.followers) + 1,
        )
    ids = list(itertools.islice(_request_ids, len(batch.prompts)))
    try:
        for name, prompt, params in zip(ids, batch.prompts, batch.params, strict=True):
            # These requests have no end, so that none ends before the last one has
            # begun to decode.
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
        engine.wait_for_programs()  # compiling would share the processor
        rows = jnp.asarray([request.row for request in running], jnp.int32)
        kv_len = sum(
            one.num_prompt_tokens + one.stats.num_generation_tokens for one in running
        )
        return [
            _parts(engine, rows, k, kv_len=kv_len, calls=calls) for k in draft_lengths
        ]
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
    )


def tree_of(engine: LLMEngine, num_draft_tokens: int) -> Tree:
    """Return the engine's tree if it has this depth, else a chain."""
    tree = template_of(engine.config.speculative)
    if tree is not None and tree.num_levels == num_draft_tokens:
        return tree
    return Tree.chain(num_draft_tokens)


def round_bytes(engine: LLMEngine, num_draft_tokens: int, kv_len: int) -> int:
    """Return the bytes that a round's passes read: weights, keys and values.

    Args:
        kv_len: Total positions of all sequences.
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


def _matrices(params: Any) -> list[Any]:
    """Return the weights that a pass reads in full: all but an untied embedding."""
    if {EMBEDDING, HEAD} <= params.keys():
        unread = EMBEDDING, TOKEN_IDS
        params = {name: one for name, one in params.items() if name not in unread}
    return jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "nbytes"))


def cost_ratio(engine: LLMEngine) -> float:
    """Return bytes of a draft pass / a target pass: c if memory limits the speed."""
    target = round_bytes(engine, 0, 0)
    return (round_bytes(engine, 1, 0) - target) / target


class _Timer:
    """Times parts on an engine's state."""

    def __init__(self, engine: LLMEngine, rows: Array, calls: int):
        self._runner, self._rows, self._calls = engine.runner, rows, calls

    def time(self, part: Part, *made: Any) -> tuple[float, Any]:
        """Return the median seconds of a part on the device, and its result.

        Args:
            made: Results of earlier parts.
        """
        runner, seconds, result = self._runner, [], None
        # Donate the state, as a round does: otherwise a copy of all pages would be
        # timed too.
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
    context = ProposerContext(
        active=_active(state, rows),
        token_pages=state.token_pages,
        tree=tree,
        wanted_levels=jnp.full(rows.shape, tree.num_levels, jnp.int32),
        pool=config.pool,
        prompts=None,
        backend=config.backend,
        adjuster=lambda axes: None,
        target=params[0],
    )
    proposal, states = None, []
    for one, own, before in zip(
        config.proposers, params[1], state.proposers, strict=True
    ):
        proposal, after = one.propose(own, before, context, proposal)
        states.append(after)
    assert proposal is not None, "no proposer"
    return dataclasses.replace(state, proposers=tuple(states)), proposal


def verify_part(
    config: ProgramConfig,
    tree: Tree,
    params: Params,
    state: EngineState,
    rows: Array,
    proposal: Proposal | None,
) -> tuple[EngineState, Array]:
    """Run the target's pass over the newest tokens and drafts, up to logits."""
    active = _active(state, rows)
    tokens = active.last_tokens[:, 1:]
    if proposal is not None:
        tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
    region = make_token_batch(
        tokens,
        active.num_tokens + tokens.shape[1] - 1,
        active.page_table,
        jnp.broadcast_to(active.is_active[:, None], tokens.shape),
        config.pool,
        tree=tree,
        local_page_table=active.local_page_table,
    )
    target = build_network(config.target, params[0], config.backend(TARGET_MESH_AXES))
    output, pages = target.forward(region, state.target_pages)
    logits, _ = logits_of(target, output.hidden_states, tokens.size)
    return dataclasses.replace(state, target_pages=pages), logits


def accept_part(
    config: ProgramConfig,
    tree: Tree,
    params: Params,
    state: EngineState,
    rows: Array,
    made: tuple[Proposal | None, Array],
) -> tuple[EngineState, Any]:
    """Verify the drafts and write the accepted tokens; also return the new lengths."""
    proposal, logits = made
    active, backend = _active(state, rows), config.backend(TARGET_MESH_AXES)
    tokens = active.last_tokens[:, 1:]
    if proposal is not None:
        tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
    num_valid_drafts = jnp.full_like(rows, tree.num_levels)
    verdict = verify(
        proposal,
        logits,
        num_valid_drafts,
        active,
        backend,
        tree=tree,
        adjust=None,
        forced_acceptance=state.forced_acceptance,
    )
    decision = follow_branches(
        tree,
        verdict,
        tokens,
        logits,
        num_valid_drafts,
        active,
        backend,
        max_model_len=config.pool.max_model_len,
    )
    pages = compact_kv(
        config.target,
        state.target_pages,
        tree,
        decision.tree_row,
        active,
        config.pool,
        backend,
    )
    num_accepted_nodes = jnp.asarray(tree.depths)[decision.tree_row]
    emitted = truncate(decision.tokens, num_accepted_nodes + 1, active)
    moved, token_pages = append(state.rows, state.token_pages, active, emitted)
    # Return the new lengths, so that XLA computes them; the caller drops them.
    outputs = moved.num_tokens, moved.is_done, emitted
    state = dataclasses.replace(state, token_pages=token_pages, target_pages=pages)
    return state, outputs


@own_settings()
def copy_bandwidth(
    device: Any,
    *,
    num_bytes: int = COPIED_BYTES,
    repeats: int = COPY_REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the bytes/s, read plus written, of the fastest of several copies."""
    count = num_bytes // 4
    array = jax.device_put(jnp.ones(count, jnp.float32), device)
    # Negate in place: writing new memory would cost a CPU page faults. Not `copy`,
    # which XLA may elide.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    seconds = []
    for _ in range(repeats + 1):
        jax.block_until_ready(array)
        start = clock()
        array = jax.block_until_ready(negate(array))
        seconds.append(clock() - start)
    return 2 * 4 * count / min(seconds[1:])  # the first call includes compiling

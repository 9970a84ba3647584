"""The target's part of a round: one pass over drafts and prompts, and its verdict.

A program whose drafts are looked up may hold the pass in several widths. A round runs
the narrowest that has room for the drafts found: a plain pass if there are none.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import FREE_ROWS, Network, build_network
from jaxspec.models.params import Params
from jaxspec.program import logprobs
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import MAX_GROUP_BYTES, TILE, StepShape
from jaxspec.program.propose.proposal import NORMALISED, Proposal, Proposer
from jaxspec.program.state import EngineState, run_if
from jaxspec.program.step_context import StepContext
from jaxspec.program.token_batch import join_batches, make_token_batch
from jaxspec.program.tree.compact_kv import compact_kv
from jaxspec.program.tree.side_branches import follow_branches
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
from jaxspec_kernels.bits import KvPools

# Number of drafts of a narrow pass. Together with the newest token's row, they take no
# longer than the single row of a plain round.
FEW = FREE_ROWS - 1


class Verified(NamedTuple):
    """Results of a target pass, always padded to the width of the program's tree."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]  # on the main chain
    tree_row: Int[Array, " seq"] | None  # of the last accepted draft; None in a chain
    num_accepted_nodes: Int[Array, " seq"]  # accepted drafts, side branches included
    is_broken: Bool[Array, " seq"]  # NaN or infinity where a token was decided
    tile_logits: Float[Array, "tile vocab"]
    is_tile_broken: Bool[Array, " tile"]  # the same in the tile's last row
    logprobs: Int[Array, "seq width column"] | None
    prompt_logprobs: Int[Array, "tile token column"] | None
    # The residual stream after the layers that proposers read, by layer.
    streams: dict[int, Float[Array, "seq width model"]]
    tile_streams: dict[int, Float[Array, "tile token model"]]
    pages: KvPools


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """One pass of the target over the newest tokens, their drafts and prompts.

    Attributes:
        num_valid_drafts: Valid drafts of each sequence: columns at or past it are
            padding.
        prompts: Tiles that share the pass.
        adjust: Applies the requests' controls to logits; None without controls.
        logprob_ids: Token ids whose logprobs are always returned.
        forced_acceptance: For benchmarks: see `EngineState`.
    """

    context: StepContext
    target: Network
    num_valid_drafts: Int[Array, " seq"]
    prompts: TokenBatch | None
    adjust: Adjust | None
    logprob_ids: Int[Array, "seq id"] | None
    forced_acceptance: Float[Array, " probability"] | None

    @classmethod
    def of(
        cls,
        context: StepContext,
        params: Params,
        state: EngineState,
        num_valid_drafts: Int[Array, " seq"],
    ) -> "TargetPass":
        """Prepare the values that passes of every width share."""
        return cls(
            context=context,
            target=build_network(context.config.target, params, context.backend),
            num_valid_drafts=num_valid_drafts,
            prompts=context.prompts(),
            adjust=context.adjuster(),
            logprob_ids=context.logprob_ids(),
            forced_acceptance=state.forced_acceptance,
        )

    def run_and_verify(
        self,
        proposal: Proposal | None,
        inputs: Int[Array, "seq width"],
        pages: KvPools,
    ) -> Verified:
        """Run the target, and decide which drafts are accepted.

        Args:
            inputs: The newest token of each sequence, then its drafts.
        """
        context, target, prompts = self.context, self.target, self.prompts
        active, pool, shape = context.active, context.pool, context.shape
        seqs, width = inputs.shape
        tree = shape.tree
        if width < tree.num_rows:
            tree = Tree.chain(width - 1)
        is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
        is_used = is_written
        if tree.is_chain:
            column = jnp.arange(width, dtype=jnp.int32)[None]
            is_used &= column <= self.num_valid_drafts[:, None]
        kv_len = active.num_tokens + width - 1
        batches = [
            make_token_batch(
                inputs,
                kv_len,
                active.page_table,
                is_written,
                pool,
                tree=tree,
                local_page_table=active.local_page_table,
                is_used=is_used,
            )
        ]
        if prompts is not None:
            batches.append(prompts)
        output, pages = target.forward(join_batches(batches), pages)
        logits, tile_logits = logits_of(target, output.hidden_states, seqs * width)
        verdict = verify(
            proposal,
            logits,
            self.num_valid_drafts,
            active,
            context.backend,
            tree=tree,
            adjust=self.adjust,
            forced_acceptance=self.forced_acceptance,
        )
        new_tokens, num_accepted, tree_row = follow_branches(
            tree,
            verdict,
            inputs,
            logits,
            self.num_valid_drafts,
            active,
            context.backend,
            max_model_len=pool.max_model_len,
        )
        pages = compact_kv(
            target.config, pages, tree, tree_row, active, pool, context.backend
        )
        token_logprobs = logprobs.maybe_logprobs(
            logits, new_tokens, self.logprob_ids, shape=shape, backend=context.backend
        )
        num_rows = shape.tree.num_rows
        new_tokens = _widen(new_tokens, num_rows)
        token_logprobs = (
            None if token_logprobs is None else _widen(token_logprobs, num_rows)
        )
        prompt_logprobs = None
        if prompts is not None and shape.features.num_prompt_logprobs is not None:
            prompt_logprobs = logprobs.prompt_logprobs(
                target,
                output.hidden_states[seqs * width :],
                prompts.tokens,
                context.fields["tile_next_token"],
                shape=shape,
                backend=context.backend,
            )
        is_broken, is_tile_broken = _broken(output.is_finite, tree, tree_row)
        streams, tile_streams = {}, {}
        for layer in sorted(context.config.target_layers):
            stream = (
                output.hidden_states if layer == NORMALISED else output.streams[layer]
            )
            nodes, rest = jnp.split(stream, [seqs * width])
            nodes = _accepted_nodes(tree, tree_row, nodes.reshape(seqs, width, -1))
            streams[layer] = _widen(nodes, num_rows)
            tile_streams[layer] = rest.reshape(-1, TILE, nodes.shape[2])
        return Verified(
            tokens=new_tokens,
            num_accepted=num_accepted,
            tree_row=None if shape.tree.is_chain else tree_row,
            num_accepted_nodes=num_accepted
            if tree.is_chain
            else jnp.asarray(tree.depths)[tree_row],
            is_broken=is_broken,
            tile_logits=tile_logits,
            is_tile_broken=is_tile_broken,
            logprobs=token_logprobs,
            prompt_logprobs=prompt_logprobs,
            streams=streams,
            tile_streams=tile_streams,
            pages=pages,
        )

    def run_narrowest(
        self,
        fewer: tuple[int, ...],
        proposal: Proposal,
        inputs: Int[Array, "seq width"],
        pages: KvPools,
    ) -> Verified:
        """Call `run_and_verify` at the smallest width with room for all valid drafts.

        Args:
            fewer: `fewer_drafts` of the proposers.
        """
        shape = self.context.shape
        verified = self._no_result(inputs, pages)
        max_valid_drafts, smaller = self.num_valid_drafts.max(initial=0), -1
        for num_nodes in (*fewer, shape.tree.num_nodes):
            is_smallest = (max_valid_drafts > smaller) & (max_valid_drafts <= num_nodes)
            run = functools.partial(self._run_first, proposal, num_nodes)
            verified = run_if(is_smallest, run, verified)
            smaller = num_nodes
        return verified

    def _run_first(
        self, proposal: Proposal, num_nodes: int, before: Verified
    ) -> Verified:
        """Run the first drafts only.

        The tokens come from the state of the loop in `run_if`, so that XLA cannot hoist
        the computations on them and run them in every round.
        """
        return self.run_and_verify(
            proposal.first(num_nodes), before.tokens[:, : num_nodes + 1], before.pages
        )

    def _no_result(self, inputs: Int[Array, "seq width"], pages: KvPools) -> Verified:
        """Placeholders of the right shapes, replaced by the one pass that runs."""
        shape, model = self.context.shape, self.target.config
        layers = self.context.config.target_layers
        return Verified(
            tokens=inputs,
            num_accepted=jnp.zeros_like(self.num_valid_drafts),
            tree_row=None
            if shape.tree.is_chain
            else jnp.zeros_like(self.num_valid_drafts),
            num_accepted_nodes=jnp.zeros_like(self.num_valid_drafts),
            is_broken=jnp.zeros_like(self.context.active.is_active),
            is_tile_broken=jnp.zeros(0, bool),
            tile_logits=jnp.zeros((0, model.vocab_size), jnp.float32),
            logprobs=logprobs.empty_logprobs(inputs, shape=shape),
            prompt_logprobs=None,
            streams={
                layer: jnp.zeros((*inputs.shape, model.hidden_size)) for layer in layers
            },
            tile_streams={
                layer: jnp.zeros((0, TILE, model.hidden_size)) for layer in layers
            },
            pages=pages,
        )


def fewer_drafts(proposers: tuple[Proposer, ...], shape: StepShape) -> tuple[int, ...]:
    """Return the smaller numbers of drafts for which the program has passes as well.

    Each pass is as much code as the widest one, so there are few. Programs with prompts
    have no such passes.
    """
    tree = shape.tree
    if shape.max_prompt_tokens or not all(one.may_find_none for one in proposers):
        return ()
    has_few = any(one.may_find_few for one in proposers) and tree.num_nodes > 2 * FEW
    # Not for a tree: its first nodes are a chain, so a narrow pass would lose the side
    # branches.
    return (0, FEW) if has_few and tree.is_chain else (0,)


def logits_of(
    model: Network, hidden: Float[Array, "token model"], num_decode: int
) -> tuple[Float[Array, "decode vocab"], Float[Array, "tile vocab"]]:
    """Return the logits of all decode rows and of the last row of every tile.

    One product reads the matrix once. With hundreds of sequences the logits are larger
    than the matrix, and splitting them would copy them: then there are two products.
    """
    last = hidden[num_decode:].reshape(-1, TILE, hidden.shape[1])[:, -1]
    if last.shape[0] and 4 * num_decode * model.config.vocab_size > MAX_GROUP_BYTES:
        return model.logits(hidden[:num_decode]), model.logits(last)
    logits = model.logits(jnp.concatenate([hidden[:num_decode], last]))
    return logits[:num_decode], logits[num_decode:]


def _is_used(tree: Tree, tree_row: Int[Array, " seq"]) -> Bool[Array, "seq width"]:
    """Return which rows' logits decided tokens: those up to the last accepted draft."""
    if tree.is_chain:
        return jnp.arange(tree.num_rows)[None] <= tree_row[:, None]
    return jnp.asarray(tree.ancestor_mask)[tree_row]


def _accepted_nodes(
    tree: Tree, tree_row: Int[Array, " seq"], nodes: Float[Array, "seq width model"]
) -> Float[Array, "seq _ model"]:
    """Return the rows of the accepted drafts, in order; in a chain, all rows."""
    if tree.is_chain:
        return nodes
    path = jnp.asarray(tree.paths)[tree_row]
    return jnp.take_along_axis(nodes, path[:, :, None], axis=1)


def _broken(
    is_finite: Bool[Array, " token"], tree: Tree, tree_row: Int[Array, " seq"]
) -> tuple[Bool[Array, " seq"], Bool[Array, " tile"]]:
    """Return the sequences and tiles whose tokens NaN or infinity decided."""
    is_broken, seqs, width = ~is_finite, tree_row.shape[0], tree.num_rows
    decode = is_broken[: seqs * width].reshape(seqs, width)
    is_used = _is_used(tree, tree_row)
    tiles = is_broken[seqs * width :].reshape(-1, TILE)
    return (decode & is_used).any(axis=1), tiles[:, -1]


def _widen(array: Array, width: int) -> Array:
    """Pad the second dimension with zeros."""
    pads = [(0, 0), (0, width - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, pads)

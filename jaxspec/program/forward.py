"""The target's part of a round: one pass over drafts and prompts, and the verdict.

A round whose drafts are looked up has several forms in one program, and runs the
narrowest that has room for what was found: the plain one where that is nothing.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Network
from jaxspec.program import logprobs
from jaxspec.program.controls import Adjust
from jaxspec.program.path import keep_path
from jaxspec.program.plan import MAX_GROUP_BYTES, TILE, PoolShape, StepShape
from jaxspec.program.propose.proposal import NORMALISED, Proposal
from jaxspec.program.region import join, make_region
from jaxspec.program.rows import Active
from jaxspec.program.state import run_if
from jaxspec.program.tree import Tree
from jaxspec.program.walk import decide
from jaxspec_kernels.bits import KvPools

Pages = KvPools


class Verified(NamedTuple):
    """What the target made of a round; as wide as the tree, however many were fed."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]  # of the spine
    row: Int[Array, " seq"] | None  # of the last that stayed; None in a chain
    num_kept: Int[Array, " seq"]  # drafts that stayed, of the spine and beside it
    is_broken: Bool[Array, " seq"]  # NaN or infinity where a token was decided
    tile_logits: Float[Array, "tile vocab"]
    is_tile_broken: Bool[Array, " tile"]  # the same in the tile's last row
    logprobs: Int[Array, "seq width column"] | None
    prompt_logprobs: Int[Array, "tile token column"] | None
    # The residual stream after the layers that proposers look at, by layer.
    streams: dict[int, Float[Array, "seq width model"]]
    tile_streams: dict[int, Float[Array, "tile token model"]]
    pages: Pages


def forward(
    target: Network,
    pages: Pages,
    active: Active,
    proposal: Proposal | None,
    num_draft: Int[Array, " seq"],
    *,
    narrower: tuple[int, ...],
    target_layers: frozenset[int],
    prompts: TokenBatch | None,
    after_prompts: Int[Array, " tile"] | None,
    adjust: Adjust | None,
    backend: Backend,
    pool: PoolShape,
    shape: StepShape,
    chosen: Int[Array, "seq id"] | None = None,
    forced_acceptance: Float[Array, " chance"] | None = None,
) -> Verified:
    """Feed the newest tokens, their drafts and prompts in one pass, and verify.

    Args:
        num_draft: Drafts of each sequence that count.
        narrower: Numbers of drafts, fewer than the tree's, that a round has forms for,
            from the smallest: how many were found the device alone knows.
        target_layers: After how many layers proposers look at the residual stream.
        prompts: Tiles that ride along.
        after_prompts: The token after each tile's last, where prompts' logprobs
            are asked for.
        adjust: What requests ask of single tokens; None where none asks anything.
        chosen: Tokens whose log-probabilities are told whatever comes, where any are.
        forced_acceptance: Chance of each draft to stay; None lets the rules decide.
    """

    def run(
        proposal: Proposal | None, tokens: Int[Array, "seq width"], pages: Pages
    ) -> Verified:
        seqs, width = tokens.shape
        tree = shape.tree
        if width < tree.num_rows:
            tree = Tree.chain(width - 1)
        is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
        kv_len = active.num_tokens + width - 1
        batches = [
            make_region(tokens, kv_len, active.page_table, is_written, pool, tree=tree)
        ]
        if prompts is not None:
            batches.append(prompts)
        hidden, pages = target.hidden(join(batches), pages)
        logits, tile_logits = logits_of(target, hidden.rows, seqs * width)
        tokens, num_accepted, row = decide(
            tree,
            proposal,
            tokens,
            logits,
            num_draft,
            active,
            backend,
            adjust=adjust,
            forced_acceptance=forced_acceptance,
            max_model_len=pool.max_model_len,
        )
        pages = keep_path(target.config, pages, tree, row, active, pool, backend)
        told = logprobs.tell_some(logits, tokens, chosen, shape=shape, backend=backend)
        most = shape.tree.num_rows
        tokens = _widen(tokens, most)
        told = None if told is None else _widen(told, most)
        prompt_told = None
        if prompts is not None and after_prompts is not None:
            prompt_told = logprobs.tell_prompt(
                target,
                hidden.rows[seqs * width :],
                prompts.tokens,
                after_prompts,
                shape=shape,
                backend=backend,
            )
        is_broken, is_tile_broken = _broken(hidden.is_finite, tree, row)
        streams, tile_streams = {}, {}
        for layer in sorted(target_layers):
            stream = hidden.rows if layer == NORMALISED else hidden.streams[layer]
            nodes, rest = jnp.split(stream, [seqs * width])
            nodes = _along(tree, row, nodes.reshape(seqs, width, -1))
            streams[layer] = _widen(nodes, most)
            tile_streams[layer] = rest.reshape(-1, TILE, nodes.shape[2])
        return Verified(
            tokens=tokens,
            num_accepted=num_accepted,
            row=None if shape.tree.is_chain else row,
            num_kept=(num_accepted if tree.is_chain else jnp.asarray(tree.depths)[row]),
            is_broken=is_broken,
            tile_logits=tile_logits,
            is_tile_broken=is_tile_broken,
            logprobs=told,
            prompt_logprobs=prompt_told,
            streams=streams,
            tile_streams=tile_streams,
            pages=pages,
        )

    tokens = active.last_tokens[:, 1:]
    if proposal is not None:
        tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
    if proposal is None or not narrower or prompts is not None:
        return run(proposal, tokens, pages)
    verified = Verified(
        tokens=tokens,
        num_accepted=jnp.zeros_like(num_draft),
        row=None if shape.tree.is_chain else jnp.zeros_like(num_draft),
        num_kept=jnp.zeros_like(num_draft),
        is_broken=jnp.zeros_like(active.is_active),
        is_tile_broken=jnp.zeros(0, bool),
        tile_logits=jnp.zeros((0, target.config.vocab_size), jnp.float32),
        logprobs=logprobs.blank(tokens, shape=shape),
        prompt_logprobs=None,
        streams={
            layer: jnp.zeros((*tokens.shape, target.config.hidden_size))
            for layer in target_layers
        },
        tile_streams={
            layer: jnp.zeros((0, TILE, target.config.hidden_size))
            for layer in target_layers
        },
        pages=pages,
    )

    # The tokens fed come from the loop's state, so that XLA cannot take what is
    # computed from them out of the loop, and do it in every round.
    def feed(count: int, value: Verified) -> Verified:
        return run(proposal.first(count), value.tokens[:, : count + 1], value.pages)

    most, before = num_draft.max(initial=0), -1
    for count in (*narrower, shape.tree.num_nodes):
        is_wanted = (most > before) & (most <= count)
        verified = run_if(is_wanted, functools.partial(feed, count), verified)
        before = count
    return verified


def logits_of(
    model: Network, hidden: Float[Array, "token model"], num_decode: int
) -> tuple[Float[Array, "decode vocab"], Float[Array, "tile vocab"]]:
    """Logits of all decode rows and of the last row of every tile.

    In one product, so that the matrix is read once. Where the logits are the larger
    array, as of hundreds of sequences, in two: to part them is to copy them.
    """
    last = hidden[num_decode:].reshape(-1, TILE, hidden.shape[1])[:, -1]
    if last.shape[0] and 4 * num_decode * model.config.vocab_size > MAX_GROUP_BYTES:
        return model.logits(hidden[:num_decode]), model.logits(last)
    logits = model.logits(jnp.concatenate([hidden[:num_decode], last]))
    return logits[:num_decode], logits[num_decode:]


def _is_used(tree: Tree, row: Int[Array, " seq"]) -> Bool[Array, "seq width"]:
    """Rows that a sequence's tokens were decided by, up to the last that stayed."""
    if tree.is_chain:
        return jnp.arange(tree.num_rows)[None] <= row[:, None]
    return jnp.asarray(tree.ancestor_mask)[row]


def _along(
    tree: Tree, row: Int[Array, " seq"], nodes: Float[Array, "seq width model"]
) -> Float[Array, "seq _ model"]:
    """What belongs to accepted drafts, in order; of a chain all rows are."""
    if tree.is_chain:
        return nodes
    path = jnp.asarray(tree.paths)[row]
    return jnp.take_along_axis(nodes, path[:, :, None], axis=1)


def _broken(
    is_finite: Bool[Array, " token"], tree: Tree, row: Int[Array, " seq"]
) -> tuple[Bool[Array, " seq"], Bool[Array, " tile"]]:
    """Whether tokens were decided by what is no number, in sequences and tiles."""
    is_broken, seqs, width = ~is_finite, row.shape[0], tree.num_rows
    decode = is_broken[: seqs * width].reshape(seqs, width)
    is_used = _is_used(tree, row)
    tiles = is_broken[seqs * width :].reshape(-1, TILE)
    return (decode & is_used).any(axis=1), tiles[:, -1]


def _widen(part: Array, width: int) -> Array:
    """Pads after a round's tokens, up to as many as the tree has rows."""
    pads = [(0, 0), (0, width - part.shape[1])] + [(0, 0)] * (part.ndim - 2)
    return jnp.pad(part, pads)

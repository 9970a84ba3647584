"""The draft model proposes a chain: a first pass of two tokens, then one at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Hidden, Network
from jaxspec.program import randomness, sampling
from jaxspec.program.active import Active
from jaxspec.program.choose import choose_token, forbid_early_stop
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.ngram import Found
from jaxspec.program.propose.proposal import Proposal, chain
from jaxspec.program.region import join, make_region

Pages = tuple[Array, ...]


def prefill(model: Network, pages: Pages, tiles: TokenBatch) -> Pages:
    """Bring the draft's pages up to date with prompt tiles; nothing is proposed."""
    _, pages = model.hidden(tiles, pages)
    return pages


def propose(
    model: Network,
    pages: Pages,
    active: Active,
    tiles: TokenBatch | None,
    *,
    num_draft_tokens: int,
    pool: PoolShape,
    is_greedy: bool = False,
    found: Found | None = None,
    adjust: Adjust | None = None,
) -> tuple[Proposal, Pages]:
    """Draw `num_draft_tokens` tokens per sequence from the draft model.

    The first pass takes the two newest tokens, and prompt tiles ride along in it. The
    others are a loop: a program's size is what it takes to compile.

    Args:
        is_greedy: Propose the argmax, a point mass, also where the request samples.
        found: Drafts that the model is fed in place of its own, as far as they go.
        adjust: What requests ask of single tokens; None where none asks anything.
    """

    def draw(hidden: Hidden, step: Array | int, drafts: Array | None):
        position = active.num_tokens + step
        logits, is_broken = _finite_logits(model, hidden)
        if adjust is not None:
            logits = adjust(logits[:, None], drafts, num_before=step)[:, 0]
        logits = forbid_early_stop(logits, position, active)
        token, probs = sampling.argmax(logits), None
        if not is_greedy and not active.is_greedy:
            token, probs = choose_token(logits, position, active, role=randomness.DRAFT)
        if found is not None:
            token, probs = found.before(step, token, probs)
        return token, probs, is_broken

    seqs = active.row.shape[0]
    hidden, pages = model.hidden(_newest(active, tiles, pool), pages)
    newest = Hidden(hidden.rows[1 : 2 * seqs : 2], hidden.is_finite[1 : 2 * seqs : 2])
    # Only controls ask which drafts came before.
    drafts = None if adjust is None else jnp.zeros((seqs, num_draft_tokens), jnp.int32)
    token, probs, was_broken = draw(newest, 0, drafts)

    def extend(carry: tuple[Array, Pages, Array | None], step: Array):
        token, pages, drafts = carry
        if drafts is not None:
            drafts = drafts.at[:, step - 1].set(token)
        hidden, pages = model.hidden(_next(token, step, active, pool), pages)
        token, probs, is_broken = draw(hidden, step, drafts)
        return (token, pages, drafts), (token, probs, is_broken)

    steps = jnp.arange(1, num_draft_tokens, dtype=jnp.int32)
    (_, pages, _), (tokens, rest, is_broken) = jax.lax.scan(
        extend, (token, pages, drafts), steps
    )
    if probs is not None and rest is not None:
        probs = jnp.concatenate([probs[None], rest]).transpose(1, 0, 2)
    tokens = jnp.concatenate([token[None], tokens]).T
    return chain(tokens, probs, was_broken | is_broken.any(axis=0)), pages


def _finite_logits(model: Network, hidden: Hidden) -> tuple[Array, Array]:
    """Logits, and the rows that are NaN or infinite: theirs are those of zeros."""
    rows, is_finite = hidden
    return model.logits(jnp.where(is_finite[:, None], rows, 0)), ~is_finite


def _next(token: Array, step: Array, active: Active, pool: PoolShape) -> TokenBatch:
    """The draft before the one that is drawn in a step."""
    kv_len, is_written = active.num_tokens + step, active.is_active[:, None]
    return make_region(token[:, None], kv_len, active.page_table, is_written, pool)


def _newest(active: Active, tiles: TokenBatch | None, pool: PoolShape) -> TokenBatch:
    """The two newest tokens of every sequence, then the tiles.

    Two: after a fully accepted round the draft has no keys and values for the last
    draft token. Where it has them, the same values are written again.
    """
    tokens = active.last_tokens
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    first = make_region(tokens, active.num_tokens, active.page_table, is_written, pool)
    return first if tiles is None else join([first, tiles])

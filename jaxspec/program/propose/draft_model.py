"""The draft model proposes a chain: one pass a draft, each over two tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma2 import Gemma2, Hidden
from jaxspec.program import randomness, sampling
from jaxspec.program.active import Active
from jaxspec.program.choose import choose_token, forbid_early_stop
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose.ngram import Found
from jaxspec.program.propose.proposal import Proposal, chain
from jaxspec.program.region import make_region

Pages = tuple[Array, ...]


def prefill(model: Gemma2, pages: Pages, tiles: TokenBatch) -> Pages:
    """Bring the draft's pages up to date with prompt tiles; nothing is proposed."""
    _, pages = model.hidden(tiles, pages)
    return pages


def propose(
    model: Gemma2,
    pages: Pages,
    active: Active,
    num_draft: Int[Array, " seq"],
    *,
    max_draft_tokens: int,
    pool: PoolShape,
    is_greedy: bool = False,
    found: Found | None = None,
    adjust: Adjust | None = None,
) -> tuple[Proposal, Pages]:
    """Draw as many tokens as the sequence with the most drafts wants.

    One loop with one copy of the network in it, as the program's size is what it takes
    to compile. Every pass takes the two newest tokens, which the first one needs: after
    a fully accepted round the draft has no keys and values for the last draft token.
    Where it has them, the same values are written again.

    Args:
        num_draft: Drafts wanted of each sequence. The others are 0.
        max_draft_tokens: Columns of the proposal.
        is_greedy: Propose the argmax, a point mass, also where the request samples.
        found: Drafts that the model is fed in place of its own, as far as they go.
        adjust: What requests ask of single tokens; None where none asks anything.
    """
    seqs, vocab_size = active.row.shape[0], model.config.vocab_size
    is_certain = is_greedy or active.is_greedy

    def draw(hidden: Hidden, step: Array, drafts: Array):
        position = active.num_tokens + step
        logits, is_broken = _finite_logits(model, hidden)
        if adjust is not None:
            logits = adjust(logits[:, None], drafts, num_before=step)[:, 0]
        logits = forbid_early_stop(logits, position, active)
        token, probs = sampling.argmax(logits), None
        if not is_certain:
            token, probs = choose_token(logits, position, active, role=randomness.DRAFT)
        if found is not None:
            token, probs = found.before(step, token, probs)
        return token, probs, is_broken

    def extend(step: Array, carry: tuple[Pages, Array, Array, Array | None, Array]):
        pages, newest, drafts, every, was_broken = carry
        batch = _newest(newest, step, active, pool)
        hidden, pages = model.hidden(batch, pages)
        last = Hidden(hidden.rows[1::2], hidden.is_finite[1::2])
        token, probs, is_broken = draw(last, step, drafts)
        drafts = drafts.at[:, step].set(token)
        if every is not None:
            every = every.at[:, step].set(probs)
        newest = jnp.stack([newest[:, 1], token], axis=1)
        return pages, newest, drafts, every, was_broken | is_broken

    drafts = jnp.zeros((seqs, max_draft_tokens), jnp.int32)
    every = None if is_certain else jnp.zeros((*drafts.shape, vocab_size), jnp.float32)
    start = pages, active.last_tokens, drafts, every, jnp.zeros(seqs, bool)
    # At least one pass: the next round's takes no more than two tokens.
    num_passes = jnp.clip(num_draft.max(), 1, max_draft_tokens)
    carry = jax.lax.fori_loop(0, num_passes, extend, start)
    pages, _, drafts, every, is_broken = carry
    return chain(drafts, every, is_broken), pages


def _finite_logits(model: Gemma2, hidden: Hidden) -> tuple[Array, Array]:
    """Logits, and the rows that are NaN or infinite: theirs are those of zeros."""
    rows, is_finite = hidden
    return model.logits(jnp.where(is_finite[:, None], rows, 0)), ~is_finite


def _newest(
    tokens: Int[Array, "seq 2"], step: Array, active: Active, pool: PoolShape
) -> TokenBatch:
    """The two tokens before the draft that is drawn in a step."""
    is_written = jnp.broadcast_to(active.is_active[:, None], tokens.shape)
    kv_len = active.num_tokens + step
    return make_region(tokens, kv_len, active.page_table, is_written, pool)

"""Token masks that the host makes while a round runs.

Which tokens a grammar lets come next depends on the drafts before them, and those are
known on the device only, in the middle of the program. So the program asks: known
tokens and drafts go out, masks come back, as bits. What a grammar is, the host knows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config import MAX_DRAFT_TOKENS
from jaxspec.program import history
from jaxspec.program.active import Active

# Bits of one word of a mask.
WORD = 32
# The newest known tokens that go out with a question. Between two questions about a
# sequence lies one round, or two where the answer to one was never used.
WINDOW = 2 * (MAX_DRAFT_TOKENS + 1)

# (grammar id, known tokens, the newest of them, drafts) -> uint32[seq, draft + 1, word]
MaskSource = Callable[[Any, Any, Any, Any], Any]


def ask(
    source: MaskSource,
    grammar_id: Int[Array, " seq"],
    active: Active,
    token_pages: Int[Array, "page page_size"],
    drafts: Int[Array, "seq draft"],
    *,
    vocab_size: int,
) -> UInt32[Array, "seq width word"]:
    """Ask the host which tokens may come after the known ones, and after each draft.

    Args:
        grammar_id: 0 for a sequence without grammar, whose masks allow everything.
        vocab_size: Bit t of a mask, counted from the low end of its words, is token t.
    """
    seqs, num_drafts = drafts.shape
    offset = jnp.arange(WINDOW, dtype=jnp.int32)[None] - WINDOW
    position = active.num_tokens[:, None] + offset
    newest = history.read(token_pages, active.page_table, jnp.maximum(position, 0))
    words = -(-vocab_size // WORD)
    form = jax.ShapeDtypeStruct((seqs, num_drafts + 1, words), jnp.uint32)
    grammar_id = jnp.where(active.is_active, grammar_id, 0)
    return jax.pure_callback(
        source, form, grammar_id, active.num_tokens, newest, drafts
    )


def restrict(
    logits: Float[Array, "token vocab"],
    raw: Float[Array, "token vocab"],
    words: UInt32[Array, "token word"],
    axes: tuple[str, ...] | None = None,
) -> Float[Array, "token vocab"]:
    """Forbid what the masks leave out.

    A grammar outranks every other control: where those leave none of its tokens (a
    text that is complete before `min_tokens`, say), its tokens keep their raw logits.

    Args:
        logits: After all other controls.
        raw: Before them.
        axes: Mesh axes that split the vocabulary, inside `shard_map`.
    """
    vocab = logits.shape[1]
    first = 0 if axes is None else jax.lax.axis_index(axes) * vocab
    is_allowed = _unpack(words, first, vocab)
    kept = jnp.where(is_allowed, logits, -jnp.inf)
    is_left = (kept > -jnp.inf).any(axis=1)
    if axes is not None:
        is_left = jax.lax.pmax(is_left.astype(jnp.int32), axes) > 0
    return jnp.where(is_left[:, None] | ~is_allowed, kept, raw)


def _unpack(
    words: UInt32[Array, "token word"], first: int | Array, vocab: int
) -> Bool[Array, "token vocab"]:
    """Bits `first` to `first + vocab` of every row."""
    shift = jnp.arange(WORD, dtype=jnp.uint32)[None, None]
    bits = (words[:, :, None] >> shift) & 1 > 0
    return jax.lax.dynamic_slice_in_dim(
        bits.reshape(words.shape[0], -1), first, vocab, axis=1
    )

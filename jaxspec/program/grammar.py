"""Token masks that the host makes while a round runs.

Which tokens a grammar lets come next depends on the drafts before them, and those are
known on the device only, in the middle of the program. So the program asks: known
tokens and drafts go out, masks come back, as bits. What a grammar is, the host knows.

The draft model asks before each of its tokens: without, it would propose what cannot
be accepted. The target asks once, for all rows of a round.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.config.methods import MAX_DRAFT_TOKENS
from jaxspec.models.backend import Backend
from jaxspec.program import history
from jaxspec.program.controls import Adjust, unpack_bits
from jaxspec.program.rows import Active
from jaxspec.program.tree import Tree
from jaxspec_kernels import native

# Bits of one word of a mask.
WORD = 32
# The newest known tokens that go out with a question. Between two questions about a
# sequence lies one round, or two where the answer to one was never used.
WINDOW = 2 * Tree.chain(MAX_DRAFT_TOKENS).max_emitted

# (grammar id, known tokens, the newest of them, drafts, drafts before each row)
# -> uint32[seq, row, word]
MaskSource = Callable[[Any, Any, Any, Any, Any], Any]


def native_masks(*_: Any) -> NoReturn:
    """Stand for the process's own function as a `MaskSource`: it is called in C++.

    Programs that ask so name no object of a process, and can be kept on disk.
    """
    raise AssertionError("this function is called by name")


def has_native_masks(mesh: Mesh) -> bool:
    """Whether programs for these devices can ask by name."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return is_cpu and mesh.size == 1 and native.is_available()


def adjuster(
    source: MaskSource,
    grammar_id: Int[Array, " row"],
    token_pages: Int[Array, "page page_size"],
    active: Active,
    *,
    inner: Adjust | None,
    backend: Backend,
) -> Adjust:
    """A `controls.Adjust` that forbids what the grammars of sequences leave out.

    A grammar outranks the other controls: where those leave none of its tokens, they
    keep their raw logits.

    Args:
        grammar_id: By row of the state; 0 for none, which allows everything.
        inner: The other controls, which come first.
    """
    ids = grammar_id.at[active.row].get(mode="clip")
    ids = jnp.where(active.is_active, ids, 0)
    offset = jnp.arange(WINDOW, dtype=jnp.int32)[None] - WINDOW
    position = jnp.maximum(active.num_tokens[:, None] + offset, 0)
    newest = history.read(token_pages, active.page_table, position)

    def adjust(
        raw: Float[Array, "seq width vocab"],
        drafts: Int[Array, "seq draft"],
        num_before: Int[Array, ""] | int = 0,
    ) -> Float[Array, "seq width vocab"]:
        logits = raw
        if inner is not None:
            logits = inner(raw, drafts, num_before=num_before)
        before = num_before + jnp.arange(raw.shape[1], dtype=jnp.int32)
        words = -(-raw.shape[2] // WORD)
        form = jax.ShapeDtypeStruct((*raw.shape[:2], words), jnp.uint32)
        asked = ids, active.num_tokens, newest, drafts, before
        if source is native_masks:
            masks = native.masks.ask(form, *asked)
        else:
            masks = jax.pure_callback(source, form, *asked)
        return restrict(logits, raw, masks, backend=backend)

    return adjust


def restrict(
    logits: Float[Array, "seq width vocab"],
    raw: Float[Array, "seq width vocab"],
    masks: UInt32[Array, "seq width word"],
    *,
    backend: Backend,
) -> Float[Array, "seq width vocab"]:
    """Forbid what the masks leave out; of nothing that is left, keep the raw logits."""
    axes = backend.vocab_axes(logits.shape[2])
    rows, whole = PartitionSpec(None, None, axes), PartitionSpec()

    def run(logits: Array, raw: Array, masks: Array) -> Array:
        size = logits.shape[2]
        first = 0 if axes is None else jax.lax.axis_index(axes) * size
        is_allowed = unpack_bits(masks, first, size)
        kept = jnp.where(is_allowed, logits, -jnp.inf)
        is_left = (kept > -jnp.inf).any(axis=2, keepdims=True)
        if axes is not None:
            is_left = jax.lax.pmax(is_left.astype(jnp.int32), axes) > 0
        return jnp.where(is_left | ~is_allowed, kept, raw)

    return backend.split(run, (rows, rows, whole), rows)(logits, raw, masks)

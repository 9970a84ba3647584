"""Grammar masks, which the host computes while a round runs.

The tokens that a grammar allows next depend on the drafts before them, which exist only
on the device, in the middle of the program. So the program calls the host: it sends
known tokens and drafts and receives masks, as bits. Only the host knows the grammars.

The draft model requests a mask for each of its tokens: without it, it would propose
tokens that cannot be accepted. The target requests the masks of all rows of a round at
once.
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
from jaxspec.program.tree.tree import Tree
from jaxspec_kernels import native

# Bits of one word of a mask.
WORD = 32

# (grammar id, known tokens, the newest of them, drafts, drafts before each row)
# -> uint32[seq, row, word]
MaskSource = Callable[[Any, Any, Any, Any, Any], Any]


def native_masks(*_: Any) -> NoReturn:
    """Stand-in `MaskSource`: C++ calls the process's own function by name instead.

    A program with it refers to no Python object of a process, and can be cached on
    disk.
    """
    raise AssertionError("a placeholder: C++ calls the function by name")


def has_native_masks(mesh: Mesh) -> bool:
    """Return whether programs for these devices can call the mask source by name.

    One device of a CPU can. Elsewhere programs call the host by `jax.pure_callback`,
    through an object of their process, so no other process can load them; jax's own
    cache leaves such programs out as well.

    On several devices the operation would run once on each, and masks may differ from
    call to call: one that takes too long allows the end token only. Devices would then
    sample different tokens. `jax.pure_callback` calls the host on the first device
    alone. On GPUs and TPUs a named operation is code of the device, which cannot call
    Python.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return is_cpu and mesh.size == 1 and native.is_available()


def window_of(max_draft_tokens: int) -> int:
    """Return the number of newest known tokens sent with a request for masks.

    Two mask requests of a sequence are one round apart, or two rounds if the masks of
    the first request were never used.

    Args:
        max_draft_tokens: Maximum number of drafts in a round.
    """
    longest = max(max_draft_tokens, MAX_DRAFT_TOKENS)
    return 2 * Tree.chain(longest).max_emitted


def adjuster(
    source: MaskSource,
    grammar_id: Int[Array, " row"],
    token_pages: Int[Array, "page page_size"],
    active: Active,
    *,
    window: int,
    inner: Adjust | None,
    backend: Backend,
) -> Adjust:
    """Return a `controls.Adjust` that masks tokens that the grammars do not allow.

    A grammar takes precedence over the other controls: if those leave none of its
    tokens, these keep their raw logits.

    Args:
        grammar_id: By row of the state; 0 for none, which allows everything.
        window: See `window_of`.
        inner: The other controls, applied first.
    """
    ids = grammar_id.at[active.row].get(mode="clip")
    ids = jnp.where(active.is_active, ids, 0)
    offset = jnp.arange(window, dtype=jnp.int32)[None] - window
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
        request = ids, active.num_tokens, newest, drafts, before
        if source is native_masks:
            masks = native.masks.ask(form, *request)
        else:
            masks = jax.pure_callback(source, form, *request)
        return restrict(logits, raw, masks, backend=backend)

    return adjust


def restrict(
    logits: Float[Array, "seq width vocab"],
    raw: Float[Array, "seq width vocab"],
    masks: UInt32[Array, "seq width word"],
    *,
    backend: Backend,
) -> Float[Array, "seq width vocab"]:
    """Mask tokens; keep the raw logits of allowed tokens if none would be left."""
    axes = backend.vocab_axes(logits.shape[2])
    rows, whole = PartitionSpec(None, None, axes), PartitionSpec()

    def run(logits: Array, raw: Array, masks: Array) -> Array:
        size = logits.shape[2]
        first = 0 if axes is None else jax.lax.axis_index(axes) * size
        is_allowed = unpack_bits(masks, first, size)
        masked = jnp.where(is_allowed, logits, -jnp.inf)
        is_left = (masked > -jnp.inf).any(axis=2, keepdims=True)
        if axes is not None:
            is_left = jax.lax.pmax(is_left.astype(jnp.int32), axes) > 0
        return jnp.where(is_left | ~is_allowed, masked, raw)

    return backend.split(run, (rows, rows, whole), rows)(logits, raw, masks)

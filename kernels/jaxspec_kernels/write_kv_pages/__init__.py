"""Writing new keys and values into their pages."""

from jaxtyping import Array, Float, Int

from jaxspec_kernels import dispatch
from jaxspec_kernels.bits import KvPages

__all__ = ["copy_kv_rows", "write_kv_pages"]

# XLA's scatter is in place on every backend; the tests of compiled programs show it.
# Of a TPU the scales of int8 are written by a kernel.
_MODULES = dict.fromkeys(dispatch.IMPLEMENTATIONS, "reference") | {"tpu": "tpu"}


def write_kv_pages(
    kv_pages: KvPages,
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
    *,
    implementation: str | None = None,
) -> KvPages:
    """Return `kv_pages` with row t of `key` and `value` at `slot_mapping[t]`.

    In place when the caller donates `kv_pages`. Slots at or past the number of slots
    are pads and are not written; two equal slots must hold equal rows.

    Args:
        kv_pages: As of `paged_attention`.
        key: Brought to what the pages hold: cast, or quantized by itself.
        slot_mapping: page * page_size + offset; not negative, which jax would count
            from the end.
        implementation: A name to force; None is that of jax's default backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: The scales of pages of int8 are in lanes, and the size of
            pages is no power of two: a TPU's kernel finds no token there.
    """
    _check_shapes(kv_pages.shape, key.shape, value.shape, slot_mapping.shape)
    run = dispatch.choose("write_kv_pages", _MODULES, implementation)
    return run(kv_pages, key, value, slot_mapping)


def copy_kv_rows(
    kv_pages: KvPages,
    source: Int[Array, " slot"],
    target: Int[Array, " slot"],
    *,
    implementation: str | None = None,
) -> KvPages:
    """Return `kv_pages` with what is in slot `source[i]` in slot `target[i]`.

    All is read before anything is written. In place as `write_kv_pages` is, and with
    the same pads: what is copied to those goes nowhere, wherever it comes from.

    Args:
        source: Distinct targets may have one source.
        target: Two equal slots must have equal sources.
        implementation: A name to force; None is that of jax's default backend.
    """
    run = dispatch.choose("write_kv_pages", _MODULES, implementation, "copy_kv_rows")
    return run(kv_pages, source, target)


def _check_shapes(
    kv_pages: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    slot_mapping: tuple[int, ...],
) -> None:
    if len(kv_pages) != 4 or kv_pages[2] % 2:
        raise ValueError(
            f"kv_pages of shape {kv_pages}: [page, page_size, 2 * kv_head, head_dim] "
            "is needed, keys and values in turn"
        )
    rows = (*slot_mapping[:1], kv_pages[2] // 2, kv_pages[3])
    if len(slot_mapping) != 1 or key != rows or value != rows:
        raise ValueError(
            f"key {key}, value {value} and slot_mapping {slot_mapping} for pages "
            f"{kv_pages}: key and value must be [token, {kv_pages[2] // 2}, "
            f"{kv_pages[3]}], with one slot per token"
        )

"""Write new keys and values into their pages."""

from jaxtyping import Array, Float, Int

from jaxspec_kernels import dispatch
from jaxspec_kernels.bits import KvPages

__all__ = ["copy_kv_rows", "write_kv_pages"]

# No kernels for CPU and GPU: XLA's scatter writes in place on every backend, as tests
# of compiled programs show. On TPU a kernel writes the scales of int8 pages.
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

    In place if the caller donates `kv_pages`. Slots at or past the number of slots are
    padding and are not written; equal slots must get equal rows.

    Args:
        kv_pages: As in `paged_attention`.
        key: Converted to the type of the pages: cast, or each row quantized.
        slot_mapping: page * page_size + offset; not negative, which jax would count
            from the end.
        implementation: Name of one implementation; None selects that of jax's default
            backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: The scales of int8 pages are in lanes, and page_size is not
            a power of two, which the TPU kernel needs.
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
    """Return `kv_pages` with the content of slot `source[i]` in slot `target[i]`.

    All sources are read before anything is written. In place as in `write_kv_pages`;
    padding targets are not written.

    Args:
        source: Several targets may have the same source.
        target: Equal slots must have equal sources.
        implementation: Name of one implementation; None selects that of jax's default
            backend.
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
            f"kv_pages has shape {kv_pages}, but must be "
            "[page, page_size, 2 * kv_head, head_dim], with keys and values "
            "alternating on the third axis"
        )
    rows = (*slot_mapping[:1], kv_pages[2] // 2, kv_pages[3])
    if len(slot_mapping) != 1 or key != rows or value != rows:
        raise ValueError(
            f"key has shape {key}, value {value} and slot_mapping {slot_mapping}, but "
            f"for kv_pages of shape {kv_pages} key and value must be [token, "
            f"{kv_pages[2] // 2}, {kv_pages[3]}], and slot_mapping must be [token]"
        )

"""Call the backends of paged attention, for tests and mutants."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec_kernels.paged_attention import cpu, gpu, reference, tpu
from jaxspec_kernels.paged_attention.cases import Case
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles, choose_tiles, gpu_of
from tests.kernels.oracle import EXACT, SMALL, UNOPTIMISED, Call, build, error

# With the sizes of SMALL: four pages per block, and six blocks in the longest context.
BLOCK_TOKENS = 16
# SMALL has ten rows per head, which is one tile; 90 tokens are six blocks in three
# splits.
TILES = Tiles(rows=16, keys=16, splits=3)
# Interpreter settings: reads out of bounds raise, and uninitialized memory is NaN.
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
_SETTINGS = ("scale", "soft_cap", "window")
# Modules instead of functions, because a mutant replaces the function in its module.
BACKENDS = {"reference": reference, "cpu": cpu, "gpu": gpu, "tpu": tpu}
OWN: dict[str, dict[str, Any]] = {
    "reference": dict(block_tokens=BLOCK_TOKENS),
    "cpu": {},
    "gpu": dict(tiles=TILES, interpret=True),
    "tpu": dict(block_tokens=BLOCK_TOKENS, interpret=True),
}


def compiled(backend: str) -> Callable[..., jax.Array]:
    """Return a new jit of a backend, without cached traces."""
    options = UNOPTIMISED if backend in ("gpu", "tpu") else None
    return jax.jit(
        partial(BACKENDS[backend].paged_attention),
        static_argnames=(*_SETTINGS, *OWN[backend]),
        compiler_options=options,
    )


COMPILED = {name: compiled(name) for name in BACKENDS}


def run(
    backend: str,
    call: Call,
    *,
    arrays: tuple[Any, ...] | None = None,
    function: Callable[..., jax.Array] | None = None,
    **own: Any,
) -> np.ndarray:
    """Return a backend's result in float32.

    Args:
        arrays: Positional arguments that replace those of the call.
        function: Function to run instead of the shared jit.
        own: Changed arguments, of those that only this backend has.
    """
    result = (function or COMPILED[backend])(
        *(arrays or call.arrays),
        ancestor_mask=call.ancestor_mask,
        **call.settings,
        **OWN[backend] | own,
    )
    assert result.dtype == jnp.dtype(call.query_dtype)
    return np.asarray(result.astype(jnp.float32))


def count_reads(
    monkeypatch: pytest.MonkeyPatch, backend: str, call: Call
) -> list[int | None]:
    """Return a list of what a backend reads, by the unit of its reads.

    For each block (reference) or page (TPU) that is read the list has a None. For the
    GPU kernel it has the page id of each slot that is read.
    """
    reads: list[int | None] = []
    add = partial(jax.debug.callback, lambda: reads.append(None))
    read, load, make = reference.from_storage, gpu.plgpu.load, tpu.copy_page

    def counted_read(rows: Any) -> Any:
        add()
        return read(rows)

    def note(page: Any, mask: Any) -> None:
        reads.extend(np.broadcast_to(page, mask.shape)[mask].tolist())

    def counted_load(ref: Any, *, mask: Any = None, **settings: Any) -> Any:
        if ref.dtype == jnp.bfloat16:  # only loads of pages: the query is float32
            jax.debug.callback(note, ref.transforms[-1].indices[0], mask)
        return load(ref, mask=mask, **settings)

    class CountedCopy:
        def __init__(self, *places: Any):
            self.copy = make(*places)
            self.wait = self.copy.wait

        def start(self) -> None:
            add()
            self.copy.start()

    with monkeypatch.context() as patch:
        patch.setattr(reference, "from_storage", counted_read)
        patch.setattr(gpu.plgpu, "load", counted_load)
        patch.setattr(tpu, "copy_page", CountedCopy)
        result = run(backend, call, function=compiled(backend))
        jax.effects_barrier()
    assert error(call, result) <= EXACT
    return reads


def tiles_of(
    case: Case,
    *,
    itemsize: int = 2,
    is_tree: bool = False,
    device_kind: str | None = None,
) -> Tiles:
    """Return the tiles that the GPU kernel chooses."""
    return choose_tiles(
        (case.seqs, case.queries, case.q_heads, case.head_dim),
        (1, case.page_size, 2 * case.kv_heads, case.head_dim),
        table=-(-case.context // case.page_size),
        itemsize=itemsize,
        window=case.window,
        is_tree=is_tree,
        gpu=gpu_of(device_kind),
    )


def strict_case(window: int | None) -> Call:
    """Make a call with invalid page ids wherever the kernel must not read."""
    case = replace(SMALL, seqs=3, context=41, window=window)
    call = build(case, kv_len=[0, 41, 19])
    table = call.page_table.copy()
    for seq, length in enumerate(call.kv_len):
        first = 0 if window is None else max(length - 5 - window + 1, 0) // 4
        table[seq, :first] = table[seq, -(-length // 4) :] = 10**6
    return replace(call, page_table=table)


def run_strictly(call: Call, **changes: Any) -> np.ndarray:
    """Run the TPU kernel with the interpreter's checks."""
    try:
        return run("tpu", call, interpret=STRICT, **changes)
    finally:
        pltpu.reset_tpu_interpret_mode_state()

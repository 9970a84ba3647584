"""Compiles kernels for TPUs that are not there, with libtpu from PyPI.

`JAX_PLATFORMS=cpu python -m tests.kernels.aot_tpu` prints JSON, a case and chip a line.
"""

import contextlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jaxspec_kernels.paged_attention import tpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES, Case

# One chip of each kind, and the shape that says so.
CHIPS = {
    "v5e": ("v5e:1x1", (1, 1, 1)),
    "v5p": ("v5p:1x1x1", (1, 1, 1)),
    "v6e": ("v6e:1x1", (1, 1, 1)),
}
MISSING = None if importlib.util.find_spec("libtpu") else "libtpu is not installed"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says about one kernel in a program of its own."""

    chip: str
    vmem_bytes: int  # scoped: buffers, scratch and what Mosaic adds
    whole_copies: int  # operations that make an array as large as the pool
    compile_s: float


@cache
def sharding(chip: str) -> SingleDeviceSharding:
    """Placement on a chip that exists for the compiler only."""
    # No metadata server to ask, and other processes of a test run compile too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    name, shape = CHIPS[chip]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=shape
    )
    return SingleDeviceSharding(topology.devices[0])


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Neither read nor write compiled programs.

    jax stores an executable for a chip that is not there, and then fails to read it.
    """
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it was in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def compile_kernel(
    function: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    chip: str,
    *,
    pool: int,
) -> Compiled:
    """Compile a function with one Pallas kernel in it; `pool` is an argument's index.

    Raises:
        jax.errors.JaxRuntimeError: the compiler refuses it.
    """
    start = time.monotonic()
    with no_compilation_cache():
        text = jax.jit(function).lower(*shapes).compile().as_text()
    elapsed = time.monotonic() - start
    assert text is not None
    (call,) = (line for line in text.splitlines() if '"tpu_custom_call"' in line)
    used = re.search(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"',
        call,
    )
    assert used, call
    dimensions = ",".join(str(size) for size in shapes[pool].shape)
    made = re.findall(rf"= \(?\w+\[{dimensions}\]\S* ([\w-]+)\(", text)
    return Compiled(
        chip=chip,
        vmem_bytes=int(used[1]),
        whole_copies=sum(operation != "parameter" for operation in made),
        compile_s=round(elapsed, 2),
    )


def compile_attention(
    case: Case,
    chip: str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    block_tokens: int | None = None,
    has_tree: bool = False,
    is_row_major: bool = False,
) -> Compiled:
    """Compile `paged_attention` for a case; `is_row_major` fixes the pool's layout."""
    one = sharding(chip)
    shape = partial(jax.ShapeDtypeStruct, sharding=one)
    table_len = -(-case.context // case.page_size)
    pool = (case.seqs * table_len, case.page_size, 2 * case.kv_heads, case.head_dim)
    layout = Format(Layout((0, 1, 2, 3)), one) if is_row_major else one
    shapes = [
        shape((case.seqs, case.queries, case.q_heads, case.head_dim), dtype),
        jax.ShapeDtypeStruct(pool, dtype, sharding=layout),
        shape((case.seqs, table_len), jnp.int32),
        shape((case.seqs,), jnp.int32),
    ]
    if has_tree:
        shapes.append(shape((case.seqs, case.queries, case.queries), jnp.bool_))

    def attend(query, kv_pages, page_table, kv_len, mask=None):
        return tpu.paged_attention(
            query,
            kv_pages,
            page_table,
            kv_len,
            scale=case.scale,
            soft_cap=case.soft_cap,
            window=case.window,
            ancestor_mask=mask,
            block_tokens=block_tokens,
        )

    return compile_kernel(attend, shapes, chip, pool=1)


def main() -> None:
    """Compile every case for every chip."""
    for name, case in (CASES | REAL_CASES).items():
        for chip in CHIPS:
            print(json.dumps({"case": name, **asdict(compile_attention(case, chip))}))


if __name__ == "__main__":
    main()

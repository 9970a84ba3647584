"""Operations over paged KV memory, usable by any JAX engine.

Reading order: `paged_attention`, `write_kv_pages`, `rejection_sampling`,
`grouped_matmul` (quantized matrices), `panel_matmul` (matrix products on CPUs),
`decoder_blocks` (halves of a layer, on CPUs), `native` (their C++), then `dispatch`
(which implementation runs where) and `tuning` (measured tile sizes). Each operation is
a folder: the public function and its contract in `__init__`, the specification in plain
jnp in `reference`, and in `cases` the named shapes that tests and benchmarks share, if
any. `benchmarks/kernels` of the repository measures and tunes.
"""

from jaxspec_kernels.bits import storage_dtype
from jaxspec_kernels.grouped_matmul import grouped_matmul
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.panel_matmul import panel_matmul, panel_rows
from jaxspec_kernels.rejection_sampling import rejection_sampling
from jaxspec_kernels.write_kv_pages import copy_kv_rows, write_kv_pages

__all__ = [
    "copy_kv_rows",
    "grouped_matmul",
    "paged_attention",
    "panel_matmul",
    "panel_rows",
    "rejection_sampling",
    "storage_dtype",
    "write_kv_pages",
]

"""Operations over paged KV memory, usable by any JAX engine.

Reading order: `paged_attention`, `write_kv_pages`, then `dispatch` (which
implementation runs where). Each operation is a folder: the public function and its
contract in `__init__`, the specification in plain jnp in `reference`, and the named
shapes that tests and benchmarks share in `cases`.
"""

from jaxspec_kernels.bits import storage_dtype
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.write_kv_pages import write_kv_pages

__all__ = ["paged_attention", "storage_dtype", "write_kv_pages"]

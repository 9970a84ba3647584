"""Arrays that exceed a TPU's on-chip memories are errors with shape and limit."""

import jax.numpy as jnp
import pytest

from jaxspec_kernels.tpu_memory import SCOPED_VMEM_BYTES, check_vmem, vmem_bytes

V5E = "TPU v5 lite"


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 128), jnp.float32, 4096),
        # The last two axes fill tiles of 8 x 128.
        ((3, 9, 1), jnp.float32, 3 * 16 * 128 * 4),
        ((5,), jnp.int8, 8 * 128),
        ((2, 16, 256), jnp.bfloat16, 2 * 16 * 256 * 2),
    ],
)
def test_arrays_fill_whole_tiles(shape, dtype, expected):
    assert vmem_bytes(shape, dtype) == expected


def test_largest_array_beyond_the_limit_is_named():
    # 2 x 4 MiB, and 8 MiB: exactly the limit of a v5e.
    buffers = {
        "keys": ((8192, 128), jnp.float32, 2),
        "sums": ((16_384, 128), jnp.float32, 1),
    }
    check_vmem("attention", buffers, V5E)
    more = buffers | {"rest": ((1, 1), jnp.int8, 1)}
    message = "attention needs 16.0 MiB of VMEM, but a kernel on TPU v5 lite may use "
    message += r"16.0 MiB: keys has shape \(8192, 128\) of float32 and takes 8.0 MiB in"
    with pytest.raises(NotImplementedError, match=message):
        check_vmem("attention", more, V5E)
    assert SCOPED_VMEM_BYTES[V5E] == 16 * 2**20
    for kind in ("TPU v6 lite", "TPU7x", "TPU v99", None):
        check_vmem("attention", more, kind)

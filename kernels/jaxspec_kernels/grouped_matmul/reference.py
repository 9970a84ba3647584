"""Products of groups as one dot with a batch of groups, in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jaxspec_kernels.sums import row_sums


def grouped_matmul(
    inputs: Float[Array, "row features"],
    values: Num[Array, "group size out"],
    scales: Float[Array, "..."],
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.grouped_matmul`."""
    groups, size, _ = values.shape
    split = inputs.reshape(-1, groups, size)
    outputs = jax.lax.dot_general(  # [group, row, out]
        split,
        values.astype(inputs.dtype),
        (((2,), (1,)), ((1,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    has_minima = scales.ndim == 3
    outputs = outputs * (scales[0] if has_minima else scales)[:, None]
    if has_minima:
        sums = row_sums(split.astype(jnp.float32))  # [row, group, 1]
        outputs = outputs + sums.transpose(1, 0, 2) * scales[1][:, None]
    return outputs.sum(axis=0)

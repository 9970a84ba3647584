"""Products of rows with a matrix of few bits, with a scale per group of features."""

from jaxtyping import Array, Float, Num

from jaxspec_kernels import dispatch

__all__ = ["grouped_matmul"]

# XLA for a TPU or CPU multiplies groups as they are stored.
_MODULES = {"reference": "reference", "cpu": "reference", "tpu": "reference"}
_MODULES |= {"gpu": "gpu"}


def grouped_matmul(
    inputs: Float[Array, "row features"],
    values: Num[Array, "group size out"],
    scales: Float[Array, "..."],
    *,
    implementation: str | None = None,
) -> Float[Array, "row out"]:
    """Return float32 products of rows with a quantized matrix.

    A product is the sum over groups of `scale * sum(row * values)`, with minima plus
    `minimum * sum(row)`. Sums are float32.

    Args:
        inputs: Values are converted to this type, which must hold them exactly.
        values: int8, int4, uint4 or float8_e4m3fn.
        scales: float32, [group, out]; or [2, group, out]: scales and minima.
        implementation: Name of one implementation; None selects that of jax's default
            backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    groups, size, outputs = values.shape
    fits = inputs.shape[1] == groups * size and scales.shape[-2:] == (groups, outputs)
    if not fits or scales.shape[:-2] not in ((), (2,)):
        raise ValueError(
            f"inputs have shape {inputs.shape} and scales {scales.shape}, but for "
            f"values of shape {values.shape} they must be (rows, {groups * size}) and "
            f"({groups}, {outputs}), or (2, {groups}, {outputs}) with minima"
        )
    run = dispatch.choose("grouped_matmul", _MODULES, implementation)
    return run(inputs, values, scales)

"""Products of rows with a matrix that is kept as its processor wants to read it.

In panels: of `WIDTH` outputs, float32 values of one feature lie side by side, as
[panel, features, WIDTH]; bfloat16 values of two features do, in pairs, as
[panel, pair, WIDTH, 2]. Zeros fill the last panel, and the last pair.
"""

import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxspec_kernels import dispatch

__all__ = ["WIDTH", "from_panels", "panel_form"]
__all__ += ["panel_matmul", "panel_rows", "to_panels"]

# Outputs of one panel.
WIDTH = 32
_MODULES = {"reference": "reference", "cpu": "cpu"}


def panel_form(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The panels' shape, of an (out, features) matrix of 2 or 4 bytes a value."""
    count, features = -(-shape[0] // WIDTH), shape[1]
    return (
        (count, features, WIDTH)
        if itemsize == 4
        else (count, -(-features // 2), WIDTH, 2)
    )


def to_panels(values: np.ndarray) -> np.ndarray:
    """An (out, features) matrix in panels, on the host."""
    form = panel_form(values.shape, values.itemsize)
    whole = form[0] * WIDTH, form[1] * (2 if len(form) == 4 else 1)
    if values.shape != whole:
        missing = [
            (0, size - there) for size, there in zip(whole, values.shape, strict=True)
        ]
        values = np.pad(values, missing)
    split = values.reshape(form[0], WIDTH, *form[1:2], *form[3:])
    return np.ascontiguousarray(np.moveaxis(split, 1, 2))


def from_panels(panels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_panels`, of a matrix of this shape."""
    split = np.ascontiguousarray(np.moveaxis(panels, 2, 1))
    whole = split.reshape(panels.shape[0] * WIDTH, -1)
    return np.ascontiguousarray(whole[: shape[0], : shape[1]])


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Num[Array, "panel ..."],
    *,
    num_outputs: int,
    is_rounded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "row out"]:
    """Return float32 products of rows with the transposed (out, features) matrix.

    A row's bits do not depend on the rows beside it, on a CPU.

    Args:
        inputs: float32.
        panels: float32 or bfloat16, widened to float32 as they are read.
        num_outputs: The matrix's own, without those that fill the last panel.
        is_rounded: Rows are rounded to bfloat16 first, where the panels are bfloat16:
            processors have faster products of those.
        implementation: A name to force; None is that of jax's default backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, (num_outputs, inputs.shape[1]))
    run = dispatch.choose("panel_matmul", _MODULES, implementation)
    return run(inputs, panels, num_outputs=num_outputs, is_rounded=is_rounded)


def panel_rows(
    index: Int[Array, " row"],
    panels: Num[Array, "panel ..."],
    *,
    shape: tuple[int, ...],
    implementation: str | None = None,
) -> Float[Array, "row features"]:
    """Return some rows of the (out, features) matrix, in float32.

    Args:
        index: One beyond the last means the last, a negative one the first.
        shape: The matrix's own.
        panels, implementation: As of `panel_matmul`.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, shape)
    run = dispatch.choose("panel_matmul", _MODULES, implementation, "panel_rows")
    return run(index, panels, shape=shape)


def _check(panels: Array, shape: tuple[int, ...]) -> None:
    needed = panel_form(shape, panels.dtype.itemsize)
    if panels.shape != needed:
        raise ValueError(
            f"{panels.dtype} panels {panels.shape} for a matrix of {shape[0]} outputs "
            f"and {shape[1]} features: {needed} are needed, [panel, features, {WIDTH}] "
            f"of float32 or [panel, pair of features, {WIDTH}, 2] of bfloat16"
        )

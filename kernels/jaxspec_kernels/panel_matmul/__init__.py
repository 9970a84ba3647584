"""Products of rows with a matrix that is kept as its processor wants to read it.

In panels: of `WIDTH` outputs, float32 values of one feature lie side by side, as
[panel, features, WIDTH]; bfloat16 values of two features do, in pairs, as
[panel, features / 2, WIDTH, 2].
"""

import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxspec_kernels import dispatch

__all__ = ["WIDTH", "fits", "from_panels", "panel_form"]
__all__ += ["panel_matmul", "panel_rows", "to_panels"]

# Outputs of one panel.
WIDTH = 32
_MODULES = {"reference": "reference", "cpu": "cpu"}


def fits(shape: tuple[int, ...]) -> bool:
    """Whether an (out, features) matrix divides into panels."""
    return shape[0] % WIDTH == 0 and shape[1] % 2 == 0


def panel_form(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The panels' shape, of an (out, features) matrix of 2 or 4 bytes a value."""
    count, features = shape[0] // WIDTH, shape[1]
    return (
        (count, features, WIDTH) if itemsize == 4 else (count, features // 2, WIDTH, 2)
    )


def to_panels(values: np.ndarray) -> np.ndarray:
    """An (out, features) matrix in panels, on the host."""
    form = panel_form(values.shape, values.itemsize)
    split = values.reshape(form[0], WIDTH, *form[1:2], *form[3:])
    return np.ascontiguousarray(np.moveaxis(split, 1, 2))


def from_panels(panels: np.ndarray) -> np.ndarray:
    """The inverse of `to_panels`."""
    split = np.ascontiguousarray(np.moveaxis(panels, 2, 1))
    return split.reshape(panels.shape[0] * WIDTH, -1)


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Num[Array, "panel ..."],
    *,
    is_rounded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "row out"]:
    """Return float32 products of rows with the transposed (out, features) matrix.

    A row's bits do not depend on the rows beside it, on a CPU.

    Args:
        inputs: float32.
        panels: float32 or bfloat16, widened to float32 as they are read.
        is_rounded: Rows are rounded to bfloat16 first, where the panels are bfloat16:
            processors have faster products of those.
        implementation: A name to force; None is that of jax's default backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, inputs.shape[1])
    run = dispatch.choose("panel_matmul", _MODULES, implementation)
    return run(inputs, panels, is_rounded=is_rounded)


def panel_rows(
    index: Int[Array, " row"],
    panels: Num[Array, "panel ..."],
    *,
    implementation: str | None = None,
) -> Float[Array, "row features"]:
    """Return some rows of the (out, features) matrix, in float32.

    Args:
        index: One beyond the last means the last, a negative one the first.
        panels, implementation: As of `panel_matmul`.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, None)
    run = dispatch.choose("panel_matmul", _MODULES, implementation, "panel_rows")
    return run(index, panels)


def _check(panels: Array, features: int | None) -> None:
    pairs = 2 if panels.dtype.itemsize == 2 else 1
    tail = (WIDTH, 2)[:pairs]
    if panels.shape[2:] != tail or features not in (None, panels.shape[1] * pairs):
        raise ValueError(
            f"{panels.dtype} panels {panels.shape} for rows of {features} features: "
            f"[panel, features, {WIDTH}] of float32 or [panel, features / 2, {WIDTH}, "
            "2] of bfloat16 are needed, of as many features"
        )

"""Muon for matrices, Adam for other parameters: trains well in few steps.

References: Jordan et al. 2024, "Muon: an optimizer for hidden layers";
Kingma and Ba 2015, arXiv:1412.6980.
"""

from typing import Any

import jax
import jax.numpy as jnp

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
# Adam's learning rate / Muon's. Muon's is in units of a matrix's spectral norm.
ADAM_RATE = 0.15


def is_matrix(name: str) -> bool:
    """Return whether Muon updates a parameter: all matrices but the embedding."""
    return "_proj" in name


def init_moments(params: dict[str, jax.Array]) -> dict[str, Any]:
    return {
        "first": {name: jnp.zeros_like(value) for name, value in params.items()},
        "second": {
            name: jnp.zeros_like(value)
            for name, value in params.items()
            if not is_matrix(name)
        },
    }


def _dot(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    return jax.lax.dot_general(
        left.astype(jnp.bfloat16),
        right.astype(jnp.bfloat16),
        (((1,), (right_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """Approximate the nearest semi-orthogonal matrix by Newton-Schulz iterations."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (jnp.linalg.norm(wide) + 1e-7)
    for _ in range(5):
        gram = _dot(wide, wide, 1)
        polynomial = -4.7750 * gram + 2.0315 * _dot(gram, gram, 0)
        wide = 3.4445 * wide + _dot(polynomial, wide, 0)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def update(
    params: dict[str, jax.Array],
    moments: dict[str, Any],
    grads: dict[str, jax.Array],
    *,
    rate: jax.Array,
    step: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Make one optimizer step; `rate` is Muon's learning rate, `step` counts from 1."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
    clip = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    first, second, updated = {}, {}, {}
    for name, value in params.items():
        grad = grads[name] * clip
        if is_matrix(name):
            first[name] = MUON_MOMENTUM * moments["first"][name] + grad
            nesterov = grad + MUON_MOMENTUM * first[name]
            scale = max(1.0, value.shape[0] / value.shape[1]) ** 0.5
            decayed = value * (1.0 - 0.01 * rate)
            updated[name] = decayed - rate * scale * orthogonalize(nesterov)
            continue
        beta_1, beta_2 = ADAM_BETAS
        first[name] = beta_1 * moments["first"][name] + (1 - beta_1) * grad
        square = jnp.square(grad)
        second[name] = beta_2 * moments["second"][name] + (1 - beta_2) * square
        corrected = first[name] / (1 - beta_1**step)
        scale = jnp.sqrt(second[name] / (1 - beta_2**step)) + 1e-8
        updated[name] = value - ADAM_RATE * rate * corrected / scale
    return updated, {"first": first, "second": second}

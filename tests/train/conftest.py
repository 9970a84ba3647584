"""Fixtures of training tests: programs compiled without optimization."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def unoptimised_programs() -> Iterator[None]:
    """Compile with few optimizations, because compilation dominates these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def relaxed_promotion() -> Iterator[None]:
    """Relax jax's type promotion: optax mixes integer step counts with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield

"""Owns what tests of heads have in common: programs that are soon compiled."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def unoptimised_programs() -> Iterator[None]:
    """Compiling is what takes long in them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

"""Settings that only some tests of kernels ask for."""

import jax
import pytest


@pytest.fixture
def unoptimised():
    """For commands whose results matter: compiling is all that takes long in them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

"""Fixtures for some tests of kernels."""

import os

import hypothesis
import jax
import pytest

from jaxspec_kernels import native

# Profile of `test_native_builds.py`, which runs tests again with sanitizers.
THOROUGH = "thorough"
hypothesis.settings.register_profile(THOROUGH, deadline=None)


@pytest.fixture
def unoptimised():
    """Compile with few optimizations, for tests of results, not of speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def has_native(monkeypatch):
    """Skip tests if the C++ operations cannot be built."""
    if os.environ.get(native.VARIABLE, "").lower() == native.OFF:
        monkeypatch.setenv(native.VARIABLE, native.ON)
    if not native.is_available():
        pytest.skip("no native operations here: the log says why")

"""The settings of conftest.py have an effect; no other test would notice a loss."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.errors import KeyReuseError

import jaxspec_kernels


def test_eight_devices_are_simulated() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("the devices of an accelerator are not simulated")
    assert jax.device_count() == 8


def test_reused_keys_and_promotions_are_errors() -> None:
    key = jax.random.key(0)
    jax.random.uniform(key)
    with pytest.raises(KeyReuseError):
        jax.random.uniform(key)
    with pytest.raises(ValueError, match="rank_promotion"):
        _ = jnp.ones((2, 3)) + jnp.ones(3)
    with pytest.raises(ValueError, match="implicit dtype promotion"):
        _ = jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.int32)


@pytest.fixture(scope="module")
def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return pages, a row and slots, made before types are checked for `CHECKED_S`."""
    return jnp.zeros((2, 4, 2, 8)), jnp.zeros((1, 1, 8)), jnp.array([0, 1])


def test_wrong_shapes_are_errors(arrays: tuple[jax.Array, ...]) -> None:
    # One key/value row for two slots: without the check, a broadcast would write both.
    pages, row, slots = arrays
    with pytest.raises(jaxtyping.TypeCheckError, match="slot_mapping"):
        jaxspec_kernels.write_kv_pages(pages, row, row, slots)

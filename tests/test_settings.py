"""The settings of a test run have an effect; no other test would notice a loss."""

import os

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.errors import KeyReuseError

import jaxspec_kernels
from tests.support.processes import run_python
from tests.support.programs import QUICK_COMPILER, USERS_COMPILER, flags_of, users_flags


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


# Flags are read only once per process, so this runs in a new process.
CODE = """
from jaxlib import xla_client
print(xla_client.CompileOptions().SerializeAsString())
"""


def options_with(flags: list[str]) -> str:
    """Return XLA's compile options in a process with these flags."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    return run_python("-c", CODE, env=environment, check=True).stdout


def test_users_options_are_xlas_defaults():
    assert USERS_COMPILER.keys() == QUICK_COMPILER.keys()
    defaults = options_with([])
    assert options_with(flags_of(USERS_COMPILER)) == defaults
    assert options_with(flags_of(QUICK_COMPILER)) != defaults


def test_users_flags_exclude_the_tests_flags(monkeypatch):
    given = ["--xla_cpu_use_fusion_emitters=true", "--xla_dump_to=here"]
    flags = [given[0], *flags_of(QUICK_COMPILER), given[1]]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    assert users_flags().split() == given

"""A server that was killed is soon back, with what it had compiled."""

import os

import pytest

from benchmarks.restart import GOAL_S, measure
from tests.programs import quick_flags


@pytest.mark.slow
def test_a_killed_server_comes_back_with_its_programs(monkeypatch: pytest.MonkeyPatch):
    # The cache that the tests share is jax's own; here the server has one.
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert os.environ["JAX_PLATFORMS"]
    monkeypatch.setenv("XLA_FLAGS", quick_flags())
    few = ["--max-num-seqs", "1", "--num-speculative-tokens", "1"]
    found = measure([*few, "--max-num-batched-tokens", "32"])
    assert found["same_text"]
    assert found["warm_ready_s"] < min(GOAL_S, found["cold_ready_s"])

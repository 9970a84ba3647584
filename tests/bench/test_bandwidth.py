"""The copy's speed, with a clock whose ticks are known; ridges."""

import jax
import pytest

from jaxspec.bench.bandwidth import copy_bandwidth, ridge


def test_the_fastest_copy_counts():
    # Two readings a copy; the first is compiled and does not count.
    times = iter([0, 0.001, 10, 10.5, 20, 20.25, 30, 31])
    found = copy_bandwidth(
        jax.devices()[0], num_bytes=4096, repeats=3, clock=lambda: next(times)
    )
    assert found == pytest.approx(2 * 4096 / 0.25)


def test_a_copy_moves_bytes_at_a_speed_that_memory_has():
    speed = copy_bandwidth(jax.devices()[0], num_bytes=2**20, repeats=3)
    assert 1e7 < speed < 1e14


def test_a_ridge_is_of_a_known_device_in_bfloat16():
    assert ridge("NVIDIA H200", "bfloat16") == pytest.approx(206, abs=0.1)
    assert ridge("NVIDIA H200", "float32") is None
    assert ridge("cpu", "bfloat16") is None

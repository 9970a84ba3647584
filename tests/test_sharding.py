"""Logical axes are divided over mesh axes by whole units, or else replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.sharding import (
    DRAFT_MESH_AXES,
    MESH_AXES,
    TARGET_MESH_AXES,
    make_mesh,
    named_sharding,
    replicated,
)


@pytest.mark.parametrize(
    ("target", "draft", "shape"),
    [
        (1, None, (1, 1, 1)),
        (8, None, (1, 1, 8)),
        (8, 8, (1, 1, 8)),
        (8, 2, (1, 4, 2)),
        (8, 1, (1, 8, 1)),
        (4, 1, (1, 4, 1)),
    ],
)
def test_mesh_is_factored_for_the_draft(target, draft, shape):
    mesh = make_mesh(target, draft)
    assert mesh.axis_names == MESH_AXES
    assert mesh.devices.shape == shape
    assert list(mesh.devices.flat) == jax.devices()[:target]


def test_mesh_takes_the_given_devices_or_rejects_too_few():
    devices = jax.devices()[::-1]
    assert list(make_mesh(2, devices=devices).devices.flat) == devices[:2]
    expected = "tensor_parallel_size=3, but 2 cpu device.* lower it to at most 2"
    with pytest.raises(ConfigError, match=expected):
        make_mesh(3, devices=jax.devices()[:2])


@pytest.mark.parametrize("axis", ["vocab", "q_head", "kv_head", "hidden"])
def test_split_axes_span_the_target(axis):
    sharding = named_sharding(make_mesh(8, 2), (axis, "model"), (16, 4))
    assert sharding.spec == PartitionSpec(TARGET_MESH_AXES, None)
    assert sharding.shard_shape((16, 4)) == (2, 4)


def test_draft_is_split_only_over_the_model_axis():
    # 12 can be divided by the draft's two shards, but not by the target's eight.
    sharding = named_sharding(
        make_mesh(8, 2), ("model", "hidden"), (4, 12), mesh_axes=DRAFT_MESH_AXES
    )
    assert sharding.spec == PartitionSpec(None, DRAFT_MESH_AXES)
    assert sharding.shard_shape((4, 12)) == (4, 6)
    assert sharding.num_devices == 8


@pytest.mark.parametrize(
    ("size", "unit", "shard"),
    [
        (64, 8, 8),  # 8 heads of size 8 are divided: one per device
        (32, 8, 32),  # 4 heads cannot be divided by 8: replicated
        (96, 8, 96),  # 12 heads cannot be divided by 8: replicated
        (64, 1, 8),
        (60, 1, 60),
    ],
)
def test_units_stay_together_or_the_axis_is_replicated(size, unit, shard):
    sharding = named_sharding(make_mesh(8), ("kv_head",), (size,), unit=unit)
    assert sharding.shard_shape((size,)) == (shard,)


def test_shards_hold_consecutive_parts_or_whole_arrays():
    mesh = make_mesh(8, 2)
    rows = jnp.arange(16.0)
    placed = jax.device_put(rows, named_sharding(mesh, ("vocab",), (16,)))
    parts = {part.device: np.asarray(part.data) for part in placed.addressable_shards}
    # In the target's order of devices, copies of the same part of the draft model are
    # neighbours.
    order = mesh.devices.transpose(0, 2, 1)  # mesh axes: data, model, replica
    found = np.concatenate([parts[device] for device in order.flat])
    np.testing.assert_array_equal(found, rows)
    for axis in ("model", None):
        sharding = named_sharding(make_mesh(8), (axis,), (16,))
        assert sharding.spec == PartitionSpec(None)
    placed = jax.device_put(jnp.arange(6), replicated(mesh))
    assert [part.data.shape for part in placed.addressable_shards] == [(6,)] * 8

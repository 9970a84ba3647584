"""Operations over pages with scales in lanes, split over devices by heads.

Only TPUs store scales in lanes. Here the reference implementation runs on each device's
part, and the result is compared with scales by slot on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.backend import Backend
from jaxspec.models.batch import Region
from jaxspec.sharding import DRAFT_MESH_AXES, TARGET_MESH_AXES, make_mesh
from jaxspec_kernels.bits import ScaledPages, lanes_of, scaled_form, to_storage

PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, TOKENS = 6, 4, 8, 8, 5
Q_HEADS, SLOTS = 2 * KV_HEADS, PAGES * PAGE_SIZE


def of(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def by_slot() -> ScaledPages:
    pool = ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0))
    return to_storage(of(0, PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), pool)


def run(backend: Backend, pages: ScaledPages) -> tuple[ScaledPages, jax.Array]:
    """Write rows, copy some over others, and attend to all; return pages and result."""

    def step(pages: Any) -> tuple[Any, jax.Array]:
        key, value = (
            of(1, TOKENS, KV_HEADS, HEAD_DIM),
            of(2, TOKENS, KV_HEADS, HEAD_DIM),
        )
        at = jnp.asarray([9, 2, SLOTS, 23, 14], jnp.int32)
        pages = backend.write(pages, key, value, at, Q_HEADS)
        source, target = jnp.asarray([[23, 9, 5, SLOTS], [9, 17, 0, SLOTS]], jnp.int32)
        pages = backend.copy(pages, source, target, Q_HEADS)
        region = Region(
            page_table=jnp.asarray([[3, 0, 5, 2, 4]], jnp.int32),
            kv_len=jnp.asarray([19], jnp.int32),
            num_queries=2,
        )
        query = of(3, 1, 2, Q_HEADS, HEAD_DIM)
        settings: dict[str, Any] = dict(scale=0.3, soft_cap=5.0, window=None)
        return pages, backend.attend(query, pages, region, **settings)

    return jax.jit(step)(pages)


@pytest.mark.parametrize(
    ("devices", "draft_devices", "axes"),
    [
        pytest.param(2, 2, TARGET_MESH_AXES, marks=pytest.mark.slow),
        (8, 8, TARGET_MESH_AXES),
        (8, 4, DRAFT_MESH_AXES),
    ],
)
def test_each_device_has_the_lanes_of_its_own_heads(devices, draft_devices, axes):
    pages = by_slot()
    expected, attended = run(Backend(implementation="reference"), pages)
    mesh = make_mesh(devices, draft_devices)
    split = NamedSharding(mesh, PartitionSpec(None, None, axes))
    shape = jax.ShapeDtypeStruct(pages.shape, jnp.int8, sharding=split)
    form: Any = scaled_form(shape, "tpu")
    parts = draft_devices if axes == DRAFT_MESH_AXES else devices
    rows = 2 * KV_HEADS // parts
    # Each device has 128 lanes, of which its heads' rows use 8 to 32.
    assert form.scales.shape == (PAGES, 1, 128 * parts)
    lanes = np.full(form.scales.shape, np.nan, np.float32)
    offsets = jnp.arange(PAGE_SIZE, dtype=jnp.int32)
    own = np.asarray(lanes_of(offsets, PAGE_SIZE, rows))  # [offset, row of a device]
    for row in range(2 * KV_HEADS):
        place = 128 * (row // rows) + own[:, row % rows]
        lanes[:, 0, place] = pages.scales[:, :, row]
    given = ScaledPages(
        jax.device_put(pages.values, form.values.sharding),
        jax.device_put(lanes, form.scales.sharding),
        is_in_lanes=True,
    )
    backend = Backend(implementation="reference", mesh=mesh, mesh_axes=axes)
    found, said = run(backend, given)
    np.testing.assert_array_equal(found.values, expected.values)
    scales = np.asarray(found.scales)
    for row in range(2 * KV_HEADS):
        place = 128 * (row // rows) + own[:, row % rows]
        np.testing.assert_array_equal(scales[:, 0, place], expected.scales[:, :, row])
    # Programs differ, so that sums may be rounded differently.
    np.testing.assert_allclose(said, attended, atol=1e-6)

"""Keys and values are written to their slots, and nothing else changes."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import config

from jaxspec_kernels import copy_kv_rows, write_kv_pages
from jaxspec_kernels.bits import ScaledPages, to_storage
from jaxspec_kernels.write_kv_pages import reference, tpu
from jaxspec_kernels.write_kv_pages.cases import CASES, Case
from tests.kernels.oracle import in_lanes
from tests.support.programs import READERS_COMPILER

# One empty pool of every storage type.
POOLS: dict[str, Any] = {
    name: jnp.zeros(0, name)
    for name in ("float32", "bfloat16", "uint16", "uint8", "float8_e4m3fn")
}
POOLS["int8"] = ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0))

write = jax.jit(write_kv_pages)


def build(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Return full pages, new rows, and distinct slots for the rows."""
    rng = np.random.default_rng(seed)
    num_slots = case.pages * case.page_size
    shape = (case.pages, case.page_size, 2 * case.kv_heads, case.head_dim)
    rows = (case.tokens, case.kv_heads, case.head_dim)
    return dict(
        kv_pages=rng.normal(size=shape).astype(np.float32),
        key=rng.normal(size=rows).astype(np.float32),
        value=rng.normal(size=rows).astype(np.float32),
        slot_mapping=rng.permutation(num_slots)[: case.tokens].astype(np.int32),
    )


def kept_as(pool: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(pool))


def stored(values: np.ndarray, storage: str) -> Any:
    """Return values as a pool with this storage type represents them."""
    if storage == "uint16":
        return jnp.asarray(values.astype(jnp.bfloat16).view(np.uint16))
    if storage in ("float32", "bfloat16"):
        return jnp.asarray(values.astype(jnp.dtype(storage)))
    return to_storage(jnp.asarray(values), POOLS[storage])


def oracle(given: dict[str, np.ndarray], storage: str) -> list[np.ndarray]:
    """Return the pool after one assignment per token, in numpy."""
    rows = np.stack([given["key"], given["value"]], axis=2)
    rows = kept_as(stored(rows.reshape(len(rows), -1, rows.shape[3]), storage))
    pool = [part.copy() for part in kept_as(stored(given["kv_pages"], storage))]
    for part, new in zip(pool, rows, strict=True):
        page_size = part.shape[1]
        for slot, row in zip(given["slot_mapping"], new, strict=True):
            if slot < len(part) * page_size:
                part[slot // page_size, slot % page_size] = row
    return pool


# Cases by page size times heads: 8 rows share 128 lanes; 2 or 6 do not fill them; 32
# need four times 128. Also more tokens than the kernel takes in a step, and pages
# longer than 128 lanes.
LANE_CASES = [
    Case(tokens=7, pages=5, page_size=4, kv_heads=2, head_dim=8),
    Case(tokens=40, pages=20, page_size=16, kv_heads=4, head_dim=8),
    Case(tokens=1, pages=6, page_size=16, kv_heads=1, head_dim=8),
    Case(tokens=33, pages=6, page_size=16, kv_heads=3, head_dim=8),
    Case(tokens=300, pages=40, page_size=16, kv_heads=16, head_dim=8),
    Case(tokens=90, pages=2, page_size=256, kv_heads=1, head_dim=8),
]
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def lane_pools(case: Case) -> tuple[ScaledPages, dict[str, jax.Array]]:
    """Return int8 pages with scales by slot, and rows to write; one key is NaN."""
    given = build(case)
    pages = stored(given.pop("kv_pages"), "int8")
    given["key"][0, 0, 0] = np.nan
    # Some slots are padding, and one is far past the end.
    num_slots = case.pages * case.page_size
    given["slot_mapping"][2::5] = num_slots + given["slot_mapping"][2::5]
    given["slot_mapping"][3::20] = 2**31 - 1
    return pages, {name: jnp.asarray(value) for name, value in given.items()}


def check_same(found: Any, by_slot: ScaledPages) -> None:
    """Check that pools with scales in lanes and by slot hold the same numbers.

    Unused lanes may hold anything.
    """
    assert found.is_in_lanes
    # NaN has no fixed value as an integer, as it depends on how XLA vectorises.
    is_number = np.isfinite(by_slot.scales)
    values, expected = (np.asarray(one.values) for one in (found, by_slot))
    np.testing.assert_array_equal(values[is_number], expected[is_number])
    used = by_slot.scales[0].size
    expected = in_lanes(by_slot).scales
    np.testing.assert_array_equal(found.scales[..., :used], expected[..., :used])


def run_by(backend: str, name: str, interpret: Any = True) -> Any:
    """Return an operation of the reference, or of the interpreted TPU kernel."""
    if backend == "tpu":
        return jax.jit(partial(getattr(tpu, name), interpret=interpret))
    return jax.jit(getattr(reference, name))


# `make test` has a single row, several steps, and pages of more than 128 lanes.
QUICK_LANE_CASES = [LANE_CASES[number] for number in (2, 4, 5)]
LATER_LANE_CASES = [
    pytest.param(LANE_CASES[number], marks=pytest.mark.slow) for number in (0, 1, 3)
]


@pytest.mark.parametrize(
    ("backend", "case", "is_twice"),
    [
        *(("tpu", case, False) for case in QUICK_LANE_CASES),
        *(
            pytest.param("tpu", *case.values, False, marks=case.marks)
            for case in LATER_LANE_CASES
        ),
        ("tpu", LANE_CASES[1], True),
        ("reference", LANE_CASES[1], True),
        *(
            pytest.param("reference", case, False, marks=pytest.mark.slow)
            for case in LANE_CASES
        ),
    ],
    ids=str,
)
def test_scales_in_lanes_are_written_as_those_by_slot(case, is_twice, backend):
    """Two rows may write equal numbers to the same slot."""
    pages, given = lane_pools(case)
    expected = run_by("reference", "write_kv_pages")(pages, **given)
    if is_twice:
        given = {name: jnp.concatenate([rows, rows]) for name, rows in given.items()}
    check_same(run_by(backend, "write_kv_pages")(in_lanes(pages), **given), expected)


@pytest.mark.parametrize("case", [*QUICK_LANE_CASES, *LATER_LANE_CASES], ids=str)
@pytest.mark.parametrize("backend", ["by slot", "reference", "tpu"])
def test_rows_are_copied_slot_by_slot(case, backend):
    """All rows are read before any is written: a slot may be both source and target."""
    pages, given = lane_pools(case)
    num_slots = case.pages * case.page_size
    source = np.random.default_rng(1).integers(0, num_slots, case.tokens)
    source[1::7] = num_slots
    target = np.where(source < num_slots, given["slot_mapping"], num_slots)
    expected = [np.array(one) for one in (pages.values, pages.scales)]
    for part in expected:
        before, slots = part.copy(), part.reshape(num_slots, *part.shape[2:])
        rows = before.reshape(slots.shape)
        for of, to in zip(source, target, strict=True):
            if to < num_slots:
                slots[to] = rows[of]
    moves = [jnp.asarray(one, jnp.int32) for one in (source, target)]
    by_slot = ScaledPages(jnp.asarray(expected[0]), jnp.asarray(expected[1]))
    if backend == "by slot":
        found = run_by("reference", "copy_kv_rows")(pages, *moves)
        for one, other in zip(kept_as(found), kept_as(by_slot), strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        check_same(run_by(backend, "copy_kv_rows")(in_lanes(pages), *moves), by_slot)


def test_rejects_page_size_that_is_no_power_of_two():
    """Bit operations compute a lane from a slot."""
    case = Case(tokens=3, pages=4, page_size=6, kv_heads=2, head_dim=8)
    pages, given = lane_pools(case)
    slots = given["slot_mapping"]
    lanes, error = in_lanes(pages), "page_size 6: .* power of two"
    with pytest.raises(NotImplementedError, match=error):
        write_kv_pages(lanes, **given, implementation="tpu")
    with pytest.raises(NotImplementedError, match=error):
        copy_kv_rows(lanes, slots, slots, implementation="tpu")


def test_scale_kernels_have_no_race_and_no_access_out_of_bounds(capfd):
    pages, given = lane_pools(LANE_CASES[0])
    slots = given["slot_mapping"]
    expected = run_by("reference", "write_kv_pages")(pages, **given)
    source = jnp.arange(LANE_CASES[0].tokens, dtype=jnp.int32)
    moved = run_by("reference", "copy_kv_rows")(expected, source, slots)
    try:
        found = run_by("tpu", "write_kv_pages", STRICT)(in_lanes(pages), **given)
        check_same(jax.block_until_ready(found), expected)
        found = run_by("tpu", "copy_kv_rows", STRICT)(found, source, slots)
        check_same(jax.block_until_ready(found), moved)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in capfd.readouterr().out


ONE_ROW = Case(tokens=1, pages=40, page_size=16, kv_heads=2, head_dim=8)
WRITES: list[tuple[Case, dict[int, int]]] = [
    *((case, {}) for case in CASES.values()),
    # Padding slots are ignored, whatever their number.
    (CASES["tiny/verify"], {0: 640, 3: 641, 5: 2**31 - 1}),
    # A single row is written by code of its own. Slot 639 is the last, 640 is padding.
    *((ONE_ROW, {0: slot}) for slot in (0, 17, 639, 640)),
]


# The sizes of a call do not change how a type is stored, so `make test` has all sizes
# in one type only.
@pytest.mark.parametrize(
    ("case", "slots", "storage"),
    [
        pytest.param(
            *write,
            storage,
            marks=[pytest.mark.slow] * (not write[1] and storage != "float32"),
        )
        for write in WRITES
        for storage in POOLS
    ],
    ids=str,
)
def test_writes_equal_assignments(case, slots, storage):
    given = build(case)
    for token, slot in slots.items():
        given["slot_mapping"][token] = slot
        if slot >= case.pages * case.page_size:
            given["key"][token] = np.nan
    arrays = [jnp.asarray(given[name]) for name in ("key", "value", "slot_mapping")]
    pages = stored(given["kv_pages"], storage)
    found = kept_as(write(pages, *arrays))
    for part, expected in zip(found, oracle(given, storage), strict=True):
        assert part.dtype == expected.dtype
        np.testing.assert_array_equal(part, expected)
    changed = (found[0] != kept_as(pages)[0]).any(axis=(2, 3))
    num_pads = sum(slot >= 640 for slot in slots.values())
    assert changed.sum() == case.tokens - num_pads


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("storage", ["float32", "uint16"])
def test_donated_pages_are_written_in_place(tokens, storage):
    """Copying a pool of gigabytes would take longer than the round."""
    case = Case(tokens=tokens, pages=64, page_size=16, kv_heads=2, head_dim=64)
    given = build(case)
    pages = stored(given.pop("kv_pages"), storage)
    rows = {name: jnp.asarray(value) for name, value in given.items()}
    donating = partial(jax.jit, donate_argnums=0)(write_kv_pages)
    compiled = donating.lower(pages, **rows).compile(READERS_COMPILER)
    program = compiled.as_text() or ""
    copies = [line for line in program.splitlines() if " copy(" in line]
    assert not [line for line in copies if "[64,16,4,64]" in line]
    assert not [line for line in copies if "[1024,4,64]" in line]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 4


@pytest.mark.parametrize("implementation", ["reference", "tpu", "gpu"])
def test_every_backend_writes_kv_pages(implementation):
    given = build(CASES["tiny/verify"])
    arrays = {name: jnp.asarray(value) for name, value in given.items()}
    written = write_kv_pages(**arrays, implementation=implementation)
    np.testing.assert_array_equal(written, oracle(given, "float32")[0])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("key", (5, 2, 64)),
        ("key", (6, 1, 64)),
        ("value", (6, 2, 32)),
        ("value", (6, 2)),
        ("slot_mapping", (7,)),
        ("slot_mapping", (6, 1)),
        ("kv_pages", (40, 16, 3, 64)),
        ("kv_pages", (640, 4, 64)),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(name, shape, monkeypatch):
    """Type annotations are not checked here, as when a user calls the function."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    arrays: dict[str, Any] = {
        name: jnp.asarray(value) for name, value in build(CASES["tiny/verify"]).items()
    }
    with pytest.raises(ValueError, match="'cuda' of write_kv_pages: choose one of"):
        write_kv_pages(**arrays, implementation="cuda")
    arrays[name] = jnp.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        write_kv_pages(**arrays)

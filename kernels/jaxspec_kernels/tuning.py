"""Tile sizes that were measured on a device, as data.

`python -m benchmarks.kernels.tune` writes `tuned/<device kind>.json` with the origin of
its numbers; it is never edited by hand. For a shape without an entry the kernel's own
heuristics apply. This module queries no device: callers pass its kind.
"""

import functools
import importlib.resources
import json
import re
from importlib.resources.abc import Traversable
from typing import Any

from jaxspec_kernels import dispatch

OPERATIONS = ("paged_attention", "rejection_sampling")
# Fields that record the origin of a table; each is a non-empty string.
PROVENANCE = ("device", "jax", "date", "command", "commit")

Sizes = dict[str, int]
Entries = dict[str, dict[str, dict[str, Sizes]]]  # operation, implementation, key


def attention_key(
    *,
    seqs: int,
    queries: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    context: int,
    window: int | None,
    dtype: str,
) -> str:
    """Return the table key of the shapes of a `paged_attention` call.

    Sequences, queries and context are rounded up to a power of two, as an engine's
    differ from the measured ones.

    Args:
        context: Tokens that a row of the page table can hold.
        dtype: Type of the pages.
    """
    near = "all" if window is None else str(window)
    return (
        f"seqs{_power_of_two(seqs)}-queries{_power_of_two(queries)}"
        f"-heads{q_heads}/{kv_heads}-dim{head_dim}-page{page_size}"
        f"-context{_power_of_two(context)}-window{near}-{dtype}"
    )


def sampling_key(*, rows: int, columns: int, dtype: str) -> str:
    """Return the table key of the shapes of a `rejection_sampling` call.

    Args:
        rows: Rows of logits, sequences times (drafts + 1); rounded up to a power of
            two.
        columns: Columns of the vocabulary that one device holds.
    """
    return f"rows{_power_of_two(rows)}-columns{columns}-{dtype}"


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def file_name(device_kind: str) -> str:
    """Return the name of a device's table: `NVIDIA H200` is in `nvidia-h200.json`."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return (name or "unnamed") + ".json"


def folder() -> Traversable:
    """Return the folder of the tables in the package."""
    return importlib.resources.files("jaxspec_kernels") / "tuned"


def sizes(
    operation: str, implementation: str, device_kind: str, key: str
) -> Sizes | None:
    """Return the measured sizes for a call; None if it was not measured.

    Args:
        implementation: The measured implementation: each has sizes of its own.
        device_kind: As jax names it, `device.device_kind`.
        key: From `attention_key` or `sampling_key`.

    Raises:
        ValueError: There is no such tuned operation, or the device's table is broken.
    """
    if operation not in OPERATIONS:
        raise ValueError(
            f"operation {operation!r} has no sizes to tune; those that have: "
            f"{', '.join(OPERATIONS)}"
        )
    of_operation = _table(folder(), device_kind).get(operation, {})
    found = of_operation.get(implementation, {}).get(key)
    return None if found is None else dict(found)


@functools.cache
def _table(place: Traversable, device_kind: str) -> Entries:
    path = place / file_name(device_kind)
    if not path.is_file():
        return {}
    return read(path, device_kind)["entries"]


def read(path: Traversable, device_kind: str) -> dict[str, Any]:
    """Read a table.

    Raises:
        ValueError: The table is malformed, or of another device.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _broken(path, f"is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise _broken(path, f"holds a {type(table).__name__}, not an object")
    for name in PROVENANCE:
        value = table.get(name)
        if not isinstance(value, str) or not value:
            problem = f"says {name} = {value!r}, which must be a non-empty string"
            raise _broken(path, problem)
    if table["device"] != device_kind:
        raise _broken(path, f"was measured on {table['device']}, not on {device_kind}")
    entries = table.get("entries")
    if not isinstance(entries, dict) or not set(entries) <= set(OPERATIONS):
        raise _broken(path, f"needs entries for some of {', '.join(OPERATIONS)}")
    for operation, of_operation in entries.items():
        if not isinstance(of_operation, dict) or not (
            set(of_operation) <= set(dispatch.IMPLEMENTATIONS)
        ):
            names = ", ".join(dispatch.IMPLEMENTATIONS)
            raise _broken(path, f"needs entries of {operation} for some of {names}")
        for implementation, keys in of_operation.items():
            where = f"{operation}, {implementation}"
            if not isinstance(keys, dict):
                raise _broken(path, f"holds no object as entries of {where}")
            for key, found in keys.items():
                _check_sizes(path, f"{where}, {key}", found)
    return table


def _check_sizes(path: Traversable, where: str, sizes: Any) -> None:
    is_object = isinstance(sizes, dict) and bool(sizes)
    # True is an int to Python.
    if not is_object or not all(
        type(size) is int and size > 0 for size in sizes.values()
    ):
        raise _broken(path, f"has {where}: {sizes!r}; sizes are whole numbers above 0")


def _broken(path: Traversable, what: str) -> ValueError:
    return ValueError(
        f"tuned table {path.name} {what}. Measure it again on the device with "
        "`python -m benchmarks.kernels.tune --again`, or remove the file to use the "
        "kernels' default sizes"
    )

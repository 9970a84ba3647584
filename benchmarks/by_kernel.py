"""Where the time on a device goes, by kernel: jax's profile, summed up."""

import collections
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

MAX_ROWS = 25


def profile(run: Callable[[], object]) -> dict[str, Any]:
    """Run once under jax's profiler; what took how long on the device.

    Args:
        run: Waits for what it launches.

    Returns:
        `device_s`, and `kernels`: name, calls, seconds and share, the longest first.
        Of a device without a timeline of its own (the CPU), the threads of XLA.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return summarise(_events(jax.profiler.ProfileData.from_file(str(path))))


def _events(data: Any) -> Iterable[tuple[str, float]]:
    """Name and seconds of all that ran on the device."""
    planes = list(data.planes)
    on_device = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in on_device or planes:
        for line in plane.lines:
            is_stream = line.name.startswith("Stream")
            is_thread = "XLA" in line.name or "Eigen" in line.name
            if is_stream or (not on_device and is_thread):
                for event in line.events:
                    yield event.name, event.duration_ns / 1e9


def summarise(events: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Add up the calls of each kernel."""
    seconds, calls = collections.Counter[str](), collections.Counter[str]()
    for name, took_s in events:
        seconds[name] += took_s  # pyright: ignore[reportArgumentType]
        calls[name] += 1
    total = sum(seconds.values())
    return {
        "device_s": total,
        "kernels": [
            {
                "name": name,
                "calls": calls[name],
                "seconds": took_s,
                "share": took_s / total,
            }
            for name, took_s in seconds.most_common(MAX_ROWS)
        ],
    }

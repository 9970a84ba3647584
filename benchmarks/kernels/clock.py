"""Times calls on a device.

Two times are measured, because launching a program takes as long as a small kernel: the
time of a single call from Python until its result is ready, and the time per call of a
loop inside one program, in which each call needs the result of the previous one.
`profile` sums jax's profile of one run by kernel.
"""

import collections
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Arrays = tuple[Any, ...]
MAX_ROWS = 25  # of a profile


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds of one call over several repeats."""

    median_s: float
    least_s: float
    most_s: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        return cls(
            median_s=statistics.median(seconds),
            least_s=min(seconds),
            most_s=max(seconds),
        )

    def in_microseconds(self) -> dict[str, float]:
        """Return the times in microseconds, as in result files."""
        return {
            "median": round(self.median_s * 1e6, 3),
            "least": round(self.least_s * 1e6, 3),
            "most": round(self.most_s * 1e6, 3),
        }


def loop_of(step: Callable[..., Any], rounds: int) -> Callable[..., Any]:
    """Return `loop(carry, *turns)`, which runs one step per turn, `rounds` times."""

    def loop(carry: Any, *turns: Arrays) -> Any:
        def body(number: Array, carry: Any) -> Any:
            for arrays in turns:
                carry = step(carry, number, *arrays)
            return carry

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(rounds), body, carry)

    return loop


def measure(
    step: Callable[..., Any],
    carry: Any,
    turns: Sequence[Arrays],
    *,
    calls: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Spread:
    """Time `carry = step(carry, number, *arrays)`, `calls` times in one program.

    Args:
        turns: The arrays of consecutive calls. With several turns, small arrays are not
            in a cache at the next call.
    """
    rounds = -(-calls // len(turns))
    # The carry may be a pool of pages, so it is donated: a copy per timing would be
    # measured too. The first copy preserves the caller's array.
    program = jax.jit(loop_of(step, rounds), donate_argnums=0)
    carry = jax.block_until_ready(program(jax.tree.map(jnp.copy, carry), *turns))
    seconds = []
    for _ in range(repeats):
        start = clock()
        carry = jax.block_until_ready(program(carry, *turns))
        seconds.append((clock() - start) / (rounds * len(turns)))
    return Spread.of(seconds)


def copy_bandwidth(num_bytes: int, *, calls: int, repeats: int) -> float:
    """Return GB/s, reads plus writes, of a program that rewrites `num_bytes`."""

    def step(words: Array, number: Array) -> Array:
        return words ^ (words >> 1)  # consecutive steps cannot be fused

    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    spread = measure(step, words, [()], calls=calls, repeats=repeats)
    return 2 * words.nbytes / spread.median_s / 1e9


def profile(run: Callable[[], object]) -> dict[str, Any]:
    """Run once under jax's profiler; return the device time of each kernel.

    Args:
        run: Waits for what it launches.

    Returns:
        `device_s`, and `kernels`: name, calls, seconds and share, the longest first.
        For a device without a timeline of its own (the CPU), times are those of XLA's
        threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return summarise(_events(jax.profiler.ProfileData.from_file(str(path))))


def _events(data: Any) -> Iterable[tuple[str, float]]:
    """Yield the name and the seconds of each kernel that ran on the device."""
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

"""The run: alternates between child processes that stay alive, and writes rows."""

import argparse
import json
import os
import time
from typing import Any

from tqdm.auto import tqdm

from benchmarks.peers.cells import CHOSEN, OURS, Cell, rows
from benchmarks.peers.found import Child, Peer, PeerError
from jaxspec.bench.report import num_cores, write_whole

LOOKUP_MAX = 4
ROOM = 512  # tokens for a prompt
# Maximum number of runs of this engine that compile and so do not count; which programs
# a run needs depends on its texts.
MOST_COMPILING_RUNS = 16
LONGEST_ANSWER_S = 300.0
LONGEST_COMPILING_S = 1800.0
NO_TIME = "the time limit was reached"


class Turns:
    """All cells, the children that fill them, and the result so far.

    Attributes:
        result: The written result, with the rows so far.
        left_s: Remaining seconds; the time of runs that compile is not subtracted.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        peers: dict[str, Peer],
        prompts: list[list[int]],
        result: dict[str, Any],
    ):
        self._options, self._peers, self._prompts = options, peers, prompts
        self._most = max(options.batch_sizes)
        self.result = result | {"peers": {name: {} for name in peers}, "rows": []}
        self._cells: list[Cell] = []
        self._models: dict[str, dict[str, str]] = {}
        self._children: dict[tuple[str, str, str], Child] = {}
        self._is_warm: set[tuple[Any, ...]] = set()
        self.left_s, self._end = 60 * options.minutes, time.monotonic()

    def prepare(self) -> None:
        """Find the available peers, and convert the weights for them."""
        for name, peer in self._peers.items():
            reason = peer.missing
            if reason is None:
                try:
                    self._models[name] = peer.models(self._options.models)
                except PeerError as error:
                    reason = str(error)
            if reason is not None:
                self.result["peers"][name]["skipped"] = reason
                tqdm.write(f"{name}: skipped, {reason}")
        self._write()

    def measure(self, threads: int, share: float) -> None:
        """Run all cells of a number of threads in turn, until done or out of time.

        Args:
            share: Share of the remaining time.
        """
        cells, cores = self._make_cells(threads), usable_cores()[:threads]
        self._cells += cells
        repeats = self._options.repeats
        given_s = share * self.left_s
        self._end = time.monotonic() + given_s
        try:
            with tqdm(total=repeats * len(cells), desc=f"{threads} threads") as bar:
                for repeat in range(repeats):
                    for cell in cells[:: -1 if repeat % 2 else 1]:
                        bar.set_postfix_str(f"{cell.peer} {cell.mode}")
                        self._fill(cell, cores)
                        self._write()
                        bar.update()
        finally:
            self.close()
        self.left_s -= given_s - (self._end - time.monotonic())

    def _make_cells(self, threads: int) -> list[Cell]:
        found = []
        for name in self._models:
            peer, dtypes = self._peers[name], [self._options.dtype]
            if self._options.bfloat16 and name == OURS:
                dtypes.append("bfloat16")
            found += [
                Cell(
                    peer=name,
                    mode=mode,
                    dtype=dtype,
                    batch_size=size,
                    threads=threads,
                    bans_end=peer.bans_end,
                    failed=f"limited to batch {most}" if size > most else None,
                )
                for dtype in dtypes
                for mode, most in peer.modes.items()
                for size in self._options.batch_sizes
            ]
        return found

    def _fill(self, cell: Cell, cores: list[int]) -> None:
        """Run a cell once, or record why it cannot run."""
        if cell.failed:
            return
        if time.monotonic() >= self._end:
            if not cell.answers:
                cell.failed = NO_TIME
            return
        name = cell.peer, cell.mode, cell.dtype
        try:
            if name not in self._children:
                self._children[name] = self._start(cell, cores)
            if cell.kind() not in self._is_warm:
                self._ask(cell, is_short=True)
                self._is_warm.add(cell.kind())
            cell.answers.append(self._ask(cell))
        except PeerError as error:
            # The child has ended; the peer's other batch sizes get a new one.
            if name in self._children:
                self._children.pop(name).close()
            if time.monotonic() < self._end:
                cell.failed = str(error)
                tqdm.write(f"{cell.peer} {cell.mode}, batch {cell.batch_size}: {error}")
            elif not cell.answers:
                cell.failed = NO_TIME

    def _start(self, cell: Cell, cores: list[int]) -> Child:
        peer, options = self._peers[cell.peer], self._options
        task = {
            **self._models[cell.peer],
            "mode": cell.mode,
            "dtype": cell.dtype,
            "num_drafts": options.num_speculative_tokens,
            "lookup_max": LOOKUP_MAX,
            "max_batch_size": self._most,
            "max_model_len": ROOM + options.num_tokens,
        }
        child = start(peer, task, cores=cores, limit_s=self._limit_s(cell))
        about = self.result["peers"][peer.name]
        about["version"] = child.about["version"]
        if peer.note is not None:
            about["note"] = peer.note
        what = f"{cell.mode}, {cell.dtype}, threads {cell.threads}"
        about.setdefault("settings", {})[what] = child.about["settings"]
        self._is_warm -= {kind for kind in self._is_warm if kind[:3] == cell.kind()[:3]}
        return child

    def _ask(self, cell: Cell, *, is_short: bool = False) -> dict[str, Any]:
        """Run until a run compiles nothing; a short run is one warm-up batch."""
        size, options = cell.batch_size, self._options
        wanted = options.single_prompts if size == 1 else options.num_prompts
        has_queue = self._peers[cell.peer].has_queue and 1 < size == self._most
        request = {
            "prompts": self._prompts[: size if is_short else wanted],
            "batch_size": wanted if has_queue else size,
            "num_tokens": options.num_tokens,
        }
        child = self._children[cell.peer, cell.mode, cell.dtype]
        for _ in range(MOST_COMPILING_RUNS):
            start = time.monotonic()
            answer = child.ask(request, self._limit_s(cell))
            if not answer["counts"].get("compiles"):
                return answer
            self._end += time.monotonic() - start
        # The child is still alive, but its runs cannot be used, so no more are made.
        raise PeerError(
            f"each of {MOST_COMPILING_RUNS} runs in a row compiled a program, so none "
            "could be timed"
        )

    def _limit_s(self, cell: Cell) -> float:
        """Return the time limit of an answer; longer for this engine's compilations."""
        if cell.peer in (OURS, CHOSEN):
            return LONGEST_COMPILING_S
        return min(max(self._end - time.monotonic(), 1.0), LONGEST_ANSWER_S)

    def _write(self) -> None:
        """Write the result so far, so that the run may be stopped."""
        self.result["rows"] = rows(self._cells)
        text = json.dumps(self.result, indent=1) + "\n"
        write_whole(text, self._options.output)

    def close(self) -> None:
        while self._children:
            self._children.popitem()[1].close()


def start(
    peer: Peer, task: dict[str, Any], *, cores: list[int], limit_s: float
) -> Child:
    """Start a peer's process, and wait until it has loaded its models."""
    return Child(
        peer.command(),
        task | peer.task | {"threads": len(cores)},
        cores=cores,
        environment=peer.environment_of(cores),
        limit_s=limit_s,
    )


def usable_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(num_cores()))

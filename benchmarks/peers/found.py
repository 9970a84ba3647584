"""The peers of this machine, the models made for them, and their processes."""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import CHOSEN, DRAFT, MODES, NGRAM, OURS, PLAIN
from jaxspec_checkpoints import bundled_draft, bundled_target, open_checkpoint
from jaxspec_checkpoints.writing import write_checkpoint

HERE = Path(__file__).parent
MODELS = {"target": bundled_target(), "draft": bundled_draft()}
LONGEST_EXPORT_S = 600.0

# Placeholders for paths in an export command.
SOURCE, MADE = "{source}", "{made}"
# Maximum characters of a reason, which is shown in a table.
MOST_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How one engine is run.

    Attributes:
        script: The child's script in this folder.
        python: The interpreter that runs the child.
        modes: The largest batch size of each mode.
        environment: Additional environment variables.
        missing: Reason why the peer cannot run on this machine; None if it can.
        bans_end: See `Cell`.
        export: A command that converts a folder with float32 weights; empty if the peer
            reads our folders.
        suffix: File suffix of the exported model.
        has_queue: Whether the peer accepts any number of prompts and fills its batch
            itself.
        note: A remark on the peer's texts or speeds, for the table.
    """

    name: str
    script: str
    python: str = sys.executable
    modes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 8192))
    environment: dict[str, str] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None
    bans_end: bool = False
    export: tuple[str, ...] = ()
    suffix: str = ""
    has_queue: bool = False
    note: str | None = None

    def command(self) -> list[str]:
        return [self.python, str(HERE / self.script)]

    def environment_of(self, cores: list[int]) -> dict[str, str]:
        """Return the environment of the peer's process, with one thread per core."""
        threads = str(len(cores))
        found = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
        }
        if self.python != sys.executable:
            # Other interpreters must not import our packages.
            found.pop("PYTHONPATH", None)
        cores_bound = ",".join(map(str, cores))
        return found | {
            name: value.format(cores=cores_bound)
            for name, value in self.environment.items()
        }

    def models(self, folder: Path) -> dict[str, str]:
        """Return target and draft in the peer's format; convert them if missing.

        Raises:
            PeerError: They cannot be made.
        """
        if not self.export:
            return {name: str(path) for name, path in MODELS.items()}
        found = {}
        for name, source in MODELS.items():
            path = folder / f"{name}-{self.script.removesuffix('.py')}{self.suffix}"
            if not path.exists():
                wide = folder / f"{name}-float32"
                if not wide.exists():
                    checkpoint = open_checkpoint(source)
                    write_checkpoint(
                        checkpoint, wide, to="hf", dtype="float32", progress=False
                    )
                part = path.with_name("part-of-" + path.name)
                paths = {SOURCE: str(wide), MADE: str(part)}
                run_export([paths.get(word, word) for word in self.export])
                part.rename(path)
            found[name] = str(path)
        return found


def find_peers(options: argparse.Namespace) -> list[Peer]:
    """Return all known peers, in the order of the tables."""
    return [
        # K is fixed, as for the other engines.
        Peer(name=OURS, script="ours.py", has_queue=True, task={"controller": "fixed"}),
        Peer(
            name=CHOSEN,
            script="ours.py",
            has_queue=True,
            modes=dict.fromkeys((DRAFT, NGRAM), 8192),
            task={"controller": "adaptive"},
        ),
        huggingface(),
        _openvino(options.openvino_python),
        _llama(options.llama_server, options.llama_convert, options.llama_python),
        _vllm(options.vllm_python),
    ]


def huggingface() -> Peer:
    missing = [
        name
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    return Peer(
        name="HuggingFace",
        script="hf.py",
        # transformers' assisted generation supports one sequence only.
        modes={PLAIN: 8192, DRAFT: 1, NGRAM: 1},
        missing=f"not installed: {', '.join(missing)} (extra hf)" if missing else None,
    )


def _openvino(python: str | None) -> Peer:
    name, script = "openvino-genai", "ov.py"
    if python is None:
        return Peer(name=name, script=script, missing="no --openvino-python")
    exporter = str(Path(python).with_name("optimum-cli"))
    what = ("--task", "text-generation-with-past", "--weight-format", "fp32")
    return Peer(
        name=name,
        script=script,
        python=python,
        missing=_lacks(python) or _lacks(exporter),
        note="its exporter leaves out the soft cap of attention scores: texts differ",
        export=(exporter, "export", "openvino", "--model", SOURCE, *what, MADE),
    )


def _llama(server: str | None, converter: str | None, python: str) -> Peer:
    name, script = "llama.cpp", "llama.py"
    if server is None or converter is None:
        missing = "no --llama-server" if server is None else "no --llama-convert"
        return Peer(name=name, script=script, missing=missing)
    return Peer(
        name=name,
        script=script,
        modes={PLAIN: 8192, DRAFT: 8192},
        task={"server": server},
        missing=_lacks(server) or _lacks(converter) or _lacks(python),
        bans_end=True,
        note="it bans end tokens, so texts are compared up to our first end token",
        export=(python, converter, SOURCE, "--outtype", "f32", "--outfile", MADE),
        suffix=".gguf",
    )


def _vllm(python: str | None) -> Peer:
    if python is None:
        return Peer(name="vLLM", script="vllm_cpu.py", missing="no --vllm-python")
    # vLLM comes with Intel's OpenMP, which must be loaded before any other.
    library = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    return Peer(
        name="vLLM",
        script="vllm_cpu.py",
        python=python,
        has_queue=True,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
            "VLLM_NO_USAGE_STATS": "1",
            # Run vLLM in one process: on one core, its three processes, which poll for
            # each other's results, gave 40 and 250 tokens/s at batch 1 and 8, and one
            # process 52 and 315. The OpenMP settings that vLLM makes for its worker
            # process are then set here.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "KMP_AFFINITY": "granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            **({"LD_PRELOAD": str(library)} if library.exists() else {}),
        },
        missing=_lacks(python),
    )


def _lacks(program: str) -> str | None:
    if shutil.which(program) or Path(program).is_file():
        return None
    return f"not found: {shorten(program)}"


def run_export(command: list[str]) -> None:
    """Run a command that converts a model.

    Raises:
        PeerError: It fails, or takes too long.
    """
    environment = dict(os.environ)
    if command[0] != sys.executable:
        environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=LONGEST_EXPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"export took longer than {LONGEST_EXPORT_S:.0f} s") from error
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
        raise PeerError(f"export failed: {shorten(' '.join(last))}")


class PeerError(Exception):
    """A peer failed; the message is the reason that the table shows."""


@contextlib.contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """Restrict processes that are started within to these cores, if the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A child process that answers lines of JSON; see `answer`.

    Attributes:
        about: Version and settings, which the child sends when it has loaded its
            models.
    """

    def __init__(
        self,
        command: list[str],
        task: dict[str, Any],
        *,
        cores: list[int],
        environment: Mapping[str, str],
        limit_s: float,
    ):
        # The child's other output; its end becomes the reason if the child fails.
        self._log = tempfile.TemporaryFile()
        try:
            with on_cores(cores):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    env=dict(environment),
                    # The child gets a process group of its own, so that its own
                    # children end with it.
                    start_new_session=True,
                )
        except BaseException:
            self._log.close()
            raise
        try:
            self.about = self.ask(task, limit_s)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one question and return its answer.

        Raises:
            PeerError: The child has ended, or takes longer than `limit_s` and was
                killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        line = ""
        # Writing fails if the child has ended.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        timer.cancel()
        if is_late.is_set():
            raise PeerError(f"took longer than {limit_s:.0f} s")
        if not line.endswith("\n"):
            code = self._process.wait()
            raise PeerError(f"ended with code {code}: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return shorten(lines[-1]) if lines else "it printed nothing"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child and all processes that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def shorten(reason: str) -> str:
    """Shorten the reason of a failure, and remove folders of this machine from it."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", reason)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"

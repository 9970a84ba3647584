"""Parts of `benchmarks.device` that measure programs of full-size models.

Weights are random and made on the device, and acceptance is forced, so texts mean
nothing. A row of a step has the time that the cost model expects (`expected_us`), from
the device's published speeds or, if there are none, from the bandwidth of a copy.
"""

import argparse
import dataclasses
import importlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from statistics import median
from typing import Any

import jax

from benchmarks.kernels.clock import copy_bandwidth, profile
from benchmarks.step_times import (
    Models,
    Program,
    Setting,
    TargetPass,
    compile_all,
)
from jaxspec.bench.acceptance import speed_up_ceiling
from jaxspec.config.engine import ModelConfig
from jaxspec.engine.memory.draft_sharding import Speeds, speeds_of
from jaxspec.engine.memory.round_cost import PassCost, RoundCost
from jaxspec.models.families import config_from_hf
from jaxspec.models.families import published_config as gemma3_config
from jaxspec.program.plan import TILE, Features
from jaxspec.program.tree.tree import Tree
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints.gemma.published import published_config

# Target and draft of each pair, by size.
PAIRS = {"9b-2b": ("9b", "2b"), "27b-2b": ("27b", "2b"), "4b-270m": ("4b", "270m")}
# Published names of the sizes of Gemma 3; the others are Gemma 2's.
GEMMA3 = {"4b": "google/gemma-3-4b-it", "270m": "google/gemma-3-270m-it"}
NUM_DRAFTS = tuple(range(1, 9))
ACCEPTANCES = (0.6, 0.8)
BATCHES = (1, 8)
VERIFY_DRAFTS = 5
# Trees by name: a chain of three drafts with one leaf each, and a tree of eight drafts
# whose side branches have children.
TREES = {
    "leaves": Tree((-1, -1, 0, 0, 2, 2)),
    "tree": Tree((-1, -1, 0, 0, 1, 2, 2, 4)),
}
# Requests whose sampling is compared, as changes of a plain launch.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"features": Features(all_greedy=True)},
    "sampled": {"temperature": 0.8},
    "logprobs": {"temperature": 0.8, "features": Features(num_logprobs=5)},
    "controls": {"temperature": 0.8, "features": Features(has_controls=True)},
}
PROMPT_TOKENS = (512, 2048)
ROUNDS_PER_LAUNCH = (1, 4, 8)
COPIED_BYTES = 4 * 2**30
SHORT = 4  # tokens of the short HuggingFace text, whose time is subtracted
# Weights may take this share of a device's memory; the rest is for pages and programs.
MAX_WEIGHT_SHARE = 0.85
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


class SkippedError(Exception):
    """A part cannot be measured on this device; the message is the reason."""


def config_of(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the published config of a model size; for a dry run, a smaller one."""
    config = gemma3_config(GEMMA3[size]) if size in GEMMA3 else published_config(size)
    assert config is not None, size
    if not options.dry_run:
        return config
    layers = 2 if size == "27b" else 1
    period = config.get("sliding_window_pattern", 2)
    if options.scan_layers:
        layers = period  # the fewest that there can be a loop over
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


def find_speeds(bandwidth: float) -> tuple[Speeds, str]:
    """Return the first device's speeds, and where they are from.

    Args:
        bandwidth: GB/s of a copy, for devices without published speeds. Their
            operations count as free.
    """
    speeds = speeds_of(jax.devices()[0].device_kind)
    if speeds is not None:
        return speeds, "published"
    memory = bandwidth * 1e9
    return Speeds(operations=math.inf, memory=memory, link=1.0, start_s=0.0), "copy"


def cost_of(models: Models) -> PassCost:
    """Return what a pass of the target costs according to the cost model."""
    return PassCost(
        weight_bytes=models.weight_bytes,
        kv_bytes=models.kv_bytes(1),
        operations=2 * models.num_values,
        num_devices=1,
        num_layers=models.target.num_layers,
        hidden_size=models.target.hidden_size,
    )


def expectation(models: Models, bandwidth: float) -> tuple[RoundCost, Row]:
    """Return the cost model of rounds, and an entry for the rows that it is used in."""
    speeds, source = find_speeds(bandwidth)
    cost = RoundCost(
        speeds=speeds,
        target=cost_of(models),
        draft=None if models.draft is None else cost_of(models.draft_alone()),
        has_one_pass=False,
        max_draft_tokens=max(NUM_DRAFTS),
        context=models.setting.context,
    )
    return cost, {"speeds": source}


def measure_copy(options: argparse.Namespace) -> float:
    """Return the bandwidth of a copy in GB/s."""
    copied = 2**22 if options.dry_run else COPIED_BYTES
    return copy_bandwidth(copied, calls=4, repeats=3)


def measure_device(options: argparse.Namespace) -> Iterator[Row]:
    """Describe the device, and measure the bandwidth of a copy."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    yield {
        "what": "copy",
        "device": device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "memory_bytes": stats.get("bytes_limit"),
        "gb_per_s": measure_copy(options),
    }


def check_memory(weight_bytes: int) -> None:
    """Raise SkippedError for weights that do not fit the first device."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and weight_bytes > MAX_WEIGHT_SHARE * limit:
        raise SkippedError(
            f"weights take {weight_bytes / 1e9:.1f} GB, more than "
            f"{MAX_WEIGHT_SHARE:.0%} of {limit / 1e9:.1f} GB"
        )


def make_models(
    name: str, options: argparse.Namespace, *, scan_layers: bool | None = None
) -> Models:
    """Make the models of a pair; raise SkippedError if they do not fit."""
    if scan_layers is not None:
        options = argparse.Namespace(**{**vars(options), "scan_layers": scan_layers})
    configs, setting = configs_of(name, options), setting_of(options)
    shapes = Models.abstract(*configs, setting, make_mesh(1))
    check_memory(shapes.weight_bytes + shapes.draft_alone().weight_bytes)
    return Models.random(*configs, setting)


def build(makers: Makers) -> Generator[Row, None, dict[Any, Any]]:
    """Compile programs in parallel; yield a row for each, and return them."""
    start = time.monotonic()
    programs = compile_all(makers)
    wall_s = time.monotonic() - start
    for program in programs.values():
        if isinstance(program, Program):
            yield {
                "what": "compile",
                "program": program.shape.name,
                "layers": program.models.target.num_layers,
                "is_scanned": program.models.target.scan_layers,
                "lower_s": round(program.lower_s, 2),
                "compile_s": round(program.compile_s, 2),
                "num_parallel": len(programs),
                "wall_s": round(wall_s, 2),
            }
    return programs


def measure_pair(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure plain steps of both models, the target's pass, and rounds of every K."""
    bandwidth = measure_copy(options)
    models = make_models(name, options)
    plain = yield from _plain(name, models, bandwidth, options)
    yield from _passes(name, models, bandwidth, options)
    yield from _rounds(name, models, plain, bandwidth, options)
    yield from _trees(name, models, plain, options)


def _plain(
    name: str, models: Models, bandwidth: float, options: argparse.Namespace
) -> Any:
    """Measure plain steps; return both models' seconds at the first batch size."""
    plain = {}
    programs = yield from build(plain_steps(name, models, options))
    for (size, seqs), program in programs.items():
        timed = program.run()
        read = program.models.weight_bytes + program.models.kv_bytes(seqs)
        plain[size, seqs] = timed.step_s.median_s
        cost, entry = expectation(program.models, bandwidth)
        yield entry | {
            "what": "plain",
            "model": size,
            "batch": seqs,
            "step_us": timed.step_s.in_microseconds(),
            "expected_us": 1e6 * cost.seconds(0, seqs),
            "tokens_per_s": seqs / timed.step_s.median_s,
            "bytes_read": read,
            "share_of_bandwidth": read / timed.step_s.median_s / 1e9 / bandwidth,
        }
    return [plain[size, options.batches[0]] for size in PAIRS[name]]


def _passes(
    name: str, models: Models, bandwidth: float, options: argparse.Namespace
) -> Iterator[Row]:
    programs = yield from build(target_passes(models, options))
    cost, entry = expectation(models, bandwidth)
    for seqs in options.batches:
        plain, verify = (programs[seqs, count].run() for count in (0, VERIFY_DRAFTS))
        rows = seqs * (VERIFY_DRAFTS + 1)
        yield entry | {
            "what": "verify",
            "model": PAIRS[name][0],
            "batch": seqs,
            "num_drafts": VERIFY_DRAFTS,
            "plain_us": plain.in_microseconds(),
            "verify_us": verify.in_microseconds(),
            "expected_us": 1e6 * cost.target.seconds(cost.speeds, seqs, rows),
            "verify_over_plain": verify.median_s / plain.median_s,
        }


def _rounds(
    name: str,
    models: Models,
    plain: list[float],
    bandwidth: float,
    options: argparse.Namespace,
) -> Iterator[Row]:
    ratio, most = plain[1] / plain[0], max(options.num_drafts)
    programs = yield from build(rounds(models, options))
    cost, entry = expectation(models, bandwidth)
    seqs = options.batches[0]
    row = {"pair": name, "batch": seqs, "draft_over_target": ratio}
    for count in options.num_drafts:
        for acceptance in options.acceptances:
            timed = programs[count].run((acceptance,) * count)
            speed_up = timed.tokens * plain[0] / timed.step_s.median_s
            best = speed_up_ceiling([acceptance] * count, ratio)
            yield (
                row
                | entry
                | {
                    "what": "round",
                    "acceptance": "synthetic",
                    "num_drafts": count,
                    "forced_acceptance": acceptance,
                    "round_us": timed.step_s.in_microseconds(),
                    "expected_us": 1e6 * cost.seconds(count, seqs),
                    "tokens_per_round": timed.tokens,
                    "accepted": timed.accepted,
                    "drafted": timed.drafted,
                    "speed_up": speed_up,
                    "expected_speed_up": cost.speed_up(count, acceptance, seqs),
                    "ceiling": best,
                    "share_of_ceiling": speed_up / best,
                }
            )
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


def _trees(
    name: str, models: Models, plain: list[float], options: argparse.Namespace
) -> Iterator[Row]:
    """Measure rounds with trees; acceptance can only be forced in a chain."""
    makers: Makers = {
        key: partial(Program, models, num_drafts=tree.num_levels, tree=tree, seqs=seqs)
        for key, tree in TREES.items()
        for seqs in options.batches[:1]
    }
    programs = yield from build(makers)
    for key, program in programs.items():
        timed = program.run()
        yield {
            "what": "tree",
            "pair": name,
            "tree": key,
            "num_nodes": TREES[key].num_nodes,
            "num_levels": TREES[key].num_levels,
            "batch": program.launch.seqs,
            "round_us": timed.step_s.in_microseconds(),
            "round_over_plain": timed.step_s.median_s / plain[0],
        }


def measure_sampling(options: argparse.Namespace) -> Iterator[Row]:
    """Compare plain steps of 2B that take the argmax, sample, and do more."""
    models = make_models("9b-2b", options).draft_alone()
    makers: Makers = {
        (kind, seqs): partial(Program, models, seqs=seqs, **changes)
        for seqs in options.batches
        for kind, changes in SAMPLINGS.items()
    }
    programs = yield from build(makers)
    greedy = {}
    for (kind, seqs), program in programs.items():
        timed = program.run()
        greedy.setdefault(seqs, timed.step_s.median_s)
        yield {
            "what": "sampling",
            "model": "2b",
            "batch": seqs,
            "requests": kind,
            "step_us": timed.step_s.in_microseconds(),
            "over_greedy": timed.step_s.median_s / greedy[seqs],
        }


def measure_prompts(options: argparse.Namespace) -> Iterator[Row]:
    """Measure launches that read a part of a prompt, for every size of the pairs."""
    bandwidth = measure_copy(options)
    lengths = (TILE,) if options.dry_run else PROMPT_TOKENS
    given = argparse.Namespace(**{**vars(options), "context": max(lengths)})
    for name in ("4b-270m", "9b-2b"):
        try:
            both = make_models(name, given)
        except SkippedError as error:
            yield {"what": "skipped", "pair": name, "why": str(error)}
            continue
        alone = dict(zip(PAIRS[name], (both, both.draft_alone()), strict=True))
        for size, models in alone.items():
            makers: Makers = {
                tokens: partial(Program, models, prompt_tokens=tokens)
                for tokens in lengths
            }
            programs = yield from build(makers)
            cost, entry = expectation(models, bandwidth)
            for tokens, program in programs.items():
                step = program.run().step_s
                yield entry | {
                    "what": "prompt",
                    "model": size,
                    "prompt_tokens": tokens,
                    "step_us": step.in_microseconds(),
                    "expected_us": 1e6 * cost.target.seconds(cost.speeds, 1, tokens),
                    "tokens_per_s": tokens / step.median_s,
                }


def measure_layers(options: argparse.Namespace) -> Iterator[Row]:
    """Compare programs of unrolled layers with those of a loop over the layers."""
    for scan_layers in (False, True):
        models = make_models("4b-270m", options, scan_layers=scan_layers)
        count = min(VERIFY_DRAFTS, max(options.num_drafts))
        makers: Makers = {
            0: partial(Program, models),
            count: partial(Program, models, num_drafts=count),
        }
        programs = yield from build(makers)
        for num_drafts, program in programs.items():
            yield {
                "what": "layers",
                "pair": "4b-270m",
                "is_scanned": scan_layers,
                "num_drafts": num_drafts,
                "step_us": program.run().step_s.in_microseconds(),
                "compile_s": round(program.lower_s + program.compile_s, 2),
            }


def measure_launches(options: argparse.Namespace) -> Iterator[Row]:
    """Compare launches of one and of several rounds, plain and with drafts."""
    models = make_models("4b-270m", options)
    counts = ROUNDS_PER_LAUNCH[:2] if options.dry_run else ROUNDS_PER_LAUNCH
    most = min(VERIFY_DRAFTS, max(options.num_drafts))
    makers: Makers = {
        (num_drafts, count): partial(
            Program,
            models,
            num_drafts=num_drafts,
            acceptance=(0.8,) * num_drafts or None,
            max_rounds=count,
        )
        for num_drafts in (0, most)
        for count in counts
    }
    programs = yield from build(makers)
    for (num_drafts, count), program in programs.items():
        timed = program.run()
        yield {
            "what": "launch",
            "pair": "4b-270m",
            "num_drafts": num_drafts,
            "num_rounds": count,
            "launch_us": timed.step_s.in_microseconds(),
            "round_us": timed.step_s.in_microseconds()["median"] / count,
            "tokens_per_s": timed.tokens / timed.step_s.median_s,
        }


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

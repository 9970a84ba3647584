"""`make bench`: the bundled pair at batch 1, with and without speculation.

Prints a table and one JSON line, and writes that line under benchmarks/results/. See
benchmarks/README.md for what is measured and how.
"""

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import commit, describe_machine, num_cores, versions
from measure import PromptRuns, run_in_turn, sampling, summarise
from prompts import DOMAINS, PromptSet, load_prompts
from rounds import profile, trace
from startup import measure_startup
from tables import profile_table, result_table
from tqdm.auto import tqdm

from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TARGET, DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"
CONTROLS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
# What --quick changes: enough to see that everything works, no more.
QUICK = {"num_tokens": 16, "repeats": 1, "prompts_per_domain": 1}
HF_DTYPES = ("float32", "bfloat16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, help="folder with valid.jsonl.xz, to take prompts from")
    add("--prompts-per-domain", type=int, default=3)
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--num-speculative-tokens", type=int, default=4, help="drafts per round")
    add("--repeats", type=int, default=5, help="runs of every prompt in every mode")
    add("--dtype", default="auto")
    add("--quick", action="store_true", help="one short run; writes no result")
    add("--skip-huggingface", action="store_true")
    add("--skip-startup", action="store_true")
    add("--profile", action="store_true", help="only show where a round's time goes")
    add("--trace", type=Path, help="write jax's profile of a few rounds to this folder")
    add("--output", type=Path, help="where to write the JSON line")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if options.num_tokens < 2 or options.repeats < 1 or options.prompts_per_domain < 1:
        raise SystemExit("--num-tokens must be at least 2, the other counts 1")
    machine = describe_machine()
    if machine["load_average"][0] > 0.5 * machine["cores"]:
        print(f"Not a quiet machine: load {machine['load_average']}", file=sys.stderr)
    chosen = load_prompts(options.corpus, options.prompts_per_domain)
    print(f"Prompts: {options.prompts_per_domain} per domain, from {chosen.source}")
    engine = make_engine(options)
    if options.profile or options.trace:
        look_inside(engine, chosen, options)
        return
    result = header(options, machine, chosen, engine)
    result["modes"] = {
        mode: measure_mode(engine, chosen, mode, options) for mode in CONTROLS
    }
    folder = engine.config.model
    prompts = [tokens for _, tokens in tokenised(engine, chosen)]
    engine.shutdown()
    del engine
    result["huggingface"] = measure_huggingface(folder, prompts, options)
    result["startup"] = {"skipped": "by --skip-startup"}
    if not options.skip_startup:
        result["startup"] = measure_startup(
            options.num_speculative_tokens, options.dtype, min(options.num_tokens, 16)
        )
    print(result_table(result))
    line = json.dumps(result)
    print(line)
    path = options.output
    if path is None and not options.quick:
        name = result["date"].replace(":", "").replace("-", "")
        path = RESULTS / f"cpu_pair-{name}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n", encoding="utf-8")


def make_engine(options: argparse.Namespace) -> LLMEngine:
    args = EngineArgs(
        model=TARGET,
        speculative_model=DRAFT,
        num_speculative_tokens=options.num_speculative_tokens,
        dtype=options.dtype,
        max_num_seqs=1,
    )
    return LLMEngine.from_engine_args(args)


def tokenised(engine: LLMEngine, chosen: PromptSet) -> list[tuple[str, list[int]]]:
    """Domain and token ids of every prompt."""
    return [
        (domain, engine.tokenizer.encode(prompt))
        for domain, prompts in chosen.by_domain.items()
        for prompt in prompts
    ]


def header(
    options: argparse.Namespace,
    machine: dict[str, Any],
    chosen: PromptSet,
    engine: LLMEngine,
) -> dict[str, Any]:
    """What identifies a result; paths of this machine stay out."""
    device = engine.runner.mesh.devices.flat[0]
    hidden = ("corpus", "output", "profile", "trace")
    now = datetime.datetime.now(datetime.UTC)
    return {
        "benchmark": "cpu_pair",
        "date": now.isoformat(timespec="seconds").removesuffix("+00:00"),
        **commit(),
        "arguments": {
            name: value for name, value in vars(options).items() if name not in hidden
        },
        "prompts": {"source": chosen.source, "digest": chosen.digest},
        "target": TARGET,
        "draft": DRAFT,
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": str(engine.runner.dtype),
        "machine": machine,
        "versions": versions(),
    }


def measure_mode(
    engine: LLMEngine, chosen: PromptSet, mode: str, options: argparse.Namespace
) -> dict[str, Any]:
    """All prompts in one way of sampling: rows per domain and over all."""
    modes = {
        name: sampling(options.num_tokens, drafts, **CONTROLS[mode])
        for name, drafts in (
            ("plain", 0),
            ("speculative", options.num_speculative_tokens),
        )
    }
    runs = []
    for domain, tokens in tqdm(tokenised(engine, chosen), desc=f"jaxspec {mode}"):
        samples = run_in_turn(engine, tokens, modes, options.repeats)
        runs.append(PromptRuns(domain=domain, num_prompt_tokens=len(tokens), **samples))
    rows = {
        domain: summarise([run for run in runs if run.domain == domain])
        for domain in DOMAINS
    }
    return {
        "controls": CONTROLS[mode],
        "rows": rows | {"all": summarise(runs)},
        "prompts": [run.as_json() for run in runs],
    }


def measure_huggingface(
    folder: str, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Greedy `generate` of transformers by dtype; or why it was not run."""
    if options.skip_huggingface:
        return {"skipped": "by --skip-huggingface"}
    missing = [
        name
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)} (extra hf)"}
    found = {}
    for dtype in HF_DTYPES:
        task = {
            "folder": folder,
            "dtype": dtype,
            "prompts": prompts,
            "num_tokens": options.num_tokens,
            "repeats": options.repeats,
            "threads": num_cores(),
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "hf_generate.py")],
            input=json.dumps(task),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        speeds = json.loads(done.stdout)["tokens_per_s"]
        found[dtype] = {"tokens_per_s": speeds, "threads": num_cores()}
    return found


def look_inside(
    engine: LLMEngine, chosen: PromptSet, options: argparse.Namespace
) -> None:
    """Show where the time of a round goes, instead of measuring speed."""
    prompts = [tokens for _, tokens in tokenised(engine, chosen)]
    if options.trace:
        trace(engine, prompts[0], options.num_tokens, options.trace)
        print(f"Profile of jax for TensorBoard or xprof: {options.trace}")
    if options.profile:
        alone = LLMEngine.from_engine_args(
            EngineArgs(model=DRAFT, dtype=options.dtype, max_num_seqs=1)
        )
        result = profile(
            engine,
            alone,
            prompts,
            num_tokens=options.num_tokens,
            repeats=options.repeats,
        )
        print(profile_table(result))


if __name__ == "__main__":
    main()

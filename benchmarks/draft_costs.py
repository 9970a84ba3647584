"""Computes which drafts pay for Gemma 3 4B, 12B and 27B on TPUs and GPUs, from bytes.

`python -m benchmarks.draft_costs` asks the memory plan (`python -m jaxspec plan`) for
the bytes that a round reads, for draft models, an EAGLE-3 head, a DFlash drafter and
lookups, and writes `results/draft-costs.json`. Nothing runs on such devices.
`benchmarks/readme_table.py` writes the table in `docs/drafts.md` from it.

With `--training RESULT`, it computes instead which acceptance the drafts in a result of
`benchmarks.training` need on Gemma 3 270M, and adds it to the result.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.draft_tables import COSTS_FILE, Result, cost_table
from jaxspec.bench.report import commit, now, write_whole
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import named_devices
from jaxspec.engine.memory.probe import plan_for
from jaxspec.errors import ConfigError
from jaxspec.models.families import published_config

RESULT = Path(__file__).with_name("results") / COSTS_FILE
# Devices for each size of the target: the smallest on which its bfloat16 weights fit.
DEVICES = {
    "4b": ("v5e-1", "v6e-1", "h100"),
    "12b": ("v5e-4", "v6e-1", "h100"),
    "27b": ("v5e-8", "v6e-4", "h100"),
}
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
CURVE = tuple(i / 20 for i in range(20))
BATCHES = (1, 8, 32)
TRIMMED = 32_768
# Devices and speed-ups for which the acceptance of trained drafts is computed.
TRAINED_DEVICES = "v6e-1", "h100"
SPEED_UPS = 1.0, 1.4
MAX_MODEL_LEN, NUM_SEQS = 2048, 8
# Layers of the drafter, and drafts of a block and the newest token: as in published
# DFlash drafters.
DFLASH_LAYERS, DFLASH_BLOCK = 5, 16
LOOKUP, EAGLE3, DFLASH = "n-gram or suffix", "EAGLE-3 head", "DFlash"


def head_config(size: str, kind: str) -> dict[str, Any]:
    """Return the `config.json` of a head of the target's width."""
    target = published_config(f"google/gemma-3-{size}-it")
    assert target is not None
    text = target.get("text_config", target)
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    common = {
        "hidden_size": hidden,
        "intermediate_size": text["intermediate_size"],
        "num_attention_heads": text.get("num_attention_heads", 8),
        "num_key_value_heads": text.get("num_key_value_heads", 4),
        "head_dim": text.get("head_dim", 256),
        "vocab_size": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "model_type": "llama",
    }
    if kind == EAGLE3:
        return common | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": 32_000,
        }
    places = range(1, DFLASH_LAYERS + 1)
    return common | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "num_target_layers": layers,
        "block_size": DFLASH_BLOCK,
        "dflash_config": {
            "mask_token_id": 4,
            "target_layer_ids": [
                round(i * (layers - 1) / (DFLASH_LAYERS + 1)) for i in places
            ],
        },
    }


def drafters(size: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the `speculative_config` of every drafter, by its name."""
    found: dict[str, dict[str, Any]] = {LOOKUP: {"method": "suffix"}}
    models = ["270m"] if size == "4b" else ["270m", "1b"]
    for model in models:
        name = f"google/gemma-3-{model}-it"
        trimmed = {"draft_vocab_size": TRIMMED}
        found[f"{model} model"] = {"model": name, "num_speculative_tokens": 8}
        found[f"{model} model, trimmed"] = found[f"{model} model"] | trimmed
    for name, method, most in ((EAGLE3, "eagle3", 8), (DFLASH, "dflash", 15)):
        path = folder / f"{method}-{size}"
        path.mkdir()
        content = json.dumps(head_config(size, name))
        (path / "config.json").write_text(content, encoding="utf-8")
        found[name] = {
            "method": method,
            "model": str(path),
            "num_speculative_tokens": most,
        }
    return found


def trained_drafters(runs: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the `speculative_config` of the drafts of a training result, by name.

    They are for Gemma 3 270M, and of the sizes in the runs' settings.
    """
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        settings, name = run["settings"], run["name"]
        path = folder / str(len(found))
        path.mkdir()
        own: dict[str, Any] = {"model": str(path)}
        if settings["method"] == "draft":
            content = dict(published_config("google/gemma-3-270m-it") or {})
            content["num_hidden_layers"] = len(settings["keep_layers"])
            content["layer_types"] = ["sliding_attention"] * len(
                settings["keep_layers"]
            )
            own |= {
                "num_speculative_tokens": 8,
                "draft_vocab_size": settings["draft_vocab_size"],
            }
        elif settings["method"] == "eagle3":
            content = head_config("270m", EAGLE3)
            own |= {"method": "eagle3", "num_speculative_tokens": 8}
        else:
            content = head_config("270m", DFLASH)
            block = settings["block_size"]
            content |= {
                "num_hidden_layers": settings["num_hidden_layers"],
                "block_size": block,
            }
            content["dflash_config"] |= {"target_layer_ids": [1, 8, 14]}
            own |= {"method": "dflash", "num_speculative_tokens": block - 1}
        content["draft_vocab_size"] = settings["draft_vocab_size"]
        (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
        found[name] = own
    return found


def needed_acceptance(runs: Any) -> list[Result]:
    """Compute the acceptance that trained drafts need for a speed-up on the 270M.

    `speed_ups` of a row are those at an acceptance of 0, 0.01 and so on up to 1.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in trained_drafters(runs, Path(folder)).items():
            for device in TRAINED_DEVICES:
                plan = plan_for(engine_args("270m", device, config), device)
                cost = plan.round_cost
                assert cost is not None
                row = {"name": name, "device": device, "cost_ratio": cost.cost_ratio}
                speeds = [round(cost.best(i / 100)[1], 3) for i in range(101)]
                rows.append(
                    row | {"acceptance": acceptance_for(cost.best), "speed_ups": speeds}
                )
    return rows


def acceptance_for(best: Callable[[float], tuple[int, float]]) -> dict[str, Any]:
    """Return the lowest acceptance for each of `SPEED_UPS`, or None.

    Args:
        best: Returns the best K at an acceptance, and its speed-up.
    """
    found = [(i / 100, best(i / 100)) for i in range(101)]
    return {
        str(goal): next((a for a, (k, speed) in found if k and speed >= goal), None)
        for goal in SPEED_UPS
    }


def engine_args(size: str, device: str, config: dict[str, Any]) -> EngineArgs:
    """Return the arguments of an engine with a drafter on a device."""
    return EngineArgs(
        model=f"google/gemma-3-{size}-it",
        speculative_config=config,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_SEQS,
        tensor_parallel_size=len(named_devices(device)),
    )


def cost_row(size: str, device: str, name: str, config: dict[str, Any]) -> Result:
    """Compute the row of a drafter on a device."""
    args = engine_args(size, device, config)
    row = {"target": size, "device": device, "drafter": name}
    try:
        plan = plan_for(args, device)
    except ConfigError:
        return row | {"fits": False}
    cost, facts = plan.round_cost, plan.facts
    assert cost is not None
    return row | {
        "fits": True,
        "weight_bytes": facts.draft.weight_bytes * facts.num_devices
        if cost.draft
        else 0,
        "memory_bytes": plan.draft_bytes,
        "memory_share": plan.draft_bytes / (facts.limit_bytes or 1),
        "context": cost.context,
        "plain_round_s": {str(n): cost.seconds(0, n) for n in BATCHES},
        "cost_ratio": cost.cost_ratio,
        "break_even": {str(n): cost.break_even(n) for n in BATCHES},
        "best": {
            str(n): {str(a): cost.best(a, n) for a in ACCEPTANCES} for n in BATCHES
        },
        "curve": [cost.best(a)[1] for a in CURVE],
    }


def compute() -> Result:
    """Compute all rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = [(size, one) for size, found in DEVICES.items() for one in found]
        configs = {size: drafters(size, Path(folder)) for size in DEVICES}
        for size, device in tqdm(places, desc="Targets and devices"):
            for name, config in configs[size].items():
                rows.append(cost_row(size, device, name, config))
    return {"date": now(), **commit(), "acceptances": CURVE, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute which drafts pay.")
    parser.add_argument("--training", type=Path, metavar="RESULT")
    options = parser.parse_args()
    if options.training is not None:
        trained = json.loads(options.training.read_text(encoding="utf-8"))
        needed = needed_acceptance(trained["runs"])
        trained["needed"] = {**commit(), "rows": needed}
        write_whole(json.dumps(trained, indent=1) + "\n", options.training)
        return
    result = compute()
    write_whole(json.dumps(result) + "\n", RESULT)
    print(cost_table(result))


if __name__ == "__main__":
    main()

"""Writes the model card from measured figures; its text is in `model_card.md`.

This module formats tables; it measures nothing.
"""

import string
from pathlib import Path
from typing import Any

# Ways of sampling for which acceptance is reported.
WAYS = ("sampled", "greedy")
TEMPLATE = Path(__file__).with_name("model_card.md")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def loss_table(losses: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [
            domain,
            f"{figures['tokens']:,}",
            f"{figures['nats_per_token']:.3f}",
            f"{figures['bits_per_byte']:.3f}",
            f"{losses['draft'][domain]['nats_per_token']:.3f}",
            f"{losses['draft'][domain]['bits_per_byte']:.3f}",
        ]
        for domain, figures in losses["target"].items()
    ]
    head = ["domain", "tokens"]
    for model in ("target", "draft"):
        head += [f"{model}, nats/token", f"{model}, bits/byte"]
    return table(head, rows)


def acceptance_table(acceptance: dict[str, dict[str, float]]) -> str:
    ways = "sampled", "greedy", "greedy_new"
    rows = [
        [domain, *(f"{figures[way]:.3f}" for way in ways)]
        for domain, figures in acceptance.items()
    ]
    return table(["domain", "sampled", "greedy", "greedy, not repeated"], rows)


def repeated_table(repeated: dict[str, dict[str, float]]) -> str:
    rows = [
        [domain, f"{found['tokens']:,}", f"{found['repeated_4_grams']:.3f}"]
        for domain, found in repeated.items()
    ]
    return table(["domain", "tokens", "repeated 4-grams"], rows)


def quality_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of quantization quality, from `benchmarks.quantization`."""
    if not rows:
        return "Not measured for this pair: `python -m benchmarks.quantization` does."
    lines = []
    for row in rows:
        form = row["kind"] or "as they are"
        form += ", embedding int8" if row["has_int8_embedding"] else ""
        kv_kind = row.get("kv_cache_dtype", "auto")
        form += f", keys and values {kv_kind}" if kv_kind != "auto" else ""
        lines.append(
            [
                form,
                f"{row['weight_bytes']:,}",
                f"{row['perplexity']:.2f}",
                f"{row['kl_nats_per_token']:.5f}",
                f"{100 * row['share_of_same_first']:.1f} %",
            ]
        )
    head = ["weights", "bytes", "perplexity", "KL, nats/token", "same first token"]
    return table(head, lines)


def head_table(heads: dict[str, dict[str, Any]]) -> str:
    """Return the table of the bundled heads' acceptance, as measured in training."""
    if not heads:
        return "None is bundled: `python -m jaxspec.train` makes one."
    lines = [
        [
            f"`{kind}`",
            f"{head['num_params']:,}",
            *(" ".join(f"{one:.2f}" for one in head[way]) for way in WAYS),
            f"`{head['flags']}`",
        ]
        for kind, head in heads.items()
    ]
    return table(["head", "parameters", *WAYS, "flags of its training"], lines)


def runs(training: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recorded facts of each training run; the last one made this pair."""
    before = training.get("start")
    return [*(runs(before) if before else []), training]


def steps_and_tokens(training: dict[str, Any], name: str) -> dict[str, str]:
    """Return steps and tokens of a model's training, for each run."""
    steps = [run[f"{name}_steps"] for run in runs(training)]
    tokens = sum(run["rows"] * 512 * run[f"{name}_steps"] for run in runs(training))
    return {
        f"{name}_steps": " and ".join(map(str, steps)),
        f"{name}_tokens": f"{tokens:,}",
    }


def commands(training: dict[str, Any]) -> str:
    """Return the command lines, in order, that train this pair."""
    lines, start = list[str](), ""
    for number, run in enumerate(runs(training), start=1):
        place = f"--corpus CORPUS --work WORK{number}"
        options = {
            name: f" --steps {run[name + '_steps']}"
            f" --cooldown {run[name + '_cooldown']}"
            f" --rate {run[name + '_rate']}"
            for name in ("target", "draft")
        }
        for stage in ("tokenizer", "target", "sample", "draft", "export", "evaluate"):
            line = f"python checkpoints/recipes/train_pair.py {stage} {place}"
            line += options.get(stage, "")
            if stage in ("export", "evaluate"):
                line += f" --out OUT{number}"
            if stage in ("target", "draft", "evaluate"):
                line += start
            lines.append(line)
        start = f" --start OUT{number}"
    return "\n".join(lines)


def render(results: dict[str, Any], hashes: dict[str, str]) -> str:
    """Return the card; `results` are the figures of the evaluation."""
    training = results["training"]
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        target_params=f"{results['num_params']['target']:,}",
        draft_params=f"{results['num_params']['draft']:,}",
        vocab_size=f"{results['vocab_size']:,}",
        **steps_and_tokens(training, "target"),
        **steps_and_tokens(training, "draft"),
        rows=training["rows"],
        commands=commands(training),
        weights=", ".join(
            f"{domain} {weight:.2f}" for domain, weight in training["weights"].items()
        ),
        losses=loss_table(results["losses"]),
        acceptance=acceptance_table(results["acceptance"]),
        repeated=repeated_table(results["repeated"]),
        quantized=quality_table(results.get("quantization", [])),
        heads=head_table(results.get("heads", {})),
        hashes=table(
            ["file", "SHA-256"],
            [[f"`{path}`", f"`{digest}`"] for path, digest in hashes.items()],
        ),
    )

"""Trains the bundled pair: tokenizer, target, the target's own text, draft, export.

    python checkpoints/recipes/train_pair.py STAGE --corpus CORPUS --work WORK

with the stages `tokenizer`, `target`, `sample`, `draft`, and, with `--out OUT` as well,
`export` and `evaluate`, in this order; README.md has the sizes and the times.

Every stage resumes from what it finds under WORK. `target` and `draft` train for
`--steps` steps; the learning rate is constant, and falls to zero over the last
`--cooldown` steps. With `--start` they begin with the weights of an exported pair in
place of random ones.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import card
import corpus
import decode
import distill
import evaluate
import export
import loops
import network
import numpy as np
import sample
import sentencepiece
import training

from jaxspec.train.losses import LOSSES
from jaxspec.train.text import read_documents

VOCAB_SIZE = 8192
LENGTH = 512


def tokenized(args: Any, file: str = "train.jsonl.xz") -> dict[str, list[np.ndarray]]:
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(args.work / "tokenizer.model")
    )
    documents = list(read_documents(args.corpus / file))
    return corpus.tokenize(documents, processor)


def stage_tokenizer(args: Any) -> None:
    documents = list(read_documents(args.corpus / "train.jsonl.xz"))
    model = corpus.train_tokenizer(documents, VOCAB_SIZE)
    (args.work / "tokenizer.model").write_bytes(model)


def start_of(
    args: Any, name: str, init: Callable[[], network.Params]
) -> Callable[[], network.Params]:
    """Return a function that makes the first weights: those of `--start`, or `init`."""
    if args.start is None:
        return init
    return functools.partial(export.read_weights, args.start / name)


def stage_target(args: Any) -> None:
    config = network.target_config(VOCAB_SIZE)
    state = args.work / "target.safetensors"
    rows = corpus.PackedRows(tokenized(args), length=LENGTH, seed=args.seed)
    loss = training.text_loss
    if args.unlikelihood:
        rows = loops.MixedRows(rows, config, state, length=LENGTH, seed=args.seed)
        loss = functools.partial(loops.mixed_loss, weight=args.unlikelihood)
    training.train(
        lambda params, *batch: loss(params, config, *batch),
        state,
        start_of(args, "target", functools.partial(network.init_params, config, 0)),
        rows,
        args=args,
    )


def load_target(args: Any) -> network.Params:
    """Return the target as exported: rounded to bf16."""
    params, _, _ = training.load_state(args.work / "target.safetensors")
    return decode.narrow(params)


def stage_sample(args: Any) -> None:
    config, params = network.target_config(VOCAB_SIZE), load_target(args)
    by_domain, folder = tokenized(args), args.work / "rows"
    folder.mkdir(exist_ok=True)
    sample.write_shards(params, config, by_domain, folder, tokens=args.written_tokens)
    rows = corpus.PackedRows(by_domain, length=LENGTH, seed=args.seed + 1)
    sample.label_shards(params, config, rows, folder, tokens=args.corpus_tokens)
    share = sample.greedy_agreement(params, config, folder / "written-0000.npz")
    print(f"share of greedy tokens that a full forward pass also chooses: {share:.4f}")


def stage_draft(args: Any) -> None:
    config = network.draft_config(network.target_config(VOCAB_SIZE))
    training.train(
        lambda params, *batch: distill.label_loss(
            params, config, *batch, kind=args.loss
        ),
        args.work / "draft.safetensors",
        start_of(
            args, "draft", lambda: distill.init_draft(config, load_target(args), 0)
        ),
        distill.ShardRows(args.work / "rows", seed=args.seed),
        args=args,
    )


def stage_export(args: Any) -> None:
    target_config = network.target_config(VOCAB_SIZE)
    configs = {"target": target_config, "draft": network.draft_config(target_config)}
    for name, config in configs.items():
        params, _, step = training.load_state(args.work / f"{name}.safetensors")
        export.write_model(
            args.out / name, params, config, args.work / "tokenizer.model"
        )
        print(f"{name}: step {step}, {args.out / name}")
    export.write_credits(
        args.corpus / "kids_stories.ATTRIBUTION.tsv", args.out / "CREDITS.tsv"
    )


def stage_evaluate(args: Any) -> None:
    models = {name: export.read_model(args.out / name) for name in ("target", "draft")}
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(args.out / "target" / "tokenizer.model")
    )
    documents = list(read_documents(args.corpus / "valid.jsonl.xz"))
    losses = {
        name: evaluate.text_losses(model, documents, processor)
        for name, model in models.items()
    }
    print(json.dumps(losses, indent=2), flush=True)
    by_domain = corpus.tokenize(documents, processor)
    rows = evaluate.write_text(models["target"], by_domain, seed=args.seed)
    acceptance = evaluate.acceptance(models["target"], models["draft"], rows)
    print(json.dumps(acceptance, indent=2), flush=True)
    results = {
        "num_params": {
            name: sum(value.size for value in params.values())
            for name, (params, _) in models.items()
        },
        "vocab_size": VOCAB_SIZE,
        "training": training_facts(args),
        "losses": losses,
        "acceptance": acceptance,
        "repeated": evaluate.repeated(args.out / "target", by_domain),
    }
    export.write_json(args.out / "evaluation.json", results)
    text = card.render(results, export.hashes(args.out))
    (args.out / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def training_facts(args: Any) -> dict[str, Any]:
    """Return how the pair was trained, from the training logs."""
    facts: dict[str, Any] = {"rows": args.rows, "weights": corpus.DOMAIN_WEIGHTS}
    if args.start is not None:
        before = json.loads((args.start / "evaluation.json").read_text("utf-8"))
        facts["start"] = before["training"]
    for name in ("target", "draft"):
        lines = (args.work / f"{name}.log.jsonl").read_text().split("\n")
        entries = [json.loads(line) for line in lines if line]
        peak, last = max(entry["rate"] for entry in entries), entries[-1]
        facts[f"{name}_steps"] = last["step"] + 1
        # The last rate is peak / cooldown, see `training.schedule`.
        facts[f"{name}_cooldown"] = round(peak / last["rate"])
        facts[f"{name}_rate"] = peak
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    stages = {
        "tokenizer": stage_tokenizer,
        "target": stage_target,
        "sample": stage_sample,
        "draft": stage_draft,
        "export": stage_export,
        "evaluate": stage_evaluate,
    }
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where `export` writes the pair")
    parser.add_argument("--start", type=Path, help="an exported pair to continue from")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--cooldown", type=int, default=200)
    parser.add_argument(
        "--rows", type=int, default=16, help="rows of 512 tokens per step"
    )
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument(
        "--unlikelihood",
        type=float,
        default=0.0,
        help="weight of the loss that trains the target against repeating itself "
        "(loops.py); needs a target that was saved by an earlier run",
    )
    parser.add_argument("--loss", choices=LOSSES, default="kl", help="the draft's loss")
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--written-tokens", type=int, default=1_200_000)
    parser.add_argument("--corpus-tokens", type=int, default=500_000)
    args = parser.parse_args()
    if args.stage in ("export", "evaluate") and args.out is None:
        parser.error(f"{args.stage} needs --out OUT, the folder of the exported pair")
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()

"""Train the bundled pair: tokenizer, target, the target's own text, draft, export.

    python checkpoints/recipes/train_pair.py tokenizer --corpus CORPUS --work WORK
    python checkpoints/recipes/train_pair.py target    --corpus CORPUS --work WORK
    python checkpoints/recipes/train_pair.py sample    --corpus CORPUS --work WORK
    python checkpoints/recipes/train_pair.py draft     --corpus CORPUS --work WORK
    python checkpoints/recipes/train_pair.py export    --corpus CORPUS --work WORK

Every stage resumes from what it finds under WORK. `target` and `draft` hold the rate
constant until `--steps`, and bring it to zero over the last `--cooldown` of them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import network
import numpy as np
import optimizer
import sentencepiece
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

VOCAB_SIZE = 8192
LENGTH = 512
WARMUP = 30


def save_state(
    path: Path, params: network.Params, moments: dict[str, Any], step: int
) -> None:
    """Write parameters, moments and the step count to one safetensors file."""
    arrays = {f"params/{name}": np.asarray(value) for name, value in params.items()}
    for moment, values in moments.items():
        for name, value in values.items():
            arrays[f"{moment}/{name}"] = np.asarray(value)
    arrays["step"] = np.array(step)
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    partial.replace(path)


def load_state(path: Path) -> tuple[network.Params, dict[str, Any], int]:
    arrays = load_file(path)
    groups: dict[str, Any] = {"params": {}, "first": {}, "second": {}}
    for name, value in arrays.items():
        if "/" in name:
            group, parameter = name.split("/", 1)
            groups[group][parameter] = jnp.asarray(value)
    moments = {"first": groups["first"], "second": groups["second"]}
    return groups["params"], moments, int(arrays["step"])


def schedule(step: int, *, steps: int, cooldown: int, peak: float) -> float:
    """Warm up, stay at `peak`, fall to zero over the last `cooldown` steps."""
    return peak * min(1.0, (step + 1) / WARMUP, (steps - step) / max(cooldown, 1))


def next_token_mask(segments: jax.Array) -> jax.Array:
    """Which positions have their next token in the same document: `[row * token]`."""
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inside.reshape(-1).astype(jnp.float32)


def text_loss(
    params: network.Params, config: dict[str, Any], tokens: jax.Array, segs: jax.Array
) -> jax.Array:
    """Mean cross-entropy, nats per token."""
    logits = network.forward(params, config, tokens[:, :-1], segs[:, :-1])
    mask = next_token_mask(segs)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:].reshape(-1, 1), axis=-1)[:, 0]
    return jnp.sum((log_sum - chosen) * mask) / jnp.sum(mask)


def train(
    loss_fn: Any, state: Path, config: dict[str, Any], rows: Any, *, args: Any
) -> None:
    """Minimise `loss_fn(params, tokens, segments)`; save every `args.save_every`."""
    if state.exists():
        params, moments, start = load_state(state)
    else:
        params = network.init_params(config, seed=0)
        moments, start = optimizer.init_moments(params), 0

    def update(params, moments, tokens, segments, rate, step):
        # Gradients of a few rows at a time: the logits stay in cache.
        grads, loss = jax.tree.map(jnp.zeros_like, params), 0.0
        parts = args.rows // args.micro_rows
        for part in range(parts):
            here = slice(part * args.micro_rows, (part + 1) * args.micro_rows)
            value, grad = jax.value_and_grad(loss_fn)(
                params, tokens[here], segments[here]
            )
            grads = jax.tree.map(jnp.add, grads, grad)
            loss = loss + value / parts
        grads = jax.tree.map(lambda grad: grad / parts, grads)
        params, moments = optimizer.update(
            params, moments, grads, rate=rate, step=step
        )
        return params, moments, loss

    step_fn = jax.jit(update, donate_argnums=(0, 1))
    log = state.with_suffix(".log.jsonl").open("a")
    smooth = None
    progress = tqdm(range(start, args.steps), initial=start, total=args.steps)
    for step in progress:
        tokens, segments = rows.batch(args.rows)
        rate = schedule(
            step, steps=args.steps, cooldown=args.cooldown, peak=args.rate
        )
        params, moments, loss = step_fn(
            params, moments, tokens, segments, jnp.float32(rate), jnp.float32(step + 1)
        )
        loss = float(loss)
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        progress.set_postfix(loss=f"{smooth:.3f}", rate=f"{rate:.4f}")
        entry = dict(step=step, loss=loss, rate=rate, time=time.time())
        log.write(json.dumps(entry) + "\n")
        log.flush()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_state(state, params, moments, step + 1)


def load_rows(args: Any, *, seed: int) -> corpus.PackedRows:
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(args.work / "tokenizer.model")
    )
    documents = list(corpus.read_documents(args.corpus / "train.jsonl.xz"))
    by_domain = corpus.tokenize(documents, processor)
    return corpus.PackedRows(by_domain, length=LENGTH, seed=seed)


def stage_tokenizer(args: Any) -> None:
    documents = list(corpus.read_documents(args.corpus / "train.jsonl.xz"))
    model = corpus.train_tokenizer(documents, VOCAB_SIZE)
    (args.work / "tokenizer.model").write_bytes(model)


def stage_target(args: Any) -> None:
    config = network.target_config(VOCAB_SIZE)
    state = args.work / "target.safetensors"
    rows = load_rows(args, seed=args.seed)
    train(
        lambda params, tokens, segments: text_loss(params, config, tokens, segments),
        state,
        config,
        rows,
        args=args,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    stages = {"tokenizer": stage_tokenizer, "target": stage_target}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--cooldown", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="rows of 512 tokens a step")
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()

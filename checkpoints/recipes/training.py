"""The training loop of both models, and its state on disk.

Independent of the source of batches and of the loss. A resumed run draws and drops the
batches that were already used, so it ends with the same parameters.
"""

import json
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import network
import numpy as np
import optimizer
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

WARMUP = 30


class Rows(Protocol):
    """A source of batches: tokens, segment ids, and other arguments of the loss."""

    def batch(self, rows: int) -> tuple[Any, ...]: ...


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
    """Warm up, hold `peak`, fall to zero over the last `cooldown` steps."""
    return peak * min(1.0, (step + 1) / WARMUP, (steps - step) / max(cooldown, 1))


def next_token_mask(segments: jax.Array) -> jax.Array:
    """Return which positions have their next token in the same document."""
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inside.reshape(-1).astype(jnp.float32)


def next_token_losses(
    params: network.Params, config: dict[str, Any], tokens: jax.Array, segs: jax.Array
) -> jax.Array:
    """Return the cross-entropy of each next token in nats, `[row * token]`."""
    logits = network.forward(params, config, tokens[:, :-1], segs[:, :-1])
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:].reshape(-1, 1), axis=-1)[:, 0]
    return log_sum - chosen


def text_loss(
    params: network.Params, config: dict[str, Any], tokens: jax.Array, segs: jax.Array
) -> jax.Array:
    """Return the mean cross-entropy in nats per token."""
    mask = next_token_mask(segs)
    losses = next_token_losses(params, config, tokens, segs)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def step_function(loss_fn: Callable[..., jax.Array], parts: int) -> Callable[..., Any]:
    """Return the jitted update: one step, with gradients from `parts` slices."""

    def update(params, moments, batch, rate, step):
        # Compute gradients of a few rows at a time, so that their logits fit in the
        # CPU's cache.
        grads, loss = jax.tree.map(jnp.zeros_like, params), 0.0
        size = len(batch[0]) // parts
        for part in range(parts):
            here = slice(part * size, (part + 1) * size)
            slices = jax.tree.map(operator.itemgetter(here), batch)
            value, grad = jax.value_and_grad(loss_fn)(params, *slices)
            grads = jax.tree.map(jnp.add, grads, grad)
            loss = loss + value / parts
        grads = jax.tree.map(lambda grad: grad / parts, grads)
        params, moments = optimizer.update(params, moments, grads, rate=rate, step=step)
        return params, moments, loss

    return jax.jit(update, donate_argnums=(0, 1))


def train(
    loss_fn: Callable[..., jax.Array],
    state: Path,
    start_params: Callable[[], network.Params],
    rows: Rows,
    *,
    args: Any,
) -> None:
    """Minimise `loss_fn(params, *batch)` from `start_params()` or from `state`.

    Args:
        args: `steps`, `cooldown`, `rows`, `micro_rows`, `rate`, `save_every`, as on the
            command line.
    """
    if state.exists():
        params, moments, start = load_state(state)
    else:
        params = start_params()
        moments, start = optimizer.init_moments(params), 0
    for _ in range(start):
        rows.batch(args.rows)
    step_fn = step_function(loss_fn, args.rows // args.micro_rows)
    smooth = None
    progress = tqdm(range(start, args.steps), initial=start, total=args.steps)
    with state.with_suffix(".log.jsonl").open("a") as log:
        for step in progress:
            batch = rows.batch(args.rows)
            rate = schedule(
                step, steps=args.steps, cooldown=args.cooldown, peak=args.rate
            )
            params, moments, loss = step_fn(
                params, moments, batch, jnp.float32(rate), jnp.float32(step + 1)
            )
            loss = float(loss)
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            progress.set_postfix(loss=f"{smooth:.3f}", rate=f"{rate:.4f}")
            entry = dict(step=step, loss=loss, rate=rate, time=time.time())
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save_state(state, params, moments, step + 1)

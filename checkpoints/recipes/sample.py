"""Writes labelled rows: the target's text and corpus text, with its predictions.

A shard is an `.npz` of `[row, position]` arrays: `tokens`, `segments`, `is_written`
(drawn by the target, not given), `ids` and `log_probs` (the target's most likely next
tokens, `[row, position, label]`), and per row `domains` and `ways`. Labels come from
the logits that sampling computes anyway, and add 8 % to its time. Running the target
while the draft is trained would cost more than the draft itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import decode
import jax
import jax.numpy as jnp
import network
import numpy as np
from tqdm import tqdm

LENGTH = 512
ROWS = 128  # rows of one shard
MAX_NEW = 192
MAX_PROMPT = 128
# Ways of sampling: 40 % greedy, 40 % temperature 0.8 with top-p 0.95, 20 % temperature
# 1.
MIX = decode.Mix(greedy=51, nucleus=51, full=26)
CHAT_DOMAINS = ("math", "shell")


def chat_prompt(document: np.ndarray) -> np.ndarray | None:
    """Return the document up to the start of its first answer, if that is short."""
    turns = np.flatnonzero(document == corpus.START_OF_TURN_ID)
    if len(turns) < 2 or turns[1] + 3 > MAX_PROMPT:
        return None
    # The marker, "model" and the newline are one token each.
    return document[: turns[1] + 3]


def text_prompt(document: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return 16 to 64 tokens of a document, from its start or inside a long one."""
    size = int(random.integers(16, 65))
    start = 0
    if len(document) > LENGTH and random.random() < 0.5:
        # Fiction and code have few documents, so prompts from their beginnings alone
        # would repeat.
        start = int(random.integers(1, len(document) - size))
    body = document[start + 1 if start == 0 else start :]
    return np.concatenate([[corpus.BOS_ID], body[: size - 1]])


def prompts_of(
    domain: str, documents: list[np.ndarray], random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield prompts without end: all documents once, then all again."""
    while True:
        for index in random.permutation(len(documents)):
            document = documents[index]
            if domain in CHAT_DOMAINS:
                prompt = chat_prompt(document)
            else:
                prompt = text_prompt(document[:-1], random)
            if prompt is not None:
                yield prompt


def queue(
    by_domain: dict[str, list[np.ndarray]],
    chosen: list[str],
    *,
    length: int,
    random: np.random.Generator,
) -> decode.Prompts:
    """Return prompts for each row, enough to fill `length` tokens.

    Args:
        chosen: Domain of each row.
    """
    sources = {
        domain: prompts_of(domain, by_domain[domain], random)
        for domain in sorted(set(chosen))
    }
    # A prompt has at least 13 tokens, and at least one token is generated after it.
    tokens = np.zeros((len(chosen), length // 14 + 2, MAX_PROMPT), np.int32)
    sizes = np.zeros(tokens.shape[:2], np.int32)
    for row, domain in enumerate(chosen):
        for place in range(tokens.shape[1]):
            prompt = next(sources[domain])
            tokens[row, place, : len(prompt)] = prompt
            sizes[row, place] = len(prompt)
    assert ((sizes + 1).sum(axis=1) > length).all()
    return decode.Prompts(jnp.asarray(tokens), jnp.asarray(sizes))


def save_shard(path: Path, arrays: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial.npz")
    on_host: dict[str, Any] = {
        name: np.asarray(value) for name, value in arrays.items()
    }
    np.savez(partial, **on_host)
    partial.replace(path)


def writer(
    config: dict[str, Any],
    *,
    mix: decode.Mix,
    length: int = LENGTH,
    max_new: int = MAX_NEW,
) -> Any:
    """Return the jitted `decode.write_rows`: `(params, prompts, key) -> arrays`."""

    def write(params: network.Params, prompts: decode.Prompts, key: jax.Array):
        rows = decode.write_rows(
            params, config, prompts, key, mix=mix, length=length, max_new=max_new
        )
        return {name: value.swapaxes(0, 1) for name, value in rows.items()}

    return jax.jit(write)


def write_shards(
    params: network.Params,
    config: dict[str, Any],
    by_domain: dict[str, list[np.ndarray]],
    folder: Path,
    *,
    tokens: int,
) -> None:
    """Fill `folder` with shards of the target's own text until it holds `tokens`."""
    write = writer(config, mix=MIX)
    ways = MIX.names()
    for number in tqdm(range(-(-tokens // (ROWS * LENGTH))), desc="written shards"):
        path = folder / f"written-{number:04d}.npz"
        if path.exists():
            continue
        random = np.random.default_rng(number)
        domains = random.choice(
            list(corpus.DOMAIN_WEIGHTS),
            size=ROWS,
            p=list(corpus.DOMAIN_WEIGHTS.values()),
        ).tolist()
        prompts = queue(by_domain, domains, length=LENGTH, random=random)
        arrays = write(params, prompts, jax.random.key(number))
        save_shard(path, dict(arrays, domains=domains, ways=ways))


def label_shards(
    params: network.Params,
    config: dict[str, Any],
    rows: corpus.PackedRows,
    folder: Path,
    *,
    tokens: int,
    micro_rows: int = 4,
) -> None:
    """Fill `folder` with shards of labelled corpus rows until it holds `tokens`."""

    @jax.jit
    def label(params: network.Params, tokens: jax.Array, segments: jax.Array):
        ids, log_probs = decode.label(network.forward(params, config, tokens, segments))
        shape = (*tokens.shape, decode.NUM_LABELS)
        return dict(
            ids=ids.astype(jnp.uint16).reshape(shape),
            log_probs=log_probs.astype(jnp.float16).reshape(shape),
        )

    for number in tqdm(range(-(-tokens // (ROWS * LENGTH))), desc="corpus shards"):
        # Draw rows for an existing shard too, so that the next shard does not repeat
        # its rows.
        drawn, segments = (array[:, :-1] for array in rows.batch(ROWS))
        path = folder / f"corpus-{number:04d}.npz"
        if path.exists():
            continue
        parts = [
            label(
                params,
                drawn[start : start + micro_rows],
                segments[start : start + micro_rows],
            )
            for start in range(0, ROWS, micro_rows)
        ]
        arrays = {
            name: np.concatenate([np.asarray(part[name]) for part in parts])
            for name in parts[0]
        }
        save_shard(
            path,
            dict(
                arrays,
                tokens=drawn.astype(np.uint16),
                segments=segments.astype(np.uint8),
                is_written=np.zeros(drawn.shape, bool),
                domains=["corpus"] * ROWS,
                ways=["given"] * ROWS,
            ),
        )


def greedy_agreement(
    params: network.Params, config: dict[str, Any], shard: Path, *, rows: int = 16
) -> float:
    """Return the share of greedily written tokens that a full forward pass chooses."""
    with np.load(shard) as arrays:
        is_greedy = arrays["ways"] == "greedy"
        tokens, segments, is_written = (
            arrays[name][is_greedy][:rows].astype(np.int32)
            for name in ("tokens", "segments", "is_written")
        )
    forward = jax.jit(
        lambda tokens, segments: jnp.argmax(
            network.forward(params, config, tokens, segments), axis=-1
        )
    )
    best = [
        np.asarray(forward(tokens[row : row + 4], segments[row : row + 4]))
        for row in range(0, len(tokens), 4)
    ]
    best = np.concatenate(best).reshape(tokens.shape)[:, :-1]
    is_next = (is_written[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
    return float((best == tokens[:, 1:])[is_next].mean())

"""Measures the exported pair: validation loss and acceptance rate.

Reads only exported files, so the figures are those of the shipped bf16 weights. Also
measures how much the greedy text repeats itself.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
import decode
import jax
import jax.numpy as jnp
import network
import numpy as np
import sample
import sentencepiece
import training

from jaxspec import LLM, SamplingParams

LENGTH = 512
MICRO_ROWS = 4
# Rows of the target's own text per domain and way; a row is LENGTH tokens.
WRITTEN_ROWS = 12
# Number of greedy texts per domain in which repetition is measured; their lengths.
NUM_TEXTS, PROMPT_TOKENS, TEXT_TOKENS = 32, 32, 256

Model = tuple[network.Params, dict[str, Any]]


def pack(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pack every document once into tokens and segment ids [row, LENGTH + 1].

    A long document is cut; the pieces share one token, so that each is predicted once.
    """
    rows: list[list[np.ndarray]] = []
    room = 0
    for document in documents:
        for start in range(0, len(document) - 1, LENGTH):
            piece = document[start : start + LENGTH + 1]
            if len(piece) > room:
                rows.append([])
                room = LENGTH + 1
            rows[-1].append(piece)
            room -= len(piece)
    count = -(-len(rows) // MICRO_ROWS) * MICRO_ROWS
    tokens = np.zeros((count, LENGTH + 1), np.int32)
    segments = np.zeros_like(tokens)
    for row, pieces in enumerate(rows):
        joined = np.concatenate(pieces)
        tokens[row, : len(joined)] = joined
        segments[row, : len(joined)] = np.repeat(
            np.arange(1, len(pieces) + 1), [len(piece) for piece in pieces]
        )
    return tokens, segments


def text_losses(
    model: Model,
    documents: list[dict[str, str]],
    processor: sentencepiece.SentencePieceProcessor,
) -> dict[str, dict[str, float]]:
    """Return nats per token and bits per byte by domain.

    `<eos>` is predicted and counted, `<bos>` is not; bytes are those of the text.
    """
    params, config = model

    @jax.jit
    def losses(params: network.Params, tokens: jax.Array, segments: jax.Array):
        each = training.next_token_losses(params, config, tokens, segments)
        mask = training.next_token_mask(segments)
        return jnp.sum(each * mask), jnp.sum(mask)

    results = {}
    for domain, tokenized in sorted(corpus.tokenize(documents, processor).items()):
        tokens, segments = pack(tokenized)
        parts = [
            losses(
                params, tokens[row : row + MICRO_ROWS], segments[row : row + MICRO_ROWS]
            )
            for row in range(0, len(tokens), MICRO_ROWS)
        ]
        nats, count = (sum(float(part[index]) for part in parts) for index in (0, 1))
        num_bytes = sum(
            len(document["text"].rstrip("\n").encode())
            for document in documents
            if document["domain"] == domain
        )
        results[domain] = {
            "tokens": int(count),
            "nats_per_token": nats / count,
            "bits_per_byte": nats / math.log(2) / num_bytes,
        }
    return results


def write_text(
    target: Model, by_domain: dict[str, list[np.ndarray]], seed: int
) -> dict[str, np.ndarray]:
    """Let the target continue validation prompts: one half greedy, one half sampled."""
    params, config = target
    domains = [domain for domain in sorted(by_domain) for _ in range(WRITTEN_ROWS)] * 2
    mix = decode.Mix(greedy=len(domains) // 2, nucleus=0, full=len(domains) // 2)
    random = np.random.default_rng(seed)
    prompts = sample.queue(by_domain, domains, length=LENGTH, random=random)
    rows = sample.writer(config, mix=mix)(params, prompts, jax.random.key(seed))
    arrays = {
        name: np.asarray(rows[name]) for name in ("tokens", "segments", "is_written")
    }
    return arrays | dict(domains=np.array(domains), ways=np.array(mix.names()))


def acceptance(
    target: Model, draft: Model, rows: dict[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Return by domain the acceptance rate of a single draft token.

    `sampled` is its probability at temperature 1, the mean of sum(min(target, draft))
    over text sampled at temperature 1; `greedy` is how often both models choose the
    same token, over greedy text, and `greedy_new` the same where no 4-gram is repeated:
    loops are easy to guess. Only tokens that the target wrote count.
    """
    target_config, draft_config = target[1], draft[1]

    @jax.jit
    def compare(target, draft, tokens, segments):
        logits = network.forward(target, target_config, tokens, segments)
        guess = network.forward(draft, draft_config, tokens, segments)
        kept = jnp.minimum(jax.nn.softmax(logits, -1), jax.nn.softmax(guess, -1))
        agrees = jnp.argmax(logits, -1) == jnp.argmax(guess, -1)
        return jnp.sum(kept, -1).reshape(tokens.shape), agrees.reshape(tokens.shape)

    tokens, segments = (rows[name].astype(np.int32) for name in ("tokens", "segments"))
    parts = [
        compare(
            target[0],
            draft[0],
            tokens[row : row + MICRO_ROWS],
            segments[row : row + MICRO_ROWS],
        )
        for row in range(0, len(tokens), MICRO_ROWS)
    ]
    kept, agrees = (
        np.concatenate([np.asarray(part[index]) for part in parts])[:, :-1]
        for index in (0, 1)
    )
    is_next = rows["is_written"][:, 1:] & (segments[:, 1:] == segments[:, :-1])
    is_new = ~ends_repeated_4_gram(rows["tokens"], rows["segments"])[:, 1:]
    results = {}
    names = sorted(set(rows["domains"].tolist()))
    for domain in [*names, "mean"]:
        is_here = (rows["domains"] == domain) | (domain == "mean")
        is_sampled = is_next & (is_here & (rows["ways"] == "full"))[:, None]
        is_greedy = is_next & (is_here & (rows["ways"] == "greedy"))[:, None]
        results[domain] = {
            "sampled": float(kept[is_sampled].mean()),
            "greedy": float(agrees[is_greedy].mean()),
            "greedy_new": float(agrees[is_greedy & is_new].mean()),
        }
    return results


def ends_repeated_4_gram(tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return [row, token]: the last four tokens occurred earlier in the same text."""
    found = np.zeros(tokens.shape, bool)
    for row, (text, parts) in enumerate(zip(tokens, segments, strict=True)):
        seen = set()
        for end in range(3, len(text)):
            gram = (*text[end - 3 : end + 1].tolist(), int(parts[end]))
            found[row, end] = gram in seen
            seen.add(gram)
    return found


def repeated_4_grams(texts: Sequence[Sequence[int]]) -> float:
    """Return the share of all 4-grams that occurred earlier in the same text."""
    grams = [list(zip(*(text[at:] for at in range(4)), strict=False)) for text in texts]
    num_grams = sum(map(len, grams))
    return 1 - sum(len(set(each)) for each in grams) / num_grams if num_grams else 0.0


def repeated(
    target: Path, by_domain: dict[str, list[np.ndarray]]
) -> dict[str, dict[str, float]]:
    """Return by domain how much of the target's greedy text repeats itself."""
    llm = LLM(str(target), dtype="float32", max_model_len=512, max_num_seqs=NUM_TEXTS)
    params = SamplingParams(temperature=0, max_tokens=TEXT_TOKENS)
    results = {}
    for domain, documents in sorted(by_domain.items()):
        prompts = [
            {"prompt_token_ids": document[:PROMPT_TOKENS].tolist()}
            for document in documents
            if len(document) > PROMPT_TOKENS
        ]
        answers = llm.generate(prompts[:NUM_TEXTS], params, use_tqdm=False)
        texts = [answer.outputs[0].token_ids for answer in answers]
        results[domain] = {
            "tokens": sum(map(len, texts)),
            "repeated_4_grams": repeated_4_grams(texts),
        }
    return results

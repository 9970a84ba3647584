"""Rejection sampling: accept a prefix of the draft tokens and sample one more token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec_kernels import dispatch, tuning
from jaxspec_kernels.rejection_sampling.reference import (
    BLOCK,
    COUPLED,
    STANDARD,
    SamplingValues,
    Verdict,
)

__all__ = [
    "BLOCK",
    "COUPLED",
    "STANDARD",
    "SamplingValues",
    "Verdict",
    "rejection_sampling",
    "sample",
]

_MODULES = {"reference": "reference", "cpu": "cpu", "tpu": "tpu", "gpu": "gpu"}


def rejection_sampling(
    draft_tokens: Int[Array, "seq draft"],
    draft_probs: Float[Array, "seq draft vocab"] | None,
    target_logits: Float[Array, "seq draft+1 vocab"],
    num_valid_drafts: Int[Array, " seq"],
    sampling_values: SamplingValues | None,
    *,
    rule: Int[Array, " seq"] | None = None,
    accept_uniform: Float[Array, "seq draft"] | None = None,
    sample_uniform: Float[Array, " seq"] | None = None,
    noise_words: UInt32[Array, "seq draft+1 2"] | None = None,
    num_forced: Int[Array, " seq"] | None = None,
    vocab_size: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str | None = None,
    device_kind: str | None = None,
) -> Verdict:
    """Accept a prefix of `draft_tokens`, then sample one token from the target.

    The target's distribution is the softmax of its logits after temperature, top-k,
    top-p and min-p, in that order; logits equal to a filter's cutoff are all kept.
    Emitted tokens follow it exactly, up to float32 rounding and the 24-bit resolution
    of the uniform random numbers. The probabilities are never written to memory: one
    pass over the logits yields row statistics and the draft tokens' probabilities,
    top-k and top-p add a few passes if a sequence uses them, and then only the row that
    the token is drawn from is read again. Sequences with different rules share a batch:

    - greedy (temperature 0, `rule` is ignored): drafts are accepted while they equal
      the argmax (lowest id on ties); the next token is the argmax.
    - `STANDARD`: draft i is accepted when u * draft(i) < target(i), strictly. The next
      token is drawn from max(target - draft, 0) after a rejection, else from the row
      after the last draft, by inverting the cumulative sum over ids at
      `sample_uniform`.
    - `BLOCK`: accept the longest prefix that passes its own test; draw as in
      `STANDARD`, from max(joint * target - draft, 0) after a rejection.
    - `COUPLED`: drafts are accepted while they equal the argmax of probability / noise
      (one exponential per id, hashed from the id and the row's `noise_words`); the next
      token is that argmax.

    Special values:

    - A logit of -inf or NaN excludes its token: it is neither accepted nor drawn.
      +inf counts as the largest float.
    - Ids at or past `vocab_size` are padding; their logits may hold anything.
    - A row without any finite logit accepts no draft and returns token 0.
    - A probability that underflows is 0. If underflow or rounding makes the whole
      residual 0, the token is drawn from the target.
    - Drafts, probabilities, uniforms and rows past `num_valid_drafts` are not used.
    - Padding sequences: pass temperature 0 and ignore their verdict.

    Under `shard_map` with the vocabulary split, pass each device's slice of logits and
    `draft_probs`, all other arrays whole, and the mesh axes as `axis_name`. Every
    device returns the same verdict and receives at most 15 numbers per target row at
    once. The TPU and GPU implementations need `check_vma=False` there.

    Args:
        draft_tokens: May have no columns: plain decoding.
        draft_probs: Distributions that `draft_tokens` were drawn from, after token
            controls, temperature, top-k, top-p and min-p; None if each draft is a point
            mass (greedy or lookup).
        target_logits: float32 or bfloat16. Row i predicts the token in the place of
            draft i (from 0); the last row, the token after all drafts.
        num_valid_drafts: Valid drafts of each sequence: columns at or past it are
            padding.
        sampling_values: None if every sequence is greedy: the program then contains
            nothing else, and the arguments that follow are not used.
        rule: `STANDARD`, `BLOCK` or `COUPLED`.
        accept_uniform: In [0, 1), one per draft.
        sample_uniform: In [0, 1).
        noise_words: Random words per row, the same as the draft model used at that
            position; None if no sequence is coupled (a coupled one would then follow
            `STANDARD`).
        num_forced: For benchmarks: accept exactly this number of drafts (at most
            `num_valid_drafts`), then sample from the target. All passes still run.
            None: the rules decide.
        vocab_size: Size of the whole vocabulary; None if no column is padding.
        axis_name: Mesh axes that split the vocabulary, major first.
        implementation: Name of one implementation; None selects that of jax's default
            backend.
        device_kind: Use the tile size that was measured on this kind of device
            (`device.device_kind`). With None, or for a device without a table, the
            implementation uses its default.

    Raises:
        ValueError: The shapes do not fit each other.

    References: Leviathan et al. 2023, arXiv:2211.17192; Sun et al. 2024,
        arXiv:2403.10444 (block); Daliri et al. 2024, arXiv:2408.07978 (coupling).
    """
    _check_shapes(
        target_logits.shape,
        draft_tokens=draft_tokens,
        draft_probs=draft_probs,
        num_valid_drafts=num_valid_drafts,
        sampling_values=sampling_values,
        rule=rule,
        accept_uniform=accept_uniform,
        sample_uniform=sample_uniform,
        noise_words=noise_words,
        num_forced=num_forced,
    )
    run = _implementation(target_logits, implementation, device_kind)
    return run(
        draft_tokens,
        draft_probs,
        target_logits,
        num_valid_drafts,
        sampling_values,
        rule=rule,
        accept_uniform=accept_uniform,
        sample_uniform=sample_uniform,
        noise_words=noise_words,
        num_forced=num_forced,
        vocab_size=2**30 if vocab_size is None else vocab_size,
        axis_name=axis_name,
    )


def sample(
    logits: Float[Array, "row vocab"],
    sampling_values: SamplingValues | None,
    *,
    rule: Int[Array, " row"] | None = None,
    uniform: Float[Array, " row"] | None = None,
    noise_words: UInt32[Array, "row 2"] | None = None,
    vocab_size: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str | None = None,
    device_kind: str | None = None,
) -> tuple[Int[Array, " row"], Float[Array, "row vocab"] | None]:
    """Draw one token per row, as `rejection_sampling` does without any drafts.

    Draft models sample with it: verification needs the probabilities it returns.
    Arguments are those of `rejection_sampling`, with one row per sequence.

    Returns:
        The tokens, and the distributions they were drawn from: float32, zeros if no row
        samples, None without `sampling_values`. Under `shard_map` this device's slice
        of them.
    """
    rows = logits.shape[0]
    nothing = jnp.zeros((rows, 0), jnp.int32)
    words = None if noise_words is None else noise_words[:, None]
    _check_shapes(
        (rows, 1, logits.shape[1]),
        sampling_values=sampling_values,
        rule=rule,
        sample_uniform=uniform,
        noise_words=words,
    )
    run = _implementation(logits[:, None], implementation, device_kind)
    decided = run(
        nothing,
        None,
        logits[:, None],
        jnp.zeros(rows, jnp.int32),
        sampling_values,
        rule=rule,
        accept_uniform=nothing.astype(jnp.float32),
        sample_uniform=uniform,
        noise_words=words,
        has_probs=sampling_values is not None,
        vocab_size=2**30 if vocab_size is None else vocab_size,
        axis_name=axis_name,
    )
    if sampling_values is None:
        return decided.next_token, None
    verdict, probs = decided
    return verdict.next_token, probs


def _implementation(
    logits: Float[Array, "seq width vocab"],
    implementation: str | None,
    device_kind: str | None,
) -> Callable[..., Any]:
    """Return the implementation, with the tile size measured for this shape."""
    name = dispatch.resolve("rejection_sampling", implementation)
    tuned: dict[str, int] = {}
    if device_kind is not None:
        seqs, width, columns = logits.shape
        key = tuning.sampling_key(
            rows=seqs * width, columns=columns, dtype=str(logits.dtype)
        )
        tuned = tuning.sizes("rejection_sampling", name, device_kind, key) or {}
    return partial(dispatch.choose("rejection_sampling", _MODULES, name), **tuned)


def _check_shapes(
    logits: tuple[int, ...], *, sampling_values: SamplingValues | None, **arrays: Any
) -> None:
    """Raise `ValueError` for shapes that do not match those of the logits."""
    if len(logits) != 3 or not logits[1]:
        raise ValueError(
            f"target_logits has shape {logits}, but must be [seq, draft + 1, vocab]"
        )
    seqs, width, columns = logits
    seq, draft = (seqs,), (seqs, width - 1)
    expected = {
        "draft_tokens": draft,
        "draft_probs": (*draft, columns),
        "num_valid_drafts": seq,
        "rule": seq,
        "accept_uniform": draft,
        "sample_uniform": seq,
        "noise_words": (seqs, width, 2),
    }
    arrays |= {} if sampling_values is None else sampling_values._asdict()
    for name, array in arrays.items():
        shape = expected.get(name, seq)
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, but for target_logits of shape "
                f"{logits} ({seqs} sequences, {width - 1} drafts) it must be {shape}"
            )

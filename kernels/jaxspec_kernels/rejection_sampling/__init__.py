"""The one sampler: which token follows, and how many draft tokens stay before it."""

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
    Controls,
    Verdict,
)

__all__ = [
    "BLOCK",
    "COUPLED",
    "STANDARD",
    "Controls",
    "Verdict",
    "rejection_sampling",
    "sample",
]

_MODULES = {"reference": "reference", "cpu": "cpu", "tpu": "tpu", "gpu": "gpu"}


def rejection_sampling(
    draft_tokens: Int[Array, "seq draft"],
    draft_probs: Float[Array, "seq draft vocab"] | None,
    target_logits: Float[Array, "seq draft+1 vocab"],
    num_draft: Int[Array, " seq"],
    controls: Controls | None,
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
    """Accept a prefix of `draft_tokens`, then choose one token from the target.

    The target's probabilities are those of its logits after temperature, top-k, top-p
    and min-p, in that order; equal logits at a filter's border all stay. Emitted tokens
    follow them exactly, but for float32 rounding and the 24 bits of a uniform. They are
    never written to memory: row statistics and the draft tokens' probabilities come
    from one pass over the logits, top-k and top-p add a few passes where a sequence
    asks for them, and then only the row that the token is drawn from is read again.
    Sequences with different rules share a batch:

    - greedy (temperature 0, whatever `rule` says): drafts stay while they equal the
      argmax, the lowest id of equal logits; then comes the argmax.
    - `STANDARD`: draft i stays when u * draft(i) < target(i), strictly. The token
      comes from max(target - draft, 0) at a rejection, else from the row after the last
      draft, by inverting the cumulative sum in order of ids at `sample_uniform`.
    - `BLOCK`: the longest prefix that passes its own test stays; the rest is alike.
    - `COUPLED`: drafts stay while they equal the argmax of probability / noise, one
      exponential per id, from a hash of the id and the row's `noise_words`; then comes
      that argmax.

    What is not a number or not a token:

    - A logit of -inf or NaN excludes its token: it is neither accepted nor drawn.
      +inf counts as the largest float.
    - Ids at or past `vocab_size` are pads, whose logits may hold anything.
    - A row without any finite logit accepts no draft and gives token 0.
    - A probability that underflows is 0. Where that, or rounding, leaves nothing of a
      residual, the token comes from the target.
    - Drafts, probabilities, uniforms and rows past `num_draft` are not used.
    - A sequence that is a pad: give it temperature 0, and drop its verdict.

    Under `shard_map` with the vocabulary split, pass each device's slice of logits and
    `draft_probs`, the rest whole, and the mesh axes as `axis_name`. Every device gets
    the same verdict; none receives more than 15 numbers per target row at once. The TPU
    and GPU implementations need `check_vma=False` there.

    Args:
        draft_tokens: May have no columns: plain decoding.
        draft_probs: What `draft_tokens` were drawn from, after all sampling controls;
            None where each was certain (a greedy or looked-up draft).
        target_logits: float32 or bfloat16; row i follows draft i - 1.
        num_draft: Drafts that count; the later ones are ignored.
        controls: None where every sequence is greedy: nothing else is made part of the
            program then, and what follows is not used.
        rule: `STANDARD`, `BLOCK` or `COUPLED`.
        accept_uniform: In [0, 1), one per draft.
        sample_uniform: In [0, 1).
        noise_words: Random words per row, as the draft used at that position; None
            where no sequence is coupled; one that is would follow `STANDARD`.
        num_forced: For benchmarks: as many drafts stay, at most `num_draft`, whatever
            they are, and the token is the target's own after them. The passes over the
            rows are made as ever. None lets the rules decide.
        vocab_size: Of the whole vocabulary; None where no column is a pad.
        axis_name: Mesh axes that split the vocabulary, major first.
        implementation: A name to force; None is that of jax's default backend.
        device_kind: Takes the tile size that was measured on this kind of device, as in
            `device.device_kind`; None, or a device without a table, is the
            implementation's own choice.

    Raises:
        ValueError: The shapes do not fit each other.

    References: Leviathan et al. 2023, arXiv:2211.17192; Sun et al. 2024,
        arXiv:2403.10444 (block); Daliri et al. 2024, arXiv:2408.07978 (coupling).
    """
    _check_shapes(
        target_logits.shape,
        draft_tokens=draft_tokens,
        draft_probs=draft_probs,
        num_draft=num_draft,
        controls=controls,
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
        num_draft,
        controls,
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
    controls: Controls | None,
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

    What a draft model draws with: its probabilities are kept, as verification needs
    them. Arguments are those of `rejection_sampling`, with one row per sequence.

    Returns:
        The tokens, and what they were drawn from: float32, zeros where no row samples,
        None without `controls`. Under `shard_map` this device's slice of it.
    """
    rows = logits.shape[0]
    nothing = jnp.zeros((rows, 0), jnp.int32)
    words = None if noise_words is None else noise_words[:, None]
    _check_shapes(
        (rows, 1, logits.shape[1]),
        controls=controls,
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
        controls,
        rule=rule,
        accept_uniform=nothing.astype(jnp.float32),
        sample_uniform=uniform,
        noise_words=words,
        has_probs=controls is not None,
        vocab_size=2**30 if vocab_size is None else vocab_size,
        axis_name=axis_name,
    )
    if controls is None:
        return decided.next_token, None
    verdict, probs = decided
    return verdict.next_token, probs


def _implementation(
    logits: Float[Array, "seq width vocab"],
    implementation: str | None,
    device_kind: str | None,
) -> Callable[..., Any]:
    """The implementation, with the tile size that was measured for such logits."""
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
    logits: tuple[int, ...], *, controls: Controls | None, **given: Any
) -> None:
    """Compare with the shape of the logits, of which each device may hold a slice."""
    if len(logits) != 3 or not logits[1]:
        raise ValueError(
            f"target_logits of shape {logits}: [seq, draft + 1, vocab] is needed"
        )
    seqs, width, columns = logits
    seq, draft = (seqs,), (seqs, width - 1)
    expected = {
        "draft_tokens": draft,
        "draft_probs": (*draft, columns),
        "num_draft": seq,
        "rule": seq,
        "accept_uniform": draft,
        "sample_uniform": seq,
        "noise_words": (seqs, width, 2),
    }
    given |= {} if controls is None else controls._asdict()
    for name, array in given.items():
        shape = expected.get(name, seq)
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} of shape {array.shape} with target_logits {logits}: {shape} "
                f"is needed, for {seqs} sequences of {width - 1} drafts"
            )

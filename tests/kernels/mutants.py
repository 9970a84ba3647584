"""Known bugs of attention kernels, inserted into each implementation one at a time.

A table lists each bug of `BUGS` for each implementation. `rejection_mutants.py` does
the same for rejection sampling.
"""

import contextlib
import io
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest

from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from tests.kernels.attention_base import (
    compiled,
    count_reads,
    run,
    run_strictly,
    strict_case,
)
from tests.kernels.oracle import EXACT, SMALL, build, error
from tests.support.mutation import Mutant

BUGS = (
    "mask off by one",
    "window off by one",
    "cap after mask",
    "page read past the end",
    "wrong GQA row",
    "bf16 statistics",
    "missing rescale",
)

# Contexts of one, two, three and two blocks, so that the two buffers alternate.
CALL = build(replace(SMALL, window=35), kv_len=[3, 41, 90, 17])
# The reference starts at the earliest window of all sequences, which here is past
# position 0.
LATE = build(replace(SMALL, window=35), kv_len=[90, 79, 85, 88])
# Tiles with splits of one and of two blocks, whose softmax statistics must be rescaled
# when they are merged.
TILES = Tiles(rows=16, keys=16, splits=2)


def check_backend(backend: str) -> None:
    """Check a backend with a new jit, as a cached trace would not contain the bug."""
    call = LATE if backend == "reference" else CALL
    own: dict[str, Any] = dict(tiles=TILES) if backend == "gpu" else {}
    assert error(call, run(backend, call, function=compiled(backend), **own)) <= EXACT


def check_walk() -> None:
    with pytest.MonkeyPatch.context() as patch:
        call = build(SMALL, kv_len=[16, 1, 0, 0])
        assert len(count_reads(patch, "reference", call)) == 1


def check_copies() -> None:
    call, printed = strict_case(7), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = run_strictly(call, function=compiled("tpu"))
    except jax.errors.JaxRuntimeError as raised:
        raise AssertionError("a read out of bounds") from raised
    assert "RACE DETECTED" not in printed.getvalue()
    assert error(call, result) <= EXACT


CHECKS = {name: partial(check_backend, name) for name in ("reference", "tpu", "gpu")}


def mutants_of(implementation: str, rows: list[tuple[Any, ...]]) -> list[Mutant]:
    """Make mutants from rows of bug, function, old and new code, and maybe a check."""
    return [
        Mutant(
            name=f"{implementation}: {bug}",
            module=f"jaxspec_kernels.paged_attention.{implementation}",
            function=function,
            old=old,
            new=new,
            check=check[0] if check else CHECKS[implementation],
        )
        for bug, function, old, new, *check in rows
    ]


def rounded(statistic: str) -> str:
    """Return an expression that rounds `statistic` to bfloat16.

    It does not use a pair of casts, which XLA may remove.
    """
    return f"jax.lax.reduce_precision({statistic}, 8, 7)"


R_SUM = "total * rescale + row_sums(weights)"
R_SCORES = """if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(visible, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_maximum), 0.0)
"""
R_CAPPED_LATE = """scores = jnp.where(visible, scores, _MASKED)
    scores = jnp.tanh(scores / soft_cap) * soft_cap
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_maximum)
"""
REFERENCE = mutants_of(
    "reference",
    [
        ("mask off by one", "_visible", "<= position", "< position"),
        ("mask one too far", "_visible", "<= position", "<= position + 1"),
        ("window off by one", "_visible", "< window", "<= window"),
        ("window too narrow", "_visible", "< window", "< window - 1"),
        ("cap after mask", "_add", R_SCORES, R_CAPPED_LATE),
        (
            "page read past the end",
            "_blocks",
            "(kv_len.max() + block - 1) // block",
            "kv_len.max() // block + 1",
            check_walk,
        ),
        (
            "unseen slots used",
            "paged_attention",
            "jnp.where(live, kv[:, :, 1], 0.0)",
            "kv[:, :, 1]",
        ),
        (
            "wrong GQA row",
            "paged_attention",
            "jnp.repeat(visible, group, axis=1)",
            "jnp.tile(visible, (1, group, 1))",
        ),
        ("wrong head", "fold", ".transpose(0, 2, 1, 3, 4)", ""),
        ("bf16 statistics", "_add", R_SUM, rounded(R_SUM)),
        ("missing rescale", "_add", "mixed * rescale", "mixed"),
        ("sum not rescaled", "_add", "total * rescale", "total"),
        ("window starts late", "_blocks", "- window + 1", "- window + 17"),
    ],
)

T_SUM = "total[head] * rescale + weights.sum(axis=1, keepdims=True)"
T_SCORES = """if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            scores = jnp.where(seen, scores, _MASKED)
            old_maximum = maximum[head]
            new_maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_maximum), 0.0)
"""
T_CAPPED_LATE = """scores = jnp.where(seen, scores, _MASKED)
            scores = jnp.tanh(scores / soft_cap) * soft_cap
            old_maximum = maximum[head]
            new_maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - new_maximum)
"""
TPU = mutants_of(
    "tpu",
    [
        ("mask off by one", "_kernel", "key <= position", "key < position"),
        ("mask one too far", "_kernel", "key <= position", "key <= position + 1"),
        ("window off by one", "_kernel", "key < window", "key <= window"),
        ("window too narrow", "_kernel", "key < window", "key < window - 1"),
        ("cap after mask", "_kernel", T_SCORES, T_CAPPED_LATE),
        (
            "page read past the end",
            "_kernel",
            "end_page[of_seq] -",
            "end_page[of_seq] + 1 -",
            check_copies,
        ),
        ("slot past the end used", "_kernel", "(at < limit)", "(at <= limit)"),
        ("unseen slots used", "_kernel", "(at >= lowest[seq]) &", ""),
        (
            "wrong GQA row",
            "_places",
            "return jnp.repeat(depth, group, axis=1)[:, :, None]",
            "return jnp.tile(depth, (1, group))[:, :, None]",
        ),
        ("wrong head", "_kernel", "lane = 2 * head", "lane = 0 * head"),
        ("keys for values", "_kernel", "lane + head_dim : lane + 2", "lane : lane + 1"),
        ("bf16 statistics", "_kernel", T_SUM, rounded(T_SUM)),
        ("missing rescale", "_kernel", "mixed[head] * rescale", "mixed[head]"),
        ("sum not rescaled", "_kernel", "total[head] * rescale", "total[head]"),
        ("window starts late", "_attend", "window + 1, 0", "window + 2, 0"),
        ("buffer of another block", "_kernel", "return 1 - slot", "return slot"),
        ("buffers not handed over", "_kernel", "next_slot[0] = jax.lax.f", "jax.lax.f"),
        (
            "no wait",
            "_kernel",
            'each_page(seq, number, slot, "wait")',
            "pass",
            check_copies,
        ),
        (
            "one buffer",
            "_kernel",
            "buffer.at[slot, at]",
            "buffer.at[0, at]",
            check_copies,
        ),
    ],
)

G_SUM = "total * rescale + weights.sum(axis=1)"
G_WEIGHTS = """scores = jnp.where(visible, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        weights = jnp.where(visible, weights, 0.0)
"""
# The score of a masked key after a soft cap.
G_CAPPED_LATE = """scores = jnp.where(visible, scores, -soft_cap * _LOG2_E)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
"""
GPU = mutants_of(
    "gpu",
    [
        ("mask off by one", "_attend", "distance >= 0", "distance >= 1"),
        ("mask one too far", "_attend", "distance >= 0", "distance >= -1"),
        ("window off by one", "_attend", "distance < window", "distance <= window"),
        ("window too narrow", "_attend", "distance < window", "distance < window - 1"),
        ("cap after mask", "_attend", G_WEIGHTS, G_CAPPED_LATE),
        ("page read past the end", "_attend", "at < end", "at < end + page_size"),
        ("wrong GQA row", "_attend", "kv_head * group + row", "kv_head + row"),
        ("keys for values", "_attend", "2 * kv_head + 1, lane", "2 * kv_head, lane"),
        ("bf16 statistics", "_attend", G_SUM, rounded(G_SUM)),
        ("missing rescale", "_attend", "mixed * rescale[:, None]", "mixed"),
        ("sum not rescaled", "_attend", "total * rescale", "total"),
        ("split not weighted", "_combine", "mixed * weights[:, None]", "mixed"),
    ],
)

MUTANTS = [*REFERENCE, *TPU, *GPU]

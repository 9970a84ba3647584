"""Named shapes of paged attention: the calls of Gemma 2 and of the bundled pair.

`CASES` are short enough to run anywhere. `REAL_CASES` are a chip's part of the three
sizes of Gemma 2 at 8k context, for compilers, benchmarks and tuners.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; lengths in tokens."""

    seqs: int
    queries: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    context: int
    window: int | None
    scale: float
    soft_cap: float | None = 50.0


CASES = {
    "tiny/decode": Case(
        seqs=1, queries=1, q_heads=6, kv_heads=2, head_dim=64, page_size=16,
        context=200, window=None, scale=1 / 8,
    ),
    "tiny-draft/decode": Case(
        seqs=3, queries=2, q_heads=4, kv_heads=1, head_dim=64, page_size=16,
        context=200, window=128, scale=1 / 8,
    ),
    "tiny/verify": Case(
        seqs=3, queries=6, q_heads=6, kv_heads=2, head_dim=64, page_size=16,
        context=300, window=128, scale=1 / 8,
    ),
    "tiny/prefill": Case(
        seqs=4, queries=32, q_heads=6, kv_heads=2, head_dim=64, page_size=16,
        context=256, window=128, scale=1 / 8,
    ),
    "2b/verify": Case(
        seqs=2, queries=5, q_heads=8, kv_heads=4, head_dim=256, page_size=16,
        context=160, window=64, scale=1 / 16,
    ),
    "9b/verify": Case(
        seqs=2, queries=5, q_heads=16, kv_heads=8, head_dim=256, page_size=32,
        context=96, window=None, scale=1 / 16,
    ),
    "27b/verify": Case(
        seqs=1, queries=6, q_heads=32, kv_heads=16, head_dim=128, page_size=16,
        context=64, window=24, scale=1 / 12,
    ),
}  # fmt: skip

# Query heads, KV heads, head_dim and attention scale of the whole model, before it is
# split over devices.
_MODELS = {
    "2b": (8, 4, 256, 1 / 16),
    "9b": (16, 8, 256, 1 / 16),
    "27b": (32, 16, 128, 1 / 12),
}
# Sequences, queries and window. A decoding draft has one query, and two in the first
# step after a fully accepted round; a chunk of 512 tokens is 16 tiles of 32.
_CALLS = {
    "decode": (8, 1, None),
    "decode-two": (8, 2, 4096),
    "verify": (8, 6, None),
    "verify-window": (8, 6, 4096),
    "prefill": (16, 32, 4096),
}


def _real_cases() -> dict[str, Case]:
    cases = {}
    for model, (q_heads, kv_heads, head_dim, scale) in _MODELS.items():
        for parts in (1, 2, 4, 8):  # tensor parallelism
            for call, (seqs, queries, window) in _CALLS.items():
                cases[f"{model}/tp{parts}/{call}"] = Case(
                    seqs=seqs,
                    queries=queries,
                    q_heads=q_heads // parts,
                    # Fewer KV heads than chips: each chip has a copy of one.
                    kv_heads=max(kv_heads // parts, 1),
                    head_dim=head_dim,
                    page_size=16,
                    context=8192,
                    window=window,
                    scale=scale,
                )
    return cases


REAL_CASES = _real_cases()

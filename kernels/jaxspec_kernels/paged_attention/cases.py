"""Named shapes of paged attention: what Gemma 2 and the bundled pair really call."""

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

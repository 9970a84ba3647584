"""Named shapes of page writes: a verification round and a prefill chunk."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; `tokens` rows into `pages` pages."""

    tokens: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int


CASES = {
    "tiny/verify": Case(tokens=6, pages=40, page_size=16, kv_heads=2, head_dim=64),
    "tiny/prefill": Case(tokens=128, pages=40, page_size=16, kv_heads=2, head_dim=64),
    "9b/verify": Case(tokens=40, pages=12, page_size=16, kv_heads=8, head_dim=256),
}

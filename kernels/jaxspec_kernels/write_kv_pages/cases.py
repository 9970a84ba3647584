"""Named shapes of page writes: the calls of Gemma 2 and of the bundled pair.

`CASES` are short enough to run anywhere. `REAL_CASES` are a chip's part of the three
sizes of Gemma 2, for compilers and benchmarks.
"""

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
    "tiny-draft/decode": Case(
        tokens=2, pages=40, page_size=16, kv_heads=1, head_dim=64
    ),
    "9b/verify": Case(tokens=40, pages=12, page_size=16, kv_heads=8, head_dim=256),
}

# KV heads and head_dim of the whole model, before it is split over devices.
_MODELS = {"2b": (4, 256), "9b": (8, 256), "27b": (16, 128)}
# Number of rows (tokens) written: by one sequence that decodes, by eight that verify K
# + 1 = 6 tokens, and by a prefill chunk.
_CALLS = {"decode": 1, "verify": 48, "prefill": 512}


def _real_cases() -> dict[str, Case]:
    cases = {}
    for model, (kv_heads, head_dim) in _MODELS.items():
        for parts in (1, 2, 4, 8):  # tensor parallelism
            for call, tokens in _CALLS.items():
                cases[f"{model}/tp{parts}/{call}"] = Case(
                    tokens=tokens,
                    pages=4096,
                    page_size=16,
                    # Fewer KV heads than chips: each chip has a copy of one.
                    kv_heads=max(kv_heads // parts, 1),
                    head_dim=head_dim,
                )
    return cases


REAL_CASES = _real_cases()

"""Named shapes of rejection sampling: the calls of Gemma 2 and of the bundled pair."""

from dataclasses import dataclass

# Gemma 2's vocabulary; the published Flax checkpoints have 128 more rows, all padding.
_GEMMA, _PADDED = 256_000, 256_128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. The vocabulary has `columns` columns, split over `shards` devices."""

    seqs: int
    drafts: int
    vocab_size: int
    columns: int
    shards: int = 1


CASES = {
    "tiny/verify": Case(seqs=4, drafts=5, vocab_size=8192, columns=8192),
    "tiny/decode": Case(seqs=4, drafts=0, vocab_size=8192, columns=8192),
} | {
    f"{model}/tp{shards}": Case(
        seqs=seqs, drafts=drafts, vocab_size=_GEMMA, columns=columns, shards=shards
    )
    # The sizes of Gemma 2 share a vocabulary; they differ in the number of drafts with
    # which decoding is fastest.
    for model, seqs, drafts, columns in (
        ("2b", 8, 0, _GEMMA),
        ("9b", 8, 4, _GEMMA),
        ("27b", 8, 6, _PADDED),
    )
    for shards in (1, 2, 4, 8)
}

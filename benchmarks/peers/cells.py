"""What is measured, one cell of a table each, and the rows that are made of it."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

OURS = "jaxspec"
# The same with K as it chooses, its default: ratios of peers are by `OURS`.
CHOSEN = f"{OURS} (K chosen)"
PLAIN, DRAFT, NGRAM = MODES = ("plain", "draft", "n-gram")
# Tokens after which a text is over; some peers never choose one where they must go on.
END_TOKENS = (1, 107)


@dataclass(kw_only=True)
class Cell:
    """One peer in one mode, with so many sequences at once, on so many threads.

    Attributes:
        bans_end: The peer is not given a way to go on after the end of a text: it is
            kept from ending it. Texts are then compared up to there.
        answers: Of its child, run by run.
        failed: Why there are no more.
    """

    peer: str
    mode: str
    dtype: str
    batch_size: int
    threads: int
    bans_end: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None

    @property
    def speeds(self) -> list[float]:
        """New tokens by the whole time, prompts included, of every run."""
        return [
            sum(map(len, one["token_ids"])) / one["seconds"] for one in self.answers
        ]

    @property
    def texts(self) -> list[list[int]]:
        return self.answers[-1]["token_ids"] if self.answers else []

    def kind(self, *, peer: str | None = None) -> tuple[Any, ...]:
        """What two cells share that may be compared."""
        names = (peer or self.peer, self.mode, self.dtype)
        return (*names, self.batch_size, self.threads)


def rows(cells: list[Cell]) -> list[dict[str, Any]]:
    """A row of every cell, with its ratio to ours and the share of equal texts."""
    ours = {cell.kind(): median(cell.speeds) for cell in cells if cell.answers}
    # Greedy texts of ours are the same on any path, so any run of all prompts serves.
    plain = (OURS, PLAIN, "float32")
    texts = [one.texts for one in cells if (one.peer, one.mode, one.dtype) == plain]
    reference = max(texts, key=len, default=[])
    found = []
    for cell in cells:
        row: dict[str, Any] = {
            "peer": cell.peer,
            "mode": cell.mode,
            "dtype": cell.dtype,
            "batch_size": cell.batch_size,
            "threads": cell.threads,
        }
        if cell.answers:
            row |= _speed(cell)
            row |= _acceptance(cell)
            beside = ours.get(cell.kind(peer=OURS))
            if beside is not None and cell.peer not in (OURS, CHOSEN):
                row["ours_over_theirs"] = round(beside / median(cell.speeds), 3)
            if cell.dtype == "float32":
                row |= _equality(cell, reference)
        if cell.failed:
            row["failed"] = cell.failed
        found.append(row)
    return found


def _speed(cell: Cell) -> dict[str, Any]:
    return {
        "tokens_per_s": [round(speed, 1) for speed in cell.speeds],
        "median_tokens_per_s": round(median(cell.speeds), 1),
        "least_tokens_per_s": round(min(cell.speeds), 1),
        "most_tokens_per_s": round(max(cell.speeds), 1),
    }


def _acceptance(cell: Cell) -> dict[str, float]:
    """Over all runs; what a peer does not tell is left out."""

    def total(name: str) -> int:
        return sum(one["counts"].get(name, 0) for one in cell.answers)

    found = {}
    if total("drafted"):
        found["acceptance_rate"] = round(total("accepted") / total("drafted"), 4)
    if total("rounds"):
        kept = total("accepted") / total("rounds")
        found["mean_acceptance_length"] = round(1 + kept, 3)
    return found


def _equality(cell: Cell, reference: list[list[int]]) -> dict[str, Any]:
    """How many texts are ours; they begin with the same prompts."""
    pairs = list(zip(cell.texts, reference, strict=False))
    if cell.bans_end:
        pairs = [_until_end(theirs, ours) for theirs, ours in pairs]
    return {
        "num_texts": len(pairs),
        "num_equal": sum(theirs == ours for theirs, ours in pairs),
    }


def _until_end(theirs: list[int], ours: list[int]) -> tuple[list[int], list[int]]:
    ends = [place for place, token in enumerate(ours) if token in END_TOKENS]
    end = min(ends, default=len(ours))
    return theirs[:end], ours[:end]

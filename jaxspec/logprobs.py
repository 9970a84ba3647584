"""Owns `Logprob`, the log-probability of one candidate token at one position.

A text's logprobs are a list of dicts, or `FlatLogprobs`: the same content in a few long
lists, which use less memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: Its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# By token id, for one position: the generated token, then the most likely ones.
LogprobsOnePosition = dict[int, Logprob]


@dataclass
class FlatLogprobs(Sequence[Any]):
    """Behaves like a list of dicts, one per position.

    A position without logprobs (the first of a prompt) reads as None.

    Attributes:
        start_indices: By position: its first entry in the lists below.
        end_indices: By position: the entry after its last one.
        token_ids: Token ids of all entries.
        logprobs: Natural logarithms of their probabilities.
        ranks: 1 for the most likely token of the vocabulary.
        decoded_tokens: Their texts.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: LogprobsOnePosition | None) -> None:
        """Append a position."""
        self.start_indices.append(len(self.token_ids))
        for token, entry in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Any]) -> None:
        """Append several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        if start == end:
            return None
        return {
            self.token_ids[at]: Logprob(
                self.logprobs[at], self.ranks[at], self.decoded_tokens[at]
            )
            for at in range(start, end)
        }

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

"""Owns `Logprob`, what is said about one candidate token at one position."""

from dataclasses import dataclass


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


# By token id, for one position.
TokenLogprobs = dict[int, Logprob]

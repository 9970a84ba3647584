"""Tokens per second that rounds of a form bring, by K, and what a choice among them is.

A form is a set of programs: with all that an engine's tree has beside the chain, or
with the chain alone. Knows nothing of who measured, nor of what was chosen before.
"""

from typing import NamedTuple

import numpy as np


class Choice(NamedTuple):
    """What the newest choice was, for those who look on.

    Attributes:
        num_drafts: K.
        gain: Tokens per second that it should bring, as a share of what plain decoding
            does; None where that is not known.
        may_draft: Nothing but the choice stands against drafts: they have not failed,
            and not too many requests run.
        has_beside: Drafts have others beside them, where the engine has such.
    """

    num_drafts: int = 0
    gain: float | None = None
    may_draft: bool = False
    has_beside: bool = True


class Form(NamedTuple):
    """Rounds of one form.

    Attributes:
        seconds: With 0, 1, ... drafts.
        beside: Tokens that drafts beside others bring, for each of those.
        is_whole: All drafts are made or none: fewer are not cheaper.
    """

    seconds: np.ndarray
    beside: float = 0.0
    is_whole: bool = False

    def rates(
        self, num_seqs: int, kept: np.ndarray, again_s: float = 0.0
    ) -> np.ndarray:
        """Tokens per second by K, from 0 on.

        Args:
            kept: As `expected_kept` says.
            again_s: What it takes, per round, before there can be drafts again.
        """
        tokens = num_seqs + np.append(0.0, (1 + self.beside) * kept)
        rates = tokens / (self.seconds + np.append(0.0, np.full(len(kept), again_s)))
        if self.is_whole:
            rates[1:-1] = 0
        return rates


def expected_kept(wanted: np.ndarray, acceptance: np.ndarray, most: int) -> np.ndarray:
    """Drafts that stay in a round of all sequences, with K of 1 to `most`.

    Args:
        wanted: Most drafts of each sequence.
        acceptance: [sequence, position], of a draft once those before it have stayed.
    """
    survival = np.cumprod(acceptance[:, :most], axis=1)
    survival *= np.arange(most) < wanted[:, None]
    return np.cumsum(survival.sum(axis=0))

"""Answers the device's question: which tokens may come next, and after each draft?

Owns one matcher per running request with a grammar. The device asks in the middle of
its program, from a thread of its own, and may be rounds ahead of what the engine has
read: a question brings the newest known tokens along, so nothing else is needed.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np

_log = logging.getLogger(__name__)

WORD = 32
EVERYTHING = np.uint32(0xFFFFFFFF)


@dataclass(kw_only=True, eq=False)
class Reading:
    """A matcher and what it has read of its request's text.

    Invariant: the matcher has consumed `tokens[:num_consumed]`. It takes no more once
    the text is complete; what comes then is end tokens.

    Attributes:
        grammar_id: How the device calls it; 0 before the first launch.
        stop_ids: Tokens that end the sequence: none of them before it has
            `min_tokens`, unless the text is complete.
    """

    matcher: llguidance.LLMatcher
    num_prompt: int
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    grammar_id: int = 0
    tokens: list[int] = field(default_factory=list)
    num_consumed: int = 0
    # Masks after drafts of this round: the target asks for what the draft was told.
    told: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def catch_up(self, num_tokens: int, newest: Sequence[int]) -> None:
        """Read on to the known tokens, back where they are others than before.

        Args:
            num_tokens: Known tokens of the sequence, its prompt included.
            newest: The last of them; those before are known here.
        """
        length = num_tokens - self.num_prompt
        assert length >= 0, "asked about a sequence before its prompt was in"
        first = max(length - len(newest), 0)
        assert first <= len(self.tokens), "the device is further ahead than it tells"
        new = list(newest[len(newest) - (length - first) :])
        known = self.tokens[first:]
        same = 0
        while same < min(len(known), len(new)) and known[same] == new[same]:
            same += 1
        if first + same < len(self.tokens) or new[same:]:
            self.told.clear()
        self._back_to(first + same)
        for token in new[same:]:
            self._read(token)

    def _back_to(self, length: int) -> None:
        del self.tokens[length:]
        if self.num_consumed > length:
            self.matcher.rollback(self.num_consumed - length)
            self.num_consumed = length

    def _read(self, token: int) -> None:
        is_next = self.num_consumed == len(self.tokens)
        self.tokens.append(token)
        if is_next and not self.matcher.is_stopped():
            # A token that it would refuse must not reach it: it would never recover.
            if self.matcher.validate_tokens([token]):
                self.matcher.consume_token(token)
                self.num_consumed += 1

    def masks(self, drafts: Sequence[int], first: int, masks: np.ndarray) -> None:
        """Write masks into rows: after the known tokens and `first` drafts, and on.

        From the first draft on that is not allowed, which cannot be accepted, rows
        stay as they are.
        """
        known = len(self.tokens)
        for draft in drafts[:first]:
            self._read(draft)
        for row in range(len(masks)):
            path = tuple(drafts[: first + row])
            if path not in self.told:
                self.told[path] = self._mask(masks.shape[1])
            masks[row] = self.told[path]
            if row + 1 == len(masks):
                break
            draft = drafts[first + row]
            if not masks[row, draft // WORD] >> (draft % WORD) & 1:
                break
            self._read(draft)
        self._back_to(known)

    def _mask(self, num_words: int) -> np.ndarray:
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[:num_words]
        if len(self.tokens) >= self.min_tokens:
            return mask
        longer = mask.copy()
        for token in self.stop_ids:
            longer[token // WORD] &= ~np.uint32(1 << token % WORD)
        return longer if longer.any() else mask


class TokenMasks:
    """The readings of all running requests, by id.

    Requests and launches hold them: once those are gone, so is the reading.

    Attributes:
        num_questions: Launches that asked, for tests and statistics.
    """

    def __init__(self, vocab_size: int):
        self._words = -(-vocab_size // WORD)
        self._readings: weakref.WeakValueDictionary[int, Reading] = (
            weakref.WeakValueDictionary()
        )
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self.num_questions = 0

    def add(self, reading: Reading) -> None:
        """Give a text the id by which the device asks about it, if it has none yet."""
        with self._lock:
            if not reading.grammar_id:
                reading.grammar_id = next(self._ids)
                self._readings[reading.grammar_id] = reading

    def __len__(self) -> int:
        return len(self._readings)

    def __call__(
        self, grammar_id: Any, num_tokens: Any, newest: Any, drafts: Any, before: Any
    ) -> np.ndarray:
        """See `jaxspec.program.grammar.MaskSource`."""
        ids, drafts = np.asarray(grammar_id), np.asarray(drafts)
        num_tokens, newest = np.asarray(num_tokens), np.asarray(newest)
        before = np.asarray(before)
        masks = np.full((len(ids), len(before), self._words), EVERYTHING)
        with self._lock:
            self.num_questions += 1
            for row in np.flatnonzero(ids).tolist():
                reading = self._readings.get(int(ids[row]))
                if reading is not None:
                    reading.catch_up(int(num_tokens[row]), newest[row].tolist())
                    reading.masks(drafts[row].tolist(), int(before[0]), masks[row])
        return masks

"""Estimates the acceptance of lookup drafts while requests decode without drafts.

The host knows every token, so it can apply the lookup rule (n-gram or suffix) itself:
it compares what the lookup would have proposed with the tokens that were generated, and
counts the result like drafts of a round. The estimate costs no launch. Only tokens that
have been read are counted, so a choice of K depends on the past alone.

The index of a text is a table of hash chains, as in LZ77: a bucket for the hash of the
newest tokens, and for every position the previous one in its bucket. Adding a token
takes constant time. A search compares the latest `MAX_COMPARED` positions of a bucket
token by token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.lookups import WHOLE, LookupRule
from jaxspec.engine.scheduling.request import Request

# Maximum number of positions of a bucket that are compared, the latest first. In prose
# fewer than one bucket in a thousand has more.
MAX_COMPARED = 32
# Maximum number of tokens in a hash, and of buckets.
MAX_KEY, MAX_BUCKETS = 4, 1 << 14
# From this number of tokens on, they are added with numpy, whose calls take 20 us in
# all.
MANY = 64
_PRIME = 0x9E3779B1  # 2^32 by the golden ratio
_WORD = 0xFFFFFFFF
# As in the answer cache on the device: maximum number of tokens compared with a
# past answer and of draft tokens taken from it, and the length of a usual answer.
ANSWER_BEFORE, ANSWER_AFTER, ANSWER_LENGTH = 12, 16, 256
# Minimum tokens of a match in a past answer. On the device two are enough, but matches
# of two or three tokens are seldom right, so the estimate ignores them.
ANSWER_MATCH = 4
# Maximum number of tokens of past answers, whatever the size of the device's cache.
MAX_ANSWER_TOKENS = 1 << 16
# Maximum number of salts: each has an index of up to 64 KiB, even for few tokens.
MAX_SALTS = 64
# Separates two answers in a list of tokens; not a token id.
END = -1
# Lengths of runs of correctly predicted tokens at which K is reconsidered at once.
RECONSIDER_RUNS = (4, 5, 6, 8, 12, 16)


class TextIndex:
    """Tokens of a text, with an index of the earlier places of each n-gram.

    Invariant: `_earlier[p] < p`: the previous position of the same bucket, or -1.
    """

    def __init__(self, key: int, num_tokens: int):
        """Make an empty index.

        Args:
            key: Minimum number of tokens of a match.
            num_tokens: Expected number of tokens; with more, only the chains become
                longer.
        """
        self.tokens: list[int] = []
        self._key = min(key, MAX_KEY)
        buckets = min(1 << max(num_tokens - 1, 1).bit_length(), MAX_BUCKETS)
        self._mask = buckets - 1
        self._latest = array("i", [-1]) * buckets
        self._earlier = array("i")

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add a token."""
        tokens, place = self.tokens, len(self.tokens)
        tokens.append(token)
        if place + 1 < self._key:
            self._earlier.append(-1)
            return
        word = 0
        for value in tokens[-self._key :]:
            word = (word ^ value) * _PRIME & _WORD
        bucket = (word ^ word >> 15) & self._mask
        self._earlier.append(self._latest[bucket])
        self._latest[bucket] = place

    def extend(self, new: list[int]) -> None:
        """Add tokens."""
        if len(new) < MANY:
            for token in new:
                self.append(token)
            return
        first, key = len(self.tokens), self._key
        self.tokens += new
        start = max(first - key + 1, 0)
        # `END` is negative. The cast keeps its lower 32 bits, which `append` hashes.
        known = np.array(self.tokens[start:], np.int64).astype(np.uint64)
        count = len(known) - key + 1
        word = np.zeros(count, np.uint64)
        for offset in range(key):
            word = (word ^ known[offset : offset + count]) * np.uint64(_PRIME)
            word &= np.uint64(_WORD)
        bucket = ((word ^ word >> np.uint64(15)) & np.uint64(self._mask)).astype("i4")
        places = np.arange(start + key - 1, len(self.tokens), dtype=np.int32)
        latest = np.frombuffer(self._latest, np.int32)
        order = np.argsort(bucket, kind="stable")
        ranked, by_bucket = places[order], bucket[order]
        is_first = np.append(True, by_bucket[1:] != by_bucket[:-1])
        before = np.where(is_first, latest[by_bucket], np.roll(ranked, 1))
        earlier = np.empty(count, np.int32)
        earlier[order] = before
        is_last = np.append(by_bucket[1:] != by_bucket[:-1], True)
        latest[by_bucket[is_last]] = ranked[is_last]
        self._earlier.extend([-1] * (int(places[0]) - len(self._earlier)))
        self._earlier.frombytes(earlier.tobytes())

    def find(self, newest: list[int], longest: int) -> tuple[int, list[int]]:
        """Find the longest match of the last tokens of `newest`.

        Args:
            newest: Tokens of this text (`self.tokens`) or of another one.
            longest: Maximum number of tokens that are compared.

        Returns:
            The number of matching tokens, and the last position of each match, the
            latest first; no positions if too few tokens match. A match of the text
            with itself ends before its last token.
        """
        if len(newest) < self._key:
            return 0, []
        tokens, earlier = self.tokens, self._earlier
        if newest is tokens:
            place = earlier[-1]
        else:
            word = 0
            for value in newest[-self._key :]:
                word = (word ^ value) * _PRIME & _WORD
            place = self._latest[(word ^ word >> 15) & self._mask]
        best, places, last = self._key, [], len(newest) - 1
        longest = min(longest, len(newest))
        for _ in range(MAX_COMPARED):
            if place < 0:
                break
            length, room = 0, min(longest, place + 1)
            while length < room and tokens[place - length] == newest[last - length]:
                length += 1
            if length > best:
                best, places = length, [place]
            elif length == best:
                places.append(place)
            place = earlier[place]
        return best, places

    def after(self, place: int, count: int) -> list[int]:
        """Return `count` tokens after a position, repeated if the text ends before."""
        text = self.tokens[place + 1 : place + 1 + count]
        while text and len(text) < count:
            text = (text + text)[:count]
        return text


def best_text(texts: list[list[int]], min_share: int) -> list[int]:
    """Return the drafts with the most expected accepted tokens.

    `jaxspec.program.propose.suffix.choose` applies the same rule to arrays.

    Args:
        texts: Tokens that followed each match; the first wins among equals.
        min_share: `LookupRule.min_share`.
    """
    if len(texts) == 1:
        return texts[0]
    best, drafts, unit = 0, texts[0][:0], WHOLE // len(texts)
    for text in texts:
        agreeing, expected, count = texts, 0, 0
        for place, token in enumerate(text):
            agreeing = [
                other
                for other in agreeing
                if len(other) > place and other[place] == token
            ]
            share = len(agreeing) * unit
            if share < min_share:
                break
            expected, count = expected + share, count + 1
        if expected > best:
            best, drafts = expected, text[:count]
    return drafts


class Answers:
    """Answers of past requests by cache salt, limited in tokens and in salts.

    If the limit is exceeded, the least recently used salt is evicted.
    """

    def __init__(self, num_requests: int):
        """Make an empty cache for about `num_requests` answers of usual length."""
        self._room = min(num_requests * ANSWER_LENGTH, MAX_ANSWER_TOKENS)
        self._by_salt: OrderedDict[str | None, TextIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return sum(map(len, self._by_salt.values()))

    def add(self, request: Request) -> None:
        """Add the answer of a request, and the last tokens of its prompt."""
        text = request.prompt_token_ids[-ANSWER_BEFORE:] + request.output_token_ids
        text = [*text[: self._room - 1], END]
        while self._by_salt and self.num_tokens + len(text) > self._room:
            self._by_salt.popitem(last=False)
        salt = request.cache_salt
        if salt not in self._by_salt:
            if len(self._by_salt) == MAX_SALTS:
                self._by_salt.popitem(last=False)
            self._by_salt[salt] = TextIndex(ANSWER_MATCH, self._room)
        index = self._by_salt[salt]
        for token in text:
            index.append(token)
        self._by_salt.move_to_end(salt)

    def find(
        self, request: Request, newest: list[int], rule: LookupRule
    ) -> tuple[int, list[list[int]]]:
        """Return the length of the longest matches, and the tokens after each match."""
        index = self._by_salt.get(request.cache_salt)
        return find_texts(index, request, newest, rule)


def find_texts(
    index: TextIndex | None, request: Request, newest: list[int], rule: LookupRule
) -> tuple[int, list[list[int]]]:
    """Return the length of the longest matches, and the tokens after each match.

    Args:
        index: Texts that each end with `END`; None if there are none.
    """
    if index is None:
        return 0, []
    longest = min(rule.longest, ANSWER_BEFORE)
    length, places = index.find(newest[-longest:], longest)
    if not places or length < rule.shortest:
        return 0, []
    count = min(rule.limits[length], ANSWER_AFTER, request.max_draft_tokens)
    texts = [
        index.tokens[place + 1 : place + 1 + count]
        for place in places[: rule.num_matches]
    ]
    return length, [text[: text.index(END)] if END in text else text for text in texts]


def index_corpora(
    texts: Sequence[tuple[str | None, np.ndarray]],
) -> dict[str | None, TextIndex]:
    """Return an index of the texts of each cache salt."""
    by_salt: dict[str | None, list[int]] = {}
    for salt, tokens in texts:
        by_salt.setdefault(salt, []).extend([*tokens.tolist(), END])
    indices = {}
    for salt, tokens in by_salt.items():
        indices[salt] = TextIndex(ANSWER_MATCH, len(tokens))
        indices[salt].extend(tokens)
    return indices


class LookupTrace:
    """Simulated rounds of one request, with the drafts of a lookup.

    A round ends with the first token that was not predicted, or with the token after
    the last draft. The next one begins there.

    Attributes:
        drafts: Draft tokens of the current round.
        num_right: Number of `drafts` that were right so far.
        run: Number of newest tokens predicted in a row. Tokens after the last draft of
            a round (bonus tokens) neither count nor end the run.
    """

    def __init__(self, request: Request, index: TextIndex):
        self.request, self.index = request, index
        self.drafts: list[int] = []
        self.num_right = self.run = 0


class PredictedRounds(NamedTuple):
    """Estimated acceptance of drafts in plain rounds.

    Attributes:
        rows: Rows with counts.
        reached: [row, position]: rounds in which a draft there would have been tried.
        accepted: [row, position]: rounds in which it would have been accepted.
        num_rounds: [row]: rounds that have ended.
        num_compared: Drafts compared with the target's tokens, over all rows.
    """

    rows: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    num_rounds: np.ndarray
    num_compared: int


class LookupEstimator:
    """Follows requests, and counts by row the drafts that would be accepted.

    Attributes:
        corpora: Indices of the corpora by cache salt.
    """

    def __init__(
        self,
        rule: LookupRule,
        num_rows: int,
        max_draft_tokens: int,
        num_requests: int = 0,
        *,
        has_fallback: bool = False,
    ):
        """Start without requests.

        Args:
            max_draft_tokens: Maximum number of drafts of a round.
            num_requests: Number of past answers that are searched besides the request's
                own text.
            has_fallback: A draft model drafts where the lookup finds nothing. Such
                rounds are not counted: probes of the draft model show its acceptance.
        """
        self._rule, self._has_fallback = rule, has_fallback
        self.corpora: Mapping[str | None, TextIndex] = {}
        self._traces: list[LookupTrace | None] = [None] * num_rows
        self._answers = Answers(num_requests) if num_requests else None
        # As in `PredictedRounds`, for all rows. A position is counted as soon as its
        # token is known, before the round ends, so that K can rise early in a long
        # copy.
        self._reached = np.zeros((num_rows, max_draft_tokens))
        self._accepted = np.zeros((num_rows, max_draft_tokens))
        self._num_rounds = np.zeros(num_rows, np.int64)
        self._num_compared = 0

    def finish(self, request: Request) -> None:
        """Add the answer of a finished request to those that others may match."""
        if self._answers is not None:
            self._answers.add(request)

    def follow(self, request: Request, num_new: int) -> int:
        """Compare a request's newest tokens, which were decoded without drafts.

        Returns:
            The number of newest tokens predicted in a row.
        """
        row, known = request.row, request.num_tokens - num_new
        trace = self._traces[row]
        if trace is None or trace.request is not request:
            index = TextIndex(self._rule.shortest, request.max_total)
            trace = self._traces[row] = LookupTrace(request, index)
        if len(trace.index) != known:
            # The tokens between come from rounds with drafts, whose results are already
            # counted.
            trace.index.extend(request.tokens(len(trace.index), known))
            trace.run = 0
            self._propose(trace)
        for token in request.output_token_ids[-num_new:]:
            self._compare(trace, token)
        return trace.run

    def _compare(self, trace: LookupTrace, token: int) -> None:
        row, place, drafts = trace.request.row, trace.num_right, trace.drafts
        trace.index.append(token)
        is_counted = bool(drafts) or not self._has_fallback
        max_draft_tokens = min(self._reached.shape[1], trace.request.max_draft_tokens)
        if is_counted and place < max_draft_tokens:
            self._reached[row, place] += 1
        if place < len(drafts):
            self._num_compared += 1
            if drafts[place] == token:
                self._accepted[row, place] += 1
                trace.num_right += 1
                trace.run += 1
                return
            trace.run = 0
        elif not drafts:
            trace.run = 0
        self._num_rounds[row] += is_counted
        self._propose(trace)

    def _propose(self, trace: LookupTrace) -> None:
        """Start a round with the tokens that the lookup proposes now."""
        rule, index, request = self._rule, trace.index, trace.request
        length, places = index.find(index.tokens, rule.longest)
        texts = list[list[int]]()
        if places and length >= rule.shortest:
            count = min(rule.limits[length], request.max_draft_tokens)
            texts = [index.after(place, count) for place in places[: rule.num_matches]]
        if self._answers is not None:
            other, others = self._answers.find(request, index.tokens, rule)
            if others and (not texts or other > length):
                length, texts = other, others
        corpora = self.corpora.get(request.cache_salt)
        other, others = find_texts(corpora, request, index.tokens, rule)
        if others and (not texts or other > length):
            texts = others
        trace.drafts = best_text(texts, rule.min_share) if texts else []
        trace.num_right = 0

    def take(self) -> "PredictedRounds | None":
        """Return and reset the counts since the last call; None if there are none."""
        rows = np.flatnonzero(self._reached.any(axis=1) | (self._num_rounds > 0))
        if not len(rows):
            return None
        predicted = PredictedRounds(
            rows,
            self._reached[rows],
            self._accepted[rows],
            self._num_rounds[rows],
            self._num_compared,
        )
        for counts in (self._reached, self._accepted, self._num_rounds):
            counts[rows] = 0
        self._num_compared = 0
        return predicted

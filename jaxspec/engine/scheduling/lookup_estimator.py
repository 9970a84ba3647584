"""What lookups would have found in texts that are decoded without drafts.

The host knows every token, so it can follow the rule of a lookup on its own: what that
would have proposed is compared with the tokens that come, and counted as the drafts of
a round are. That costs no launch. A count is of tokens that have been read, so that a
choice made by it depends on the past alone.

An index of a text is a table of chains, as of LZ77: a bucket for the hash of the newest
tokens, and of every position the one before it in its bucket. Adding a token takes
constant time; what a bucket has is compared token for token, the latest
`MAX_COMPARED` places.
"""

from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from jaxspec.config.lookups import WHOLE, LookupRule
from jaxspec.engine.scheduling.request import Request

# Places that are compared, at most: the latest. Of prose under a thousandth has more.
MAX_COMPARED = 32
# Tokens that are hashed, at most, and buckets.
MAX_KEY, MAX_BUCKETS = 4, 1 << 14
# Tokens that are added in one go from so many on: numpy takes 20 us to begin.
MANY = 64
_PRIME = 0x9E3779B1  # 2^32 by the golden ratio
_WORD = 0xFFFFFFFF
# As the corpus on the device: tokens that are compared with a past answer, that follow
# them, and that an answer of usual length leaves.
ANSWER_BEFORE, ANSWER_AFTER, ANSWER_LENGTH = 12, 16, 256
# Fewest of the newest tokens that a past answer must have. On the device two are
# enough; the estimate need not find what is seldom right.
ANSWER_MATCH = 4
# Past answers are remembered up to so many tokens, whatever the device has room for.
MAX_ANSWER_TOKENS = 1 << 16
# Salts of which any are: each has an index, of up to 64 KiB, however little it holds.
MAX_SALTS = 64
# Between two answers: no token.
END = -1
# Runs of tokens that were foretold, after which K is looked at again at once.
TELLING_RUNS = (4, 5, 6, 8, 12, 16)


class TextIndex:
    """Tokens, and where the newest of them came before.

    Invariant: `_earlier[p] < p`, the latest place of the same bucket, or -1.
    """

    def __init__(self, key: int, num_tokens: int):
        """Begin without tokens.

        Args:
            key: Fewest tokens of a match.
            num_tokens: That will come, about: more only make chains longer.
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
        for one in tokens[-self._key :]:
            word = (word ^ one) * _PRIME & _WORD
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
        known = np.array(self.tokens[start:], np.uint64)
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
        """Places of the longest match of some tokens, the latest first.

        Args:
            newest: As many as are known, or as may match; this text's own or others.
            longest: Most tokens that are compared.

        Returns:
            How many tokens match, and the last position of each match; no positions
            where too few do. A match of the text with itself ends before its end.
        """
        if len(newest) < self._key:
            return 0, []
        tokens, earlier = self.tokens, self._earlier
        if newest is tokens:
            place = earlier[-1]
        else:
            word = 0
            for one in newest[-self._key :]:
                word = (word ^ one) * _PRIME & _WORD
            place = self._latest[(word ^ word >> 15) & self._mask]
        best, found, last = self._key, [], len(newest) - 1
        longest = min(longest, len(newest))
        for _ in range(MAX_COMPARED):
            if place < 0:
                break
            length, most = 0, min(longest, place + 1)
            while length < most and tokens[place - length] == newest[last - length]:
                length += 1
            if length > best:
                best, found = length, [place]
            elif length == best:
                found.append(place)
            place = earlier[place]
        return best, found

    def after(self, place: int, count: int) -> list[int]:
        """What followed a position; where the text ends, it begins again from there."""
        text = self.tokens[place + 1 : place + 1 + count]
        while text and len(text) < count:
            text = (text + text)[:count]
        return text


def best_text(texts: list[list[int]], min_share: int) -> list[int]:
    """Of what followed several matches, the drafts of which most are expected to stay.

    `jaxspec.program.propose.suffix.choose` is the same of arrays.

    Args:
        texts: The first wins among equals.
        min_share: Of `LookupRule`.
    """
    if len(texts) == 1:
        return texts[0]
    best, drafts, unit = 0, texts[0][:0], WHOLE // len(texts)
    for text in texts:
        agreeing, expected, count = texts, 0, 0
        for place, token in enumerate(text):
            agreeing = [
                one for one in agreeing if len(one) > place and one[place] == token
            ]
            share = len(agreeing) * unit
            if share < min_share:
                break
            expected, count = expected + share, count + 1
        if expected > best:
            best, drafts = expected, text[:count]
    return drafts


class Answers:
    """Answers of past requests, by salt, up to a number of tokens and of salts.

    Where they become too many, those of the salt that was used least lately go.
    """

    def __init__(self, num_requests: int):
        """Remember about so many answers of usual length."""
        self._room = min(num_requests * ANSWER_LENGTH, MAX_ANSWER_TOKENS)
        self._by_salt: OrderedDict[str | None, TextIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are remembered."""
        return sum(map(len, self._by_salt.values()))

    def add(self, request: Request) -> None:
        """Remember what a request was answered, and the tokens before that."""
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
        """The longest match, and what followed it, as far as that is known."""
        index = self._by_salt.get(request.cache_salt)
        if index is None:
            return 0, []
        longest = min(rule.longest, ANSWER_BEFORE)
        length, places = index.find(newest[-longest:], longest)
        if not places or length < rule.shortest:
            return 0, []
        count = min(rule.limits[length], ANSWER_AFTER, request.num_draft_tokens)
        texts = [
            index.tokens[place + 1 : place + 1 + count]
            for place in places[: rule.num_matches]
        ]
        return length, [
            text[: text.index(END)] if END in text else text for text in texts
        ]


class Watch:
    """Rounds that one request would have had, had a lookup drafted at each.

    They begin anew where one ends: after the first token that was not foretold, or the
    one after all drafts.

    Attributes:
        drafts: Of the round that is under way, and how many have been right so far.
        run: Newest tokens of the text that were foretold in a row, but for those after
            all drafts of a round, which nobody foretold.
    """

    def __init__(self, request: Request, index: TextIndex):
        self.request, self.index = request, index
        self.drafts: list[int] = []
        self.num_right = self.run = 0


class Foretold(NamedTuple):
    """What drafts would have brought to some rows.

    Attributes:
        reached: [row, position]: rounds that would have wanted a draft there.
        accepted: Rounds of which it would have stayed.
        num_rounds: That have ended, by row.
        num_compared: Drafts that were compared, over all rows.
    """

    rows: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    num_rounds: np.ndarray
    num_compared: int


class LookupEstimator:
    """Watches requests, and counts by row what drafts would have brought."""

    def __init__(
        self, rule: LookupRule, num_rows: int, most: int, num_requests: int = 0
    ):
        """Watch nobody yet.

        Args:
            most: Most drafts of a round.
            num_requests: Past answers that are looked into, too.
        """
        self._rule = rule
        self._watches: list[Watch | None] = [None] * num_rows
        self._answers = Answers(num_requests) if num_requests else None
        # As in `Foretold`, of all rows. A round counts at a position as soon as the
        # token there has come, not only once it is over: a long copy tells at once.
        self._reached = np.zeros((num_rows, most))
        self._accepted = np.zeros((num_rows, most))
        self._num_rounds = np.zeros(num_rows, np.int64)
        self._num_compared = 0

    def finish(self, request: Request) -> None:
        """A request ends: others may find its answer."""
        if self._answers is not None:
            self._answers.add(request)

    def follow(self, request: Request, num_new: int) -> int:
        """Compare a request's newest tokens, which came without drafts.

        Returns:
            How many in a row were foretold, up to the newest.
        """
        row, known = request.row, request.num_tokens - num_new
        watch = self._watches[row]
        if watch is None or watch.request is not request:
            index = TextIndex(self._rule.shortest, request.max_total)
            watch = self._watches[row] = Watch(request, index)
        if len(watch.index) != known:
            # Rounds with drafts lie between: they have been counted as what they were.
            watch.index.extend(request.tokens(len(watch.index), known))
            watch.run = 0
            self._propose(watch)
        for token in request.output_token_ids[-num_new:]:
            self._compare(watch, token)
        return watch.run

    def _compare(self, watch: Watch, token: int) -> None:
        row, place, drafts = watch.request.row, watch.num_right, watch.drafts
        watch.index.append(token)
        if place < min(self._reached.shape[1], watch.request.num_draft_tokens):
            self._reached[row, place] += 1
        if place < len(drafts):
            self._num_compared += 1
            if drafts[place] == token:
                self._accepted[row, place] += 1
                watch.num_right += 1
                watch.run += 1
                return
            watch.run = 0
        elif not drafts:
            watch.run = 0
        self._num_rounds[row] += 1
        self._propose(watch)

    def _propose(self, watch: Watch) -> None:
        """What the lookup proposes now."""
        rule, index, request = self._rule, watch.index, watch.request
        length, places = index.find(index.tokens, rule.longest)
        texts = list[list[int]]()
        if places and length >= rule.shortest:
            count = min(rule.limits[length], request.num_draft_tokens)
            texts = [index.after(one, count) for one in places[: rule.num_matches]]
        if self._answers is not None:
            other, others = self._answers.find(request, index.tokens, rule)
            if others and (not texts or other > length):
                texts = others
        watch.drafts = best_text(texts, rule.min_share) if texts else []
        watch.num_right = 0

    def take(self) -> "Foretold | None":
        """What has been counted since the last call; None where that is nothing."""
        rows = np.flatnonzero(self._reached.any(axis=1) | (self._num_rounds > 0))
        if not len(rows):
            return None
        found = Foretold(
            rows,
            self._reached[rows],
            self._accepted[rows],
            self._num_rounds[rows],
            self._num_compared,
        )
        for counts in (self._reached, self._accepted, self._num_rounds):
            counts[rows] = 0
        self._num_compared = 0
        return found

"""Incremental detokenization, stop strings, and logprobs of one text."""

import codecs
from collections.abc import Sequence
from typing import Any

from jaxspec.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition
from jaxspec.program.wire import TokenLogprobs
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what decoding shows for a character whose bytes are incomplete
# Earlier tokens that are decoded again with the new ones. SentencePiece joins at most
# the bytes of one character, four tokens.
_CONTEXT = 6
# Once the context has more tokens than this, it is cut to the last `_CONTEXT`.
_MOST_CONTEXT = 18
# Logprobs by position, in either of vLLM's two representations.
Logprobs = list[Any] | FlatLogprobs


class TextStream:
    """The text of one growing list of token ids.

    Text is held back while its last character is incomplete (several byte tokens make
    one character) and released with the token that completes it, or at the end.
    Without stop strings, tokens are decoded only when the text is read.

    Attributes:
        ends: Length of the text after each token; None unless `has_ends`.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, has_ends: bool = False
    ):
        self._tokenizer = tokenizer
        self._params = params
        self._stops = list(params.stop or [])
        self.ends: list[int] | None = [] if has_ends else None
        self._joined = ""
        # Text after `_joined`. Joined when it is read: otherwise a long text would be
        # copied for each token.
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._read = 0  # number of ids whose text is in `_text`
        self._start = 0  # the first id of the context, which is decoded again
        # Text of the context; None if it must be decoded anew.
        self._known: str | None = ""

    @property
    def _text(self) -> str:
        if self._pieces:
            self._joined += "".join(self._pieces)
            self._pieces.clear()
        return self._joined

    @_text.setter
    def _text(self, text: str) -> None:
        self._joined = text
        self._pieces.clear()

    @property
    def text(self) -> str:
        """The text so far, without an incomplete last character."""
        self._advance(is_end=False)
        return self._text

    def push(self, token_ids: list[int]) -> tuple[str, int] | None:
        """Add tokens; return the stop string that matched, and the number of new ids.

        Tokens are checked one by one, so that ids after a match are left out even if a
        round has several. As in vLLM, a stop string that is complete within the first
        `min_tokens` tokens does not count.
        """
        if not self._stops and self.ends is None:
            self._ids += token_ids
            return None
        for count, token in enumerate(token_ids, 1):
            self._ids.append(token)
            before = len(self._text)
            self._advance(is_end=False)
            if self.ends is not None:
                self.ends.append(len(self._text))
            if len(self._ids) <= self._params.min_tokens:
                continue
            matched = self._match(before)
            if matched is not None:
                return matched, count
        return None

    def follow(self, token_ids: list[int]) -> str:
        """Add tokens of a request without stop strings; return the new text."""
        self._ids += token_ids
        if self._params.detokenize and self._read and self._append_plain():
            return self._pieces[-1]
        before = len(self._text)
        self._advance(is_end=False)
        return self._text[before:]

    def finish(self) -> str | None:
        """Release held back text; return a stop string that it completes."""
        before = len(self._text)
        self._advance(is_end=True)
        if self.ends:
            self.ends[-1] = len(self._text)
        if len(self._ids) <= self._params.min_tokens:
            return None
        return self._match(before)

    def visible(self, *, is_finished: bool) -> str:
        """Return the text without an end that may be the start of a stop string.

        A stop string may arrive in pieces, whose beginning must not be streamed.
        """
        text = self.text
        if not self._stops or is_finished or self._params.include_stop_str_in_output:
            return text
        # "abST" with stop "STOP" -> "ab"
        return text[: min(_start_of_stop(text, stop) for stop in self._stops)]

    def _advance(self, *, is_end: bool) -> None:
        if not self._params.detokenize or self._read == len(self._ids):
            return
        if self._read and self._append_plain():
            return
        if self._known is None or self._read - self._start > _MOST_CONTEXT:
            self._start = max(0, self._read - _CONTEXT)
            self._known = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        if whole.endswith(_BROKEN) and not is_end:
            return
        self._text += whole[len(self._known) :]
        self._known, self._read = whole, len(self._ids)

    def _append_plain(self) -> bool:
        """Append the new tokens' texts; return False if one depends on its context.

        Most tokens' texts do not.

        Bytes of an incomplete character are still among the new tokens.
        """
        plain_texts = self._tokenizer.plain_texts
        new = ""
        for token in self._ids[self._read :]:
            text = plain_texts[token]
            if text is None:
                return False
            new += text
        self._pieces.append(new)
        self._known, self._read = None, len(self._ids)
        return True

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._params.skip_special_tokens
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip)

    def _match(self, before: int) -> str | None:
        """Cut the text at the first stop string that the new part completes.

        Returns that stop string, or None.
        """
        if not self._stops or len(self._text) == before:
            return None
        # The start depends on each stop string's length: otherwise a shorter one that
        # was complete before, within `min_tokens`, would match again.
        matches = [
            (position, stop)
            for stop in self._stops
            if (position := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        position, stop = min(matches)
        include = self._params.include_stop_str_in_output
        self._text = self._text[: position + len(stop) if include else position]
        return stop


def _start_of_stop(text: str, stop: str) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `stop`.

    Only positions of the stop string's first character are compared: a stop string may
    be very long, and this runs in every round.
    """
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)


class LogprobStream:
    """Logprobs of one growing text and of its prompt.

    Launches return `max_logprobs` candidates, and values for as many ids as any request
    may name in `logprob_token_ids`; this class keeps only those that the request wants.

    Attributes:
        cumulative: Sum of the logprobs of the text's tokens; None if not requested.
        prompt: Prompt logprobs; None until they are complete, or if not requested.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: list[int]
    ):
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_ids = prompt_ids
        self._logprobs = self._empty()
        self._own: list[float] = []
        self._chosen = list(params.logprob_token_ids or ())
        # Bytes of an incomplete character at the end of the text, and of the prompt.
        self._begun, self._begun_prompt = b"", self._after(b"", prompt_ids[:1])
        self.cumulative: float | None = None if params.num_logprobs is None else 0.0
        # Nothing precedes the first token, so it has no probability.
        self._prompt = self._empty()
        self._prompt.append(None)

    def _empty(self) -> Logprobs:
        return FlatLogprobs() if self._params.flat_logprobs else []

    def push(self, token_ids: list[int], values: TokenLogprobs | None) -> None:
        """Add generated tokens; entry i of `values` belongs to token i."""
        num_requested = self._params.num_logprobs
        if num_requested is None or self.cumulative is None or not token_ids:
            return
        assert values is not None, "a launch without logprobs"
        token_logprobs = values.own.tolist()
        for index, token in enumerate(token_ids):
            position = self._position(
                token, values, index, num_requested, self._begun, self._chosen
            )
            self._begun = self._after(self._begun, [token])
            self._logprobs.append(position)
            self._own.append(token_logprobs[index])
            self.cumulative += token_logprobs[index]

    def keep(self, count: int) -> None:
        """Drop the logprobs after the text's first `count` tokens."""
        if self.cumulative is not None and count < len(self._own):
            self._logprobs = self._logprobs[:count]
            del self._own[count:]
            self.cumulative = sum(self._own)

    def since(self, count: int) -> Logprobs | None:
        """Return logprobs after the first `count` tokens; None if not requested."""
        return None if self.cumulative is None else self._logprobs[count:]

    def push_prompt(self, values: TokenLogprobs) -> None:
        """Append the logprobs of the next prompt tokens, if they were requested."""
        num_requested = self._params.prompt_logprobs
        if num_requested is None:
            return
        for index in range(len(values.own)):
            token = self._prompt_ids[len(self._prompt)]
            begun = self._begun_prompt
            position = self._position(token, values, index, num_requested, begun)
            self._begun_prompt = self._after(begun, [token])
            self._prompt.append(position)

    @property
    def prompt(self) -> Logprobs | None:
        """Logprobs by position of the prompt; None for the first."""
        is_whole = len(self._prompt) == len(self._prompt_ids)
        is_requested = self._params.prompt_logprobs is not None
        return self._prompt if is_requested and is_whole else None

    def _position(
        self,
        token: int,
        values: TokenLogprobs,
        index: int,
        num_requested: int,
        begun: bytes,
        chosen: Sequence[int] = (),
    ) -> LogprobsOnePosition:
        # As in vLLM: the token itself comes first, wherever it ranks.
        candidates: dict[int, tuple[float, int | None]] = {
            token: (float(values.own[index]), int(values.rank[index]))
        }
        returns_all = num_requested == -1 or chosen
        count = values.top_ids.shape[-1] if returns_all else num_requested
        top_ids = values.top_ids[index, :count].tolist()
        if chosen:
            # Only tokens among the most probable ones have a known rank.
            ranks = {candidate: rank for rank, candidate in enumerate(top_ids, 1)}
            own = values.chosen[index, : len(chosen)].tolist()
            for candidate, value in zip(chosen, own, strict=True):
                candidates.setdefault(candidate, (value, ranks.get(candidate)))
        else:
            top = values.top[index, :count].tolist()
            for rank, (other, value) in enumerate(zip(top_ids, top, strict=True), 1):
                candidates.setdefault(other, (value, rank))
        return {
            candidate: Logprob(value, rank, self._text(candidate, begun))
            for candidate, (value, rank) in candidates.items()
        }

    def _text(self, token: int, begun: bytes) -> str | None:
        """Return the text that a token adds.

        If a character spans several byte tokens, the last one has the whole character
        as its text and the others have "", as in vLLM: token texts join to the
        generated text.

        Args:
            begun: Bytes of an incomplete character before the token.
        """
        if not self._params.detokenize:
            return None
        if self._tokenizer.is_byte(token):
            return self._decoder(begun).decode(self._tokenizer.token_bytes(token))
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _after(self, begun: bytes, token_ids: list[int]) -> bytes:
        """Return the bytes of a character that is not complete after these tokens."""
        for token in token_ids:
            if not (self._params.detokenize and self._tokenizer.is_byte(token)):
                begun = b""
                continue
            decoder = self._decoder(begun)
            decoder.decode(self._tokenizer.token_bytes(token))
            begun = decoder.getstate()[0]
        return begun

    @staticmethod
    def _decoder(begun: bytes) -> codecs.IncrementalDecoder:
        """Return a decoder that has read the first bytes of a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate((begun, 0))
        return decoder

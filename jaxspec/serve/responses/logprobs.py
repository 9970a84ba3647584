"""Owns OpenAI's two formats of log-probabilities."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.engine.detokenizer import TextStream
from jaxspec.logprobs import Logprob, LogprobsOnePosition
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

# Returned in place of minus infinity, which JSON does not have.
MIN_LOGPROB = -9999.0
_REPLACEMENT = "\ufffd"  # the decoded text of an incomplete character


class TextOffsets:
    """Offsets of generated tokens, in characters, as the text grows.

    A token's offset is the length of the returned text before it. Bytes of one
    character share the character's offset; a hidden special token adds nothing.

    Attributes:
        end: Offset of the next token.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, *, skip_special_tokens: bool):
        """Begin a text.

        Args:
            start: Number of characters before the first generated token: the length of
                the echoed prompt, or 0.
            skip_special_tokens: Whether special tokens are hidden.
        """
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._stream = TextStream(tokenizer, params, has_ends=True)
        self._start = self.end = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Add tokens; return the offset of each."""
        ends = self._stream.ends
        assert ends is not None
        first = len(ends)
        self._stream.push(list(token_ids))
        offsets = [self.end]
        offsets += [self._start + end for end in ends[first:]]
        self.end = offsets.pop()
        return offsets


def prompt_offsets(
    tokenizer: Tokenizer,
    text: str,
    token_ids: Sequence[int],
    *,
    is_spelled: bool,
    is_cut_right: bool,
) -> list[int]:
    """Return the offset of each prompt token, in characters of the echoed prompt.

    Args:
        text: The prompt as it is echoed.
        token_ids: Token ids of the prompt, of which truncation may have dropped the
            first or the last.
        is_spelled: The client gave the text, so the special tokens that it spells are
            visible. Otherwise the text was decoded from ids, without special tokens.
        is_cut_right: Truncation dropped the last tokens, not the first.
    """
    if not is_spelled:
        return TextOffsets(tokenizer, 0, skip_special_tokens=True).push(token_ids)
    # The index of the character that each byte belongs to, because truncation may cut
    # inside a character.
    places = [at for at, one in enumerate(text) for _ in one.encode()] + [len(text)]
    content = text.encode()
    # Offsets are counted from the end that truncation kept, because a truncated prompt
    # is echoed whole.
    at = 0 if is_cut_right else len(content)
    starts: list[int] = []
    for token in token_ids if is_cut_right else reversed(token_ids):
        if tokenizer.is_byte(token):
            part = tokenizer.token_bytes(token)
        else:
            part = tokenizer.decode([token], skip_special_tokens=False).encode()
        before = at
        if is_cut_right and content.startswith(part, at):
            at += len(part)
        elif not is_cut_right and content.endswith(part, 0, at):
            before = at = at - len(part)
        starts.append(places[before])
    return starts if is_cut_right else starts[::-1]


class LogprobWriter:
    """Writes log-probabilities for one request."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool):
        """Make a writer.

        Args:
            as_ids: Write "token_id:7" in place of a token's text.
        """
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def for_completion(
        self,
        token_ids: Sequence[int],
        positions: Iterable[LogprobsOnePosition | None],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """Write the format of completions.

        Args:
            positions: Log-probabilities at each token; None for the first token of a
                prompt.
            offsets: Offset of each token, in characters of the returned text.
        """
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token, position in zip(token_ids, positions, strict=True):
            entry = None if position is None else position[token]
            tokens.append(self._key(token, entry, is_own=True))
            own.append(None if entry is None else _bounded(entry.logprob))
            top.append(None if position is None else self._by_key(token, position))
        return {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": top,
            "text_offset": list(offsets),
        }

    def _by_key(self, own: int, position: LogprobsOnePosition) -> dict[str, float]:
        """Return log-probabilities by token text; the first one if texts are equal.

        Args:
            own: The generated token.
        """
        found: dict[str, float] = {}
        for token, entry in position.items():
            key = self._key(token, entry, is_own=token == own)
            found.setdefault(key, _bounded(entry.logprob))
        return found

    def _key(self, token: int, entry: Logprob | None, *, is_own: bool) -> str:
        r"""Return a token's text; for part of a character "bytes:\xf0", as OpenAI does.

        All such parts have the text "" or U+FFFD, and would have the same key. The
        generated token's own text stays "", so that texts join to the whole text.
        """
        text = self._text(token, entry)
        is_part = text == _REPLACEMENT or (text == "" and not is_own)
        if is_part and self._tokenizer.is_byte(token):
            return f"bytes:\\x{self._tokenizer.token_bytes(token).hex()}"
        return text

    def for_chat(
        self,
        token_ids: Sequence[int],
        positions: Iterable[LogprobsOnePosition],
        num_top: int | None,
    ) -> dict[str, Any]:
        """Write the format of chats.

        Args:
            num_top: Number of the most likely tokens to return; -1 for all, by
                rank; None for all in their given order, as for
                `logprob_token_ids`.
        """
        content = []
        for token, position in zip(token_ids, positions, strict=True):
            others = list(position.items())
            if num_top is not None:
                others.sort(key=lambda item: item[1].rank or 0)
            if num_top is not None and num_top >= 0:
                others = [
                    (other, one)
                    for other, one in others[:num_top]
                    if one.rank is not None and one.rank <= num_top
                ]
            entries = [self._chat_entry(other, one) for other, one in others]
            own = self._chat_entry(token, position[token])
            content.append(own | {"top_logprobs": entries})
        return {"content": content}

    def for_prompt(
        self, positions: Iterable[LogprobsOnePosition | None] | None
    ) -> list[Any] | None:
        """Write vLLM's `prompt_logprobs`: by token id, for each token of the prompt."""
        if positions is None:
            return None
        return [
            None
            if position is None
            else {
                str(token): {
                    "logprob": _bounded(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for token, entry in position.items()
            }
            for position in positions
        ]

    def _chat_entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = self._text(token, entry)
        # If a token is part of a character, only its bytes are exact.
        content = self._tokenizer.token_bytes(token) or text.encode()
        logprob = _bounded(entry.logprob)
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    def _text(self, token: int, entry: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text = None if entry is None else entry.decoded_token
        if text is None:
            return self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _bounded(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)

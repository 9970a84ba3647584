"""Owns the two forms in which OpenAI tells log-probabilities."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.logprobs import Logprob, LogprobsOnePosition
from jaxspec.text.tokenizer import Tokenizer

# JSON has no infinity: what cannot come is told as this.
LEAST = -9999.0


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
        told: Iterable[LogprobsOnePosition | None],
        offset: int,
    ) -> dict[str, Any]:
        """Write the form of completions.

        Args:
            told: By token; None for the first of a prompt, which nothing precedes.
            offset: Characters of the text before the first of these tokens.
        """
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, position in zip(token_ids, told, strict=True):
            entry = None if position is None else position[token]
            text = self._text(token, entry)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            own.append(None if entry is None else _bounded(entry.logprob))
            top.append(
                None
                if position is None
                else {
                    self._text(other, one): _bounded(one.logprob)
                    for other, one in position.items()
                }
            )
        return {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def for_chat(
        self,
        token_ids: Sequence[int],
        told: Iterable[LogprobsOnePosition],
        num_top: int | None,
    ) -> dict[str, Any]:
        """Write the form of chats.

        Args:
            num_top: How many of the most likely tokens to tell of; None for all that
                are known of, in their order, as where a request has chosen them.
        """
        content = []
        for token, position in zip(token_ids, told, strict=True):
            others = list(position.items())
            if num_top is not None:
                others.sort(key=lambda item: item[1].rank or 0)
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
        self, told: Iterable[LogprobsOnePosition | None] | None
    ) -> list[Any] | None:
        """Write vLLM's `prompt_logprobs`: by token id, for each token of the prompt."""
        if told is None:
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
            for position in told
        ]

    def _chat_entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = self._text(token, entry)
        # A token may be a part of a character, which only its bytes can tell.
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
    return max(logprob, LEAST)

"""Owns the named corpora whose tokens suffix drafts may copy.

A corpus belongs to a `cache_salt`: only requests with the same salt find its tokens.
All corpora together have a limited number of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.errors import RequestError, UnsupportedError, shown, wrong_argument

LIMIT = "suffix_decoding_max_corpus_tokens"
MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Some texts.

    Attributes:
        texts: Token ids of each text, which continue only within the text.
        cache_salt: Salt of the requests that may find them.
    """

    texts: tuple[np.ndarray, ...]
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """The corpora of an engine; changes return a new object.

    Attributes:
        max_tokens: Maximum number of tokens of all corpora; 0 if the engine has none.
        by_id: The corpora, the oldest first.
    """

    max_tokens: int
    by_id: Mapping[str, Corpus] = field(default_factory=dict)

    @property
    def num_tokens(self) -> dict[str, int]:
        """Number of tokens of each corpus, by its id."""
        return {name: one.num_tokens for name, one in self.by_id.items()}

    @property
    def texts(self) -> list[tuple[str | None, np.ndarray]]:
        """The texts of all corpora, each with its salt."""
        return [
            (one.cache_salt, text) for one in self.by_id.values() for text in one.texts
        ]

    def added(
        self,
        corpus_id: Any,
        token_chunks: Sequence[Any],
        cache_salt: Any,
        vocab_size: int,
    ) -> "Corpora":
        """Return these corpora and another one.

        Args:
            token_chunks: Token ids of each text.

        Raises:
            RequestError: The id is invalid or in use, a token id does not exist, or
                there would be too many tokens.
            UnsupportedError: The engine has no room for corpora.
        """
        if not self.max_tokens:
            raise UnsupportedError(
                "This engine has no corpora: start it with method 'suffix' and "
                f"{LIMIT}=N in speculative_config.",
                parameter="corpus_id",
                value=corpus_id,
            )
        is_text = isinstance(corpus_id, str) and corpus_id
        if not is_text or len(corpus_id) > MAX_ID_CHARACTERS:
            allowed = f"a string of 1 to {MAX_ID_CHARACTERS} characters"
            raise wrong_argument(RequestError, "corpus_id", allowed, corpus_id)
        if corpus_id in self.by_id:
            hint = "Remove that corpus first, or choose another id."
            allowed = "an id that no other corpus has"
            raise wrong_argument(RequestError, "corpus_id", allowed, corpus_id, hint)
        if not (cache_salt is None or (isinstance(cache_salt, str) and cache_salt)):
            allowed = "a non-empty string, or None"
            raise wrong_argument(RequestError, "cache_salt", allowed, cache_salt)
        texts = tuple(_token_array(chunk, vocab_size) for chunk in token_chunks)
        corpus = Corpus(texts=texts, cache_salt=cache_salt)
        num_used = sum(self.num_tokens.values())
        if not 0 < corpus.num_tokens <= self.max_tokens - num_used:
            raise RequestError(
                f"A corpus must have 1 to {self.max_tokens - num_used} tokens, got "
                f"{corpus.num_tokens}: {LIMIT} is {self.max_tokens}, of which other "
                f"corpora take {num_used}. Remove one of them, or add fewer tokens.",
                parameter="documents",
                value=corpus.num_tokens,
            )
        by_id = {**self.by_id, corpus_id: corpus}
        return Corpora(max_tokens=self.max_tokens, by_id=by_id)

    def removed(self, corpus_id: Any) -> "Corpora":
        """Return these corpora without one of them.

        Raises:
            RequestError: There is no such corpus.
        """
        if corpus_id not in self.by_id:
            raise RequestError(
                f"There is no corpus {shown(corpus_id)}.",
                parameter="corpus_id",
                value=corpus_id,
            )
        by_id = {name: one for name, one in self.by_id.items() if name != corpus_id}
        return Corpora(max_tokens=self.max_tokens, by_id=by_id)


def _token_array(chunk: Any, vocab_size: int) -> np.ndarray:
    tokens = np.asarray(chunk)
    if not len(tokens):
        return np.zeros(0, np.int32)
    is_integer = tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)
    if not is_integer or tokens.min() < 0 or tokens.max() >= vocab_size:
        allowed = f"lists of token ids from 0 to {vocab_size - 1}"
        raise wrong_argument(RequestError, "token_chunks", allowed, shown(chunk))
    return tokens.astype(np.int32)

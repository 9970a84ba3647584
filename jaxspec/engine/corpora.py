"""Owns the named corpora whose tokens suffix drafts may copy.

A corpus belongs to a `cache_salt`: only requests with the same salt find its tokens.
All corpora together have a limited number of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.errors import (
    RequestError,
    UnsupportedError,
    check_utf8,
    shown,
    wrong_argument,
)

LIMIT = "suffix_decoding_max_corpus_tokens"
# Maximum number of corpora; each change copies the list of all.
MAX_CORPORA = 1000
MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Some texts.

    Attributes:
        texts: Token ids of each text. A draft never continues into another text.
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

    def check_new(self, corpus_id: Any, cache_salt: Any) -> None:
        """Check whether another corpus may be added, whatever its tokens are.

        Raises:
            RequestError: The id or the salt is invalid, the id is in use, or there are
                too many corpora.
            UnsupportedError: The engine has no room for corpora.
        """
        if not self.max_tokens:
            raise UnsupportedError(
                "This engine accepts no corpora: start it with method 'suffix' and "
                f"{LIMIT}=N in speculative_config.",
                parameter="corpus_id",
                value=corpus_id,
            )
        is_text = isinstance(corpus_id, str) and corpus_id
        if not is_text or len(corpus_id) > MAX_ID_CHARACTERS:
            allowed = f"a string of 1 to {MAX_ID_CHARACTERS} characters"
            raise wrong_argument(RequestError, "corpus_id", allowed, corpus_id)
        check_utf8(RequestError, "corpus_id", corpus_id)
        if corpus_id in self.by_id:
            hint = "Remove that corpus first, or choose another id."
            allowed = "an id that no other corpus has"
            raise wrong_argument(RequestError, "corpus_id", allowed, corpus_id, hint)
        if not (cache_salt is None or (isinstance(cache_salt, str) and cache_salt)):
            allowed = "a non-empty string, or None"
            raise wrong_argument(RequestError, "cache_salt", allowed, cache_salt)
        if cache_salt is not None:
            check_utf8(RequestError, "cache_salt", cache_salt)
        if len(self.by_id) >= MAX_CORPORA:
            raise RequestError(
                f"There are {len(self.by_id)} corpora, and at most {MAX_CORPORA} are "
                "allowed. Remove one of them first.",
                parameter="corpus_id",
                value=corpus_id,
            )

    def added(
        self,
        corpus_id: Any,
        token_chunks: Any,
        cache_salt: Any,
        vocab_size: int,
    ) -> "Corpora":
        """Return a copy with one more corpus.

        Args:
            token_chunks: List of the token ids of each text; empty texts are left out.

        Raises:
            RequestError: See `check_new`; or a token id does not exist, or there would
                be too many tokens.
            UnsupportedError: The engine has no room for corpora.
        """
        self.check_new(corpus_id, cache_salt)
        allowed = f"lists of token ids from 0 to {vocab_size - 1}"
        try:
            # An iterator, which can be read only once, has no length.
            num_tokens = sum(map(len, token_chunks)) if len(token_chunks) else 0
        except TypeError as error:
            name = "token_chunks"
            raise wrong_argument(RequestError, name, allowed, token_chunks) from error
        if not num_tokens:
            raise RequestError(
                "A corpus must have at least 1 token, got 0.",
                parameter="documents",
                value=0,
            )
        num_used = sum(self.num_tokens.values())
        if num_tokens > self.max_tokens - num_used:
            raise RequestError(
                f"The corpus has {num_tokens} tokens, which do not fit: {LIMIT} is "
                f"{self.max_tokens}, of which other corpora take {num_used}. Remove "
                "one of them, or add fewer tokens.",
                parameter="documents",
                value=num_tokens,
            )
        texts = []
        for chunk in token_chunks:
            text = _token_array(chunk, vocab_size)
            if text is None:
                raise wrong_argument(RequestError, "token_chunks", allowed, chunk)
            if len(text):
                texts.append(text)
        corpus = Corpus(texts=tuple(texts), cache_salt=cache_salt)
        by_id = {**self.by_id, corpus_id: corpus}
        return Corpora(max_tokens=self.max_tokens, by_id=by_id)

    def removed(self, corpus_id: Any) -> "Corpora":
        """Return a copy without one corpus.

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


def _token_array(chunk: Any, vocab_size: int) -> np.ndarray | None:
    """Return the token ids of a text; None if it is not a list of token ids."""
    try:
        tokens = np.asarray(chunk)
    except ValueError:  # lists of different lengths
        return None
    if tokens.ndim != 1:
        return None
    if not len(tokens):
        return np.zeros(0, np.int32)
    is_integer = np.issubdtype(tokens.dtype, np.integer)
    if not is_integer or tokens.min() < 0 or tokens.max() >= vocab_size:
        return None
    return tokens.astype(np.int32)

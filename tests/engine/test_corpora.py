"""Corpora are limited in tokens, and changed as a whole."""

from typing import Any

import numpy as np
import pytest

from jaxspec.engine import corpora as module
from jaxspec.engine.corpora import Corpora
from jaxspec.errors import RequestError, UnsupportedError

VOCAB = 16


def added(corpora: Corpora, name: Any, *chunks: Any, salt: Any = None) -> Corpora:
    return corpora.added(name, chunks, salt, VOCAB)


def test_corpora_are_added_and_removed():
    empty = Corpora(max_tokens=8)
    first = added(empty, "a", [2, 3], [], np.array([4]))
    both = added(first, "b", [5] * 5, salt="s")
    assert (empty.num_tokens, first.num_tokens) == ({}, {"a": 3})
    assert both.num_tokens == {"a": 3, "b": 5}
    texts = [(salt, text.tolist()) for salt, text in both.texts]
    assert texts == [(None, [2, 3]), (None, [4]), ("s", [5] * 5)], "no empty text"
    assert both.removed("a").num_tokens == {"b": 5}
    assert added(both.removed("b"), "c", [1] * 5).num_tokens == {"a": 3, "c": 5}


@pytest.mark.parametrize(
    ("name", "chunks", "salt", "parameter"),
    [
        ("", [[2]], None, "corpus_id"),
        (7, [[2]], None, "corpus_id"),
        ("x" * 257, [[2]], None, "corpus_id"),
        ("old", [[2]], None, "corpus_id"),
        ("new", [[VOCAB]], None, "token_chunks"),
        ("new", [[-1]], None, "token_chunks"),
        ("new", [[0.5]], None, "token_chunks"),
        ("new", [[[2]]], None, "token_chunks"),
        ("new", [[2], [3, 4, 5]], None, "documents"),
        ("new", [[2] * 3, [[2]]], None, "documents"),
        ("new", [], None, "documents"),
        ("new", [[]], None, "documents"),
        ("new", [[[2], [3, 4]]], None, "token_chunks"),
        ("new", ["2"], None, "token_chunks"),
        ("new", [2], None, "token_chunks"),
        ("new", iter([[2]]), None, "token_chunks"),
        ("new\ud800", [[2]], None, "corpus_id"),
        ("new", [[2]], "\ud800", "cache_salt"),
        ("new", [[2]], "", "cache_salt"),
        ("new", [[2]], 3, "cache_salt"),
    ],
)
def test_rejects_invalid_corpora(name: Any, chunks: Any, salt: Any, parameter: str):
    corpora = added(Corpora(max_tokens=8), "old", [2] * 5)
    with pytest.raises(RequestError) as caught:
        corpora.added(name, chunks, salt, VOCAB)
    assert caught.value.parameter == parameter
    with pytest.raises(RequestError, match="no corpus 'new'"):
        corpora.removed("new")


def test_errors_name_the_limits(monkeypatch: pytest.MonkeyPatch):
    corpora = added(Corpora(max_tokens=8), "old", [2] * 8)
    with pytest.raises(RequestError, match="1 tokens, .* is 8, .* corpora take 8"):
        added(corpora, "new", [2])
    with pytest.raises(UnsupportedError, match="suffix_decoding_max_corpus_tokens=N"):
        added(Corpora(max_tokens=0), "a", [2])
    monkeypatch.setattr(module, "MAX_CORPORA", 2)
    corpora = added(added(Corpora(max_tokens=8), "a", [2]), "b", [2])
    with pytest.raises(RequestError, match="2 corpora, and at most 2"):
        added(corpora, "c", [2])
    assert added(corpora.removed("a"), "c", [2]).num_tokens == {"b": 1, "c": 1}

"""Masks and failures depend only on the text; a failure ends only its own text."""

import functools
import json
import re
from collections.abc import Iterable
from typing import Any
from unittest.mock import MagicMock, patch

import llguidance
import numpy as np
import pytest

import jaxspec_checkpoints
from jaxspec.engine import grammar_matcher
from jaxspec.engine.grammar_matcher import (
    Grammar,
    GrammarFailure,
    Matcher,
    Vocabulary,
    call_library,
    grammar_of_choices,
    grammar_of_regex,
    grammar_of_rules,
    grammar_of_schema,
)
from jaxspec.text.tokenizer import Tokenizer

EOS = 1
WORDS_OF_LETTERS = grammar_of_regex(r"(\w{1,20} ?){1,200}")
PANIC = grammar_of_rules("start: <eos> <[1]> <[0-8191]>*")
# The library reports the error only when it computes the first mask.
CYCLES = [
    grammar_of_rules("start: start"),
    grammar_of_schema('{"$ref": "#"}', {}),
    grammar_of_schema('{"anyOf": [{"$ref": "#"}]}', {}),
    grammar_of_schema(
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},'
        ' "$ref": "#/$defs/a"}',
        {},
    ),
]


@functools.cache
def bundled() -> Tokenizer:
    return Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(bundled(), bundled().vocab_size, (EOS,))


def limited(monkeypatch: pytest.MonkeyPatch, fuel: int) -> None:
    """Limit the computation that the library may use for one mask."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=2**40, step_lexer_fuel=fuel, verbose_errors=False
    )
    monkeypatch.setattr(grammar_matcher, "LIMITS", limits)
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", fuel)


def ids_of(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def make_matcher(grammar: str = WORDS_OF_LETTERS) -> Matcher:
    return Matcher(Grammar(grammar, vocabulary()))


def read_allowed(matcher: Matcher, text: str, **options: Any) -> bool:
    """Read the tokens of a text until one is forbidden; return whether none was."""
    tokens = bundled().encode(text, add_special_tokens=False, **options)
    return all(one in ids_of(matcher.mask()) and matcher.read(one) for one in tokens)


def read_drawn(matcher: Matcher, seed: int, positions: Iterable[int]) -> None:
    for position in positions:
        assert matcher.read(drawn(matcher.mask(), seed, position))


def drawn(mask: np.ndarray, seed: int, position: int) -> int:
    """Sample a token that depends only on the mask, the seed and the position."""
    choices = ids_of(mask)
    texts = [one for one in choices if one != EOS] or choices
    return texts[hash((seed, position)) % len(texts)]


def test_a_rebuilt_matcher_computes_the_same_masks(monkeypatch):
    kept = make_matcher()
    masks, tokens = [], list[int]()
    for position in range(12):
        masks.append(kept.mask())
        tokens.append(drawn(masks[-1], 3, position))
        assert kept.read(tokens[-1])
    # Every lexer reaches its limit of computation immediately.
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", 0)
    rebuilt = make_matcher()
    for mask, token in zip(masks, tokens, strict=True):
        np.testing.assert_array_equal(rebuilt.mask(), mask)
        assert rebuilt.read(token)


def test_mask_that_reaches_the_lexer_limit_is_recomputed_by_a_new_lexer(monkeypatch):
    matcher = make_matcher()
    matcher._lexer.spent_s = 0.0  # including the mask computed while compiling
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", 0)
    make = Grammar.new_lexer
    with patch.object(Grammar, "new_lexer", autospec=True) as new_lexer:
        new_lexer.side_effect = make
        matcher.mask()
    new_lexer.assert_called_once()


def test_failed_text_does_not_affect_others_of_its_grammar(monkeypatch):
    limited(monkeypatch, 200_000)
    grammar = Grammar(WORDS_OF_LETTERS, vocabulary())
    other = Matcher(grammar)
    assert other.read(drawn(other.mask(), 0, 0))
    with pytest.raises(GrammarFailure) as caught:
        read_drawn(Matcher(grammar), 1, range(200))
    assert caught.value.kind == "limit"
    # The texts share the lexer whose limit was reached.
    for matcher in (other, Matcher(grammar)):
        assert len(ids_of(matcher.mask())) > 100
        assert matcher.read(drawn(matcher.mask(), 2, 0))


def test_a_dead_end_is_a_failure():
    # After the comma only the key "score" may follow, but the text has that key
    # already.
    schema = (
        '{"type": "object", "properties": {"score": {"type": "integer"}},'
        ' "required": ["score"], "additionalProperties": false,'
        ' "patternProperties": {"^score$": {"type": "integer"}}}'
    )
    grammar = grammar_of_schema(schema, {"whitespace_pattern": " ?"})
    matcher = make_matcher(grammar)
    assert read_allowed(matcher, '{"score":5 ,')
    with pytest.raises(GrammarFailure, match="dead end") as caught:
        read_drawn(matcher, 0, range(9))  # tokens of white space
    assert caught.value.kind == "dead_end"


def test_rejects_grammars_that_no_text_matches_or_that_make_the_library_panic():
    for cycle in CYCLES:
        with pytest.raises(GrammarFailure, match="no text matches it"):
            make_matcher(cycle)
    with pytest.raises(GrammarFailure, match="panicked") as caught:
        make_matcher(PANIC)
    assert caught.value.kind == "panic"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_is_not_a_failure(error):
    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        call_library(interrupted)


@pytest.mark.parametrize("use", ["mask", "read", "back_to"])
def test_every_call_of_a_matcher_may_panic(use, monkeypatch):
    fail = MagicMock(
        side_effect=type("PanicException", (BaseException,), {})("no luck")
    )

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return fail

    matcher: Any = make_matcher(grammar_of_regex("[a-z]{1,90}"))
    first = matcher.mask()
    matcher.read(drawn(first, 1, 0))
    arguments = {"mask": [], "read": [drawn(first, 1, 1)], "back_to": [0]}[use]
    matcher._native = Broken()
    with monkeypatch.context() as patched:
        patched.setattr(llguidance, "LLMatcher", fail)
        with pytest.raises(GrammarFailure, match="no luck"):
            getattr(matcher, use)(*arguments)
    # The library recovers, and the text continues.
    matcher.back_to(0)
    np.testing.assert_array_equal(matcher.mask(), first)


def test_early_stop_of_the_library_is_a_failure():
    matcher: Any = make_matcher(grammar_of_regex("[a-z]{9}"))
    stopped = MagicMock(
        spec=["is_stopped", "is_error", "stop_reason", "compute_bitmask"]
    )
    stopped.is_stopped.return_value, stopped.is_error.return_value = True, False
    stopped.stop_reason.return_value = "MaxTokensTotal"
    stopped.compute_bitmask.return_value = bytes(vocabulary().end_mask.nbytes)
    matcher._native = stopped
    with pytest.raises(GrammarFailure, match="MaxTokensTotal"):
        matcher.read(5)


def test_failed_rollback_is_repeated_by_a_new_lexer():
    matcher: Any = make_matcher(grammar_of_regex("[a-z]{1,90}"))
    first = matcher.mask()
    matcher.read(drawn(first, 1, 0))
    failed = matcher._native = MagicMock(spec=["rollback", "is_error"])
    failed.rollback.return_value = failed.is_error.return_value = True
    matcher.back_to(0)
    np.testing.assert_array_equal(matcher.mask(), first)


def test_many_choices_and_alternatives_of_a_schema_compile():
    labels = [f"label number {number}" for number in range(20_000)]
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{number}"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for number in range(2500)
    ]
    for grammar, text in (
        (grammar_of_choices(labels), "label number 19999"),
        (grammar_of_schema(json.dumps({"anyOf": kinds}), {}), '{"kind":"k2499"}'),
    ):
        matcher = make_matcher(grammar)
        assert read_allowed(matcher, text)
        assert ids_of(matcher.mask()) == [EOS]


ODD = [r"a.b*c", "(x|y)", "[z]{2}", "^$", "\\d", "a&b~c#d-e", "\n\t ", "é😀", "<eos>"]


@pytest.mark.parametrize("label", ODD)
def test_choices_are_matched_literally(label):
    matcher = make_matcher(grammar_of_choices(ODD))
    assert read_allowed(matcher, label, parse_special_tokens=False)
    assert ids_of(matcher.mask()) == [EOS]
    for other in ("aXbc", "x", "zz", "5"):
        matcher = make_matcher(grammar_of_choices(ODD))
        is_whole = read_allowed(matcher, other)
        assert not (is_whole and EOS in ids_of(matcher.mask())), other


def test_reasons_do_not_quote_the_grammar():
    with pytest.raises(GrammarFailure) as caught:
        make_matcher(grammar_of_regex("(secret"))
    assert not re.search("Parser: {|grammars", str(caught.value))

"""Masks and failures depend only on the text; a failure ends only its own text."""

import functools
import itertools
import json
import re
from typing import Any

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
from jaxspec.engine.structured_output import GrammarState
from jaxspec.text.tokenizer import Tokenizer

EOS, NUM_PROMPT, NUM_DRAFTS, WINDOW = 1, 2, 5, 18
WORDS_OF_LETTERS = grammar_of_regex(r"(\w{1,20} ?){1,200}")
PANIC = grammar_of_rules("start: <eos> <[1]> <[0-8191]>*")
# The library reports the error only when it computes the first mask.
CYCLES = {
    "$ref": grammar_of_schema('{"$ref": "#"}', {}),
    "anyOf": grammar_of_schema('{"anyOf": [{"$ref": "#"}]}', {}),
    "rule": grammar_of_rules("start: start"),
    "property": grammar_of_schema(
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},'
        ' "$ref": "#/$defs/a"}',
        {},
    ),
}


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


def drawn(mask: np.ndarray, seed: int, position: int) -> int:
    """Sample a token that depends only on the mask, the seed and the position."""
    choices = ids_of(mask)
    texts = [one for one in choices if one != EOS] or choices
    return texts[hash((seed, position)) % len(texts)]


def masks_of(state: GrammarState, text: list[int], drafts: list[int]) -> np.ndarray:
    known = [7] * NUM_PROMPT + text
    state.sync(len(known), known[-WINDOW:])
    masks = np.zeros((len(drafts) + 1, len(state.matcher.end_mask)), np.uint32)
    state.masks(drafts, 0, masks)
    return masks


def written(grammar: Grammar, seed: int, length: int, *, has_drafts: bool) -> Any:
    """Generate a text as an engine does; return it, where it failed, and why."""
    state = GrammarState(matcher=Matcher(grammar), num_prompt=NUM_PROMPT)
    random, text = np.random.default_rng(seed), list[int]()
    while len(text) < length:
        drafts = []
        if has_drafts:
            # Drafts are a random walk over the masks, so they sometimes differ from the
            # text.
            for index in range(NUM_DRAFTS):
                mask = masks_of(state, text, drafts)[-1]
                drafts.append(drawn(mask, seed, len(text) + index))
                if random.random() < 0.3:
                    drafts[-1] = int(random.choice(ids_of(mask)))
        masks = masks_of(state, text, drafts)
        for row in range(len(drafts) + 1):
            text.append(drawn(masks[row], seed, len(text)))
            failure = state.failure_in(text)
            if failure is not None:
                return text[: len(failure.tokens)], failure.kind
            if row < len(drafts) and text[-1] != drafts[row]:
                break
    return text[:length], None


def test_drafts_do_not_change_the_token_at_which_a_limit_is_reached(monkeypatch):
    limited(monkeypatch, 300_000)
    kinds = set()
    for seed in range(6):
        grammar = Grammar(WORDS_OF_LETTERS, vocabulary())
        plain = written(grammar, seed, 60, has_drafts=False)
        drafted = written(grammar, seed, 60, has_drafts=True)
        assert drafted == plain
        kinds.add(plain[1])
    assert "limit" in kinds


def test_a_rebuilt_matcher_computes_the_same_masks(monkeypatch):
    kept = Matcher(Grammar(WORDS_OF_LETTERS, vocabulary()))
    masks, tokens = [], list[int]()
    for position in range(12):
        masks.append(kept.mask())
        tokens.append(drawn(masks[-1], 3, position))
        assert kept.read(tokens[-1])
    # Every lexer reaches its limit of computation immediately.
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", 0)
    rebuilt = Matcher(Grammar(WORDS_OF_LETTERS, vocabulary()))
    for mask, token in zip(masks, tokens, strict=True):
        np.testing.assert_array_equal(rebuilt.mask(), mask)
        assert rebuilt.read(token)


def test_mask_that_reaches_the_lexer_limit_is_recomputed_by_a_new_lexer(monkeypatch):
    matcher = Matcher(Grammar(WORDS_OF_LETTERS, vocabulary()))
    matcher._lexer.spent_s = 0.0  # including the mask computed while compiling
    monkeypatch.setattr(grammar_matcher, "MASK_FUEL", 0)
    make, made = Grammar.new_lexer, []

    def counted(self: Grammar) -> Any:
        made.append(make(self))
        return made[-1]

    monkeypatch.setattr(Grammar, "new_lexer", counted)
    matcher.mask()
    assert len(made) == 1


def test_failed_text_does_not_affect_others_of_its_grammar(monkeypatch):
    limited(monkeypatch, 200_000)
    grammar = Grammar(WORDS_OF_LETTERS, vocabulary())
    other = Matcher(grammar)
    assert other.read(drawn(other.mask(), 0, 0))
    failing = Matcher(grammar)
    with pytest.raises(GrammarFailure) as caught:
        for position in range(200):
            failing.read(drawn(failing.mask(), 1, position))
    assert caught.value.kind == "limit"
    # The texts share the lexer whose limit was reached.
    for matcher in (other, Matcher(grammar)):
        assert len(ids_of(matcher.mask())) > 100
        assert matcher.read(drawn(matcher.mask(), 2, 0))


def test_failed_draft_does_not_affect_the_text(monkeypatch):
    limited(monkeypatch, 200_000)
    matcher = Matcher(Grammar(WORDS_OF_LETTERS, vocabulary()))
    length = 0
    with pytest.raises(GrammarFailure):
        for position in range(200):
            matcher.read(drawn(matcher.mask(), 1, position))
            length += 1
    matcher.back_to(length - 4)
    assert len(matcher.tokens) == length - 4
    fresh = Matcher(Grammar(WORDS_OF_LETTERS, vocabulary()))
    for token in matcher.tokens:
        assert fresh.read(token)
    np.testing.assert_array_equal(matcher.mask(), fresh.mask())


def test_a_dead_end_is_a_failure():
    # After the comma only the key "score" may follow, but the text has that key
    # already.
    schema = (
        '{"type": "object", "properties": {"score": {"type": "integer"}},'
        ' "required": ["score"], "additionalProperties": false,'
        ' "patternProperties": {"^score$": {"type": "integer"}}}'
    )
    grammar = grammar_of_schema(schema, {"whitespace_pattern": " ?"})
    matcher = Matcher(Grammar(grammar, vocabulary()))
    with pytest.raises(GrammarFailure, match="dead end") as caught:
        for token in bundled().encode('{"score":5 ,', add_special_tokens=False):
            assert token in ids_of(matcher.mask())
            assert matcher.read(token)
        for position in range(9):  # tokens of white space
            matcher.read(drawn(matcher.mask(), 0, position))
    assert caught.value.kind == "dead_end"


@pytest.mark.parametrize("cycle", CYCLES)
def test_rejects_grammar_that_no_text_matches(cycle):
    with pytest.raises(GrammarFailure, match="no text matches it"):
        Grammar(CYCLES[cycle], vocabulary())


def test_a_panic_of_the_library_is_a_failure():
    with pytest.raises(GrammarFailure, match="panicked") as caught:
        Grammar(PANIC, vocabulary())
    assert caught.value.kind == "panic"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_is_not_a_failure(error):
    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        call_library(interrupted)


@pytest.mark.parametrize("use", ["mask", "read", "back_to"])
def test_every_call_of_a_matcher_may_panic(use, monkeypatch):
    grammar = Grammar(grammar_of_regex("[a-z]{1,90}"), vocabulary())
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: object, **__: object) -> Any:
        raise panic("no luck")

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return fail

    matcher: Any = Matcher(grammar)
    first = matcher.mask()
    matcher.read(drawn(first, 1, 0))
    arguments = {"mask": [], "read": [drawn(first, 1, 1)], "back_to": [0]}[use]
    matcher._native = Broken()
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", fail)
        with pytest.raises(GrammarFailure, match="no luck"):
            getattr(matcher, use)(*arguments)
    # The library recovers, and the text continues.
    matcher.back_to(0)
    np.testing.assert_array_equal(matcher.mask(), first)


def test_early_stop_of_the_library_is_a_failure(monkeypatch):
    matcher: Any = Matcher(Grammar(grammar_of_regex("[a-z]{9}"), vocabulary()))

    class Stopped:
        def __getattr__(self, name: str) -> Any:
            return {
                "is_stopped": lambda: True,
                "is_error": lambda: False,
                "stop_reason": lambda: "MaxTokensTotal",
                "compute_bitmask": lambda: bytes(vocabulary().end_mask.nbytes),
            }[name]

    matcher._native = Stopped()
    with pytest.raises(GrammarFailure, match="MaxTokensTotal"):
        matcher.read(5)


def test_many_choices_compile_to_one_expression():
    labels = [f"label number {number}" for number in range(20_000)]
    matcher = Matcher(Grammar(grammar_of_choices(labels), vocabulary()))
    for token in bundled().encode("label number 19999", add_special_tokens=False):
        assert token in ids_of(matcher.mask())
        assert matcher.read(token)
    assert ids_of(matcher.mask()) == [EOS]


def test_schema_with_many_alternatives_compiles():
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{number}"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for number in range(2500)
    ]
    schema = grammar_of_schema(json.dumps({"anyOf": kinds}), {})
    matcher = Matcher(Grammar(schema, vocabulary()))
    for token in bundled().encode('{"kind":"k2499"}', add_special_tokens=False):
        assert token in ids_of(matcher.mask())
        assert matcher.read(token)
    assert ids_of(matcher.mask()) == [EOS]


ODD = [r"a.b*c", "(x|y)", "[z]{2}", "^$", "\\d", "a&b~c#d-e", "\n\t ", "é😀", "<eos>"]


@pytest.mark.parametrize("label", ODD)
def test_choices_are_matched_literally(label):
    matcher = Matcher(Grammar(grammar_of_choices(ODD), vocabulary()))
    for token in bundled().encode(
        label, add_special_tokens=False, parse_special_tokens=False
    ):
        assert token in ids_of(matcher.mask())
        assert matcher.read(token)
    assert ids_of(matcher.mask()) == [EOS]
    for other in ("aXbc", "x", "zz", "5"):
        matcher = Matcher(Grammar(grammar_of_choices(ODD), vocabulary()))
        tokens = bundled().encode(other, add_special_tokens=False)
        allowed = itertools.takewhile(
            lambda token, m=matcher: token in ids_of(m.mask()) and m.read(token), tokens
        )
        is_whole = len(list(allowed)) == len(tokens)
        assert not (is_whole and EOS in ids_of(matcher.mask())), other


def test_reasons_do_not_quote_the_grammar():
    try:
        Grammar(grammar_of_regex("(secret"), vocabulary())
    except GrammarFailure as failure:
        assert not re.search("Parser: {|grammars", str(failure))
    else:
        raise AssertionError("no failure")

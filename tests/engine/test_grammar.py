"""Masks against brute force, and what a caller is told of a wrong grammar."""

import itertools
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jaxspec_checkpoints
from jaxspec.engine.grammar import MAX_KEPT, GrammarCompiler
from jaxspec.errors import RequestError
from jaxspec.sampling_params import StructuredOutputsParams
from jaxspec.tokenizer import Tokenizer
from tests.engines import StubTokenizer

EOS, OTHER_END = 1, 2
STUB = GrammarCompiler(StubTokenizer(16), 16, (EOS, OTHER_END))
# Tokens 4 to 15 of the stub are these characters.
LETTERS = "%&'()*+,-./0"
CIRCULAR: dict[str, Any] = {"type": "object"}
CIRCULAR["properties"] = {"a": CIRCULAR}


def allowed(matcher, vocab_size: int = 16) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    bits = np.unpackbits(bits, bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


@pytest.mark.parametrize(
    "pattern",
    ["%&?'", "[%&]{1,3}", r"(%&|%'|\()[*+]?", "%(&'(%)?)?", r"([%&],){0,2}[%-]"],
)
def test_masks_are_all_that_can_become_a_match(pattern):
    words = [
        "".join(word)
        for length in range(6)
        for word in itertools.product("%&'(*+,-", repeat=length)
        if re.fullmatch(pattern, "".join(word))
    ]
    beginnings = {word[:cut] for word in words for cut in range(len(word) + 1)}
    for text in beginnings:
        matcher = STUB.matcher(StructuredOutputsParams(regex=pattern))
        assert matcher.consume_tokens([4 + LETTERS.index(one) for one in text])
        following = {
            4 + LETTERS.index(word[len(text)])
            for word in words
            if word.startswith(text) and word != text
        }
        ends = {EOS, OTHER_END} if text in words else set()
        assert allowed(matcher) == following | ends, text


def texts_of(compiler, tokenizer, params, seed: int, end: int) -> str:
    """A random walk through what is allowed, by tokens of several characters."""
    matcher, random, tokens = compiler.matcher(params), np.random.default_rng(seed), []
    while len(tokens) < 400:
        choices = sorted(allowed(matcher, tokenizer.vocab_size))
        assert choices and not matcher.is_error()
        if end in choices and random.random() < 0.3:
            return tokenizer.decode(tokens)
        texts = [token for token in choices if token not in (end, EOS)]
        if not texts:
            return tokenizer.decode(tokens)
        tokens.append(int(random.choice(texts)))
        assert matcher.consume_token(tokens[-1])
    return ""


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
        and set(value.get("tags", [])) <= {"a", "é"}
    )


FORMS = {
    "json": (dict(json=SCHEMA), is_person),
    "json_text": (dict(json=json.dumps(SCHEMA)), is_person),
    "regex": (
        dict(regex=r"([0-9]{3}-){2}[a-zé]+"),
        lambda text: re.fullmatch(r"([0-9]{3}-){2}[a-zé]+", text),
    ),
    "choice": (
        dict(choice=['say "hi"', "日本\\n", "a|b"]),
        lambda text: text in ('say "hi"', "日本\\n", "a|b"),
    ),
    "lark": (
        dict(grammar='start: "<" /[a-z]{1,5}/ ("," /[0-9]/)* ">"'),
        lambda text: re.fullmatch("<[a-z]{1,5}(,[0-9])*>", text),
    ),
    "gbnf": (
        dict(grammar='root ::= "<" [a-z] [a-z]? ("," [0-9])* ">"'),
        lambda text: re.fullmatch("<[a-z]{1,2}(,[0-9])*>", text),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_allowed_fits_the_form(form, bundled):
    (end,) = bundled.turn_end_ids
    compiler = GrammarCompiler(bundled, 8200, (EOS, end))  # pad rows at the end
    given, fits = FORMS[form]
    params = StructuredOutputsParams(**given)
    texts = [texts_of(compiler, bundled, params, seed, end) for seed in range(8)]
    texts = [text for text in texts if text]
    assert len(texts) > 5 and all(map(fits, texts)), texts


def test_white_space_and_additional_properties_of_json(bundled):
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    compiler = GrammarCompiler(bundled, bundled.vocab_size, (EOS,))

    def accepts(text: str, **options: Any) -> bool:
        form = StructuredOutputsParams(json=schema, **options)
        matcher = compiler.matcher(form)
        tokens = bundled.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens)

    spaced, open_ended = '{"a":  {}}', '{"a":{"b":1}}'
    assert accepts(spaced) and accepts(open_ended)
    assert not accepts(spaced, disable_any_whitespace=True)
    assert not accepts(spaced, whitespace_pattern=" ?")
    assert accepts(spaced, whitespace_pattern=" {0,2}")
    assert not accepts(open_ended, disable_additional_properties=True)
    assert accepts('{"a":{}}', disable_additional_properties=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(regex="(a"), "unclosed group"),
        (dict(regex="a(?=b)"), "look-around"),
        (dict(grammar="start: missing"), "unknown name"),
        (dict(grammar='root ::= "a'), "GBNF"),
        (dict(json="{"), "structured_outputs.json cannot be used: Expecting"),
        (dict(json="[]"), "a JSON schema is an object"),
        (dict(json="[" * 100_000), "recursion"),
        (dict(json=CIRCULAR), "Circular reference"),
        (dict(json={"const": float("nan")}), "not JSON compliant"),
        (dict(json={"type": "strin"}), "Invalid type: strin"),
        (dict(json={"type": "string", "format": "no-such"}), "Unknown format"),
        (dict(json_object=True, whitespace_pattern="("), "unclosed group"),
    ],
)
def test_a_wrong_form_is_an_error_that_says_why(given, message):
    with pytest.raises(RequestError, match=message) as caught:
        STUB.matcher(StructuredOutputsParams(**given))
    assert caught.value.parameter == "structured_outputs"


def test_matchers_of_one_grammar_do_not_disturb_each_other():
    form = StructuredOutputsParams(regex="%&'")
    first = STUB.matcher(form)
    assert first.consume_token(4)
    second = STUB.matcher(form)
    assert allowed(first) == {5} and allowed(second) == {4}


def test_only_so_many_grammars_are_kept():
    compiler = GrammarCompiler(StubTokenizer(16), 16, (EOS,))
    for count in range(1, MAX_KEPT + 9):
        compiler.matcher(StructuredOutputsParams(regex=f"%{{{count}}}"))
    assert len(compiler._kept) == MAX_KEPT


def chain_of_rules(count: int) -> StructuredOutputsParams:
    rules = [f'r{i}: "%" r{i + 1}' for i in range(count)]
    return StructuredOutputsParams(
        grammar="\n".join(["start: r0", *rules, f'r{count}: "&"'])
    )


def chain_of_schemas(count: int) -> StructuredOutputsParams:
    schemas: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)
    }
    schemas[f"d{count}"] = {"type": "string"}
    return StructuredOutputsParams(json={"$ref": "#/$defs/d0", "$defs": schemas})


@pytest.mark.parametrize(
    "params", [chain_of_rules(5000), chain_of_schemas(1400)], ids=["rules", "schemas"]
)
def test_a_long_chain_does_not_end_the_process(params):
    assert not STUB.matcher(params).is_error()


def test_many_threads_ask_at_once():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        # More than are kept: while one is looked up, another makes room for a third.
        texts = ["%" * number for number in range(1, MAX_KEPT + 9)] * 12
        forms = [StructuredOutputsParams(choice=[text]) for text in texts]
        compiler = GrammarCompiler(StubTokenizer(16), 16, (EOS,))
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(lambda form: allowed(compiler.matcher(form)), forms))
        assert len(compiler._kept) == MAX_KEPT
    finally:
        sys.setswitchinterval(usual)


def test_compilers_leave_the_stacks_of_other_threads_as_they_were(monkeypatch):
    """Two engines of a process, whose requests bring grammars at one moment."""
    set_size, before = threading.stack_size, threading.stack_size()

    def set_slowly(size: int = 0) -> int:
        usual = set_size(size)
        time.sleep(0.05)
        return usual

    monkeypatch.setattr(threading, "stack_size", set_slowly)
    compilers = [GrammarCompiler(StubTokenizer(16), 16, (EOS,)) for _ in range(2)]
    params = StructuredOutputsParams(regex="%+")
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(one.matcher, params) for one in compilers]
    assert all(allowed(one.result()) == {4} for one in made)
    try:
        assert set_size() == before
    finally:
        set_size(before)

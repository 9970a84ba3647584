"""Masks equal those of a new matcher; grammars are compiled or rejected."""

import gc
import itertools
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jaxspec_checkpoints
from jaxspec.config.structured_outputs import (
    StructuredOutputsConfig,
    StructuredOutputsParams,
)
from jaxspec.engine import grammar_matcher, structured_output
from jaxspec.engine.grammar_matcher import GrammarFailure, Matcher
from jaxspec.engine.structured_output import (
    EVERYTHING,
    GrammarCompiler,
    GrammarState,
    TokenMasks,
)
from jaxspec.errors import RequestError
from jaxspec.text.tokenizer import Tokenizer
from tests.support.engines import StubTokenizer

VOCAB, NUM_PROMPT, WINDOW, DRAFTS = 40, 5, 18, 3
EOS, OTHER_END = 1, 2
WORDS = 2
FORM = StructuredOutputsParams(regex=r"([%-*]{2,4}-)+[0-5]{0,6}")
COMPILER = GrammarCompiler(StubTokenizer(VOCAB), VOCAB, (EOS,))
STUB = GrammarCompiler(StubTokenizer(16), 16, (EOS, OTHER_END))
# The stub tokenizer decodes the tokens 4 to 15 to these characters.
LETTERS = "%&'()*+,-./0"
CIRCULAR: dict[str, Any] = {"type": "object"}
CIRCULAR["properties"] = {"a": CIRCULAR}


def fresh_masks(text: list[int], drafts: list[int]) -> np.ndarray:
    """Return the expected masks, computed with a new matcher for every row."""
    masks = np.full((len(drafts) + 1, WORDS), EVERYTHING)
    for row in range(len(drafts) + 1):
        matcher = COMPILER.matcher(FORM)
        path = [token for token in [*text, *drafts[:row]] if token != EOS]
        if num_taken(matcher, path) < len(path):
            break
        if EOS in [*text, *drafts[:row]]:
            matcher.read(EOS)
        masks[row] = matcher.mask()[:WORDS]
        if row < len(drafts) and drafts[row] not in ids_of(masks[row]):
            break
    return masks


def num_taken(matcher: Matcher, tokens: list[int]) -> int:
    """Return the number of tokens that the grammar accepts."""
    for count, token in enumerate(tokens):
        try:
            if not matcher.read(token):
                return count
        except GrammarFailure:
            return count
    return len(tokens)


def ids_of(mask: np.ndarray, vocab_size: int = VOCAB) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits).tolist()


def ask(
    masks: TokenMasks, *rows: tuple[Any, list[int], list[int]], only: int | None = None
) -> np.ndarray:
    """Return masks of several sequences (state, text, drafts), made in one call.

    They are the masks after every number of drafts, or after `only` that many.
    """
    newest = np.zeros((len(rows), WINDOW), np.int32)
    for index, (_, text, _) in enumerate(rows):
        known = [7] * NUM_PROMPT + text
        newest[index, -len(known) :] = known[-WINDOW:]
    return masks(
        np.array([getattr(row[0], "grammar_id", row[0]) for row in rows], np.int32),
        np.array([NUM_PROMPT + len(row[1]) for row in rows], np.int32),
        newest,
        np.array([row[2] for row in rows], np.int32).reshape(len(rows), -1),
        np.arange(len(rows[0][2]) + 1) if only is None else np.array([only]),
    )


def make_state(num_prompt: int = NUM_PROMPT, **changes: Any) -> GrammarState:
    return GrammarState(
        matcher=COMPILER.matcher(FORM), num_prompt=num_prompt, **changes
    )


def check(masks: TokenMasks, state: Any, text: list[int], drafts: list[int]) -> Any:
    """Check the masks of one sequence against new matchers; return them."""
    answer = ask(masks, (state, text, drafts))[0]
    np.testing.assert_array_equal(answer, fresh_masks(text, drafts))
    return answer


def opened() -> tuple[TokenMasks, GrammarState]:
    masks, state = TokenMasks(VOCAB), make_state()
    masks.add(state)
    return masks, state


def drawn(text: list[int], count: int, random: np.random.Generator) -> list[int]:
    """Return random tokens that mostly continue the text as its grammar allows."""
    tokens: list[int] = []
    for _ in range(count):
        choices = ids_of(fresh_masks([*text, *tokens], [])[0])
        if EOS in choices and len(choices) > 1 and random.random() < 0.7:
            choices.remove(EOS)
        is_any = random.random() < 0.15
        tokens.append(int(random.integers(4, VOCAB) if is_any else choices[0]))
        if not is_any:
            tokens[-1] = int(random.choice(choices))
        else:
            break
    rest = random.integers(4, VOCAB, count - len(tokens))
    return tokens + rest.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_random_rounds_get_their_masks(seed):
    random = np.random.default_rng(seed)
    masks, state = opened()
    text: list[int] = []
    while EOS not in text and len(text) < 60:
        drafts = drawn(text, DRAFTS, random)
        answer = check(masks, state, text, drafts)
        # A program may run twice with the same drafts, and then requests the same
        # masks.
        check(masks, state, text, drafts)
        accepted = 0
        while accepted < DRAFTS and drafts[accepted] in ids_of(answer[accepted]):
            accepted += 1
        kept = drafts[: random.integers(0, accepted + 1)]
        choices = ids_of(fresh_masks([*text, *kept], [])[0])
        text += [*kept, int(random.choice(choices))]
        if EOS in text:
            text = text[: text.index(EOS) + 1]
        if random.random() < 0.2:  # the last tile of a prompt has no drafts
            check(masks, state, text, [])


def test_only_the_end_token_follows_a_complete_text():
    masks, state = opened()
    text = [4, 5, 12, EOS]  # "%&-"
    for end in ([EOS], [EOS, EOS, EOS]):
        answer = ask(masks, (state, text + end, [EOS, EOS, 4]))[0]
        assert [ids_of(row) for row in answer[:3]] == [[EOS]] * 3
        assert (answer[3] == EVERYTHING).all()  # after a draft that the grammar forbids


def test_text_after_a_rollback_gets_the_right_masks():
    masks, state = opened()
    ask(masks, (state, [4, 5, 12, 20], [20, 20, 20]))
    for text in ([4, 5, 6], [4, 5, 12], [], [7, 7, 12, EOS]):
        check(masks, state, text, [4, 4, 12])


def test_matcher_follows_new_tokens_up_to_its_window():
    masks, state = opened()
    text = [4, 5, 12] * 6
    check(masks, state, text, [4, 5, 12])
    masks, state = opened()
    with pytest.raises(AssertionError, match="tokens before the newest ones are miss"):
        ask(masks, (state, [*text, 4], [4, 5, 12]))


def test_rows_without_grammar_and_unknown_ids_allow_everything():
    masks, state = opened()
    unknown, drafts = state.grammar_id + 7, [4, 5, 12]
    answer = ask(masks, (0, [9], drafts), (state, [], drafts), (unknown, [9], drafts))
    assert (answer[[0, 2]] == EVERYTHING).all()
    np.testing.assert_array_equal(answer[1], fresh_masks([], drafts))


def test_state_is_dropped_with_its_last_reference():
    masks, state = opened()
    grammar_id = state.grammar_id
    masks.add(state)
    assert state.grammar_id == grammar_id and len(masks) == 1
    del state
    assert len(masks) == 0
    assert (ask(masks, (grammar_id, [], [4, 5, 12])) == EVERYTHING).all()
    other = make_state()
    masks.add(other)
    assert other.grammar_id != grammar_id
    assert masks.num_questions == 1


def test_draft_model_requests_one_mask_at_a_time():
    masks, state = opened()
    text, drafts = [4, 5], [12, 4, 5]
    expected = fresh_masks(text, drafts)
    for before in range(DRAFTS):
        # Drafts that have not been sampled yet have random values in the array.
        known = drafts[:before] + [39] * (DRAFTS - before)
        answer = ask(masks, (state, text, known), only=before)
        np.testing.assert_array_equal(answer[0, 0], expected[before])
    check(masks, state, text, drafts)


def test_verification_reuses_the_masks_of_the_draft_model():
    masks, state = opened()
    ask(masks, (state, [4], [5, 12, 4]))
    known_before = dict(state.known_masks)
    assert sorted(map(len, known_before)) == [0, 1, 2, 3]
    ask(masks, (state, [4], [5, 12, 4]))
    assert all(state.known_masks[path] is mask for path, mask in known_before.items())
    check(masks, state, [4, 5], [12, 4, 4])
    check(masks, state, [4, 5], [12, 4, 4])


def slow_states(monkeypatch: pytest.MonkeyPatch, count: int) -> Any:
    """Return states whose masks wait for an event, and that event."""
    gate, compute = threading.Event(), Matcher.mask
    states = [make_state() for _ in range(count)]
    slow = [state.matcher for state in states]

    def mask(matcher: Matcher) -> np.ndarray:
        if any(matcher is one for one in slow):
            assert gate.wait(60)
        return compute(matcher)

    monkeypatch.setattr(Matcher, "mask", mask)
    return states, gate


def test_failure_after_drafts_is_one_of_the_text_only_if_it_has_their_tokens(
    monkeypatch,
):
    masks, state = opened()
    compute = Matcher.mask

    def mask(matcher: Matcher) -> np.ndarray:
        if matcher.tokens == [4, 5]:
            raise GrammarFailure("limit", "too much")
        return compute(matcher)

    monkeypatch.setattr(Matcher, "mask", mask)
    ask(masks, (state, [4], [5, 6, 7]))
    for text in ([4, 5], [4, 6, 7]):
        assert state.failure_in(text) is None
    assert state.failure_in([4, 5, EOS]) == ([4, 5], "limit", "too much")


def test_slow_mask_is_late_and_does_not_block_a_launch(monkeypatch):
    (slow,), gate = slow_states(monkeypatch, 1)
    masks, other = TokenMasks(VOCAB), make_state()
    for state in (slow, other):
        masks.add(state)
    rows = (slow, [4], [5, 12, 4]), (other, [4, 5], [12, 4, 5])
    answer = ask(masks, *rows)
    assert [ids_of(row) for row in answer[0]] == [[EOS]] * 4
    np.testing.assert_array_equal(answer[1], fresh_masks([4, 5], [12, 4, 5]))
    assert (slow.late_length, slow.is_slow) == (1, True)
    assert (other.late_length, other.is_slow) == (None, False)
    # A launch in flight requests masks for tokens that will be discarded later.
    late = ask(masks, (slow, [4, EOS], [4, 4, 4]))[0]
    assert [ids_of(row) for row in late] == [[EOS]] * 4
    with ThreadPoolExecutor(1) as threads:
        assert not slow.poll_mask([4], threads) and slow.computing is not None
        gate.set()
        slow.computing.result(60)
        assert slow.poll_mask([4], threads)
    assert slow.late_length is None and slow.is_slow
    gate.clear()
    # This row has no drafts in the launch, so no mask after drafts is computed.
    answer = ask(masks, (slow, [4], [5, 12, 4]))[0]
    np.testing.assert_array_equal(answer[0], fresh_masks([4], [])[0])
    assert slow.late_length is None
    gate.set()
    check(masks, slow, [4, 5], [12, 4, 5])


def test_wait_for_many_slow_masks_is_bounded(monkeypatch):
    states, gate = slow_states(monkeypatch, 12)
    masks = TokenMasks(VOCAB)
    for state in states:
        masks.add(state)
    start = time.monotonic()
    for group in (states[:6], states[6:]):
        ask(masks, *((state, [4], [5, 12, 4]) for state in group))
    assert time.monotonic() - start < 12 * structured_output.MAX_ROW_WAIT_S
    assert all(state.late_length == 1 for state in states)
    assert 0 < len(masks._late_threads) <= structured_output.MAX_LATE_THREADS
    gate.set()
    for one in masks._late_threads:
        one.join(60)
        assert not one.is_alive()


def test_no_end_before_min_tokens_unless_the_text_is_complete():
    form = StructuredOutputsParams(regex="%&(%)?")
    masks = TokenMasks(VOCAB)
    asked = [
        GrammarState(
            matcher=COMPILER.matcher(form),
            num_prompt=NUM_PROMPT,
            min_tokens=min_tokens,
            stop_ids=(EOS, 35),
        )
        for min_tokens in (0, 3, 9)
    ]
    for state in asked:
        masks.add(state)
    answer = ask(masks, *((one, [4, 5], [4, EOS]) for one in asked))
    found = [[ids_of(row) for row in rows] for rows in answer]
    assert found[0] == [[EOS, 4], [EOS], [EOS]]
    assert found[1] == found[2] == [[4], [EOS], [EOS]]


def allowed(matcher: Matcher, vocab_size: int = 16) -> set[int]:
    return set(ids_of(matcher.mask(), vocab_size))


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


@pytest.mark.parametrize(
    "pattern",
    ["%&?'", "[%&]{1,3}", r"(%&|%'|\()[*+]?", "%(&'(%)?)?", r"([%&],){0,2}[%-]"],
)
def test_masks_allow_exactly_the_possible_matches(pattern):
    words = [
        "".join(word)
        for length in range(6)
        for word in itertools.product("%&'(*+,-", repeat=length)
        if re.fullmatch(pattern, "".join(word))
    ]
    beginnings = {word[:cut] for word in words for cut in range(len(word) + 1)}
    for text in beginnings:
        matcher = STUB.matcher(StructuredOutputsParams(regex=pattern))
        assert all(matcher.read(4 + LETTERS.index(one)) for one in text)
        following = {
            4 + LETTERS.index(word[len(text)])
            for word in words
            if word.startswith(text) and word != text
        }
        ends = {EOS, OTHER_END} if text in words else set()
        assert allowed(matcher) == following | ends, text


def walk(
    matcher: Matcher, tokenizer: Tokenizer, choose: Callable[[list[int]], int | None]
) -> str | None:
    """Return the text of chosen allowed tokens; None if it does not end.

    It ends when no token is allowed except EOS, or `choose` returns None.
    """
    tokens = list[int]()
    while len(tokens) < 1000:
        choices = sorted(allowed(matcher, tokenizer.vocab_size) - {EOS})
        token = choose(choices) if choices else None
        if token is None:
            return tokenizer.decode(tokens)
        tokens.append(token)
        assert matcher.read(token)
    return None


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
def test_texts_of_allowed_tokens_match_the_grammar(form, bundled):
    (end,) = bundled.turn_end_ids
    compiler = GrammarCompiler(bundled, 8200, (EOS, end))  # padding rows at the end
    given, fits = FORMS[form]
    params = StructuredOutputsParams(**given)
    random = np.random.default_rng(0)

    def choose(choices: list[int]) -> int | None:
        texts = [token for token in choices if token != end]
        if not texts or (end in choices and random.random() < 0.3):
            return None
        return int(random.choice(texts))

    texts = [walk(compiler.matcher(params), bundled, choose) for _ in range(8)]
    texts = [text for text in texts if text is not None]
    assert len(texts) > 5 and all(map(fits, texts)), texts


UNBOUNDED = r"[ \n\r\t]+"
GUIDED = SCHEMA | {"x-guidance": {"whitespace_flexible": True}}
PATTERNED = SCHEMA | {"x-guidance": {"whitespace_pattern": UNBOUNDED}}


@pytest.mark.parametrize(
    ("params", "config", "longest"),
    [
        (dict(json=SCHEMA), {}, 17),
        (dict(json=SCHEMA), dict(disable_any_whitespace=True), 0),
        (dict(json=SCHEMA), dict(whitespace_pattern=" {1,3}"), 3),
        (dict(json=SCHEMA), dict(whitespace_pattern=UNBOUNDED), None),
        (dict(json=SCHEMA, disable_any_whitespace=True), {}, 0),
        (dict(json=SCHEMA, whitespace_pattern="\n?"), {}, 1),
        (dict(json=SCHEMA, whitespace_pattern=UNBOUNDED), {}, None),
        (dict(json=SCHEMA, whitespace_pattern=""), {}, 0),
        (dict(json=SCHEMA), dict(whitespace_pattern=""), 0),
        # As in vLLM, a schema may contain its own options for white space.
        (dict(json=GUIDED), {}, None),
        (dict(json=GUIDED), dict(disable_any_whitespace=True), None),
        (dict(json=GUIDED, disable_any_whitespace=True), {}, 0),
        (dict(json=PATTERNED), {}, None),
        (dict(json=PATTERNED, disable_any_whitespace=True), {}, 0),
        (dict(json=GUIDED, whitespace_pattern=" "), {}, 1),
    ],
)
def test_white_space_in_json_follows_the_options(params, config, longest, bundled):
    compiler = GrammarCompiler(
        bundled, bundled.vocab_size, (EOS,), StructuredOutputsConfig(**config)
    )
    form = StructuredOutputsParams(**params)

    def prefer_white_space(choices: list[int]) -> int:
        white = [one for one in choices if not bundled.decode([one]).strip(" \n\r\t")]
        return (white or choices)[0]

    text = walk(compiler.matcher(form), bundled, prefer_white_space)
    if longest is None:
        assert text is None
        return
    assert text is not None and is_person(text)
    between = re.sub(r"\"[^\"]*\"|[^\s\"]+", "x", text)
    assert max(map(len, re.findall(r"\s+", between)), default=0) == longest, text


def accepts(
    tokenizer: Tokenizer,
    text: str,
    schema: dict[str, Any],
    config: dict[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Return whether a schema allows a text, or the start of one."""
    engine_options = StructuredOutputsConfig(**config or {})
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (EOS,), engine_options)
    matcher = compiler.matcher(StructuredOutputsParams(json=schema, **options))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return num_taken(matcher, tokens) == len(tokens)


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_may_have_line_breaks(indent, bundled):
    value = {"name": "", "age": 3, "tags": ["a", "\u00e9"]}
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert accepts(bundled, text, SCHEMA)
    assert accepts(bundled, text.replace("\n", "\r\n"), SCHEMA)


CLOSED = {"disable_additional_properties": True}
OPEN_ENDED = '{"properties":{"a":{"b":1}'


@pytest.mark.parametrize(
    ("text", "options", "is_accepted"),
    [
        ('{"properties":  {}', {}, False),
        (OPEN_ENDED, {}, True),
        (OPEN_ENDED, CLOSED, False),
        (OPEN_ENDED, {"config": CLOSED}, False),
        ('{"properties":{"b"', {"config": CLOSED}, False),
        ('{"b"', {"config": CLOSED}, False),
        ('{"properties":{"a":{}}}', CLOSED, True),
        # Values that look like schemas, and a property named like a keyword.
        ('{"const": {"type": "object"}, "enum": {"properties": {}}', CLOSED, True),
    ],
)
def test_additional_properties_of_schemas_follow_the_options(
    text, options, is_accepted, bundled
):
    schema = {
        "type": "object",
        "properties": {
            "const": {"const": {"type": "object"}},
            "enum": {"enum": [{"properties": {}}]},
            "properties": {"type": "object", "properties": {"a": {"type": "object"}}},
        },
    }
    assert accepts(bundled, text, schema, **options) == is_accepted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(regex="(a"), "unclosed group"),
        (dict(regex="a(?=b)"), "look-around"),
        (dict(grammar="start: missing"), "unknown name"),
        (dict(grammar='root ::= "a'), "GBNF"),
        (dict(json="{"), "structured_outputs.json cannot be used: Expecting"),
        (dict(json="[]"), "a JSON schema must be an object"),
        (dict(json="[" * 100_000), "recursion"),
        (dict(json=CIRCULAR), "Circular reference"),
        (dict(json={"const": float("nan")}), "not JSON compliant"),
        (dict(json={"type": "strin"}), "Invalid type: strin"),
        (dict(json={"type": "string", "format": "no-such"}), "Unknown format"),
        (dict(json_object=True, whitespace_pattern="("), "unclosed group"),
    ],
)
def test_bad_structured_outputs_are_rejected_with_the_reason(given, message):
    with pytest.raises(RequestError, match=message) as caught:
        STUB.matcher(StructuredOutputsParams(**given))
    assert caught.value.parameter == "structured_outputs"


def test_grammar_cache_is_limited_in_bytes(monkeypatch):
    compiler = GrammarCompiler(StubTokenizer(16), 16, (EOS,))
    forms = [StructuredOutputsParams(regex=f"%{{{count}}}") for count in range(1, 9)]
    # Sizes are fixed here, because real lexers grow while they are used.
    monkeypatch.setattr(grammar_matcher.Grammar, "num_bytes", 1000)
    monkeypatch.setattr(structured_output, "MAX_CACHED_BYTES", 3500)
    for form in forms:
        compiler.matcher(form)
    assert len(compiler._cache) == 3
    compiler.matcher(forms[5])  # the oldest grammar becomes the newest by use
    compiler.matcher(forms[0])
    assert str(forms[5].regex) in " ".join(compiler._cache)
    # A grammar larger than the whole limit remains in the cache while it is the newest.
    monkeypatch.setattr(structured_output, "MAX_CACHED_BYTES", 1)
    compiler.matcher(forms[0])
    assert len(compiler._cache) == 1


def test_lexer_at_its_limit_is_dropped_from_the_cache():
    matcher = STUB.matcher(StructuredOutputsParams(regex="[%&]{9}"))
    grammar: Any = matcher._grammar
    before = grammar.num_bytes
    matcher._lexer.spent_s += grammar_matcher.MASK_FUEL / grammar_matcher.FUEL_PER_S / 2
    assert grammar.num_bytes > before + 2**20
    lexer = weakref.ref(matcher._lexer)
    matcher._spend(1.0)
    assert grammar.num_bytes < before + 2**20
    assert allowed(matcher) == {4, 5}
    del matcher
    gc.collect()
    assert lexer() is None


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
def test_long_chain_of_references_does_not_crash_the_process(params):
    assert allowed(STUB.matcher(params))


def test_many_threads_request_masks(monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_CACHED_BYTES", 2**20)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        # There are more grammars than the cache holds, so lookups and evictions run
        # concurrently.
        texts = ["%" * number for number in range(1, 30)] * 20
        forms = [StructuredOutputsParams(choice=[text]) for text in texts]
        compiler = GrammarCompiler(StubTokenizer(16), 16, (EOS,))
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(lambda form: allowed(compiler.matcher(form)), forms))
        assert 1 < len(compiler._cache) <= 8
    finally:
        sys.setswitchinterval(usual)


def test_compilers_restore_the_stack_size(monkeypatch):
    """Two engines of a process may compile grammars at the same time."""
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


def test_schema_cannot_inject_lines_into_the_log(caplog):
    schema: dict[str, Any] = {"type": "string", "format": "date\nINFO forged"}
    schema["x-guidance"] = {"lenient": True}
    COMPILER.matcher(StructuredOutputsParams(json=schema))
    (message,) = caplog.messages
    assert "\\nINFO forged" in message
    assert message.isprintable()

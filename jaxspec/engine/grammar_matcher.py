"""Calls llguidance: compiles grammars, and follows one text with a matcher.

No other module calls the library. Every call goes through `call_library`: whatever the
library raises, a Rust panic included, becomes a `GrammarFailure` of one request.
"""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import llguidance
import numpy as np

from jaxspec.errors import NativePanicError
from jaxspec.exit import call_native
from jaxspec.text.tokenizer import Tokenizer

T = TypeVar("T")

# Of stack, for each character of a grammar. The library calls itself for every rule of
# a chain, and a full stack ends the process: 4,000 rules of 13 characters took 8 MiB.
STACK_BYTES = 4096
LEAST_STACK_BYTES = 2**24
# Fuel of one mask: 0.1 to 0.5 s on one core of a server.
MASK_FUEL = 5_000_000
# The most that a machine spends: 15 to 65 million were measured.
FUEL_PER_S = 100_000_000
# The default of `max_items_in_row` is 2,000: an `anyOf` of 2,500 objects failed after
# "{". Items of one mask: an `anyOf` of 5,000 objects needs fewer than 10,000. With the
# default of 50,000 a mask of an ambiguous grammar takes 2.0 s, with 20,000 0.15 s.
MAX_ITEMS_IN_ROW, MAX_MASK_ITEMS = 100_000, 20_000
_KEPT_LIMITS: dict[str, Any] = dict(
    max_items_in_row=MAX_ITEMS_IN_ROW,
    step_max_items=MAX_MASK_ITEMS,
    step_lexer_fuel=MASK_FUEL,
    verbose_errors=False,
)
# Fuel to compile a grammar: 0.4 s. 20,000 random labels of 30 characters compile.
COMPILE_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=20_000_000, **_KEPT_LIMITS
)
# The fuel of compiling is also that of the tokens read before the first mask. It must
# not run out there: where it did would depend on when the matcher was rebuilt.
LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=2**40, **_KEPT_LIMITS)
# Estimates of memory: of a grammar, of each character of its text, and of the states
# that a lexer caches in a second of CPU time. Measured: 53 to 131 bytes a character for
# long grammars, 40 to 175 MB a second.
GRAMMAR_BYTES, BYTES_PER_CHARACTER, LEXER_BYTES_PER_S = 2**17, 200, 500 * 2**20
# Stop reasons of a complete text.
_COMPLETE = {"NoExtension", "EndOfSentence"}
# Characters that mean something in a regular expression.
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# `threading.stack_size` is of the process: all compilers take turns, or one would take
# the other's size for the usual one and leave it behind. A thread that somebody else
# starts in between reserves more address space than it needs, which is harmless.
_stack_size_lock = threading.Lock()


class GrammarFailure(Exception):  # noqa: N818 - the end of a text, not a fault of ours
    """The library cannot continue a text.

    Attributes:
        kind: "limit", "dead_end", "panic", "refused" or "other": a label of metrics.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


FAILURE_KINDS = ("limit", "dead_end", "panic", "refused", "other")


def call_library(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call into the library.

    Raises:
        GrammarFailure: It raised an error, or panicked.
    """
    try:
        return call_native(function, *arguments, **named)
    except Exception as error:
        kind = "panic" if isinstance(error, NativePanicError) else "other"
        raise GrammarFailure(kind, f"the grammar library failed: {error}") from error


def _failure(reason: str) -> GrammarFailure:
    """Describe an error in which a matcher is, without what it quotes."""
    reason = reason.strip().partition("\n")[0] or "no reason given"
    if reason.startswith("panic"):
        return GrammarFailure("panic", f"the grammar library failed: {reason}")
    if reason.startswith("NoExtension"):
        text = "no token can follow the text so far: the grammar has a dead end there"
        return GrammarFailure("dead_end", text)
    is_limit = re.search("too (many|complex|large|big)|max is|limit", reason, re.I)
    return GrammarFailure("limit" if is_limit else "other", reason)


def grammar_of_regex(pattern: str) -> str:
    """Return a regular expression in the library's own form."""
    return call_library(llguidance.LLMatcher.grammar_from_regex, pattern)


def grammar_of_choices(choices: Sequence[str]) -> str:
    """Return a list of texts in the library's own form.

    One regular expression: as alternatives of a rule, 20,000 take 0.2 s for the first
    mask and are more than the library's limit on items.
    """
    distinct = dict.fromkeys(choices)
    return grammar_of_regex("|".join(_SYNTAX.sub(r"\\\g<0>", one) for one in distinct))


def grammar_of_rules(rules: str) -> str:
    """Return a grammar in Lark's or GBNF's form in the library's own form."""
    return call_library(llguidance.grammar_from, "grammar", rules)


def grammar_of_schema(schema: str, options: Any) -> str:
    """Return a JSON schema in the library's own form."""
    return call_library(
        llguidance.LLMatcher.grammar_from_json_schema, schema, overrides=options
    )


def check_pattern(pattern: str) -> None:
    """Check that a pattern is a regular expression.

    Raises:
        GrammarFailure: It is not.
    """
    is_error, reasons = call_library(
        llguidance.LLMatcher.validate_grammar_with_warnings, grammar_of_regex(pattern)
    )
    if is_error:
        raise GrammarFailure("other", reasons[0].strip())


class Vocabulary:
    """The tokenizer as llguidance reads it.

    Args:
        vocab_size: Rows of the network, at least the tokenizer's pieces.
        end_ids: The model's end tokens, which may follow a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]):
        wrapper = call_library(
            llguidance.TokenizerWrapper, _Pieces(tokenizer, vocab_size, end_ids[0])
        )
        self.native = call_library(
            llguidance.LLTokenizer, wrapper, n_vocab=vocab_size, eos_token=list(end_ids)
        )
        self.end_ids = end_ids
        end, words = end_ids[0], -(-vocab_size // 32)
        self.end_mask = np.zeros(words, np.uint32)
        self.end_mask[end // 32] = np.uint32(1 << end % 32)


class _Pieces:
    """Pieces of the tokenizer, under the names that the library reads."""

    bos_token_id = None
    special_token_ids: list[int] = []

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        # A token without bytes never matches: special ones, pad rows of the network.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        # The library tries bytes first, and keeps to them where they work once.
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokenizer.encode(
            text, add_special_tokens=False, parse_special_tokens=False
        )


class _Lexer:
    """A matcher at the beginning of a text, and the CPU time its lexer has used.

    Copies of a matcher share the lexer: its cached states, and its error.
    """

    def __init__(self, native: llguidance.LLMatcher):
        self.native = native
        self.spent_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory of its cached states."""
        return int(min(self.spent_s, 1.0) * LEXER_BYTES_PER_S)

    @property
    def is_used_up(self) -> bool:
        """Whether it may have spent the fuel of a mask by now: after 50 ms."""
        return self.spent_s > MASK_FUEL / FUEL_PER_S


class Grammar:
    """A compiled grammar.

    Args:
        text: The constraint in llguidance's own form.

    Attributes:
        warnings: What the library ignores of it.

    Raises:
        GrammarFailure: It is not valid, or no text matches it.
    """

    def __init__(self, text: str, vocabulary: Vocabulary):
        self._text, self.vocabulary = text, vocabulary
        self.warnings: list[str] = []
        # None once it is used up: its memory is released with its last matcher.
        self._shared: _Lexer | None = self._with_stack(self._compile)
        self.drop_used_lexer()

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory that it keeps."""
        shared, text = self._shared, len(self._text)
        lexer = 0 if shared is None else shared.num_bytes
        return GRAMMAR_BYTES + BYTES_PER_CHARACTER * text + lexer

    def drop_used_lexer(self) -> None:
        """Let go of a lexer that is used up."""
        shared = self._shared
        if shared is not None and shared.is_used_up:
            self._shared = None

    def shared_lexer(self) -> _Lexer:
        """Return a lexer that several matchers use, and that is not used up.

        A copy takes microseconds; a new lexer 0.5 ms, or 0.1 s for 20,000 labels.

        Raises:
            GrammarFailure: The library failed.
        """
        shared = self._shared
        if shared is None or shared.is_used_up:
            shared = self._shared = self.new_lexer()
        return shared

    def new_lexer(self) -> _Lexer:
        """Make a lexer that no other matcher uses.

        Raises:
            GrammarFailure: The library fails.
        """
        return self._with_stack(self._make)

    def _with_stack(self, make: Callable[[], _Lexer]) -> _Lexer:
        """Call a function in a thread that has the stack for this grammar."""
        size = LEAST_STACK_BYTES + STACK_BYTES * len(self._text)
        with ThreadPoolExecutor(1) as thread:
            with _stack_size_lock:
                usual = threading.stack_size(size)
                try:
                    making = thread.submit(make)
                finally:
                    threading.stack_size(usual)
            return making.result()

    def _compile(self) -> _Lexer:
        is_error, messages = call_library(
            llguidance.LLMatcher.validate_grammar_with_warnings,
            self._text,
            self.vocabulary.native,
            limits=COMPILE_LIMITS,
        )
        if is_error:
            raise GrammarFailure("other", messages[0].strip())
        self.warnings = messages
        lexer = self._make()
        # A cycle of references is valid to the library until its first mask.
        first = call_library(lexer.native.deep_copy)
        start = time.thread_time()
        call_library(first.compute_bitmask)
        lexer.spent_s += time.thread_time() - start
        if first.is_error():
            failure = _failure(first.get_error())
            if failure.kind == "dead_end":
                failure = GrammarFailure("dead_end", "no text matches it")
            raise failure
        return lexer

    def _make(self) -> _Lexer:
        native = call_library(
            llguidance.LLMatcher,
            self.vocabulary.native,
            self._text,
            log_level=0,
            limits=LIMITS,
        )
        if native.is_error():
            raise _failure(native.get_error())
        return _Lexer(native)


class Matcher:
    """Follows one text through a grammar.

    A mask, and whether there is one, depends on the tokens before it alone, whatever
    other masks were computed. The library's own limits do not: a lexer that has cached
    more states spends less fuel on a mask and is nearer to its limit on states, and a
    lexer that has failed never recovers. So the verdict is that of a new lexer, which
    reads the text and computes this mask. It is asked when the lexer in use fails, and
    when that lexer has worked so long that it could have spent the fuel of a mask.
    Before that a new one cannot fail: all it has to do, the one in use has done.

    Attributes:
        tokens: Consumed so far.
    """

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self.tokens: list[int] = []
        self._start(grammar.shared_lexer(), [])

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that may follow a complete text."""
        return self._grammar.vocabulary.end_ids

    @property
    def end_mask(self) -> np.ndarray:
        """A mask that allows the first end token only."""
        return self._grammar.vocabulary.end_mask

    def read(self, token: int) -> bool:
        """Consume a token that the mask before it allows; return whether it did.

        Not consumed are tokens after a complete text, and end tokens that the library
        does not take.

        Raises:
            GrammarFailure: The library failed, or refuses the token.
        """
        if self._is_complete():
            return False
        start = time.thread_time()
        try:
            has_read = self._call("validate_tokens", [token]) and self._call(
                "consume_token", token
            )
        except GrammarFailure:
            has_read = False
        self._spend(time.thread_time() - start)
        if has_read:
            self.tokens.append(token)
            return True
        length = len(self.tokens) + 1
        self._start_alone([*self.tokens, token])
        return len(self.tokens) == length

    def back_to(self, length: int) -> None:
        """Forget all but the first tokens.

        Raises:
            GrammarFailure: The library failed.
        """
        count = len(self.tokens) - length
        if count <= 0:
            return
        try:
            is_done = self._call("rollback", count) and not self._call("is_error")
        except GrammarFailure:
            is_done = False
        if is_done:
            del self.tokens[length:]
        else:
            self._start_alone(self.tokens[:length])

    def mask(self) -> np.ndarray:
        """Compute which tokens may follow, as bits of words.

        Raises:
            GrammarFailure: The library cannot say.
        """
        bits = None
        with contextlib.suppress(GrammarFailure):  # it may be that of this lexer alone
            bits = self._certain_bits()
        if bits is None:
            self._start_alone(self.tokens)
            bits = self._bits()
        return np.frombuffer(bits, np.uint32)

    def _certain_bits(self) -> bytes | None:
        """Compute a mask; return None where a new lexer must confirm it."""
        if self._lexer.is_used_up:
            if self._is_alone:
                return None
            self._start(self._grammar.shared_lexer(), self.tokens)
        bits = self._bits()
        return None if self._lexer.is_used_up else bits

    def _bits(self) -> bytes:
        start = time.thread_time()
        bits = self._call("compute_bitmask")
        self._spend(time.thread_time() - start)
        if self._call("is_error"):
            raise _failure(self._call("get_error"))
        self._is_complete()
        return bits

    def _is_complete(self) -> bool:
        """Return whether only an end token can follow.

        Raises:
            GrammarFailure: The library has stopped before the text is complete.
        """
        if not self._call("is_stopped") or self._call("is_error"):
            return False  # after an error the next call fails
        reason = self._call("stop_reason")
        if reason not in _COMPLETE:
            raise _failure(f"it stopped before the end of the text: {reason}")
        return True

    def _spend(self, seconds: float) -> None:
        self._lexer.spent_s += seconds
        if self._lexer.is_used_up:
            self._grammar.drop_used_lexer()

    def _call(self, method: str, *arguments: Any) -> Any:
        return call_library(getattr(self._native, method), *arguments)

    def _start_alone(self, tokens: list[int]) -> None:
        """Read a text with a lexer that no other matcher uses.

        The fuel of reading does not count: a mask has its own.

        Raises:
            GrammarFailure: The library failed, or refuses a token.
        """
        self._spend(math.inf)  # for matchers that share it
        self.tokens = tokens
        self._start(self._grammar.new_lexer(), tokens)
        self._lexer.spent_s, self._is_alone = 0.0, True

    def _start(self, lexer: _Lexer, tokens: list[int]) -> None:
        """Read a text with another lexer."""
        self._lexer, self.tokens, self._is_alone = lexer, tokens, False
        self._native = call_library(lexer.native.deep_copy)
        if not tokens:
            return
        start = time.thread_time()
        count = self._call("try_consume_tokens", tokens)
        lexer.spent_s += time.thread_time() - start
        if self._call("is_error"):
            raise _failure(self._call("get_error"))
        self.tokens = tokens[:count]
        if count < len(tokens) and tokens[count] not in self.end_ids:
            text = f"token {tokens[count]} cannot follow the text"
            raise GrammarFailure("refused", text)

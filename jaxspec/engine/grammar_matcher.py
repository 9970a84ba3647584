"""Calls llguidance: compiles grammars, and matches one text with each matcher.

No other module calls the library. Every call goes through `call_library`, which turns
any error of the library, a Rust panic included, into a `GrammarFailure` of one request.
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

# Bytes of stack that are reserved per character of a grammar. The library recurses for
# every rule of a chain, and a full stack ends the process: 4,000 rules of 13 characters
# took 8 MiB.
STACK_BYTES = 4096
LEAST_STACK_BYTES = 2**24
# Fuel of one mask: 0.1 to 0.5 s on one core of a server.
MASK_FUEL = 5_000_000
# Upper bound on the fuel used per second: 15 to 65 million were measured.
FUEL_PER_S = 100_000_000
# The default of `max_items_in_row` is 2,000: an `anyOf` of 2,500 objects failed after
# "{". Items of one mask: an `anyOf` of 5,000 objects needs fewer than 10,000. With the
# default of 50,000 a mask of an ambiguous grammar takes 2.0 s, with 20,000 0.15 s.
MAX_ITEMS_IN_ROW, MAX_MASK_ITEMS = 100_000, 20_000
_SHARED_LIMITS: dict[str, Any] = dict(
    max_items_in_row=MAX_ITEMS_IN_ROW,
    step_max_items=MAX_MASK_ITEMS,
    step_lexer_fuel=MASK_FUEL,
    verbose_errors=False,
)
# Fuel to compile a grammar: 0.4 s. 20,000 random labels of 30 characters compile.
COMPILE_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=20_000_000, **_SHARED_LIMITS
)
# The initial fuel also pays for the tokens read before the first mask. It must not run
# out there: the failing token would depend on when the matcher was rebuilt.
LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=2**40, **_SHARED_LIMITS)
# Memory estimates: per grammar, per character of its text, and for the states that a
# lexer caches per second of CPU time. Measured: 53 to 131 bytes per character for long
# grammars, 40 to 175 MB per second.
GRAMMAR_BYTES, BYTES_PER_CHARACTER, LEXER_BYTES_PER_S = 2**17, 200, 500 * 2**20
# Stop reasons of a complete text.
_COMPLETE = {"NoExtension", "EndOfSentence"}
# Characters with a meaning in regular expressions.
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# `threading.stack_size` is one value per process. Without the lock, a compiler could
# read another's size as the usual one, and restore it at its end. A thread started by
# other code meanwhile reserves more address space than it needs, which is harmless.
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
        GrammarFailure: The library raised an error, or panicked.
    """
    try:
        return call_native(function, *arguments, **named)
    except Exception as error:
        kind = "panic" if isinstance(error, NativePanicError) else "other"
        raise GrammarFailure(kind, f"the grammar library failed: {error}") from error


def _failure(reason: str) -> GrammarFailure:
    """Return the failure for a matcher's error text, without quoted input."""
    reason = reason.strip().partition("\n")[0] or "no reason given"
    if reason.startswith("panic"):
        return GrammarFailure("panic", f"the grammar library failed: {reason}")
    if reason.startswith("NoExtension"):
        text = "no token can follow the text so far: the grammar has a dead end there"
        return GrammarFailure("dead_end", text)
    is_limit = re.search("too (many|complex|large|big)|max is|limit", reason, re.I)
    return GrammarFailure("limit" if is_limit else "other", reason)


def grammar_of_regex(pattern: str) -> str:
    """Convert a regular expression to the library's format."""
    return call_library(llguidance.LLMatcher.grammar_from_regex, pattern)


def grammar_of_choices(choices: Sequence[str]) -> str:
    """Convert a list of texts to the library's format.

    The result is one regular expression: as alternatives of a rule, 20,000 texts take
    0.2 s for the first mask, and exceed the library's limit on items.
    """
    distinct = dict.fromkeys(choices)
    return grammar_of_regex("|".join(_SYNTAX.sub(r"\\\g<0>", one) for one in distinct))


def grammar_of_rules(rules: str) -> str:
    """Convert a Lark or GBNF grammar to the library's format."""
    return call_library(llguidance.grammar_from, "grammar", rules)


def grammar_of_schema(schema: str, options: Any) -> str:
    """Convert a JSON schema to the library's format."""
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
        # Tokens without bytes never match: special tokens, padding rows of the network.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        # The library tries bytes first, and uses them from then on if that works.
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
        """Whether the lexer ran so long (50 ms) that one mask's fuel may be used up."""
        return self.spent_s > MASK_FUEL / FUEL_PER_S


class Grammar:
    """A compiled grammar.

    Args:
        text: The constraint in llguidance's format.

    Attributes:
        warnings: Messages about parts that the library ignores.

    Raises:
        GrammarFailure: The grammar is not valid, or no text matches it.
    """

    def __init__(self, text: str, vocabulary: Vocabulary):
        self._text, self.vocabulary = text, vocabulary
        self.warnings: list[str] = []
        # None once the lexer is used up: its memory is then freed together with the
        # last matcher that uses it.
        self._shared: _Lexer | None = self._with_stack(self._compile)
        self.drop_used_lexer()

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the grammar's memory."""
        shared, text = self._shared, len(self._text)
        lexer = 0 if shared is None else shared.num_bytes
        return GRAMMAR_BYTES + BYTES_PER_CHARACTER * text + lexer

    def drop_used_lexer(self) -> None:
        """Drop the shared lexer if it is used up."""
        shared = self._shared
        if shared is not None and shared.is_used_up:
            self._shared = None

    def shared_lexer(self) -> _Lexer:
        """Return a lexer that is not used up, which matchers share.

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
            GrammarFailure: The library failed.
        """
        return self._with_stack(self._make)

    def _with_stack(self, make: Callable[[], _Lexer]) -> _Lexer:
        """Call a function in a thread with enough stack for this grammar."""
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
        # The library reports a cycle of references only with the first mask.
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
    """Matches one text with a grammar.

    A mask, and whether it can be computed, depends only on the tokens before it, not on
    other masks. The library's limits violate this: a lexer with more cached states uses
    less fuel for a mask and is nearer to its limit on states, and a lexer that has
    failed never recovers. So the correct result is, by definition, that of a new lexer
    which reads the text and computes only this mask. A new lexer is used when the
    present one fails, and when the present one's time could have used the fuel of a
    mask. Before that a new lexer cannot fail: the present one has already done all of
    its work.

    Attributes:
        tokens: Tokens consumed so far.
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
        """Consume a token that the mask allows; return whether it was consumed.

        Tokens after a complete text, and end tokens that the library does not accept,
        are not consumed.

        Raises:
            GrammarFailure: The library failed, or rejects the token.
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
        self._restart([*self.tokens, token])
        return len(self.tokens) == length

    def back_to(self, length: int) -> None:
        """Remove all but the first `length` tokens.

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
            self._restart(self.tokens[:length])

    def mask(self) -> np.ndarray:
        """Compute which tokens may follow, as bits of 32-bit words.

        Raises:
            GrammarFailure: The library failed.
        """
        bits = None
        with contextlib.suppress(GrammarFailure):  # a new lexer may succeed
            bits = self._certain_bits()
        if bits is None:
            self._restart(self.tokens)
            bits = self._bits()
        return np.frombuffer(bits, np.uint32)

    def _certain_bits(self) -> bytes | None:
        """Return the mask's bits; None if a new lexer must compute it again."""
        if self._lexer.is_used_up:
            if self._has_own_lexer:
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
            raise _failure(f"it stopped before the text was complete: {reason}")
        return True

    def _spend(self, seconds: float) -> None:
        self._lexer.spent_s += seconds
        if self._lexer.is_used_up:
            self._grammar.drop_used_lexer()

    def _call(self, method: str, *arguments: Any) -> Any:
        return call_library(getattr(self._native, method), *arguments)

    def _restart(self, tokens: list[int]) -> None:
        """Read a text with a lexer that no other matcher uses.

        The time for this does not count as the lexer's: a mask has fuel of its own.

        Raises:
            GrammarFailure: The library failed, or rejects a token.
        """
        self._spend(math.inf)  # other matchers stop using the old lexer
        self.tokens = tokens
        self._start(self._grammar.new_lexer(), tokens)
        self._lexer.spent_s, self._has_own_lexer = 0.0, True

    def _start(self, lexer: _Lexer, tokens: list[int]) -> None:
        """Read a text with `lexer`, in place of the present one."""
        self._lexer, self.tokens, self._has_own_lexer = lexer, tokens, False
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

"""Grammars: from `StructuredOutputsParams` to the masks of tokens that may come next.

Owns what is known of the library, llguidance, and one matcher per running request with
a grammar. The device asks for masks in the middle of its program, from a thread of its
own, and may be rounds ahead of what the engine has read: a question brings the newest
known tokens along, so nothing else is needed.
"""

import itertools
import json
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from jaxspec.errors import ConfigError, RequestError
from jaxspec.settings.structured_outputs import (
    DEFAULT_WHITESPACE_PATTERN,
    StructuredOutputsConfig,
    StructuredOutputsParams,
)
from jaxspec.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

WORD = 32
EVERYTHING = np.uint32(0xFFFFFFFF)
# Grammars kept ready, the most recent ones: requests often come with the same.
MAX_KEPT = 64
# Of stack, for each character of a grammar. The library calls itself for every rule of
# a chain, and a full stack ends the process: 4,000 rules of 13 characters took 8 MiB.
STACK_BYTES = 4096
LEAST_STACK_BYTES = 2**24
# Keys of "x-guidance", by which a schema itself speaks to llguidance.
_WHITE_SPACE_OPTIONS = {"whitespace_flexible", "whitespace_pattern"}
_DEFAULTS = StructuredOutputsConfig()
# `threading.stack_size` is of the process: all compilers take turns, or one would take
# the other's size for the usual one and leave it behind. A thread that somebody else
# starts in between reserves more address space than it needs, which is harmless.
_stack_size_lock = threading.Lock()


@dataclass(kw_only=True, eq=False)
class GrammarState:
    """The state of one request's grammar.

    Invariant: the matcher has consumed `tokens[:num_consumed]`. It takes no more once
    the text is complete; only end tokens follow then.

    Attributes:
        grammar_id: The device's name for it; 0 before the first launch.
        stop_ids: Tokens that end the sequence: none of them before it has
            `min_tokens`, unless the text is complete.
    """

    matcher: llguidance.LLMatcher
    num_prompt: int
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    grammar_id: int = 0
    tokens: list[int] = field(default_factory=list)
    num_consumed: int = 0
    # Masks by the drafts before them: the target asks again for those of the draft.
    known_masks: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def sync(self, num_tokens: int, newest: Sequence[int]) -> None:
        """Advance to the known tokens; roll back where they differ from earlier ones.

        Args:
            num_tokens: Known tokens of the sequence, its prompt included.
            newest: The last of them; those before are known here.
        """
        length = num_tokens - self.num_prompt
        assert length >= 0, "asked about a sequence before its prompt was in"
        first = max(length - len(newest), 0)
        assert first <= len(self.tokens), "the device is further ahead than it tells"
        new = list(newest[len(newest) - (length - first) :])
        known = self.tokens[first:]
        same = 0
        while same < min(len(known), len(new)) and known[same] == new[same]:
            same += 1
        if first + same < len(self.tokens) or new[same:]:
            self.known_masks.clear()
        self._back_to(first + same)
        for token in new[same:]:
            self._read(token)

    def _back_to(self, length: int) -> None:
        del self.tokens[length:]
        if self.num_consumed > length:
            self.matcher.rollback(self.num_consumed - length)
            self.num_consumed = length

    def _read(self, token: int) -> None:
        is_next = self.num_consumed == len(self.tokens)
        self.tokens.append(token)
        if is_next and not self.matcher.is_stopped():
            # The matcher does not recover from a token that it refuses.
            if self.matcher.validate_tokens([token]):
                self.matcher.consume_token(token)
                self.num_consumed += 1

    def masks(self, drafts: Sequence[int], first: int, masks: np.ndarray) -> None:
        """Write the masks after the known tokens and `first` drafts, one more per row.

        Rows after a draft that is not allowed stay as they are: it is not accepted.
        """
        known = len(self.tokens)
        for draft in drafts[:first]:
            self._read(draft)
        for row in range(len(masks)):
            path = tuple(drafts[: first + row])
            if path not in self.known_masks:
                self.known_masks[path] = self._mask(masks.shape[1])
            masks[row] = self.known_masks[path]
            if row + 1 == len(masks):
                break
            draft = drafts[first + row]
            if not masks[row, draft // WORD] >> (draft % WORD) & 1:
                break
            self._read(draft)
        self._back_to(known)

    def _mask(self, num_words: int) -> np.ndarray:
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[:num_words]
        if len(self.tokens) >= self.min_tokens:
            return mask
        longer = mask.copy()
        for token in self.stop_ids:
            longer[token // WORD] &= ~np.uint32(1 << token % WORD)
        return longer if longer.any() else mask


class TokenMasks:
    """Host callback that computes grammar masks for each draft position.

    Knows the grammar state of every running request by id. Requests and launches hold
    the states: they are freed with them.

    Attributes:
        num_questions: Calls by the device.
    """

    def __init__(self, vocab_size: int):
        self._words = -(-vocab_size // WORD)
        self._states: weakref.WeakValueDictionary[int, GrammarState] = (
            weakref.WeakValueDictionary()
        )
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self.num_questions = 0

    def add(self, state: GrammarState) -> None:
        """Give a state the id by which the device asks for it, if it has none yet."""
        with self._lock:
            if not state.grammar_id:
                state.grammar_id = next(self._ids)
                self._states[state.grammar_id] = state

    def __len__(self) -> int:
        return len(self._states)

    def __call__(
        self, grammar_id: Any, num_tokens: Any, newest: Any, drafts: Any, before: Any
    ) -> np.ndarray:
        """See `jaxspec.program.grammar.MaskSource`."""
        ids, drafts = np.asarray(grammar_id), np.asarray(drafts)
        num_tokens, newest = np.asarray(num_tokens), np.asarray(newest)
        before = np.asarray(before)
        masks = np.full((len(ids), len(before), self._words), EVERYTHING)
        with self._lock:
            self.num_questions += 1
            for row in np.flatnonzero(ids).tolist():
                state = self._states.get(int(ids[row]))
                if state is not None:
                    state.sync(int(num_tokens[row]), newest[row].tolist())
                    state.masks(drafts[row].tolist(), int(before[0]), masks[row])
        return masks


class GrammarCompiler:
    """Makes matchers, in any thread; the vocabulary is read when the first is wanted.

    Args:
        vocab_size: Rows of the network, at least the tokenizer's pieces.
        end_ids: The model's end tokens, which may follow a complete text.
        config: What holds where a request says nothing.

    Raises:
        ConfigError: Its white space is no regular expression.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_ids: tuple[int, ...],
        config: StructuredOutputsConfig = _DEFAULTS,
    ):
        _check_pattern(config.whitespace_pattern)
        self._config = config
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = end_ids
        self._kept: dict[str, llguidance.LLMatcher] = {}
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(
            _Vocabulary(self._tokenizer, self._vocab_size, self._end_ids[0])
        )
        return llguidance.LLTokenizer(
            wrapper, n_vocab=self._vocab_size, eos_token=list(self._end_ids)
        )

    def matcher(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """Return a matcher of its own at the beginning of a text.

        Raises:
            RequestError: The schema, expression or grammar is not a valid one.
        """
        try:
            grammar = _grammar_of(params, self._config)
        except (ValueError, TypeError, RecursionError) as error:
            raise _unusable(params, str(error)) from error
        with self._lock:
            kept = self._kept.get(grammar)
        if kept is None:
            kept = self._compile(grammar, params)
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = kept  # the most recent last
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return kept.deep_copy()

    def _compile(
        self, grammar: str, params: StructuredOutputsParams
    ) -> llguidance.LLMatcher:
        """Make a matcher in a thread that has the stack for it."""
        size = LEAST_STACK_BYTES + STACK_BYTES * len(grammar)
        with ThreadPoolExecutor(1) as thread:
            with _stack_size_lock:
                usual = threading.stack_size(size)
                try:
                    making = thread.submit(self._make, grammar)
                finally:
                    threading.stack_size(usual)
            made, messages = making.result()
        if made is None:
            raise _unusable(params, messages[0])
        for message in messages:
            _log.warning("structured_outputs.%s: %s", params.kind, message)
        return made

    def _make(self, grammar: str) -> tuple[llguidance.LLMatcher | None, list[str]]:
        """A matcher and warnings; or none, and why."""
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._vocabulary
        )
        if is_error:
            return None, messages
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            return None, [matcher.get_error()]
        return matcher, messages


class _Vocabulary:
    """The tokenizer as llguidance wants to see it."""

    bos_token_id = None
    special_token_ids: list[int] = []

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        # A token without bytes never matches: special ones, pad rows of the network.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(
            text, add_special_tokens=False, parse_special_tokens=False
        )


def _grammar_of(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> str:
    """The constraint in llguidance's own form."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(list(params.choice)))
    if params.grammar is not None:
        return llguidance.grammar_from("grammar", params.grammar)
    schema = _schema_of(params, config)
    options: Any = _json_options(params, config, schema)
    # As text: the library follows a dict that holds itself until the stack is full.
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema, allow_nan=False), overrides=options
    )


def _schema_of(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> dict[str, Any]:
    if params.json_object:
        return {"type": "object"}
    schema = params.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, this is {schema!r}")
    if params.disable_additional_properties or config.disable_additional_properties:
        schema = _closed(schema)
    return dict(schema)


def _closed(schema: Any) -> Any:
    """The schema with no additional properties where it says nothing of them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if closed.get("type") == "object" or isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _json_options(
    params: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    schema: Mapping[str, Any],
) -> dict[str, Any]:
    """White space as the request says, or the schema itself, or else the engine."""
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace:
        # A schema's own pattern would go before the flag.
        return {"whitespace_pattern": None, "whitespace_flexible": False}
    own = schema.get("x-guidance")
    if isinstance(own, Mapping) and own.keys() & _WHITE_SPACE_OPTIONS:
        return {}
    if config.disable_any_whitespace:
        return {"whitespace_flexible": False}
    # The library matches a pattern at most once at every place.
    return {
        "whitespace_pattern": config.whitespace_pattern or DEFAULT_WHITESPACE_PATTERN
    }


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    regex = llguidance.LLMatcher.grammar_from_regex(pattern)
    is_error, reasons = llguidance.LLMatcher.validate_grammar_with_warnings(regex)
    if is_error:
        raise ConfigError(
            f"structured_outputs_config has whitespace_pattern={pattern!r}, which is "
            f"no regular expression: {reasons[0].strip()}",
            parameter="structured_outputs_config",
            value=pattern,
        )


def _unusable(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{params.kind} cannot be used: {reason.strip()}",
        parameter="structured_outputs",
        value=params,
    )

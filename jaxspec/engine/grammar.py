"""From `StructuredOutputsParams` to a matcher over the engine's vocabulary.

Owns what is known of the library, llguidance; who holds which matcher is
`jaxspec.engine.token_masks`'s.
"""

import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import llguidance

from jaxspec.errors import RequestError
from jaxspec.structured_outputs import StructuredOutputsParams
from jaxspec.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Grammars kept ready, the most recent ones: requests often come with the same.
MAX_KEPT = 64
# Of stack, for each character of a grammar. The library calls itself for every rule of
# a chain, and a full stack ends the process: 4,000 rules of 13 characters took 8 MiB.
STACK_BYTES = 4096
LEAST_STACK_BYTES = 2**24
# `threading.stack_size` is of the process: all compilers take turns, or one would take
# the other's size for the usual one and leave it behind. A thread that somebody else
# starts in between reserves more address space than it needs, which is harmless.
_stack_size_lock = threading.Lock()


class GrammarCompiler:
    """Makes matchers, in any thread; the vocabulary is read when the first is wanted.

    Args:
        vocab_size: Rows of the network, at least the tokenizer's pieces.
        end_ids: The model's end tokens, which may follow a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]):
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
            grammar = _grammar_of(params)
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


def _grammar_of(params: StructuredOutputsParams) -> str:
    """The constraint in llguidance's own form."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(list(params.choice)))
    if params.grammar is not None:
        return llguidance.grammar_from("grammar", params.grammar)
    options: Any = _white_space_of(params)
    # As text: the library follows a dict that holds itself until the stack is full.
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(_schema_of(params), allow_nan=False), overrides=options
    )


def _schema_of(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json_object:
        return {"type": "object"}
    schema = params.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, this is {schema!r}")
    if params.disable_additional_properties:
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


def _white_space_of(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    return {"whitespace_flexible": not params.disable_any_whitespace}


def _unusable(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{params.kind} cannot be used: {reason.strip()}",
        parameter="structured_outputs",
        value=params,
    )

"""Structured outputs: from `StructuredOutputsParams` to masks of allowed next tokens.

Owns the grammar state of every running request. A program on the device requests masks
through a host callback, in a thread of the device's, and may be rounds ahead of the
engine: each request for masks includes the newest tokens.

A program waits a short time for its masks. For a row whose masks take longer, it
continues with masks that allow only the end token; the scheduler drops the row's
tokens, preempts the request, and admits it again when the mask has been computed.

If the library fails, the mask allows only the end token. The engine drops that token,
and ends the request with an error (`GrammarState.failure_in`).
"""

import itertools
import json
import logging
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config.structured_outputs import (
    DEFAULT_WHITESPACE_PATTERN,
    StructuredOutputsConfig,
    StructuredOutputsParams,
)
from jaxspec.engine.grammar_matcher import (
    Grammar,
    GrammarFailure,
    Matcher,
    Vocabulary,
    check_pattern,
    grammar_of_choices,
    grammar_of_regex,
    grammar_of_rules,
    grammar_of_schema,
)
from jaxspec.engine.structural_tags import grammar_of_tag
from jaxspec.errors import ConfigError, RequestError, escaped
from jaxspec.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

WORD = 32
EVERYTHING = np.uint32(0xFFFFFFFF)
# CPU time of a mask above which the next one is computed between launches. Masks of
# 8,192 tokens take 0.01 to 2 ms as a rule.
SLOW_MASK_S = 0.02
# Wall time that a program waits for the masks of one row, and of all rows. A round with
# 5 drafts requests masks 6 times: other rows wait 0.9 s at most.
MAX_ROW_WAIT_S, MAX_WAIT_S = 0.05, 0.15
# After the first late mask of a text, this many of its masks are computed between
# launches; after the n-th late mask, n times as many.
NUM_SLOW_MASKS = 16
# Maximum number of threads that still compute masks for which a program has stopped
# waiting.
MAX_LATE_THREADS = 4
# Maximum CPU time for all masks of one text: enough for 10,000 tokens at 1 ms.
MAX_TEXT_S = 10.0
# Threads that compute masks between launches.
NUM_MASK_THREADS = 2
# Memory of cached grammars, the most recently used ones: requests often share one.
MAX_CACHED_BYTES = 64 * 2**20
# Keys of "x-guidance", llguidance's options in a schema.
_WHITE_SPACE_OPTIONS = {"whitespace_flexible", "whitespace_pattern"}
# Keywords of a schema whose values are data, and those whose values are named schemas.
_DATA = {"const", "enum", "default", "examples"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas"}
_NAMED_SCHEMAS |= {"$defs", "definitions"}
_DEFAULTS = StructuredOutputsConfig()


class Failure(NamedTuple):
    """The place where the grammar of a text failed, and the reason.

    Attributes:
        tokens: Tokens of the text before the mask that could not be computed.
        kind: See `GrammarFailure`.
    """

    tokens: list[int]
    kind: str
    reason: str


@dataclass(kw_only=True, eq=False)
class GrammarState:
    """The state of one request's grammar.

    Invariant: the matcher has consumed a prefix of `tokens`: all of them, unless the
    text is complete, and only end tokens follow, or the matcher has failed.

    Attributes:
        grammar_id: Its id on the device; 0 before the first launch.
        stop_ids: Tokens that end the sequence. They are masked before `min_tokens`,
            unless the text is complete.
        failures: Failures after a prefix of `tokens`, or after a text of which `tokens`
            is a prefix.
        lock: Held by any thread that computes masks.
        spent_s: CPU time spent on the text so far.
        late_length: Number of tokens before the late mask, until the mask has been
            computed. Later tokens are invalid.
        ready: Number of tokens of a slow text, and the mask after them. It is the only
            mask that the next launch needs, because slow texts have no drafts.
    """

    matcher: Matcher
    num_prompt: int
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    grammar_id: int = 0
    tokens: list[int] = field(default_factory=list)
    failures: tuple[Failure, ...] = ()
    # Masks by the drafts before them, because the target's pass requests the same masks
    # as the draft model's passes.
    known_masks: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    spent_s: float = 0.0
    late_length: int | None = None
    ready: tuple[int, np.ndarray] | None = None
    _num_late: int = 0
    _num_slow: int = 0
    _computing: Future[None] | None = None

    @property
    def is_slow(self) -> bool:
        """Whether the next mask is computed between launches: see `poll_mask`.

        True after a mask that took more than `SLOW_MASK_S`, and for a while after a
        late mask. A slow text has no drafts.
        """
        return self._num_slow > 0

    def ready_mask(self, num_tokens: int) -> np.ndarray | None:
        """Return the mask of a text for which `poll_mask` returned True, or None.

        Args:
            num_tokens: See `sync`.
        """
        if self.ready is None or not self.is_slow:
            return None
        length, mask = self.ready
        return mask if num_tokens - self.num_prompt == length else None

    def set_late(self, num_tokens: int) -> None:
        """Record that a launch does not wait for the masks after the known tokens.

        Args:
            num_tokens: See `sync`.
        """
        self._num_late += 1
        self._num_slow = self._num_late * NUM_SLOW_MASKS
        self.late_length = num_tokens - self.num_prompt

    def poll_mask(self, text: list[int], threads: Executor) -> bool:
        """Return whether the mask after a text is known; if not, start computing it.

        The text must have no unread launches.
        """
        if self._computing is not None and not self._computing.done():
            return False
        if self._computing is not None:
            self._computing.result()
            self._computing = None
        if self.lock.acquire(blocking=False):
            try:
                if self.tokens == text and () in self.known_masks:
                    self.late_length = None
                    self.ready = len(text), self.known_masks[()]
                    return True
            finally:
                self.lock.release()
        self._computing = threads.submit(self.compute, list(text))
        return False

    @property
    def computing(self) -> Future[None] | None:
        """The computation that `poll_mask` started last."""
        return self._computing

    def compute(self, text: list[int]) -> None:
        """Compute the mask after a text."""
        with self.lock:
            self.sync(self.num_prompt + len(text), text)
            self._mask_after(())

    def failure_in(self, text: list[int]) -> Failure | None:
        """Return a failure after which the text has further tokens, or None.

        Those tokens are invalid, as no mask was computed for them.

        Called by the engine's thread, while other threads compute masks.
        """
        for failure in self.failures:
            length = len(failure.tokens)
            if length < len(text) and text[:length] == failure.tokens:
                return failure
        return None

    def sync(self, num_tokens: int, newest: Sequence[int]) -> None:
        """Advance the grammar's state to the known tokens.

        The state is rolled back first where the tokens differ from those of earlier
        calls.

        Args:
            num_tokens: Known tokens of the sequence, its prompt included.
            newest: The last of those tokens; earlier tokens must be known from previous
                calls.
        """
        length = num_tokens - self.num_prompt
        assert length >= 0, "masks were requested before the prompt was prefilled"
        first = max(length - len(newest), 0)
        assert first <= len(self.tokens), "tokens before the newest ones are missing"
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
        if self.failures:
            self.failures = tuple(filter(self._is_ahead, self.failures))

    def _is_ahead(self, failure: Failure) -> bool:
        length = min(len(failure.tokens), len(self.tokens))
        return failure.tokens[:length] == self.tokens[:length]

    @property
    def _has_failed(self) -> bool:
        for failure in self.failures:
            length = len(failure.tokens)
            if self.tokens[:length] == failure.tokens:
                return True
        return False

    def _fail(self, failure: GrammarFailure) -> None:
        self.failures += (Failure(list(self.tokens), failure.kind, str(failure)),)

    def _back_to(self, length: int) -> None:
        del self.tokens[length:]
        if not self._has_failed:
            try:
                self.matcher.back_to(length)
            except GrammarFailure as failure:
                self._fail(failure)

    def _read(self, token: int) -> None:
        """Let the matcher consume a token that the mask before it allows."""
        is_next = len(self.matcher.tokens) == len(self.tokens)
        self.tokens.append(token)
        if not is_next or self._has_failed:
            return
        start = time.thread_time()
        try:
            self.matcher.read(token)
        except GrammarFailure as failure:
            self._fail(failure)
        self.spent_s += time.thread_time() - start

    def masks(self, drafts: Sequence[int], first: int, masks: np.ndarray) -> None:
        """Write masks: row i is the mask after the known tokens and `first + i` drafts.

        Rows after a forbidden draft are not written: that draft is not accepted.
        """
        known = len(self.tokens)
        for index, draft in enumerate(drafts[:first]):
            if not _allows(self._mask_after(drafts[:index]), draft):
                break  # these drafts are rejected
            self._read(draft)
        else:
            self._write(drafts, first, masks)
        self._back_to(known)

    def _write(self, drafts: Sequence[int], first: int, masks: np.ndarray) -> None:
        for row in range(len(masks)):
            mask = self._mask_after(drafts[: first + row])
            masks[row] = mask[: masks.shape[1]]
            if row + 1 == len(masks) or self.late_length is not None:
                break
            draft = drafts[first + row]
            if not _allows(mask, draft):
                break
            self._read(draft)

    def _mask_after(self, drafts: Sequence[int]) -> np.ndarray:
        """Return the mask after some drafts, which were read."""
        path = tuple(drafts)
        if path not in self.known_masks:
            self.known_masks[path] = self._mask()
        return self.known_masks[path]

    def _mask(self) -> np.ndarray:
        if self._has_failed:
            return self.matcher.end_mask
        start = time.thread_time()
        try:
            if self.spent_s > MAX_TEXT_S:
                reason = f"its masks took more than {MAX_TEXT_S:g} s of CPU time"
                raise GrammarFailure("limit", reason)
            mask = self.matcher.mask()
        except GrammarFailure as failure:
            self._fail(failure)
            return self.matcher.end_mask
        took_s = time.thread_time() - start
        self.spent_s += took_s
        if took_s > SLOW_MASK_S:
            self._num_slow = max(self._num_slow, 1)
        elif self._num_slow:
            self._num_slow -= 1
        if len(self.tokens) >= self.min_tokens:
            return mask
        longer = mask.copy()
        for token in self.stop_ids:
            longer[token // WORD] &= ~np.uint32(1 << token % WORD)
        return longer if longer.any() else mask


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // WORD] >> (token % WORD) & 1)


class _Question(NamedTuple):
    """A request of the device for the masks of one row.

    Attributes:
        num_tokens, newest: See `GrammarState.sync`.
        first: Number of drafts before the first mask.
        masks: Receives the answer.
    """

    row: int
    state: GrammarState
    num_tokens: int
    newest: list[int]
    drafts: list[int]
    first: int
    masks: np.ndarray

    def answer(self) -> None:
        with self.state.lock:
            self.state.sync(self.num_tokens, self.newest)
            self.state.masks(self.drafts, self.first, self.masks)


class _Job:
    """Answers questions in a thread, until `wait` gives up."""

    def __init__(self, questions: list[_Question]):
        self._questions = questions
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_awaited = True
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Answer all questions, one after the other."""
        try:
            for question in self._questions:
                if not self._is_awaited:
                    break
                question.answer()
                self._num_done += 1
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        finally:
            self._running.release()

    def wait(self, until: float) -> int:
        """Wait while answers arrive in time; return the number of answers.

        Args:
            until: Latest return, by `time.monotonic`.
        """
        num_before = 0
        while True:
            left_s = max(until - time.monotonic(), 0)
            if self._running.acquire(timeout=min(left_s, MAX_ROW_WAIT_S)):
                if self._error is not None:
                    raise self._error
                return len(self._questions)
            num_done = self._num_done
            if num_done == num_before or time.monotonic() >= until:
                self._is_awaited = False
                return num_done
            num_before = num_done


class _Worker:
    """A thread that runs jobs until `stop`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="jaxspec-launch-masks"
        )
        # A daemon: at exit, only its calls into the library are waited for.
        self._thread.daemon = True
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def start(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> threading.Thread:
        """End the thread after its present job."""
        self._jobs.put(None)
        return self._thread


def _run_jobs(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it holds grammar states


class TokenMasks:
    """Host callback that computes grammar masks for each draft position.

    Knows the grammar state of every running request by id, through weak references:
    requests and launches own the states.

    Called by one launch at a time.

    Attributes:
        num_questions: Number of calls by the device.
    """

    def __init__(self, vocab_size: int):
        self._words = -(-vocab_size // WORD)
        self._states: weakref.WeakValueDictionary[int, GrammarState] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._late_threads: list[threading.Thread] = []
        self.num_questions = 0
        _all_masks.add(self)

    def add(self, state: GrammarState) -> None:
        """Give a state its id on the device, if it has none yet."""
        with self._lock:
            if not state.grammar_id:
                state.grammar_id = next(_grammar_ids)
                self._states[state.grammar_id] = state

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, grammar_id: int) -> bool:
        return grammar_id in self._states

    def __call__(
        self, grammar_id: Any, num_tokens: Any, newest: Any, drafts: Any, before: Any
    ) -> np.ndarray:
        """See `jaxspec.program.grammar.MaskSource`."""
        ids, drafts = np.asarray(grammar_id), np.asarray(drafts)
        num_tokens, newest = np.asarray(num_tokens), np.asarray(newest)
        before = np.asarray(before)
        masks = np.full((len(ids), len(before), self._words), EVERYTHING)
        # The target's pass requests one row more than there are drafts.
        is_of_draft = len(before) <= drafts.shape[1]
        self.num_questions += 1
        questions: list[_Question] = []
        for row in np.flatnonzero(ids).tolist():
            with self._lock:
                state = self._states.get(int(ids[row]))
            if state is None:
                continue
            ready = state.ready_mask(int(num_tokens[row]))
            is_late = state.late_length is not None
            if is_late or ready is not None or (is_of_draft and state.is_slow):
                # The row allows only the end token, so its drafts are rejected or not
                # used: masks after them are not needed.
                masks[row] = state.matcher.end_mask[: self._words]
                if ready is not None and not (is_late or is_of_draft):
                    masks[row, 0] = ready[: self._words]
                continue
            questions.append(
                _Question(
                    row,
                    state,
                    int(num_tokens[row]),
                    newest[row].tolist(),
                    drafts[row].tolist(),
                    int(before[0]),
                    masks[row],
                )
            )
        late = self._answer(questions)
        if late:
            masks = masks.copy()  # a late thread may still write to the original
        for one in late:
            masks[one.row] = one.state.matcher.end_mask[: self._words]
        return masks

    def _answer(self, questions: list[_Question]) -> list[_Question]:
        """Answer questions; return those whose answers take too long."""
        late: list[_Question] = []
        until = time.monotonic() + MAX_WAIT_S
        while questions:
            job = _Job(questions)
            worker = self._free_worker()
            num_done = 0
            if worker is not None:
                worker.start(job)
                num_done = job.wait(until)
            left = questions[num_done:]
            if not left:
                break
            if worker is not None:
                self._late_threads.append(worker.stop())
                self._worker = None
            # The first question is slow; the others may be fast, so another thread
            # answers them.
            has_time = worker is not None and time.monotonic() < until
            for one in left[:1] if has_time else left:
                one.state.set_late(one.num_tokens)
                late.append(one)
            questions = left[1:] if has_time else []
        return late

    def _free_worker(self) -> _Worker | None:
        """Return a thread without a job; None if too many compute late masks."""
        if self._worker is None:
            self._late_threads = [one for one in self._late_threads if one.is_alive()]
            if len(self._late_threads) < MAX_LATE_THREADS:
                self._worker = _Worker()
        return self._worker


# Ids are unique in the process, as the callback does not know which engine runs.
_grammar_ids = itertools.count(1)
_all_masks: weakref.WeakSet[TokenMasks] = weakref.WeakSet()


def answer_masks(
    num_words: int,
    grammar_id: np.ndarray,
    num_tokens: np.ndarray,
    newest: np.ndarray,
    drafts: np.ndarray,
    before: np.ndarray,
) -> np.ndarray:
    """Compute masks for a program of any engine of the process."""
    ids = [int(one) for one in grammar_id if one]
    for masks in list(_all_masks):
        if any(one in masks for one in ids):
            return masks(grammar_id, num_tokens, newest, drafts, before)
    # All requests have ended since the launch.
    return np.full((len(grammar_id), len(before), num_words), EVERYTHING)


class GrammarCompiler:
    """Makes matchers, in any thread; the vocabulary is read for the first one.

    Args:
        vocab_size: Rows of the network, at least the tokenizer's pieces.
        end_ids: The model's end tokens, which may follow a complete text.
        config: Defaults for requests.

    Raises:
        ConfigError: `whitespace_pattern` is not a regular expression.
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
        self._cache: dict[str, Grammar] = {}
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size, self._end_ids)

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher for these parameters that has read no token yet.

        Raises:
            RequestError: The schema, expression or grammar is not valid, or no text
                matches it.
        """
        try:
            text = _grammar_of(params, self._config)
            with self._lock:
                grammar = self._cache.get(text)
            if grammar is None:
                grammar = Grammar(text, self._vocabulary)
                for message in grammar.warnings:
                    _log.warning(
                        "structured_outputs.%s: %s", params.kind, escaped(message)
                    )
            matcher = Matcher(grammar)
        except (GrammarFailure, ValueError, TypeError, RecursionError) as error:
            raise _unusable(params, str(error)) from error
        with self._lock:
            self._cache.pop(text, None)
            self._cache[text] = grammar  # the most recent last
            num_bytes = sum(one.num_bytes for one in self._cache.values())
            while num_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                oldest = next(iter(self._cache))
                num_bytes -= self._cache.pop(oldest).num_bytes
        return matcher


def _grammar_of(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> str:
    """Return the constraint in llguidance's format."""
    if params.regex is not None:
        return grammar_of_regex(params.regex)
    if params.choice is not None:
        return grammar_of_choices(params.choice)
    if params.grammar is not None:
        return grammar_of_rules(params.grammar)
    if params.structural_tag is not None:
        return grammar_of_tag(
            params.structural_tag, lambda given: _inline_schema(given, params, config)
        )
    schema = _schema_of(
        {"type": "object"} if params.json_object else params.json, params, config
    )
    options: Any = _json_options(params, config, schema)
    # As text: with a dict that contains itself, the library overflows the stack.
    return grammar_of_schema(json.dumps(schema, allow_nan=False), options)


def _inline_schema(
    given: Any, params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> str:
    """Return the text of a schema inside a grammar, with its white space options."""
    schema = _schema_of(given, params, config)
    options = _json_options(params, config, schema)
    if options:
        schema["x-guidance"] = {**schema.get("x-guidance", {}), **options}
    return json.dumps(schema, allow_nan=False)


def _schema_of(
    schema: Any, params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> dict[str, Any]:
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object, got {schema!r}")
    if params.disable_additional_properties or config.disable_additional_properties:
        schema = _closed(schema)
    return dict(schema)


def _closed(schema: Any) -> Any:
    """Set `additionalProperties` to false where the schema does not set it."""
    if isinstance(schema, list):
        return [_closed(subschema) for subschema in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for name, subschema in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(subschema, Mapping):
            closed[name] = {key: _closed(one) for key, one in subschema.items()}
        else:
            closed[name] = subschema if name in _DATA else _closed(subschema)
    if closed.get("type") == "object" or isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _json_options(
    params: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    schema: Mapping[str, Any],
) -> dict[str, Any]:
    """Return white space options: the request's, else the schema's, else defaults."""
    if params.whitespace_pattern:
        return {"whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace or params.whitespace_pattern == "":
        # A pattern in the schema would take precedence over the flag.
        return {"whitespace_pattern": None, "whitespace_flexible": False}
    options = schema.get("x-guidance")
    if isinstance(options, Mapping) and options.keys() & _WHITE_SPACE_OPTIONS:
        return {}
    if config.disable_any_whitespace or config.whitespace_pattern == "":
        return {"whitespace_flexible": False}
    # The library matches the pattern at most once in each place.
    return {
        "whitespace_pattern": config.whitespace_pattern or DEFAULT_WHITESPACE_PATTERN
    }


def _check_pattern(pattern: str | None) -> None:
    if not pattern:
        return
    try:
        check_pattern(pattern)
    except GrammarFailure as failure:
        raise ConfigError(
            f"structured_outputs_config has whitespace_pattern={pattern!r}, which is "
            f"not a regular expression: {failure}",
            parameter="structured_outputs_config",
            value=pattern,
        ) from failure


def _unusable(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{params.kind} cannot be used: {reason.strip()}",
        parameter="structured_outputs",
        value=params,
    )

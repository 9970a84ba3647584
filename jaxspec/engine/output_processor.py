"""Turns the tokens of every round into outputs: texts, finish reasons, logprobs.

Owns the part of each request that was already returned, the parents of requests with
n > 1, and the origin of each token (draft, target, ...) if a request wants it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.detokenizer import Logprobs, LogprobStream, TextStream
from jaxspec.engine.metrics import EngineMetrics
from jaxspec.engine.scheduling.launch import Advance, Progress
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.tracing import RequestTracer
from jaxspec.errors import escaped
from jaxspec.outputs import CompletionOutput, RequestOutput, TokenOrigin
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# `stop_reason` of a text that ended because of NaN or infinite logits.
NOT_FINITE = (
    "The model's logits became NaN or infinite for this request. If it happens "
    "again, the weights are damaged, or dtype has too small a range for them."
)
Finish = Callable[[Request, str, int | str | None], None]


class ParentRequest:
    """A request for `n` texts, which have one output together.

    Every text is a request of its own with `n=1`. With a seed, text i has the seed plus
    i: it is the text of a request with that seed.

    Attributes:
        children: Ids of the texts' requests, by index.
        most_tokens: Length of the longest finished text.
    """

    def __init__(self, request_id: str, params: SamplingParams):
        self.request_id, self._params = request_id, params
        self.children = [f"{index}_{request_id}" for index in range(params.n)]
        self.most_tokens = 0
        self._num_running = self._num_open = params.n
        self._latest: dict[int, RequestOutput] = {}
        self._new: dict[int, RequestOutput] = {}

    def child_params(self, index: int) -> SamplingParams:
        """Return the parameters of text `index`."""
        params = self._params.clone()
        params.n = 1
        if params.seed is not None:
            params.seed += index
        return params

    def end_text(self, num_tokens: int) -> bool:
        """Record that a text has ended; return whether it was the last."""
        self.most_tokens = max(self.most_tokens, num_tokens)
        self._num_open -= 1
        return not self._num_open

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of one text."""
        output.outputs[0].index = index
        output.request_id = self.request_id
        self._latest[index] = self._new[index] = output
        self._num_running -= output.finished

    def make_output(self) -> RequestOutput | None:
        """Merge the new outputs into one; None if `output_kind` has no output now.

        The final output has all texts. Deltas have only the texts with new tokens;
        cumulative outputs also repeat the texts without new tokens.
        """
        kind = self._params.output_kind
        is_finished = not self._num_running
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        latest = self._new if kind is RequestOutputKind.DELTA else self._latest
        outputs = [latest[index] for index in sorted(latest)]
        completions = itertools.chain.from_iterable(one.outputs for one in outputs)
        self._new = {}
        first = outputs[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=list(completions),
            finished=is_finished,
            metrics=first.metrics,
            num_cached_tokens=first.num_cached_tokens,
        )


class OriginStream:
    """Origins of one request's tokens: draft, leaf, target, bonus or recovered."""

    def __init__(self):
        self._origins: list[str] = []

    def push(
        self,
        num_tokens: int,
        num_valid_drafts: int,
        num_accepted: int,
        num_side_tokens: int = 0,
    ) -> None:
        """Add the tokens of one round: accepted drafts, then the target's token.

        If an accepted draft ended the text, no token of the target follows.

        Args:
            num_side_tokens: Accepted draft tokens of side branches. The token after
                them is a bonus token.
        """
        last = "target"
        if num_valid_drafts:
            is_bonus = num_accepted == num_valid_drafts or num_side_tokens
            last = "bonus" if is_bonus else "recovered"
        self._origins += ["draft"] * num_accepted + ["leaf"] * num_side_tokens
        self._origins += [last] * (num_tokens - num_accepted - num_side_tokens)

    def keep(self, count: int) -> None:
        """Drop all but the first `count` tokens."""
        del self._origins[count:]

    def of_part(
        self,
        token_ids: Sequence[int],
        ends: Sequence[int],
        *,
        first: int,
        start: int,
        text: str,
    ) -> list[TokenOrigin]:
        """Split a part of the text into the pieces of its tokens.

        Text that was held back as the possible start of a stop string is released after
        its own tokens were sent: it belongs to the first token of this part.

        Args:
            token_ids: All tokens so far, from the first.
            ends: Length of the text after each token; a last token that ends the text
                without being part of it has no entry.
            first: Index of the first token of the part.
            start: Index of the first character of the part.
            text: The part.
        """
        assert len(self._origins) == len(token_ids)
        pieces, done = [], 0
        for index in range(first, len(token_ids)):
            end = ends[index] - start if index < len(ends) else len(text)
            piece = text[done : max(end, done)]
            done += len(piece)
            pieces.append(TokenOrigin(piece, self._origins[index], token_ids[index]))
        return pieces


@dataclass(kw_only=True, slots=True)
class Stream:
    """State of one request's outputs.

    Attributes:
        is_fast: Deltas have only text and token ids.
        origins: Origins of its tokens; None if the request does not return them.
        num_characters: Length of the text that was sent as deltas.
        num_tokens: Number of tokens that were sent.
        parent: The request with n > 1 that this text belongs to, and its index.
    """

    request: Request
    text: TextStream
    logprobs: LogprobStream
    is_fast: bool
    origins: OriginStream | None = None
    num_characters: int = 0
    num_tokens: int = 0
    parent: tuple[ParentRequest, int] | None = None

    @property
    def parent_or_none(self) -> ParentRequest | None:
        """The request with n > 1 that this text belongs to, or None."""
        return None if self.parent is None else self.parent[0]

    def delta(self, token_ids: list[int]) -> RequestOutput | None:
        """Return the next delta of a request without stop strings."""
        if not token_ids:
            return None
        text = self.text.follow(token_ids)
        self.num_characters += len(text)
        self.num_tokens += len(token_ids)
        return self.output(text, token_ids)

    def output(
        self,
        text: str,
        token_ids: list[int],
        *,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
        cumulative_logprob: float | None = None,
        token_origins: list[TokenOrigin] | None = None,
    ) -> RequestOutput:
        """Return an output with some of the request's text and tokens."""
        request = self.request
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=cumulative_logprob,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            spec_decode_metrics=request.spec_metrics,
            token_origins=token_origins,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[completion],
            finished=request.finish_reason is not None,
            metrics=request.stats,
            num_cached_tokens=request.num_cached_tokens,
        )


class OutputProcessor:
    """Turns progress into outputs.

    Attributes:
        streams: Streams of all unfinished requests, by id.
        parents: Requests with n > 1, by the callers' ids.
        tokenizer: Tokenizer of the following requests.
        tracer: Records every finished request; None without traces.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        stats: EngineStats,
        tracer: RequestTracer | None = None,
    ):
        self.tracer = tracer
        self.streams: dict[str, Stream] = {}
        self.parents: dict[str, ParentRequest] = {}
        self._config, self.tokenizer = config, tokenizer
        self._metrics, self._stats = metrics, stats

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.streams or request_id in self.parents

    def __iter__(self) -> Iterator[Request]:
        return iter([stream.request for stream in self.streams.values()])

    def open(
        self, request: Request, parent: tuple[ParentRequest, int] | None = None
    ) -> None:
        """Start the outputs of a request."""
        if parent is not None:
            self.parents[parent[0].request_id] = parent[0]
        params = request.params
        has_origins = params.return_token_origins
        is_plain = not (
            params.stop
            or has_origins
            or params.num_logprobs is not None
            or params.prompt_logprobs is not None
        )
        kind = params.output_kind
        request.only_final_output = is_plain and kind is RequestOutputKind.FINAL_ONLY
        self.streams[request.request_id] = Stream(
            request=request,
            text=TextStream(self.tokenizer, params, has_ends=has_origins),
            logprobs=LogprobStream(self.tokenizer, params, request.prompt_token_ids),
            is_fast=is_plain and kind is RequestOutputKind.DELTA,
            origins=OriginStream() if has_origins else None,
            parent=parent,
        )

    def callers_of(self, requests: Iterable[Request]) -> set[str]:
        """Return the ids that callers gave to requests; the parents' with n > 1."""
        ids = [request.request_id for request in requests]
        parents = [self.streams[one].parent_or_none for one in ids]
        return {
            one if parent is None else parent.request_id
            for one, parent in zip(ids, parents, strict=True)
        }

    def requests_of(self, caller_id: str) -> list[Request]:
        """Return the unfinished requests of a caller's id."""
        parent = self.parents.pop(caller_id, None)
        names = [caller_id] if parent is None else parent.children
        streams = [self.streams[name] for name in names if name in self.streams]
        # The id of a finished child may have been reused by another request.
        return [one.request for one in streams if one.parent_or_none is parent]

    def reset(self) -> None:
        """Drop all requests."""
        for request in self:
            self.close(request)
        self.parents.clear()

    def close(self, request: Request) -> None:
        """Drop a request; count it, and record its trace, if it has finished."""
        stream = self.streams.pop(request.request_id)
        if request.finish_reason is None:
            return
        if self.tracer is not None:
            parent = stream.parent_or_none
            caller_id = request.request_id if parent is None else parent.request_id
            self.tracer.record(request, caller_id)
        if self._config.disable_log_stats:
            return
        self._metrics.add_finished(request)
        num_tokens = len(request.output_token_ids)
        if stream.parent is None:
            self._metrics.add_answered(1, num_tokens)
            return
        parent, _ = stream.parent
        if parent.end_text(num_tokens):
            self._metrics.add_answered(len(parent.children), parent.most_tokens)

    def advance(self, advance: Advance, finish: Finish) -> list[RequestOutput]:
        """Detokenize new tokens, finish requests at stops, and make outputs.

        Args:
            finish: Ends a request in the scheduler, with its finish and stop reason.
        """
        parts = advance.parts
        self._count(
            advance.only_final
            + [progress.request for progress in parts if progress.token_ids]
        )
        outputs: list[RequestOutput] = []
        parents: dict[str, ParentRequest] = {}
        for progress in parts:
            stream = self.streams[progress.request.request_id]
            if progress.is_done or not stream.is_fast:
                self._read(stream, progress, finish)
                # Prompt logprobs alone make no output: they are returned with the first
                # token.
                has_news = progress.is_done or progress.token_ids
                output = self._make_output(stream) if has_news else None
            else:
                output = stream.delta(progress.token_ids)
            if output is None:
                continue
            if stream.parent is None:
                outputs.append(output)
            else:
                parent, index = stream.parent
                parent.add(index, output)
                parents[parent.request_id] = parent
        of_parents = (parent.make_output() for parent in parents.values())
        outputs += [output for output in of_parents if output is not None]
        for output in outputs:
            if output.finished:
                self.parents.pop(output.request_id, None)
        return outputs

    def _count(self, requests: list[Request]) -> None:
        """Record the time at which requests got new tokens."""
        now = time.monotonic()
        if not self._config.disable_log_stats:
            self._metrics.add_tokens(requests, now)
        for request in requests:
            stats = request.stats
            if not stats.num_generation_tokens:
                stats.first_token_ts = now
                stats.first_token_latency = now - stats.queued_ts
            stats.last_token_ts = now
            stats.num_generation_tokens = len(request.output_token_ids)

    def _read(self, stream: Stream, progress: Progress, finish: Finish) -> None:
        """Detokenize new tokens, and finish the request if the text ends."""
        request, logprobs = stream.request, stream.logprobs
        if progress.prompt_logprobs is not None:
            logprobs.push_prompt(progress.prompt_logprobs)
        logprobs.push(progress.token_ids, progress.logprobs)
        if stream.origins is not None:
            stream.origins.push(
                len(progress.token_ids),
                progress.num_valid_drafts,
                progress.num_accepted,
                progress.num_side_tokens,
            )
        shown = (
            request.output_token_ids
            if request.only_final_output
            else progress.token_ids
        )
        if progress.is_broken:
            if request.only_final_output:
                stream.text.push(request.output_token_ids)
            finish(request, "error", NOT_FINITE)
            return
        failure = progress.failure
        if failure is not None:
            # A stop string in the tokens before the failure still ends the text.
            surplus = len(request.output_token_ids) - len(failure.tokens)
            self._drop(stream, surplus)
            shown = progress.token_ids = progress.token_ids[:-surplus]
            if request.only_final_output:
                shown = request.output_token_ids
        ended_by_id = progress.is_done and failure is None and _is_stop(request)
        if ended_by_id and not request.params.include_stop_str_in_output:
            shown = shown[:-1]
        matched = stream.text.push(shown)
        if matched is None and progress.is_done:
            text = stream.text.finish()
            matched = None if text is None else (text, len(progress.token_ids))
        if matched is not None:
            stop, count = matched
            surplus = len(progress.token_ids) - count
            if surplus:
                self._drop(stream, surplus)
            finish(request, "stop", stop)
        elif failure is not None:
            self._metrics.add_grammar_failure(failure.kind)
            _log.warning(
                "Request %s ended with an error after %d tokens: its grammar failed "
                "(%s): %s",
                escaped(request.request_id),
                len(failure.tokens),
                failure.kind,
                escaped(failure.reason),
            )
            reason = f"structured_outputs failed ({failure.kind}): {failure.reason}"
            finish(request, "error", reason)
        elif ended_by_id:
            last = request.output_token_ids[-1]
            # As in vLLM: the first end id is the EOS, the others are stop ids.
            is_eos = last == self._config.model_config.eos_token_ids[0]
            is_named = request.params.ignore_eos or not is_eos
            finish(request, "stop", last if is_named else None)
        elif progress.is_done:
            finish(request, "length", None)

    def _drop(self, stream: Stream, surplus: int) -> None:
        """Drop the last tokens of a request."""
        request = stream.request
        del request.output_token_ids[-surplus:]
        stream.logprobs.keep(len(request.output_token_ids))
        if stream.origins is not None:
            stream.origins.keep(len(request.output_token_ids))
        request.stats.num_generation_tokens -= surplus
        self._stats.num_generated_tokens -= surplus

    def _make_output(self, stream: Stream) -> RequestOutput | None:
        """Return the next output for the request's `output_kind`, if there is one."""
        request, logprobs = stream.request, stream.logprobs
        kind = request.params.output_kind
        is_finished = request.finish_reason is not None
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        tokens = request.output_token_ids
        if not is_finished and len(tokens) == stream.num_tokens:
            return None
        text = stream.text.visible(is_finished=is_finished)
        shown, prompt_logprobs = logprobs.since(0), logprobs.prompt
        count = characters = 0
        if kind is RequestOutputKind.DELTA:
            count, characters = stream.num_tokens, stream.num_characters
            text, shown = text[characters:], logprobs.since(count)
            prompt_logprobs = None if count else prompt_logprobs
        stream.num_tokens, stream.num_characters = len(tokens), characters + len(text)
        if is_finished:
            self.close(request)
        return stream.output(
            text,
            tokens[count:],
            prompt_logprobs=prompt_logprobs,
            cumulative_logprob=logprobs.cumulative,
            logprobs=shown,
            token_origins=_origins(stream, count, characters, text),
        )


def _origins(
    stream: Stream, first: int, start: int, text: str
) -> list[TokenOrigin] | None:
    """Return the origins of the tokens in one output; None if not requested."""
    if stream.origins is None:
        return None
    tokens, ends = stream.request.output_token_ids, stream.text.ends
    assert ends is not None
    return stream.origins.of_part(tokens, ends, first=first, start=start, text=text)


def _is_stop(request: Request) -> bool:
    """Return whether the newest token ended the request, rather than its length."""
    last = request.num_tokens - 1
    is_allowed = last >= request.min_total
    return is_allowed and request.output_token_ids[-1] in request.stop_ids

"""Owns the state that all endpoints share: engine, settings, admission, storage."""

import asyncio
import contextlib
import itertools
import logging
import re
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, no_type_check

from jaxspec.beam_search import BeamSearch, step_params
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.tracing import TRACE_HEADERS
from jaxspec.errors import EngineDeadError, RequestError, nearest, shown
from jaxspec.inputs import TokensPrompt, parse_prompt
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import BeamSearchParams, SamplingParams
from jaxspec.serve.admission import Admission
from jaxspec.serve.errors import ModelNotFoundError, TimeLimitError
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.requests.protocol import Body, ConversationBody, unknown_fields
from jaxspec.serve.response_store import Background, Key, ResponseStore
from jaxspec.serve.settings import ServerSettings
from jaxspec.serve.streaming import merge

T = TypeVar("T")

_log = logging.getLogger(__name__)
# Maximum number of unknown field names to remember as logged. Clients choose the names,
# so without a limit they could fill the memory.
MAX_LOGGED_FIELDS = 1000


class Serving:
    """The engine and the state around it, as endpoints use them."""

    def __init__(self, engine: AsyncLLMEngine, settings: ServerSettings):
        self.engine, self.settings = engine, settings
        # Safe to read from this thread, because both are constant while the engine's
        # thread runs.
        self.config, self.tokenizer = engine.engine.config, engine.engine.tokenizer
        self.prompts = Prompts(self.config, self.tokenizer, settings)
        self.admission = Admission(settings, self.config.max_num_seqs)
        self.responses = ResponseStore(
            settings.response_store, settings.max_response_store_bytes
        )
        self.background = Background(self.responses.heartbeat)
        # Writers of unfinished responses, by key.
        self.writers: weakref.WeakValueDictionary[Key, Any] = (
            weakref.WeakValueDictionary()
        )
        self._ignored: set[str] = set()
        # A counter that makes request ids unique in the engine, because clients may use
        # an id twice.
        self._number = itertools.count()

    def check_body(self, body: Body) -> None:
        """Check a request's model and the names of its fields.

        An unknown field of the request or of an object in it is ignored and logged
        once, as in vLLM. A chat template other than the model's own may read any field
        of a message.

        Raises:
            ModelNotFoundError: The request is for another model.
            RequestError: A field is unknown, and `reject_unknown_fields` is set.
        """
        name = body.model
        if name is not None and name not in self.settings.served_model_names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")
        is_strict = self.settings.reject_unknown_fields
        has_template = self.config.chat_template is not None
        if isinstance(body, ConversationBody):
            has_template |= body.chat_template is not None
        for place, name, known in unknown_fields(body):
            if has_template and place.startswith("messages["):
                continue
            # Log one line for all entries of a list, not one for each index.
            logged = re.sub(r"\[[0-9]+\]", "[]", place) + name
            is_known = (
                logged in self._ignored or len(self._ignored) >= MAX_LOGGED_FIELDS
            )
            if is_known and not is_strict:
                continue
            hint = nearest(name, known, "it has no such field")
            if is_strict:
                field = place + name
                raise RequestError(
                    f"{shown(field)} is not a field of this endpoint; {hint}",
                    parameter=field,
                )
            self._ignored.add(logged)
            _log.warning(
                "The field %s of a request is ignored: %s", shown(logged), hint
            )

    async def write(self, write: Callable[[], T], *, is_large: bool) -> T:
        """Call `write`, which serializes or stores a response; in a thread if large.

        A cancelled caller waits for the thread, which could otherwise store the
        response after the caller has stored its cancellation.
        """
        if not is_large:
            return write()
        work = asyncio.ensure_future(self.engine.run_in_thread(write, is_long=True))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def check_alive(self) -> None:
        """Check that the engine runs.

        Raises:
            EngineDeadError: It has died or was shut down.
        """
        if self.engine.errored or not self.engine.is_running:
            raise EngineDeadError

    @no_type_check  # runtime type checks do not support async generators
    async def outputs(
        self,
        request_id: str,
        prompts: list[TokensPrompt],
        params: SamplingParams,
        priority: int,
        beams: BeamSearchParams | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Generate for several prompts; yield each output with its prompt's number.

        Closing the generator early aborts all of them.

        Args:
            beams: Parameters of a beam search; None to sample.
            headers: HTTP headers of the request, which may name its trace.

        Raises:
            RequestError: The engine returns too few logprobs for the beam search.
            OverloadedError: Too many requests wait already.
            TimeLimitError: The request took longer than `max_request_s`.
        """
        ids = [f"{request_id}-{next(self._number)}" for _ in prompts]
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        limit_s = self.settings.max_request_s
        trace = None
        if self.config.otlp_traces_endpoint is not None and headers is not None:
            trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        generate = partial(self.engine.generate, priority=priority, trace_headers=trace)
        named = (
            ids if beams is None else [one for id_ in ids for one in _ids(id_, beams)]
        )
        with self.admission.admit(named, lengths, params.n):
            streams = [
                generate(prompt, params, one)
                if beams is None
                else self._search(generate, prompt, params, one, beams)
                for prompt, one in zip(prompts, ids, strict=True)
            ]
            async with contextlib.aclosing(merge(streams)) as merged:
                if limit_s is not None:
                    merged = _limited(merged, limit_s)
                async for numbered in merged:
                    yield numbered

    @no_type_check  # runtime type checks do not support async generators
    async def _search(
        self,
        generate: Callable[..., AsyncGenerator[RequestOutput, None]],
        prompt: TokensPrompt,
        params: SamplingParams,
        request_id: str,
        beams: BeamSearchParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run the beam search of one prompt; yield its single, final output.

        Args:
            generate: The engine's, with the arguments that all beams share.
        """
        processor = self.engine.engine.input_processor
        processor.checked(params)
        vocab_size = self.config.model_config.vocab_size
        max_model_len = self.config.max_model_len
        step = step_params(
            beams,
            vocab_size=vocab_size,
            max_logprobs=self.config.max_logprobs,
            num_logprobs=params.logprobs or 0,
        )
        search = BeamSearch(
            parse_prompt(prompt, self.tokenizer, vocab_size, max_model_len),
            beams,
            end_ids=processor.end_ids,
            max_model_len=max_model_len,
        )
        while prompts := search.prompts():
            outputs = await _gather(
                self._last(generate(one, step, name))
                for one, name in zip(prompts, _ids(request_id, beams), strict=False)
            )
            search.advance(outputs)
        yield search.request_output(request_id, self.tokenizer, params)

    @staticmethod
    @no_type_check
    async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> Any:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("a request ended without an output")


def _ids(request_id: str, beams: BeamSearchParams) -> list[str]:
    """Return one engine request id per beam of a search, reused at every step."""
    return [f"{request_id}-{at}" for at in range(beams.beam_width)]


async def _gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently; cancel the others if one fails."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@no_type_check  # runtime type checks do not support async generators
async def _limited(
    outputs: AsyncGenerator[Any, None], limit_s: float
) -> AsyncGenerator[Any, None]:
    end = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(end):
                output = await anext(outputs, None)
        except TimeoutError as error:
            raise TimeLimitError(
                f"The request took longer than {limit_s:g} s, the limit of this server "
                "(--max-request-s)."
            ) from error
        if output is None:
            return
        yield output


def new_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex

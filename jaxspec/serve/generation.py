"""Owns the endpoints that generate text: completions, chats, responses, messages."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar, no_type_check

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from jaxspec.engine.async_llm_engine import LONG_CHARACTERS
from jaxspec.errors import (
    ArgumentError,
    NativePanicError,
    RequestError,
    UnsupportedError,
    escaped,
    is_panic,
    wrong_argument,
)
from jaxspec.inputs import TokensPrompt
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.errors import status_and_body
from jaxspec.serve.load_report import REQUEST_HEADER, load_header
from jaxspec.serve.middleware import MAX_ID
from jaxspec.serve.requests.anthropic_input import CountBody, MessagesBody
from jaxspec.serve.requests.anthropic_input import as_chat as message_as_chat
from jaxspec.serve.requests.params import field_of, make_beams, make_params
from jaxspec.serve.requests.protocol import (
    BatchChatBody,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseBody,
)
from jaxspec.serve.requests.response_input import (
    as_chat,
    flat_tool_names,
    messages_of,
)
from jaxspec.serve.requests.tool_choice import check_form, read_choice
from jaxspec.serve.requests.tool_parsers import ToolParserManager
from jaxspec.serve.response_store import (
    HEARTBEAT_S,
    UNFINISHED,
    ResponseNotFoundError,
    Stored,
)
from jaxspec.serve.responses.anthropic_messages import MessageWriter
from jaxspec.serve.responses.chat_completions import BatchChatWriter, ChatWriter
from jaxspec.serve.responses.completions import CompletionWriter
from jaxspec.serve.responses.response_writers import Numbered, Writer
from jaxspec.serve.responses.responses import ResponseWriter, is_stored
from jaxspec.serve.serving import Serving, new_id
from jaxspec.serve.streaming import (
    SHORT_ANSWER,
    ClientGoneError,
    EventLog,
    EventStream,
    encoded,
    event,
    is_large,
    while_connected,
)

_log = logging.getLogger(__name__)

AnyBody = TypeVar("AnyBody", bound=GenerationBody)
Answer = Callable[[Serving, AnyBody, Request], Coroutine[Any, Any, Response]]

# The status that nginx logs for a client that disconnected.
CLIENT_GONE = 499
# Maximum bytes of a stored response that is parsed in the event loop: that takes a
# millisecond.
SHORT_BYTES = 2**17
# Seconds between checks whether the server that generates a cancelled response has
# stopped it.
POLL_S = 0.1


def generation_routes(serving: Serving) -> APIRouter:
    """Make the endpoints of completions, chats, (stored) responses and messages."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await _respond(serving, request, body, _complete)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(serving, request, body, _chat)

    @router.post("/v1/chat/completions/batch")
    async def create_chat_batch(body: BatchChatBody, request: Request) -> Response:
        """Answer several conversations, with a choice for each."""
        return await _respond(serving, request, body, _chat_batch)

    @router.post("/invocations")
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        """Answer a conversation (`messages`) or continue a prompt, for SageMaker."""
        try:
            if "messages" in body:
                chat = ChatBody.model_validate(body)
                return await _respond(serving, request, chat, _chat)
            completion = CompletionBody.model_validate(body)
        except ValidationError as error:
            faults = [one | {"loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(faults) from error
        return await _respond(serving, request, completion, _complete)

    @router.post("/v1/responses")
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation, with OpenAI's Responses API."""
        return await _respond(serving, request, body, _answer)

    @router.post("/v1/messages")
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation, with Anthropic's Messages API."""
        return await _respond(serving, request, body, _message)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        return await _respond(serving, request, body, _count)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a stored response in its current state, or stream its events."""
        owner = _owner(request)
        response = (await _read_stored(serving, owner, response_id)).response
        if stream:
            log = await _log_of(serving, owner, response)
            return EventStream(_follow_events(serving, log, starting_after))
        if starting_after is not None:
            raise RequestError(
                "starting_after is the number of an event in a stream, so it needs "
                "stream=true.",
                parameter="query.starting_after",
                value=starting_after,
            )
        return await _json(serving, response)

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Cancel a background response, and return it."""
        owner = _owner(request)
        stored = await _read_stored(serving, owner, response_id)
        if not stored.response["background"]:
            raise RequestError(
                "Cannot cancel a synchronous response. Only one with background=True "
                "can be cancelled; to end any other, close its connection.",
                parameter="response_id",
                value=response_id,
            )
        if (owner, response_id) in serving.background:
            await serving.background.cancel((owner, response_id))
        else:
            await _cancel_elsewhere(serving, owner, response_id)
        stored = await _read_stored(serving, owner, response_id)
        return await _json(serving, stored.response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response; cancel it if it is unfinished."""
        owner = _owner(request)
        if not serving.responses.has(response_id, owner):
            raise ResponseNotFoundError(response_id)
        await serving.background.cancel((owner, response_id))
        serving.responses.delete(response_id, owner)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


async def _read_stored(serving: Serving, owner: str, response_id: str) -> Stored:
    """Read a stored response; see `ResponseStore.get`."""
    size = serving.responses.num_bytes(response_id, owner)
    read = partial(serving.responses.get, response_id, owner)
    return await serving.write(read, is_large=size > SHORT_BYTES)


async def _json(serving: Serving, content: dict[str, Any]) -> Response:
    if not is_large(content):
        return JSONResponse(content)
    text = await serving.write(partial(encoded, content), is_large=True)
    return Response(text, media_type="application/json")


def _owner(request: Request) -> str:
    """Return a request's owner: a digest of its API key, "" without API keys."""
    return getattr(request.state, "owner", "")


async def _cancel_elsewhere(serving: Serving, owner: str, response_id: str) -> None:
    """Cancel a response that another server generates; wait until it has stopped."""
    serving.responses.cancel(response_id, owner)
    end = asyncio.get_running_loop().time() + 2 * HEARTBEAT_S
    while asyncio.get_running_loop().time() < end:
        response = (await _read_stored(serving, owner, response_id)).response
        if response["status"] not in UNFINISHED:
            return
        await asyncio.sleep(POLL_S)


async def _respond(
    serving: Serving, request: Request, body: AnyBody, answer: Answer[AnyBody]
) -> Response:
    work = answer(serving, body, request)
    try:
        response = await while_connected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except ArgumentError as error:
        error.parameter = field_of(body, error.parameter)
        raise
    except BaseException as error:
        if is_panic(error):
            # Starlette's error handlers accept subclasses of Exception only.
            raise NativePanicError(f"a native library panicked: {error}") from error
        raise
    if REQUEST_HEADER in request.headers:
        load = await serving.engine.get_load()
        load_format = request.headers[REQUEST_HEADER]
        response.headers.update(load_header(load, load_format))
    return response


async def _complete(
    serving: Serving, body: CompletionBody, request: Request
) -> Response:
    serving.check_body(body)
    params = make_params(body, serving.config.generation_defaults)
    read = partial(serving.prompts.of_completion, body, params.max_tokens)
    prompts = await serving.engine.run_in_thread(read, is_long=_is_long(body.prompt))
    request_id = _id(body, request)
    writer = CompletionWriter(serving, body, params, request_id, len(prompts))
    return await _generate(serving, request, body, prompts, params, writer)


async def _chat(serving: Serving, body: ChatBody, request: Request) -> Response:
    serving.check_body(body)
    read = partial(_prepare_chat, serving, body, _id(body, request))
    prompt, params, writer = await serving.engine.run_in_thread(
        read, is_long=_is_long_chat(body)
    )
    return await _generate(serving, request, body, [prompt], params, writer)


async def _chat_batch(
    serving: Serving, body: BatchChatBody, request: Request
) -> Response:
    refused = {
        "stream": body.stream,
        "n": (body.n or 1) > 1,
        "tools": body.tools,
        "use_beam_search": body.use_beam_search,
        "prompt_logprobs": body.prompt_logprobs is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"A batch of conversations cannot have {name}={getattr(body, name)!r}: "
                "leave it out, or send every conversation to /v1/chat/completions.",
                parameter=name,
                value=getattr(body, name),
            )
    bodies = body.conversations()
    for one in bodies:
        serving.check_body(one)

    def read() -> list[tuple[ChatBody, TokensPrompt, SamplingParams]]:
        return [_read_chat(serving, one) for one in bodies]

    found = await serving.engine.run_in_thread(read, is_long=_is_long_chat(body))
    chats, prompts, params = zip(*found, strict=True)
    writer = BatchChatWriter(serving, chats, params[0], _id(body, request))
    return await _generate(serving, request, body, list(prompts), params[0], writer)


def _is_long(content: object) -> bool:
    """Return whether a field's texts are so long that encoding them stalls the loop."""
    left, waiting = LONG_CHARACTERS, [content]
    while waiting and left >= 0:
        one = waiting.pop()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return left < 0


def _is_long_chat(body: ChatBody) -> bool:
    """Return whether a chat has long texts, or a grammar, which may need compiling."""
    shaped = (body.structured_outputs, body.response_format, body.tools)
    return any(one is not None for one in shaped) or _is_long(body.messages)


def _prepare_chat(
    serving: Serving, body: ChatBody, request_id: str
) -> tuple[TokensPrompt, SamplingParams, ChatWriter]:
    body, prompt, params = _read_chat(serving, body)
    return prompt, params, ChatWriter(serving, body, params, request_id)


def _read_chat(
    serving: Serving, body: ChatBody
) -> tuple[ChatBody, TokensPrompt, SamplingParams]:
    body = _adjusted(serving, body)
    params = make_params(body, serving.config.generation_defaults)
    prompt = serving.prompts.of_chat(body, params.max_tokens)
    check_form(body, serving.engine.engine.input_processor.check_form)
    return body, prompt, params


def _adjusted(serving: Serving, body: ChatBody) -> ChatBody:
    """Apply the tool parser's `adjust_request` if the model may choose to call.

    Raises:
        RequestError: The server was started without automatic tool choice.
    """
    if read_choice(body).kind != "auto":
        return body
    settings = serving.settings
    if not settings.enable_auto_tool_choice:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and '
            "--tool-call-parser to be set (which is gemma by default). Start the "
            "server with the first flag, or pass tool_choice="
            '"required", a function, or "none".',
            parameter="tool_choice",
            value=body.tool_choice,
        )
    parser = ToolParserManager.get_tool_parser(settings.tool_call_parser)
    return parser(serving.tokenizer, body.tools).adjust_request(body)


async def _answer(serving: Serving, body: ResponseBody, request: Request) -> Response:
    serving.check_body(body)
    _check_background(serving, body)
    owner = _owner(request)
    earlier = await _earlier(serving, owner, body.previous_response_id)
    messages = messages_of(body, earlier)
    chat = as_chat(body, messages)
    with flat_tool_names():
        chat, prompt, params = await serving.engine.run_in_thread(
            partial(_read_chat, serving, chat), is_long=_is_long_chat(chat)
        )
    request_id = _response_id(serving, body, request)
    writer = ResponseWriter(serving, body, chat, params, request_id, messages, owner)
    serving.writers[owner, writer.id] = writer
    if not body.background:
        return await _generate(serving, request, body, [prompt], params, writer)
    size = _check_size(serving, writer, [prompt])
    outputs = serving.outputs(
        writer.id, [prompt], params, body.priority or 0, headers=request.headers
    )
    response = writer.write_status("queued")
    log = EventLog() if body.stream else None
    work = _make(serving, writer, outputs, log, may_be_large=size > SHORT_ANSWER)
    await serving.background.start((owner, writer.id), work, log)
    if log is None:
        return JSONResponse(response)
    # Generation continues if the client disconnects, as it may request the stream
    # again later.
    return EventStream(_follow_events(serving, log))


async def _message(serving: Serving, body: MessagesBody, request: Request) -> Response:
    chat, prompt, params = await _read_message(serving, body)
    writer = MessageWriter(serving, body, chat, params, _id(body, request))
    return await _generate(serving, request, body, [prompt], params, writer)


async def _count(serving: Serving, body: CountBody, request: Request) -> Response:
    _, prompt, _ = await _read_message(serving, body)
    return JSONResponse({"input_tokens": len(prompt["prompt_token_ids"])})


async def _read_message(
    serving: Serving, body: CountBody
) -> tuple[ChatBody, TokensPrompt, SamplingParams]:
    serving.check_body(body)
    chat = message_as_chat(body)
    return await serving.engine.run_in_thread(
        partial(_read_chat, serving, chat), is_long=_is_long_chat(chat)
    )


def _response_id(serving: Serving, body: ResponseBody, request: Request) -> str:
    """Return the request id from which a response's id is made.

    If a running request already has the X-Request-Id, as when several requests of one
    trace share it, the id is replaced by a new one, so that no stored response is
    overwritten.

    Raises:
        RequestError: The id has a "/", or the body's `request_id` is in use.
    """
    owner, given = _owner(request), _id(body, request)
    is_of_body = given == body.request_id
    name = "request_id" if is_of_body else "X-Request-Id"
    if "/" in given:
        raise wrong_argument(RequestError, name, "a text without '/'", given)
    response_id = f"resp_{given}"
    is_used = (owner, response_id) in serving.writers
    if not (is_used or serving.responses.has(response_id, owner)):
        return given
    if is_of_body:
        allowed = "an id that no stored or unfinished response has"
        raise wrong_argument(RequestError, name, allowed, given)
    return new_id()


def _check_background(serving: Serving, body: ResponseBody) -> None:
    """Check that a background response will be stored.

    Raises:
        UnsupportedError: The response would not be stored.
    """
    if not body.background:
        return
    problem = ""
    if not serving.responses.is_on:
        problem = "this server stores no responses (--max-response-store-bytes 0)"
    elif not is_stored(serving, body):
        problem = "the response could not be retrieved"
    if problem:
        raise UnsupportedError(
            f"background can only be used when `store` is true: {problem}.",
            parameter="background",
            value=True,
        )


async def _earlier(
    serving: Serving, owner: str, response_id: str | None
) -> list[dict[str, Any]]:
    """Return an earlier response's conversation, with its answer as last message.

    Raises:
        RequestError: The response is unfinished.
        ResponseNotFoundError: It is not stored.
    """
    if response_id is None:
        return []
    response, messages = await _read_stored(serving, owner, response_id)
    if response["status"] in UNFINISHED:
        allowed = "the id of a finished response"
        name = "previous_response_id"
        raise wrong_argument(RequestError, name, allowed, response_id)
    return messages


async def _make(
    serving: Serving,
    writer: ResponseWriter,
    outputs: Numbered,
    log: EventLog | None,
    *,
    may_be_large: bool,
) -> None:
    """Generate and store a background response.

    Args:
        log: Records the events of a streamed response, and is stored with it; None if
            the response is not streamed.
        may_be_large: Serializing it may take long.
    """
    end = None
    try:
        writer.write_status("in_progress")
        async with contextlib.aclosing(outputs):
            if log is None:
                finished = [one async for one in outputs]
                whole = partial(writer.whole, finished)
                await serving.write(whole, is_large=may_be_large)
            else:
                async for chunk in writer.chunks(outputs):
                    log.add(chunk)
    except asyncio.CancelledError:
        end = writer.write_status("cancelled")
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        status, body = status_and_body(error)
        log_error = _log.exception if status == 500 else _log.info
        log_error("A background response failed: %s", escaped(str(error)))
        end = writer.write_status("failed", body["error"]["message"])
    finally:
        if log is not None:
            if end is not None:
                log.add(writer.last_event(end))
            log.end()
            store = partial(writer.store_events, log.events)
            await serving.write(store, is_large=is_large(log.events))


async def _log_of(serving: Serving, owner: str, response: dict[str, Any]) -> EventLog:
    """Return the event log of a response, finished or not.

    Raises:
        RequestError: The response is not a stream, or another server generates it.
        ResponseNotFoundError: It is not stored.
    """
    log = serving.background.log((owner, response["id"]))
    if log is not None:
        return log
    size = serving.responses.num_bytes(response["id"], owner)
    read = partial(serving.responses.events, response["id"], owner)
    events = await serving.write(read, is_large=size > SHORT_BYTES)
    if events:
        return EventLog(events, is_over=True)
    reason = "Only a response with background=True and stream=True can be streamed "
    reason += "again: leave stream out."
    if response["status"] in UNFINISHED and response["background"]:
        reason = "Either another server generates this response, and its events can be "
        reason += "streamed here once it is finished, or it was made without "
        reason += "stream=True."
    raise RequestError(reason, parameter="query.stream", value=True)


@no_type_check  # runtime type checks do not support async generators
async def _follow_events(
    serving: Serving, log: EventLog, after: int | None = None
) -> AsyncGenerator[str, None]:
    """Stream the events of a log: those after event number `after`, or all of them."""
    start = 0 if after is None else after + 1
    async with contextlib.aclosing(log.follow(start)) as followed:
        async for content in followed:
            yield await _event(serving, content)


async def _event(serving: Serving, content: dict[str, Any]) -> str:
    """Serialize an event; a response's last events each contain the whole response."""
    large = is_large(content)
    return await serving.write(partial(event, content, in_parts=large), is_large=large)


def _id(body: GenerationBody, request: Request) -> str:
    """Return the client's request id, from a header or the body, or a new one."""
    given = request.headers.get("x-request-id", "")[:MAX_ID] or body.request_id
    return given or new_id()


async def _generate(
    serving: Serving,
    request: Request,
    body: GenerationBody,
    prompts: list[TokensPrompt],
    params: SamplingParams,
    writer: Writer,
) -> Response:
    beams = make_beams(body, params, serving.config.max_model_len)
    priority = body.priority or 0
    outputs = serving.outputs(
        writer.id, prompts, params, priority, beams, request.headers
    )
    size = _check_size(serving, writer, prompts)
    if not body.stream:
        async with contextlib.aclosing(outputs):
            if size <= SHORT_ANSWER:
                return JSONResponse(await writer.answer(outputs))
            finished = [one async for one in outputs]
        content = await serving.write(
            lambda: encoded(writer.whole(finished)), is_large=True
        )
        return Response(content, media_type="application/json")
    chunks = _events(serving, writer, outputs)
    try:
        # An error before the first output is returned with its own HTTP status.
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(_prepend(first, chunks))


def _check_size(serving: Serving, writer: Writer, prompts: list[TokensPrompt]) -> int:
    """Return the maximum number of entries of the response (`Writer.check_size`)."""
    config = serving.config
    return writer.check_size(
        [len(one["prompt_token_ids"]) for one in prompts],
        config.max_model_len,
        config.model_config.vocab_size,
    )


@no_type_check  # runtime type checks do not support async generators
async def _events(
    serving: Serving, writer: Writer, outputs: Numbered
) -> AsyncGenerator[str, None]:
    has_begun = False
    try:
        async with contextlib.aclosing(outputs):
            async for chunk in writer.chunks(outputs):
                yield await _event(serving, chunk)
                has_begun = True
    except BaseException as error:
        if not has_begun or not (isinstance(error, Exception) or is_panic(error)):
            raise
        status, body = status_and_body(error)
        log = _log.exception if status == 500 else _log.info
        log("A stream ended early: %s", escaped(str(error)))
        yield event(writer.error_event(status, body))
    if writer.end:
        yield writer.end


@no_type_check  # runtime type checks do not support async generators
async def _prepend(
    first: str, events: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        yield first
        async for text in events:
            yield text

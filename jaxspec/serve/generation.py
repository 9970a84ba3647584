"""Owns the endpoints that generate."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar, no_type_check

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

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
from jaxspec.serve.errors import refusal_of
from jaxspec.serve.load_report import ASKED, load_header
from jaxspec.serve.middleware import MAX_ID
from jaxspec.serve.requests.params import field_of, make_beams, make_params
from jaxspec.serve.requests.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseBody,
)
from jaxspec.serve.requests.response_input import (
    as_chat,
    messages_of,
    naming_tools_flat,
)
from jaxspec.serve.requests.tool_choice import check_form, read_choice
from jaxspec.serve.requests.tool_parsers import ToolParserManager
from jaxspec.serve.response_store import (
    BEAT_S,
    UNFINISHED,
    ResponseNotFoundError,
    Stored,
)
from jaxspec.serve.responses.chat_completions import ChatWriter
from jaxspec.serve.responses.completions import CompletionWriter
from jaxspec.serve.responses.response_writers import Numbered, Writer
from jaxspec.serve.responses.responses import ResponseWriter, is_kept
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

# What proxies write down for a client that left.
CLIENT_GONE = 499
# Bytes of a kept response that are read in a millisecond.
SHORT_BYTES = 2**17
# Between two looks for what another server has done.
POLL_S = 0.1


def generation_routes(serving: Serving) -> APIRouter:
    """Make the endpoints of completions, chats and responses, kept ones included."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await _respond(serving, request, body, _complete)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(serving, request, body, _chat)

    @router.post("/v1/responses")
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation in OpenAI's newer form."""
        return await _respond(serving, request, body, _answer)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a response that is kept, as it is now, or its events as they come."""
        owner = _owner(request)
        response = (await _kept(serving, owner, response_id)).response
        if stream:
            log = await _log_of(serving, owner, response)
            return EventStream(_followed(serving, log, starting_after))
        if starting_after is not None:
            raise RequestError(
                "starting_after numbers an event of a stream: ask with stream=true.",
                parameter="starting_after",
                value=starting_after,
            )
        return await _json(serving, response)

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End the making of a response in the background; then return it."""
        owner = _owner(request)
        if not (await _kept(serving, owner, response_id)).response["background"]:
            raise RequestError(
                "Only a response of background=True can be cancelled: of others the "
                "connection is closed.",
                parameter="response_id",
                value=response_id,
            )
        if (owner, response_id) in serving.background:
            await serving.background.cancel((owner, response_id))
        else:
            await _cancel_elsewhere(serving, owner, response_id)
        return await _json(serving, (await _kept(serving, owner, response_id)).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response; one that is being made ends."""
        owner = _owner(request)
        if not serving.responses.has(response_id, owner):
            raise ResponseNotFoundError(response_id)
        await serving.background.cancel((owner, response_id))
        serving.responses.delete(response_id, owner)
        told = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(told)

    return router


async def _kept(serving: Serving, owner: str, response_id: str) -> Stored:
    """Read a response that is kept; see `ResponseStore.get`."""
    size = serving.responses.num_bytes(response_id, owner)
    read = partial(serving.responses.get, response_id, owner)
    return await serving.write(read, is_large=size > SHORT_BYTES)


async def _json(serving: Serving, content: dict[str, Any]) -> Response:
    if not is_large(content):
        return JSONResponse(content)
    text = await serving.write(partial(encoded, content), is_large=True)
    return Response(text, media_type="application/json")


def _owner(request: Request) -> str:
    """Return who sends a request: a digest of its API key, "" where none is needed."""
    return getattr(request.state, "owner", "")


async def _cancel_elsewhere(serving: Serving, owner: str, response_id: str) -> None:
    """Have another server stop making a response, and wait until it has."""
    serving.responses.cancel(response_id, owner)
    end = asyncio.get_running_loop().time() + 2 * BEAT_S
    while asyncio.get_running_loop().time() < end:
        response = (await _kept(serving, owner, response_id)).response
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
            # The server's own handlers know subclasses of Exception only.
            raise NativePanicError(f"a native library panicked: {error}") from error
        raise
    if ASKED in request.headers:
        load = await serving.engine.get_load()
        response.headers.update(load_header(load, request.headers[ASKED]))
    return response


async def _complete(
    serving: Serving, body: CompletionBody, request: Request
) -> Response:
    serving.check_body(body)
    params = make_params(body, serving.config.generation_defaults)
    read = partial(serving.prompts.of_completion, body, params.max_tokens)
    prompts = await serving.engine.run_in_thread(read, is_long=_is_long(body.prompt))
    writer = CompletionWriter(serving, body, params, _id(body, request))
    return await _generate(serving, body, prompts, params, writer)


async def _chat(serving: Serving, body: ChatBody, request: Request) -> Response:
    serving.check_body(body)
    read = partial(_prepare_chat, serving, body, _id(body, request))
    prompt, params, writer = await serving.engine.run_in_thread(
        read, is_long=_is_long_chat(body)
    )
    return await _generate(serving, body, [prompt], params, writer)


def _is_long(content: object) -> bool:
    """Return whether texts in a part of a body take long to encode."""
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
    """Return whether a chat has a grammar, which may be new, or long texts."""
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
    """Let the parser of calls change a request, if the model may call.

    Raises:
        RequestError: It may not, on this server.
    """
    if read_choice(body).kind != "auto":
        return body
    settings = serving.settings
    if not settings.enable_auto_tool_choice:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and '
            "--tool-call-parser to be set (which is gemma by default). Start the "
            'server so, or pass tool_choice="required", a function, or "none".',
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
    with naming_tools_flat():
        chat, prompt, params = await serving.engine.run_in_thread(
            partial(_read_chat, serving, chat), is_long=_is_long_chat(chat)
        )
    request_id = _response_id(serving, body, request)
    writer = ResponseWriter(serving, body, chat, params, request_id, messages, owner)
    serving.writers[owner, writer.id] = writer
    if not body.background:
        return await _generate(serving, body, [prompt], params, writer)
    size = _check_size(serving, writer, [prompt])
    outputs = serving.outputs(writer.id, [prompt], params, body.priority or 0)
    response = writer.tell("queued")
    log = EventLog() if body.stream else None
    work = _make(serving, writer, outputs, log, may_be_large=size > SHORT_ANSWER)
    await serving.background.start((owner, writer.id), work, log)
    if log is None:
        return JSONResponse(response)
    # Who follows it may leave, and come back: it goes on.
    return EventStream(_followed(serving, log))


def _response_id(serving: Serving, body: ResponseBody, request: Request) -> str:
    """Return what the id of a response is made of: no earlier one is replaced.

    A header that was used before, as in several requests of one trace, gives a new id.

    Raises:
        RequestError: It cannot be part of a path, or the body's is in use.
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
        allowed = "that of no response that is kept or being made"
        raise wrong_argument(RequestError, name, allowed, given)
    return new_id()


def _check_background(serving: Serving, body: ResponseBody) -> None:
    """Check that a response for which nobody waits can be asked for later.

    Raises:
        UnsupportedError: It is not kept.
    """
    if not body.background:
        return
    other = ""
    if not serving.responses.is_on:
        other = "a server that keeps no responses (--max-response-store-bytes 0)"
    elif not is_kept(serving, body):
        other = "store=False: nobody could ask for the response later"
    if other:
        raise UnsupportedError(
            f"background=True does not go with {other}.",
            parameter="background",
            value=True,
        )


async def _earlier(
    serving: Serving, owner: str, response_id: str | None
) -> list[dict[str, Any]]:
    """The conversation up to an earlier response.

    Raises:
        RequestError: It is still being made.
        ResponseNotFoundError: It is not kept.
    """
    if response_id is None:
        return []
    response, messages = await _kept(serving, owner, response_id)
    if response["status"] in UNFINISHED:
        allowed = "the id of a response that has been made"
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
    """Make a response for which nobody waits, and keep it.

    Args:
        log: Notes its events, which are kept with it; None where they are not wanted.
        may_be_large: It may take long to write.
    """
    end = None
    try:
        writer.tell("in_progress")
        async with contextlib.aclosing(outputs):
            if log is None:
                finished = [one async for one in outputs]
                whole = partial(writer.whole, finished)
                await serving.write(whole, is_large=may_be_large)
            else:
                async for chunk in writer.chunks(outputs):
                    log.add(chunk)
    except asyncio.CancelledError:
        end = writer.tell("cancelled")
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        status, body = refusal_of(error)
        say = _log.exception if status == 500 else _log.info
        say("A response in the background failed: %s", escaped(str(error)))
        end = writer.tell("failed", body["error"]["message"])
    finally:
        if log is not None:
            if end is not None:
                log.add(writer.last_event(end))
            log.end()
            keep = partial(writer.keep_events, log.events)
            await serving.write(keep, is_large=is_large(log.events))


async def _log_of(serving: Serving, owner: str, response: dict[str, Any]) -> EventLog:
    """The events of a response, which may be still being made.

    Raises:
        RequestError: It was not made as a stream, or is being made elsewhere.
        ResponseNotFoundError: It is not kept.
    """
    log = serving.background.log((owner, response["id"]))
    if log is not None:
        return log
    size = serving.responses.num_bytes(response["id"], owner)
    read = partial(serving.responses.events, response["id"], owner)
    events = await serving.write(read, is_large=size > SHORT_BYTES)
    if events:
        return EventLog(events, is_over=True)
    reason = (
        "Only a response of background=True and stream=True can be streamed again: "
    )
    reason += "leave stream out."
    if response["status"] in UNFINISHED and response["background"]:
        reason = "Another server makes this response, or it is no stream: its events "
        reason += "can be streamed here once it is finished."
    raise RequestError(reason, parameter="stream", value=True)


@no_type_check  # asynchronous generators are not checked
async def _followed(
    serving: Serving, log: EventLog, after: int | None = None
) -> AsyncGenerator[str, None]:
    """Write a log's events, those behind number `after` or all."""
    start = 0 if after is None else after + 1
    async with contextlib.aclosing(log.follow(start)) as followed:
        async for content in followed:
            yield await _event(serving, content)


async def _event(serving: Serving, content: dict[str, Any]) -> str:
    """Write an event: the last ones of a response hold all of it."""
    large = is_large(content)
    return await serving.write(partial(event, content, in_parts=large), is_large=large)


def _id(body: GenerationBody, request: Request) -> str:
    """The id that the client chose, in a header or in the body, or a new one."""
    given = request.headers.get("x-request-id", "")[:MAX_ID] or body.request_id
    return given or new_id()


async def _generate(
    serving: Serving,
    body: GenerationBody,
    prompts: list[TokensPrompt],
    params: SamplingParams,
    writer: Writer,
) -> Response:
    beams = make_beams(body, params, serving.config.max_model_len)
    priority = body.priority or 0
    outputs = serving.outputs(writer.id, prompts, params, priority, beams)
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
        # What fails before the first word has a status of its own.
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(_resumed(first, chunks))


def _check_size(serving: Serving, writer: Writer, prompts: list[TokensPrompt]) -> int:
    """Return the most entries of an answer: see `Writer.check_size`."""
    config = serving.config
    return writer.check_size(
        [len(one["prompt_token_ids"]) for one in prompts],
        config.max_model_len,
        config.model_config.vocab_size,
    )


@no_type_check  # asynchronous generators are not checked
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
        status, body = refusal_of(error)
        log = _log.exception if status == 500 else _log.info
        log("A stream ended early: %s", escaped(str(error)))
        yield event(body)
    if writer.end:
        yield writer.end


@no_type_check  # asynchronous generators are not checked
async def _resumed(
    first: str, events: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        yield first
        async for text in events:
            yield text

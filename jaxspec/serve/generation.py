"""Owns the endpoints that generate."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, no_type_check

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from jaxspec.inputs import TokensPrompt
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.chat_completions import ChatWriter
from jaxspec.serve.completions import CompletionWriter
from jaxspec.serve.errors import ResponseNotFoundError, refusal_of
from jaxspec.serve.middleware import MAX_ID
from jaxspec.serve.params import make_params
from jaxspec.serve.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseBody,
)
from jaxspec.serve.response_input import as_chat
from jaxspec.serve.response_writers import Numbered, Writer
from jaxspec.serve.responses import ResponseWriter
from jaxspec.serve.serving import Serving, new_id
from jaxspec.serve.streaming import (
    ClientGoneError,
    EventStream,
    event,
    while_connected,
)

_log = logging.getLogger(__name__)

# What proxies write down for a client that left.
CLIENT_GONE = 499


def generation_routes(serving: Serving) -> APIRouter:
    """Make POST /v1/completions, /v1/chat/completions and /v1/responses."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await _respond(request, _complete(serving, body, request))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(request, _chat(serving, body, request))

    @router.post("/v1/responses")
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation in OpenAI's newer form."""
        return await _respond(request, _answer(serving, body, request))

    @router.get("/v1/responses/{response_id}")
    @router.post("/v1/responses/{response_id}/cancel")
    async def find_response(response_id: str) -> Response:
        """Say that there is none: responses are not stored."""
        raise ResponseNotFoundError(response_id)

    return router


async def _respond(request: Request, work: Any) -> Response:
    try:
        return await while_connected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)


async def _complete(
    serving: Serving, body: CompletionBody, request: Request
) -> Response:
    serving.check_model(body.model)
    params = make_params(body, serving.config.generation_defaults)
    # Encoding a long text takes a while: beside the event loop.
    prompts = await asyncio.to_thread(
        serving.prompts.of_completion, body, params.max_tokens
    )
    writer = CompletionWriter(serving, body, params, _id(body, request))
    return await _generate(serving, body, prompts, params, writer)


async def _chat(serving: Serving, body: ChatBody, request: Request) -> Response:
    serving.check_model(body.model)
    params = make_params(body, serving.config.generation_defaults)
    prompt = await asyncio.to_thread(serving.prompts.of_chat, body, params.max_tokens)
    writer = ChatWriter(serving, body, params, _id(body, request))
    return await _generate(serving, body, [prompt], params, writer)


async def _answer(serving: Serving, body: ResponseBody, request: Request) -> Response:
    serving.check_model(body.model)
    chat = as_chat(body)
    params = make_params(chat, serving.config.generation_defaults)
    prompt = await asyncio.to_thread(serving.prompts.of_chat, chat, params.max_tokens)
    writer = ResponseWriter(serving, body, params, _id(body, request))
    return await _generate(serving, body, [prompt], params, writer)


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
    outputs = serving.outputs(writer.id, prompts, params, body.priority or 0)
    if not body.stream:
        async with contextlib.aclosing(outputs):
            return JSONResponse(await writer.answer(outputs))
    chunks = _events(writer, outputs)
    try:
        # What fails before the first word has a status of its own.
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(_resumed(first, chunks))


@no_type_check  # asynchronous generators are not checked
async def _events(writer: Writer, outputs: Numbered) -> AsyncGenerator[str, None]:
    has_begun = False
    try:
        async with contextlib.aclosing(outputs):
            async for chunk in writer.chunks(outputs):
                yield event(chunk)
                has_begun = True
    except Exception as error:
        if not has_begun:
            raise
        status, body = refusal_of(error)
        log = _log.exception if status == 500 else _log.info
        log("A stream ended early: %s", error)
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

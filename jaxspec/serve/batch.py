"""Answers OpenAI's batch files with the server's application, in this process.

Each line of the input has an endpoint and the body of a request. Each line of the
output has the response, or the error, under the same `custom_id`.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from jaxspec.command_line import CommandError
from jaxspec.engine.async_llm_engine import AsyncEngineArgs, AsyncLLMEngine
from jaxspec.errors import (
    ArgumentError,
    ConfigError,
    EngineDeadError,
    shown,
    wrong_argument,
)
from jaxspec.exit import interrupts_end
from jaxspec.serve.app import make_app
from jaxspec.serve.launcher import set_up_log
from jaxspec.serve.serving import new_id
from jaxspec.serve.settings import ServerSettings

_log = logging.getLogger(__name__)
# Seconds that the engine's current step may take at the end.
SHUTDOWN_S = 5
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A line of the input.

    Attributes:
        custom_id: The caller's name for it, unique in the file.
        url: Path of an endpoint.
        body: Body of the request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def read_batch(path: Path) -> list[BatchRequest]:
    """Read a batch file; empty lines are skipped.

    Raises:
        ConfigError: The file cannot be read, has no requests, or has a line that is not
            a request with a `custom_id` of its own.
    """
    requests: dict[str, BatchRequest] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    request = _request(line, number)
                    if request.custom_id in requests:
                        raise _wrong_line(
                            number,
                            f"custom_id {shown(request.custom_id)} is already the id "
                            "of an earlier line",
                        )
                    requests[request.custom_id] = request
    except (OSError, UnicodeDecodeError) as error:
        allowed = "a UTF-8 file with a request in each line"
        hint = f"It cannot be read: {str(error).rstrip('.')}."
        raise _wrong_file(allowed, path, hint) from error
    if not requests:
        raise _wrong_file("a file with at least one request", path, "It is empty.")
    return list(requests.values())


def _request(line: str, number: int) -> BatchRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong_line(number, f"it is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise _wrong_line(number, f"it is not an object, but {shown(found)}")
    for name, kind in _FIELDS.items():
        if not isinstance(found.get(name), kind):
            expected = "a string" if kind is str else "an object"
            got = shown(found.get(name))
            raise _wrong_line(number, f"{name} must be {expected}, got {got}")
    if found["method"] != "POST":
        got = shown(found["method"])
        raise _wrong_line(number, f"method must be 'POST', got {got}")
    return BatchRequest(**{name: found[name] for name in _FIELDS if name != "method"})


def _wrong_line(number: int, reason: str) -> ConfigError:
    return ConfigError(
        f"Line {number} of --input-file is not a batch request: {reason}. A line "
        'is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
        '"body": {...}}, with a custom_id that no other line has.',
        parameter="input_file",
        value=number,
    )


def _wrong_file(allowed: str, path: Path, hint: str) -> ArgumentError:
    name = "input_file"
    described_as = "--input-file"
    return wrong_argument(
        ConfigError, name, allowed, str(path), hint, described_as=described_as
    )


def run(
    args: AsyncEngineArgs,
    settings: ServerSettings,
    requests: Sequence[BatchRequest],
    target: Path,
) -> int:
    """Answer all requests with an engine of their own, and write them to a file.

    Returns:
        The number of requests that ended with an error.

    Raises:
        ArgumentError: The engine's arguments or the settings are invalid.
        CommandError: The file cannot be written, or the engine died.
    """
    set_up_log("info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    with interrupts_end():
        engine = AsyncLLMEngine.from_engine_args(args)
    try:
        app = make_batch_app(engine, settings)
        with _errors_name(target):
            # Not earlier: if the start fails, an existing file is not lost.
            output = target.open("w", encoding="utf-8")

        def write(line: str) -> None:
            with _errors_name(target):
                output.write(line)
                output.flush()

        try:
            with (
                logging_redirect_tqdm(),
                tqdm(
                    total=len(requests),
                    desc="Running batch",
                    unit=" requests",
                    disable=None,  # drawn on a terminal only
                ) as bar,
            ):
                return asyncio.run(answer(engine, app, requests, write, bar.update))
        finally:
            with _errors_name(target):
                output.close()
    except EngineDeadError as error:
        raise CommandError(str(error)) from error
    finally:
        engine.shutdown(SHUTDOWN_S)


@contextlib.contextmanager
def _errors_name(target: Path) -> Iterator[None]:
    """Raise errors of the operating system as errors of the output file."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error}") from error


def make_batch_app(engine: AsyncLLMEngine, settings: ServerSettings) -> FastAPI:
    """Make the server's application without keys, queue limits and body limits."""
    settings = replace(
        settings,
        api_keys=(),
        max_body_bytes=2**62,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
    )
    return make_app(engine, settings)


async def answer(
    engine: AsyncLLMEngine,
    app: FastAPI,
    requests: Sequence[BatchRequest],
    write: Callable[[str], object],
    advance: Callable[[], object],
) -> int:
    """Answer all requests, and write a line for each in their order.

    Args:
        app: The application of `make_batch_app`. API keys, the limits of the queue and
            `max_body_bytes` do not apply; all other limits do.
        write: Called with each line as soon as all earlier lines are written.
        advance: Called when a request has been answered.

    Returns:
        The number of requests that ended with an error.

    Raises:
        EngineDeadError: The engine has died.
    """
    config = engine.engine.config
    # As in vLLM: twice the engine's batch size, so that the batch is always full.
    places = asyncio.Semaphore(2 * config.max_num_seqs * config.data_parallel_size)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    num_errors = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://batch") as http:

        async def answer_one(request: BatchRequest) -> dict[str, Any]:
            async with places:
                line = await _line(http, request)
            advance()
            return line

        tasks = deque(
            asyncio.ensure_future(answer_one(request)) for request in requests
        )
        try:
            while tasks:
                line = await tasks[0]
                tasks.popleft()
                num_errors += line["error"] is not None
                write(json.dumps(line) + "\n")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if engine.errored:
        raise EngineDeadError(f"{engine.dead_error} Requests of the batch have failed.")
    return num_errors


async def _line(http: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    """Return the output for a request, in vLLM's form."""
    status, body, error = 400, None, _refusal(request)
    if error is None:
        try:
            response = await http.post(
                request.url,
                content=json.dumps(request.body),
                headers={"Content-Type": "application/json"},
            )
            status, found = response.status_code, response.json()
            body, error = (found, None) if status == 200 else (None, found)
        except Exception as failure:  # noqa: BLE001 - others continue
            _log.error("Request %s failed", shown(request.custom_id), exc_info=failure)
            status, error = 500, f"The request failed: {failure!r}"
    return {
        "id": f"batch_req_{new_id()}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": new_id(), "body": body},
        "error": error,
    }


def _refusal(request: BatchRequest) -> str | None:
    """Return why a request is not sent to an endpoint; None if it is sent."""
    if request.url == "/v1/embeddings":
        return "The model does not support Embeddings API"
    if request.url not in ENDPOINTS:
        supported = ", ".join(ENDPOINTS)
        return f"URL {request.url} was used. Supported endpoints: {supported}."
    if request.body.get("stream"):
        return "Request must not be sent in stream mode"
    return None

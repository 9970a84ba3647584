"""Owns how a failure is told to a client: vLLM's error JSON, and the HTTP status."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jaxspec.errors import ArgumentError, EngineDeadError, EngineGenerateError
from jaxspec.serve.requests.protocol import FieldError
from jaxspec.serve.response_store import ResponseNotFoundError

_log = logging.getLogger(__name__)

# Of the many things wrong with a body the first few are told.
MAX_TOLD = 5
# A message may quote what was sent: not all of it, where that is long.
MAX_MESSAGE = 2000
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ModelNotFoundError(Exception):
    """A request is for a model that is not served."""


class OverloadedError(Exception):
    """The queue is full.

    Attributes:
        retry_after_s: When it is worth trying again.
    """

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimeLimitError(Exception):
    """A request took longer than the server allows."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error JSON."""
    kind = _TYPES.get(status) or HTTPStatus(status).phrase
    told = {"message": _cut(message), "type": kind, "param": param and _cut(param)}
    told["code"] = status
    return {"error": told}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def refusal_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON that tell of an error."""
    match error:
        case ArgumentError():
            # Also of what is not supported: another request would be answered.
            return 400, error_body(400, str(error), error.parameter)
        case ModelNotFoundError():
            return 404, error_body(404, str(error), "model")
        case ResponseNotFoundError():
            return 404, error_body(404, str(error), "response_id")
        case OverloadedError():
            return 503, error_body(503, str(error))
        case TimeLimitError():
            return 504, error_body(504, str(error))
        case EngineDeadError() | EngineGenerateError():
            return 500, error_body(500, str(error))
    # What went wrong inside is for the log, not for strangers.
    return 500, error_body(500, "Internal server error; see the server's log.")


def respond(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Make a response of an error's JSON.

    ASCII: a message may quote half of a surrogate pair, which UTF-8 does not have.
    """
    text = json.dumps(body)
    return Response(text, status, headers, media_type="application/json")


async def refuse_argument(request: Request, error: Exception) -> Response:
    """Answer a request that failed."""
    status, body = refusal_of(error)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    return respond(status, body, headers)


async def refuse_fields(request: Request, error: Exception) -> Response:
    """Answer a request whose body or query is not what the endpoint takes."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    is_of_body = any(fault["loc"][0] == "body" for fault in found)
    if is_of_body and content_type.lower() != "application/json":
        message = "The body must be JSON, of Content-Type application/json."
        return respond(415, error_body(415, message))
    told = [_fault(fault) for fault in found[:MAX_TOLD]]
    if len(found) > MAX_TOLD:
        told.append(f"and {len(found) - MAX_TOLD} more")
    return respond(400, error_body(400, "; ".join(told), _field(found[0])))


async def refuse_route(request: Request, error: Exception) -> Response:
    """Answer what no endpoint takes: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, str(error.detail))
    return respond(error.status_code, body, error.headers)


async def refuse_crash(request: Request, error: Exception) -> Response:
    """Answer a request that met a fault of ours; the log has its traceback."""
    return respond(*refusal_of(error))


def _field(fault: Mapping[str, Any]) -> str | None:
    """Name the field at fault, as "messages.0.role".

    Which of several types pydantic tried there, as "prompt.list[str]", is left out.
    """
    if fault["type"] == "json_invalid":
        return None
    error = fault.get("ctx", {}).get("error")
    if isinstance(error, FieldError):
        return error.field or None
    parts = map(str, fault["loc"][1:])
    return ".".join(one for one in parts if one != "str" and "[" not in one) or None


def _fault(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        return f"The body is no JSON: {fault['ctx']['error']} at {fault['loc'][-1]}"
    field = _field(fault)
    message = fault["msg"].removeprefix("Value error, ")
    return message if field is None else f"{field}: {message}"


def add_refusals(app: FastAPI) -> None:
    """Have every failure told in one form."""
    app.add_exception_handler(RequestValidationError, refuse_fields)
    app.add_exception_handler(HTTPException, refuse_route)
    expected = (ArgumentError, ModelNotFoundError, ResponseNotFoundError)
    expected += (OverloadedError, TimeLimitError)
    for kind in (*expected, EngineDeadError, EngineGenerateError):
        app.add_exception_handler(kind, refuse_argument)
    app.add_exception_handler(Exception, refuse_crash)

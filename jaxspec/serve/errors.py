"""Owns error responses: vLLM's error JSON, and the HTTP status."""

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jaxspec.errors import (
    ArgumentError,
    EngineDeadError,
    EngineGenerateError,
    RetryableRequestError,
)
from jaxspec.serve.requests.protocol import FieldError
from jaxspec.serve.response_store import ResponseNotFoundError

_log = logging.getLogger(__name__)

# Maximum number of invalid fields that one error message lists.
MAX_REPORTED_FAULTS = 5
# Maximum characters of an error message, which may quote a long request.
MAX_MESSAGE = 2000
# Folders of an absolute path, before its last name. Not of URLs ("http://a/b"), JSON
# pointers ("#/a/b") or our endpoints ("/v1/a").
_FOLDERS = re.compile(r"(?<![\w:/.#])/(?!v1/)(?:[\w.@+~-]+/)+(?=[\w.@+~-])")
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Types of Anthropic's API; other statuses are "invalid_request_error" below 500, else
# "api_error".
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ModelNotFoundError(Exception):
    """A request names a model that is not served."""


class OverloadedError(Exception):
    """The queue is full.

    Attributes:
        retry_after_s: Seconds after which the client should retry.
    """

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimeLimitError(Exception):
    """A request took longer than `max_request_s`."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error JSON."""
    kind = _TYPES.get(status) or HTTPStatus(status).phrase
    error = {"message": _cut(message), "type": kind, "param": param and _cut(param)}
    error["code"] = status
    return {"error": error}


def anthropic_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Anthropic's error JSON for an error in vLLM's form."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    default = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": str(message)}}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last names: folders are the server's own."""
    return _FOLDERS.sub("", text)


def status_and_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body of an error's response."""
    match error:
        case ArgumentError():
            # Also for UnsupportedError. Not 501, because the server can serve other
            # requests.
            message = without_folders(str(error))
            return 400, error_body(400, message, error.parameter)
        case ModelNotFoundError():
            return 404, error_body(404, str(error), "model")
        case ResponseNotFoundError():
            return 404, error_body(404, str(error), "response_id")
        case OverloadedError() | RetryableRequestError():
            return 503, error_body(503, without_folders(str(error)))
        case TimeLimitError():
            return 504, error_body(504, str(error))
        case EngineDeadError() | EngineGenerateError():
            return 500, error_body(500, without_folders(str(error)))
    # Internal details go to the log, not to clients.
    return 500, error_body(500, "Internal server error; see the server's log.")


def respond(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Make the response with an error's JSON.

    The text is ASCII: a message may quote a lone surrogate, which UTF-8 cannot encode.
    """
    text = json.dumps(body)
    return Response(text, status, headers, media_type="application/json")


async def refuse_argument(request: Request, error: Exception) -> Response:
    """Respond to a request that failed with an expected error."""
    status, body = status_and_body(error)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    return respond(status, body, headers)


async def refuse_fields(request: Request, error: Exception) -> Response:
    """Respond to a request whose body or query does not fit the endpoint's schema."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    is_of_body = any(fault["loc"][0] == "body" for fault in found)
    if is_of_body and content_type.lower() != "application/json":
        message = "The body must be JSON, of Content-Type application/json."
        return respond(415, error_body(415, message))
    messages = [_fault(fault) for fault in found[:MAX_REPORTED_FAULTS]]
    if len(found) > MAX_REPORTED_FAULTS:
        messages.append(f"and {len(found) - MAX_REPORTED_FAULTS} more")
    return respond(400, error_body(400, "; ".join(messages), _field(found[0])))


async def refuse_route(request: Request, error: Exception) -> Response:
    """Respond to an `HTTPException`, such as an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, str(error.detail))
    return respond(error.status_code, body, error.headers)


async def refuse_crash(request: Request, error: Exception) -> Response:
    """Respond to a request that met an unexpected error; the log has its traceback."""
    return respond(*status_and_body(error))


def _field(fault: Mapping[str, Any]) -> str | None:
    """Return the field at fault: "messages.0.role" of the body, or "query.level".

    Leaves out names of types, such as "list[str]", which pydantic adds to the path for
    a union.
    """
    if fault["type"] == "json_invalid":
        return None
    error = fault.get("ctx", {}).get("error")
    if isinstance(error, FieldError):
        return error.field or None
    is_of_query = fault["loc"][0] == "query"
    parts = map(str, fault["loc"][0 if is_of_query else 1 :])
    return ".".join(one for one in parts if one != "str" and "[" not in one) or None


def _fault(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        reason, position = fault["ctx"]["error"], fault["loc"][-1]
        return f"The body is not valid JSON: {reason} at {position}"
    field = _field(fault)
    message = fault["msg"].removeprefix("Value error, ")
    return message if field is None else f"{field}: {message}"


def add_error_handlers(app: FastAPI) -> None:
    """Register the handlers that turn every error into vLLM's error JSON."""
    app.add_exception_handler(RequestValidationError, refuse_fields)
    app.add_exception_handler(HTTPException, refuse_route)
    expected = (ArgumentError, ModelNotFoundError, ResponseNotFoundError)
    expected += (OverloadedError, RetryableRequestError, TimeLimitError)
    for kind in (*expected, EngineDeadError, EngineGenerateError):
        app.add_exception_handler(kind, refuse_argument)
    app.add_exception_handler(Exception, refuse_crash)

"""Answers a chat with a server that has OpenAI's API."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from jaxspec.bench.client import data_of
from jaxspec.cli.chat_backend import BackendError, Fields, Message, Part, Parts
from jaxspec.cli.terminal import Piece
from jaxspec.command_line import bearer
from jaxspec.errors import ArgumentError
from jaxspec.outputs import DRAFTED

# Seconds to wait for a server's response when checking that it runs.
CHECK_S = 10
# Errors of connections, and of parsing responses that are not in OpenAI's format.
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)


class ServerBackend:
    """Answers with a server that has OpenAI's API, ours or another."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None):
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = f"{self._base}/chat/completions"
        self._own: Fields = {"stream": True, "include_metrics": True}
        self._own["return_token_origins"] = True
        if model is not None:
            self._own["model"] = model
        self._headers = bearer(api_key)

    def check(self) -> None:
        """Check that the server responds, before the user types anything.

        Raises:
            ArgumentError: It does not respond, or refuses the API key.
        """
        models = f"{self._base}/models"
        try:
            response = httpx.get(models, headers=self._headers, timeout=CHECK_S)
        except _BROKEN as error:
            reason = str(error).rstrip(".") or repr(error)
            raise ArgumentError(
                f"No server responds at {self._base}: {reason}. Start one "
                "(python -m jaxspec serve), or correct --url, for example to "
                "http://127.0.0.1:8000."
            ) from error
        if response.status_code in (401, 403):
            reason = _reason(response)
            raise ArgumentError(
                f"The server at {self._base} refuses the key: {reason}. Give the right "
                "one with --api-key, or in OPENAI_API_KEY."
            )

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        body = self._own | fields | {"messages": messages}
        given: dict[str, Any] = {"json": body, "headers": self._headers}
        try:
            with httpx.stream("POST", self._url, timeout=None, **given) as response:
                if response.is_error:
                    raise BackendError(_reason(response))
                for data in data_of(response):
                    if data != "[DONE]":
                        yield from _parts_in(json.loads(data))
        except _BROKEN as error:
            raise BackendError(f"{self._url}: {error!r}") from error

    def close(self) -> None:
        """Do nothing, because no connection is open between requests."""


def _parts_in(chunk: dict[str, Any]) -> Iterator[Part]:
    if "error" in chunk:
        raise BackendError(chunk["error"]["message"])
    if not chunk["choices"] and "metrics" in chunk:
        yield Part(metrics=chunk["metrics"])
    for choice in chunk["choices"]:
        text = choice["delta"].get("content") or ""
        pieces = [Piece(text, False)]
        if "token_origins" in choice:
            origins = choice["token_origins"]
            pieces = [Piece(one["text"], one["origin"] in DRAFTED) for one in origins]
        yield Part(pieces=pieces, finish_reason=choice["finish_reason"])


def _reason(response: httpx.Response) -> str:
    """Return the message of an error response, in vLLM's or any other format."""
    try:
        error = json.loads(response.read())["error"]
    except (ValueError, KeyError, TypeError):
        return f"{response.url}: {response.status_code} {response.reason_phrase}"
    return error["message"] if isinstance(error, dict) else str(error)

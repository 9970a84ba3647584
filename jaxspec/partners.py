"""Owns who answers in `python -m jaxspec chat`: an engine of its own, or a server."""

import contextlib
import itertools
import json
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import httpx

from jaxspec.bench.connection import data_of
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.serve.usage import request_metrics
from jaxspec.terminal import Piece, pieces_of

Message = dict[str, str]
# How an answer is asked for, in the names of the server's API.
Fields = dict[str, Any]


# No connection, one that breaks off, an answer that is not OpenAI's.
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)


class PartnerError(Exception):
    """The server gave no answer, or said why not."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is new of an answer.

    Attributes:
        finish_reason: Of the last part.
        metrics: Of the last part: the server's `metrics`, where it tells them.
    """

    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: dict[str, Any] | None = None


Parts = Generator[Part, None, None]


@runtime_checkable
class Partner(Protocol):
    """Answers conversations."""

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        """Answer the last message; leaving early ends the request.

        Raises:
            ArgumentError: The engine refuses it.
            PartnerError: The server refuses it or cannot be reached.
        """
        ...

    def close(self) -> None: ...


class EnginePartner:
    """Answers by an engine in this process."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._numbers = itertools.count()

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        given = dict(fields)
        extra = {"return_token_origins": True}
        extra["num_speculative_tokens"] = given.pop("num_speculative_tokens", None)
        params = SamplingParams(
            **given, extra_args=extra, output_kind=RequestOutputKind.DELTA
        )
        text, token_ids = self._engine.tokenizer.write_chat(messages)
        name = f"chat-{next(self._numbers)}"
        prompt: Any = {"prompt": text, "prompt_token_ids": token_ids}
        self._engine.add_request(name, prompt, params)
        try:
            while self._engine.has_unfinished_requests():
                with _interrupt_postponed():
                    outputs = self._engine.step()
                yield from map(_part_of, outputs)
        finally:
            self._engine.abort_request(name)

    def close(self) -> None:
        self._engine.shutdown()


def _part_of(output: RequestOutput) -> Part:
    (completion,) = output.outputs
    metrics = None
    if output.finished:
        metrics = request_metrics(output, has_drafts=True, has_times=True)
    return Part(
        pieces=pieces_of(completion),
        finish_reason=completion.finish_reason,
        metrics=metrics,
    )


@contextlib.contextmanager
def _interrupt_postponed() -> Iterator[None]:
    """Raise what Ctrl-C raises after a step: within one it would break the engine."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


class ServerPartner:
    """Answers by a server that speaks OpenAI's API, ours or another."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None):
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._own: Fields = {"stream": True, "include_metrics": True}
        self._own["return_token_origins"] = True
        if model is not None:
            self._own["model"] = model
        self._headers = {}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        body = self._own | fields | {"messages": messages}
        given: dict[str, Any] = {"json": body, "headers": self._headers}
        try:
            with httpx.stream("POST", self._url, timeout=None, **given) as response:
                if response.is_error:
                    raise PartnerError(_reason(response))
                for data in data_of(response):
                    if data != "[DONE]":
                        yield from _parts_in(json.loads(data))
        except _BROKEN as error:
            raise PartnerError(f"{self._url}: {error!r}") from error

    def close(self) -> None:
        """Do nothing: every answer has a connection of its own."""


def _parts_in(chunk: dict[str, Any]) -> Iterator[Part]:
    if "error" in chunk:
        raise PartnerError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        text = choice["delta"].get("content") or ""
        pieces = [Piece(text, False)]
        if "token_origins" in choice:
            told = choice["token_origins"]
            pieces = [Piece(one["text"], one["origin"] == "draft") for one in told]
        yield Part(
            pieces=pieces,
            finish_reason=choice["finish_reason"],
            metrics=chunk.get("metrics"),
        )


def _reason(response: httpx.Response) -> str:
    """What a server says of a failure, in vLLM's form or in another."""
    try:
        told = json.loads(response.read())["error"]
    except (ValueError, KeyError, TypeError):
        return f"{response.url}: {response.status_code} {response.reason_phrase}"
    return told["message"] if isinstance(told, dict) else str(told)

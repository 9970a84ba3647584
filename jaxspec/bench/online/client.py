"""Owns one streamed request to a server with OpenAI's API, and its times."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter as now
from typing import Any

import httpx

from jaxspec.bench.data import Prompt
from jaxspec.bench.online.connection import Address, Events, HttpError, request

CHAT_ENDING = "/chat/completions"


@dataclass(kw_only=True)
class Answer:
    """What came of one request.

    Attributes:
        ttft_s: From the request to the first piece of text.
        inter_token_s: From each piece to the next; a piece may hold several tokens.
        latency_s: From the request to the last piece.
        num_output_tokens: As the server counts them, or the pieces where it does not.
        error: Why it failed; "" if it did not.
        status: Of an answer that is an error.
    """

    start_s: float = 0.0
    ttft_s: float = 0.0
    inter_token_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""
    status: int | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None of one token."""
        gaps = self.num_output_tokens - 1
        return (self.latency_s - self.ttft_s) / gaps if gaps > 0 else None

    def times(self) -> list[float]:
        """When each piece came."""
        found = [self.start_s + self.ttft_s]
        for gap in self.inter_token_s:
            found.append(found[-1] + gap)
        return found


@dataclass(frozen=True, kw_only=True)
class Client:
    """Asks one endpoint of one server.

    Attributes:
        fields: In every request: the model, sampling.
    """

    address: Address
    endpoint: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for a prompt; usage is asked for, as it counts the tokens."""
        asked: dict[str, Any] = {"prompt": prompt.text}
        if self.endpoint.endswith(CHAT_ENDING):
            asked = {"messages": [{"role": "user", "content": prompt.text}]}
        own = {"stream": True, "stream_options": {"include_usage": True}}
        return {**asked, **own, **self.fields}

    async def ask(self, prompt: Prompt) -> Answer:
        """Send one request and read its answer to the end; failures are in it."""
        answer = Answer(start_s=now())
        try:
            async with request(
                self.address,
                self.endpoint,
                body=self.body(prompt),
                headers=self.headers,
            ) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    answer.status = response.status_code
                    answer.error = f"status {answer.status}: {said}"
                else:
                    await _read(response, answer)
        except HttpError as error:
            answer.error = str(error)
        except asyncio.CancelledError:
            answer.error = "cancelled"
            raise
        return answer


async def _data_of(response: httpx.Response) -> AsyncIterator[str]:
    events = Events()
    async for piece in response.aiter_raw():
        for data in events.read(piece):
            yield data


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Take in a stream of events."""
    num_pieces, is_done, last_s = 0, False, answer.start_s
    async for data in _data_of(response):
        now_s = now()
        if data == "[DONE]":
            is_done = True
            break
        told = json.loads(data)
        if not isinstance(told, dict):
            raise HttpError(f"not an answer of OpenAI's API: {data[:200]!r}")
        if "error" in told:
            answer.error = json.dumps(told["error"])
            return
        usage = told.get("usage") or {}
        answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
        answer.num_output_tokens = usage.get(
            "completion_tokens", answer.num_output_tokens
        )
        for choice in told.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if not text:
                continue
            answer.text += text
            num_pieces += 1
            if num_pieces == 1:
                answer.ttft_s = now_s - answer.start_s
            else:
                answer.inter_token_s.append(now_s - last_s)
            last_s = now_s
    answer.latency_s = last_s - answer.start_s
    answer.num_output_tokens = answer.num_output_tokens or num_pieces
    if not is_done:
        answer.error = "the stream broke off"
    elif not num_pieces:
        answer.error = "the answer holds no text"

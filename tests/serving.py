"""The server's application over a device of plain Python, asked as clients ask."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.serve.app import make_app
from jaxspec.serve.settings import ServerSettings
from tests.engine.test_async_llm_engine import serve
from tests.engine.test_llm_engine import letters
from tests.engines import StubTokenizer

# What the model says after a prompt of three tokens is `letters(said(count))`.
PROMPT = letters([2, 3, 4])
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


class TurnsTokenizer(StubTokenizer):
    """Writes a conversation as the text of its last message."""

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], **_: Any
    ) -> tuple[str, list[int]]:
        text = messages[-1]["content"]
        return text, self.encode(text)


def serve_http(
    ask: Ask,
    *,
    settings: dict[str, Any] | None = None,
    delay_s: float = 0.0,
    break_at: int | None = None,
    **changes: Any,
) -> None:
    """Let a client ask; afterwards nothing may be left of its requests.

    Args:
        settings: Of the server.
        break_at: The launch, counted from 0, that fails, and fails again without
            drafts; all before it take a while.
        changes: Of the engine's config.
    """

    async def use(engine: AsyncLLMEngine) -> None:
        engine.engine.tokenizer = TurnsTokenizer(16)
        if break_at is not None:
            _break(engine.engine.runner, break_at)
        app = make_app(engine, ServerSettings(**(settings or {})))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        url = "http://server"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            await ask(client)
        assert app.state.serving.admission.num_requests == 0

    serve(use, delay_s=delay_s, **changes)


def _break(runner: Any, number: int) -> None:
    launch, count = runner.launch, 0

    def broken(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count - number in (1, 2):
            raise RuntimeError("boom")
        return launch(*arguments)

    runner.launch = broken


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """Ask and expect an answer; a stream comes as a list of its events."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return events_of(response.text) if body.get("stream") else response.json()


def events_of(text: str) -> list[Any]:
    """Read a stream, which must end as OpenAI's do."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Read an error, which must have vLLM's form."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, kind)
    return error

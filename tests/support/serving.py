"""Run the server's application with a fake device, and HTTP clients for it."""

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.logprobs import Logprob
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.serve.app import make_app
from jaxspec.serve.response_store import ResponseStore
from jaxspec.serve.serving import Serving
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from tests.support.fake_engines import (
    assert_idle,
    before_launches,
    letters,
    make_fake_engine,
    serve,
)
from tests.support.stub_tokenizer import StubTokenizer, TurnsTokenizer

# After a prompt of three tokens, the model's text is `letters(said(count))`.
ROOT = Path(__file__).parents[2]
PROMPT = letters([2, 3, 4])
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


def serve_http(
    ask: Ask,
    *,
    settings: dict[str, Any] | None = None,
    delay_s: float = 0.0,
    break_at: int | None = None,
    **changes: Any,
) -> None:
    """Run a client against a server; assert afterwards that no requests remain.

    Args:
        settings: Settings of the server.
        break_at: Index of a launch that fails, also when it is retried without drafts;
            launches before it are delayed.
        changes: Changed fields of the engine's config.
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


class Gate:
    """Blocks the compilations of an idle engine until a test releases them one by one.

    A test must release all in the end, so that the compile thread can end.
    """

    def __init__(self, engine: LLMEngine):
        self._passes = threading.Semaphore(0)
        runner: Any = engine.runner
        runner.compiler = Compiler(lambda shape: self._passes.acquire())
        runner.compiles_in_background = True
        engine.scheduler = engine._make_scheduler()

    def let(self, count: int = 1) -> None:
        self._passes.release(count)

    def open(self) -> None:
        self.let(1000)


class Site:
    """A server in a thread that can be stopped and restarted on the same port.

    Attributes:
        delay_s: Seconds that every launch takes in addition.
        thread: Thread of the server; the engine has another.
    """

    def __init__(
        self,
        engine_changes: Mapping[str, Any],
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ):
        engine, runner = make_fake_engine(num_draft_tokens=3, **engine_changes)
        engine.tokenizer = tokenizer or TurnsTokenizer(16)
        self.delay_s = 0.0
        before_launches(runner, lambda: time.sleep(self.delay_s))
        self.engine = AsyncLLMEngine(engine)
        self._port = 0
        self.start(**settings)

    def start(self, **settings: Any) -> None:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", self._port))
        self._port = bound.getsockname()[1]
        self.address = bound.getsockname()
        self.url = f"http://127.0.0.1:{self._port}/"
        self.app = make_app(self.engine, ServerSettings(**settings))
        # When the server stops, it interrupts streams.
        config = uvicorn.Config(
            self.app, log_level="error", timeout_graceful_shutdown=0, ws="none"
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self._server.run, args=([bound],), daemon=True
        )
        self.thread.start()
        while not self._server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def site_of(
    engine_changes: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[Site]:
    """Run a server on its own port; assert at the end that no requests remain.

    Args:
        engine_changes: Changed fields of the configuration of the engine.
        settings: Settings of the server, or a `tokenizer` for prompts.
    """
    site = Site(engine_changes or {}, **settings)
    try:
        yield site
    finally:
        site.stop()
        site.engine.shutdown(10)
    assert_idle(site.engine.engine)
    assert site.app.state.serving.admission.num_requests == 0


def _break(runner: Any, number: int) -> None:
    numbers = itertools.count()

    def fail() -> None:
        if next(numbers) - number in (0, 1):
            raise RuntimeError("boom")

    before_launches(runner, fail)


class Client(httpx.Client):
    """A client of a `Site`, with checks of the responses."""

    def __init__(self, site: Site):
        # After an unexpected error, the server closes the connection.
        headers = {"Connection": "close"}
        super().__init__(base_url=site.url, timeout=60, headers=headers)
        self.site = site

    def ask(self, path: str, **body: Any) -> Any:
        """Send a request that must succeed; return a stream as a list of its events."""
        response = self.post(path, json=body)
        assert response.status_code == 200, response.text
        return events_of(response.text) if body.get("stream") else response.json()

    def refusal(
        self,
        path: str,
        body: Mapping[str, Any],
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> dict[str, Any]:
        """Send a request that must be refused; return the error."""
        return error_of(self.post(path, json=body), status, kind)


@contextlib.contextmanager
def server(
    engine_changes: Mapping[str, Any] | None = None,
    *,
    delay_s: float = 0.0,
    break_at: int | None = None,
    **settings: Any,
) -> Iterator[Client]:
    """Run a server and a client of it; arguments are those of `serve_http`."""
    with site_of(engine_changes, **settings) as site, Client(site) as client:
        site.delay_s = delay_s
        if break_at is not None:
            _break(site.engine.engine.runner, break_at)
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """Send a request that must succeed; return a stream as a list of its events."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return events_of(response.text) if body.get("stream") else response.json()


def events_of(text: str) -> list[Any]:
    """Parse a stream, which must end with "[DONE]" like OpenAI's; return its events."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Parse an error, which must have the fields of vLLM's."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, kind)
    # Clients must not see the server's folders.
    assert str(ROOT) not in error["message"]
    return error


_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


def openai_of(http: Client) -> openai.OpenAI:
    """Return OpenAI's client, which sends its requests with another client."""
    given: dict[str, Any] = {"http_client": http, "base_url": f"{http.base_url}v1"}
    return openai.OpenAI(api_key="x", max_retries=0, **given)


def client_of(http: Any) -> openai.AsyncOpenAI:
    """Return OpenAI's client, which sends its requests with another client."""
    return openai.AsyncOpenAI(
        base_url=f"{http.base_url}/v1", api_key="x", http_client=http, max_retries=0
    )


def checked(received: Any) -> Any:
    """Validate a response or event: OpenAI's client builds its types without checks."""
    content = received if isinstance(received, dict) else received.model_dump()
    response = content.get("response", content)
    if response.get("usage"):
        # The engine does not count how many tokens it writes to the prefix cache.
        response["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    kind = _EVENT if "sequence_number" in content else _RESPONSE
    return kind.validate_python(content)


class StubServing(Serving):
    """A `Serving` without an engine, for tests of response writers."""

    def __init__(self, **settings: Any):
        self.settings, self.tokenizer = ServerSettings(**settings), StubTokenizer(16)
        self.responses = ResponseStore(None, 0)


def output(tokens: list[int], *, is_first: bool, is_last: bool) -> RequestOutput:
    """Make part of a text; the log-probability of each token is its negative id."""
    completion = CompletionOutput(
        index=0,
        text=letters(tokens),
        token_ids=tokens,
        logprobs=[{one: Logprob(-float(one), 1, letters([one]))} for one in tokens],
        finish_reason="length" if is_last else None,
    )
    of_prompt = [None, *({token: Logprob(-float(token), 1)} for token in (3, 4))]
    return RequestOutput(
        request_id="x",
        prompt=PROMPT,
        prompt_token_ids=[2, 3, 4],
        prompt_logprobs=of_prompt if is_first else None,
        outputs=[completion],
        finished=is_last,
    )

"""An engine in this process and a server give a chat equal results."""

import os
import signal
from typing import Any

import httpx
import pytest

from jaxspec.cli.chat import BackendError, EngineBackend, Part, ServerBackend, _parts_in
from jaxspec.errors import ArgumentError, RequestError
from tests.serve.test_launcher import served
from tests.support.fake_engines import assert_idle, letters, make_fake_engine, said
from tests.support.serving import PROMPT, TurnsTokenizer, site_of

MESSAGES = [{"role": "user", "content": PROMPT}]
FIELDS = {"max_tokens": 20, "temperature": 0.0}


def engine_backend() -> EngineBackend:
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    return EngineBackend(engine)


def text_of(parts: list[Part]) -> str:
    return "".join(piece.text for part in parts for piece in part.pieces)


def check(parts: list[Part]) -> None:
    """Check the parts that a backend yields: a text with its drafts, then metrics."""
    assert text_of(parts) == letters(said(20))
    last = parts[-1]
    # The last part from a server has only metrics.
    assert [part.finish_reason for part in parts[-2:] if part.finish_reason] == [
        "length"
    ]
    assert not any(part.finish_reason for part in parts[:-2])
    assert last.metrics is not None
    counts = last.metrics["speculative_decoding"]
    green = sum(piece.is_draft for part in parts for piece in part.pieces)
    # The last round may have accepted one draft more than max_tokens allows.
    assert 0 <= counts["num_accepted_draft_tokens"] - green <= 3
    assert green > 3
    assert last.metrics["tokens_per_second"] > 0


def test_engine_backend():
    backend = engine_backend()
    check(list(backend.answer(MESSAGES, FIELDS)))
    # The backend gets several requests with different K.
    parts = list(backend.answer(MESSAGES, FIELDS | {"num_speculative_tokens": 0}))
    assert text_of(parts) == letters(said(20))
    assert not any(piece.is_draft for part in parts for piece in part.pieces)
    with pytest.raises(RequestError, match="temperature"):
        list(backend.answer(MESSAGES, {"temperature": 9}))
    assert_idle(backend._engine)


def test_engine_is_idle_after_abandoned_or_interrupted_answer():
    backend = engine_backend()
    parts = backend.answer(MESSAGES, FIELDS)
    next(parts)
    parts.close()
    step, seen = backend._engine.step, []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        seen.append(step())
        return seen[-1]

    backend._engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(backend.answer(MESSAGES, FIELDS))
    assert len(seen) == 1, "a step runs to its end"
    backend._engine.step = step
    check(list(backend.answer(MESSAGES, FIELDS)))
    assert_idle(backend._engine)


def test_server_backend():
    def ask(client: httpx.Client) -> None:
        url = str(client.base_url)
        client.get("/health")  # returns when the server listens
        for name in (url, f"{url}/v1", f"{url}/v1/"):
            backend = ServerBackend(name, model="m", api_key="any")
            check(list(backend.answer(MESSAGES, FIELDS)))
            backend.check()
        other = ServerBackend(url, model="other", api_key=None)
        with pytest.raises(BackendError, match="The model `other` does not exist"):
            list(other.answer(MESSAGES, FIELDS))
        with pytest.raises(BackendError, match="404 Not Found|Not Found"):
            list(ServerBackend(f"{url}/x", model=None, api_key=None).answer([], {}))
        with pytest.raises(BackendError, match="temperature must be"):
            list(backend.answer(MESSAGES, {"temperature": 9}))
        os.kill(os.getpid(), signal.SIGTERM)

    assert served(ask, timeout_s=30, delay_s=0) == 0


def test_failing_server(monkeypatch: pytest.MonkeyPatch):
    def ask(client: httpx.Client) -> None:
        client.get("/health")
        backend = ServerBackend(str(client.base_url), model=None, api_key=None)
        with pytest.raises(BackendError, match="boom"):
            list(backend.answer(MESSAGES, FIELDS))
        os.kill(os.getpid(), signal.SIGTERM)

    def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr("tests.support.fake_device.FakeRunner.launch", broken)
    assert served(ask, timeout_s=30, delay_s=0) == 0


def test_failure_within_answer():
    chunk = {"error": {"message": "boom"}}
    with pytest.raises(BackendError, match="boom"):
        list(_parts_in(chunk))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[::"])
def test_missing_server(url: str):
    backend = ServerBackend(url, model=None, api_key=None)
    with pytest.raises(BackendError, match="v1/chat/completions"):
        next(backend.answer(MESSAGES, {}))
    with pytest.raises(ArgumentError, match="No server responds at .*/v1: .*--url"):
        backend.check()


def test_server_check():
    with site_of(api_keys=("secret",)) as site:
        ServerBackend(site.url, model=None, api_key="secret").check()
        for key in (None, "other"):
            with pytest.raises(ArgumentError, match="refuses the key.*--api-key"):
                ServerBackend(site.url, model=None, api_key=key).check()
        # Not every server has the endpoint /v1/models.
        ServerBackend(f"{site.url}x", model=None, api_key="secret").check()

"""An engine in this process and a server give a chat equal results."""

import signal
from typing import Any

import pytest

from jaxspec.cli.chat import EngineBackend
from jaxspec.cli.chat_backend import BackendError, Part
from jaxspec.cli.chat_server import ServerBackend, _parts_in
from jaxspec.errors import ArgumentError, RequestError
from tests.support.fake_engines import assert_idle, letters, make_fake_engine, said
from tests.support.serving import MESSAGES, TurnsTokenizer, site_of

FIELDS = {"max_tokens": 20, "temperature": 0.0}


@pytest.fixture
def backend() -> EngineBackend:
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    return EngineBackend(engine)


def at(url: str, model: str | None = None, api_key: str | None = None) -> ServerBackend:
    return ServerBackend(url, model=model, api_key=api_key)


def text_of(parts: list[Part]) -> str:
    return "".join(piece.text for part in parts for piece in part.pieces)


def check(parts: list[Part]) -> None:
    """Check the parts that a backend yields: a text with its drafts, then metrics."""
    assert text_of(parts) == letters(said(20))
    # The last part from a server has only metrics.
    reasons = [part.finish_reason for part in parts]
    assert [one for one in reasons[-2:] if one] == ["length"]
    assert not any(reasons[:-2])
    metrics = parts[-1].metrics
    assert metrics is not None
    counts = metrics["speculative_decoding"]
    green = sum(piece.is_draft for part in parts for piece in part.pieces)
    # The last round may have accepted one draft more than max_tokens allows.
    assert 0 <= counts["num_accepted_draft_tokens"] - green <= 3
    assert green > 3
    assert metrics["tokens_per_second"] > 0


def test_engine_backend_yields_text_and_drafts(backend: EngineBackend):
    check(list(backend.answer(MESSAGES, FIELDS)))
    parts = list(backend.answer(MESSAGES, FIELDS | {"num_speculative_tokens": 0}))
    assert text_of(parts) == letters(said(20))
    assert not any(piece.is_draft for part in parts for piece in part.pieces)
    with pytest.raises(RequestError, match="temperature"):
        list(backend.answer(MESSAGES, {"temperature": 9}))
    assert_idle(backend._engine)


def test_engine_is_idle_after_abandoned_or_interrupted_answer(backend: EngineBackend):
    parts = backend.answer(MESSAGES, FIELDS)
    next(parts)
    parts.close()
    engine: Any = backend._engine
    step, seen = engine.step, []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        seen.append(step())
        return seen[-1]

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(backend.answer(MESSAGES, FIELDS))
    assert len(seen) == 1, "a step runs to its end"
    engine.step = step
    check(list(backend.answer(MESSAGES, FIELDS)))
    assert_idle(engine)


def test_compile_notes_are_not_within_answers(backend: EngineBackend, capsys: Any):
    parts = backend.answer(MESSAGES, FIELDS)
    backend.show_compile("first")
    next(parts)
    backend.show_compile("within")
    parts.close()
    backend.show_compile("after")
    assert capsys.readouterr().err == "[first]\n[after]\n"


def test_server_backend_yields_text_and_drafts():
    with site_of() as site:
        url = site.url[:-1]
        for name in (url, f"{url}/v1", f"{url}/v1/"):
            backend = at(name, model="model", api_key="any")
            check(list(backend.answer(MESSAGES, FIELDS)))
            backend.check()
        for other, fields, message in (
            (at(url, model="other"), FIELDS, "The model `other` does not exist"),
            (at(f"{url}/x"), {}, "Not Found"),
            (at(url), {"temperature": 9}, "temperature must be"),
        ):
            with pytest.raises(BackendError, match=message):
                list(other.answer(MESSAGES, fields))

        def broken(*_: Any) -> Any:
            raise RuntimeError("boom")

        runner: Any = site.engine.engine.runner
        runner.launch = broken
        with pytest.raises(BackendError, match="boom"):
            list(backend.answer(MESSAGES, FIELDS))
    with pytest.raises(BackendError, match="boom"):
        list(_parts_in({"error": {"message": "boom"}}))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[::"])
def test_missing_server_is_reported(url: str):
    with pytest.raises(BackendError, match="v1/chat/completions"):
        next(at(url).answer(MESSAGES, {}))
    with pytest.raises(ArgumentError, match="No server responds at .*/v1: .*--url"):
        at(url).check()


def test_server_with_another_key_is_rejected():
    with site_of(api_keys=("secret",)) as site:
        at(site.url, api_key="secret").check()
        for key in (None, "other"):
            with pytest.raises(ArgumentError, match="refuses the key.*--api-key"):
                at(site.url, api_key=key).check()
        # Not every server has the endpoint /v1/models.
        at(f"{site.url}x", api_key="secret").check()

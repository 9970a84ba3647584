"""Batch files: the server's responses in order, errors by line, invalid files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec import __main__ as command_line
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.serve import batch
from tests.support.fake_engines import make_fake_engine
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Client,
    TurnsTokenizer,
)

LONG: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 40}
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2}


def line(custom_id: object, url: str, body: object, method: str = "POST") -> str:
    given = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps(given)


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Return a function that runs a file of lines: exit code, output, messages."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def make(args: object) -> AsyncLLMEngine:
        engine, _ = make_fake_engine(num_draft_tokens=3)
        engine.tokenizer = TurnsTokenizer(16)
        return AsyncLLMEngine(engine)

    monkeypatch.setattr(batch.AsyncLLMEngine, "from_engine_args", make)

    def run_lines(lines: list[str], *flags: str, target: Path = target):
        source.write_text("\n".join(lines))
        files = ("-i", str(source), "-o", str(target))
        names = ("--served-model-name", "model")
        code = command_line.main(["run-batch", *files, *names, *flags])
        found = []
        if target.is_file():
            found = [json.loads(one) for one in target.read_text().splitlines()]
        printed = capsys.readouterr()
        return code, found, printed.out + printed.err

    return run_lines


def test_responses_are_the_servers_in_order(run, http: Client):
    asked = [("long", CHAT, LONG), *((str(at), COMPLETIONS, SHORT) for at in range(5))]
    code, found, printed = run([line(*one) for one in asked])
    assert code == 0
    assert "6 requests, 0 of them with errors" in printed
    assert "Running batch" not in printed, "drawn on a terminal only"
    assert [one["custom_id"] for one in found] == [one[0] for one in asked]
    assert len({one["id"] for one in found}) == 6
    for one, (_, path, body) in zip(found, asked, strict=True):
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        expected = http.ask(path, **body)
        for answer in (expected, one["response"]["body"]):
            for name in ("id", "created", "timings"):
                del answer[name]
        assert one["response"]["body"] == expected


def test_errors_are_in_their_lines(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")  # for servers only
    wrong = [
        (COMPLETIONS, SHORT | {"temperature": -1}, 400, "temperature"),
        (COMPLETIONS, SHORT | {"model": "other"}, 404, "does not exist"),
        (CHAT, {}, 400, "messages"),
        (CHAT, LONG | {"stream": True}, 400, "stream mode"),
        (CHAT, LONG | {"echo": float("nan")}, 400, "echo"),
        ("/v1/embeddings", {"input": "x"}, 400, "does not support Embeddings"),
        ("/v1/files", {}, 400, f"URL /v1/files was used. .*{CHAT}, {COMPLETIONS}"),
    ]
    lines = [line(str(at), *one[:2]) for at, one in enumerate(wrong)]
    code, found, printed = run([*lines, "", line("last", COMPLETIONS, SHORT)])
    assert code == 0
    assert f"8 requests, {len(wrong)} of them with errors" in printed
    assert found[-1]["error"] is None
    for one, (*_, status, text) in zip(found, wrong, strict=False):
        assert one["response"]["status_code"] == status
        assert one["response"]["body"] is None
        assert re.search(text, json.dumps(one["error"]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("1", CHAT, LONG), "{"], "Line 2 .* not valid JSON"),
        (["[]"], r"Line 1 .* not an object"),
        ([line(1, CHAT, LONG)], "custom_id must be a string, got 1"),
        ([line("1", CHAT, "x")], "body must be an object, got 'x'"),
        ([line("1", CHAT, LONG, "GET")], "method must be 'POST', got 'GET'"),
        ([line("1", CHAT, LONG)] * 2, "Line 2 .* custom_id '1' is already"),
        (["", " "], "at least one request"),
    ],
)
def test_invalid_file_is_refused_before_the_engine(run, monkeypatch, lines, message):
    monkeypatch.setattr(batch, "run", None)
    code, found, printed = run(lines)
    assert (code, found) == (2, [])
    assert re.search(message, printed), printed


def test_unexpected_error_fails_one_line(run, monkeypatch, caplog):
    post = batch.httpx.AsyncClient.post

    async def fail_once(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(batch.httpx.AsyncClient, "post", post)
        raise RecursionError("too deep")

    monkeypatch.setattr(batch.httpx.AsyncClient, "post", fail_once)
    code, found, printed = run([line(name, COMPLETIONS, SHORT) for name in "ab"])
    assert (code, len(found)) == (0, 2)
    assert "2 requests, 1 of them with errors" in printed
    assert found[0]["response"]["status_code"] == 500
    assert "too deep" in found[0]["error"]
    assert "Request 'a' failed" in caplog.text
    assert found[1]["error"] is None


def test_failed_start_keeps_an_existing_output(run, monkeypatch, tmp_path: Path):
    def fail(*arguments: Any) -> None:
        raise OSError("the plugin cannot be read")

    monkeypatch.setattr(batch, "make_app", fail)
    target = tmp_path / "old.jsonl"
    target.write_text("old")
    with pytest.raises(OSError, match="the plugin cannot"):  # not as the output's
        run([line("1", COMPLETIONS, SHORT)], target=target)
    assert target.read_text() == "old"


def test_full_disk_is_an_error_of_the_output(run):
    code, _, printed = run([line("1", COMPLETIONS, SHORT)], target=Path("/dev/full"))
    assert code == 1
    assert "/dev/full cannot be written: [Errno 28]" in printed


def test_dead_engine_is_an_error(run, monkeypatch):
    monkeypatch.setattr("tests.support.fake_device.FakeRunner.launch", None)
    lines = [line(str(at), COMPLETIONS, SHORT) for at in range(30)]
    code, found, printed = run(lines)
    assert code == 1
    assert "Requests of the batch have failed" in printed
    assert {one["response"]["status_code"] for one in found} == {500}

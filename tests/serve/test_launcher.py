"""The life of a server: it listens, compiles in the background and shuts down."""

import gc
import logging
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.errors import ConfigError
from jaxspec.serve import launcher
from jaxspec.serve.flags import read_flags
from jaxspec.serve.response_store import ResponseStore
from jaxspec.text.tokenizer import NoTokenizer
from tests.serve.logged_program import Program, running
from tests.support.fake_engines import before_launches, letters, make_fake_engine, said
from tests.support.programs import quick_environment
from tests.support.serving import COMPLETIONS, PROMPT, Gate, TurnsTokenizer, events_of


def served(
    ask: Callable[[httpx.Client], Any],
    timeout_s: int = 30,
    delay_s: float = 0.0,
    flags: Sequence[str] = (),
    **connecting: Any,
) -> int:
    """Serve in this thread with a client in another; return the exit status.

    Args:
        connecting: Arguments of the client's `httpx.HTTPTransport`.
    """
    engine, runner = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    before_launches(runner, lambda: time.sleep(delay_s))
    always = ["m", "--port", "0", "--shutdown-timeout", str(timeout_s)]
    options = read_flags("prog", [*always, *flags])
    launcher._check_tls(options.listening)
    bound = launcher._bind(options.listening)
    address = launcher._address(bound, options.listening)
    url = address if "://" in address else "http://server"
    failures: list[BaseException] = []
    has_ended = threading.Event()

    def client() -> None:
        try:
            wait_until(lambda: is_listening(bound))
            transport = httpx.HTTPTransport(**connecting)
            with httpx.Client(base_url=url, transport=transport, timeout=30) as one:
                ask(one)
        except BaseException as failure:  # noqa: BLE001 - re-raised in the test
            failures.append(failure)
            if not has_ended.is_set():  # otherwise, the signal would end the tests
                os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=client)
    serving = AsyncLLMEngine(engine)
    asking.start()
    try:
        status = launcher._serve(serving, options, bound)
    finally:
        has_ended.set()
        asking.join()
        serving.shutdown(5)
        launcher._release(bound, options.listening)
    assert not failures, failures
    return status


def is_listening(bound: socket.socket) -> bool:
    with socket.socket(bound.family) as probe:
        return probe.connect_ex(bound.getsockname()) == 0


def ended_by_signal(client: httpx.Client) -> list[Any]:
    """Start a stream, send the server a signal, read to the end."""
    body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "stream": True}
    with client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_text()
        text = next(lines)
        os.kill(os.getpid(), signal.SIGTERM)
        text += "".join(lines)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{client.base_url}/health")
    return [one["choices"][0] for one in events_of(text)]


@pytest.mark.parametrize(
    ("timeout_s", "delay_s", "reason"), [(30, 0.03, "length"), (0, 0.2, "abort")]
)
def test_shutdown_waits_for_requests(timeout_s: int, delay_s: float, reason: str):
    def ask(client: httpx.Client) -> None:
        choices = ended_by_signal(client)
        assert choices[-1]["finish_reason"] == reason
        text = "".join(one["text"] for one in choices)
        assert letters(said(90)).startswith(text)
        assert len(text) == 90 if reason == "length" else 0 < len(text) < 90

    assert served(ask, timeout_s=timeout_s, delay_s=delay_s) == 0


@pytest.mark.parametrize(
    ("timeout_s", "delay_s", "status"), [(30, 0.02, "incomplete"), (0, 0.2, "failed")]
)
def test_shutdown_waits_for_background_responses(
    timeout_s: int, delay_s: float, status: str, tmp_path: Path
):
    path, created = tmp_path / "responses", dict[str, Any]()

    def ask(client: httpx.Client) -> None:
        body = {"input": PROMPT, "max_output_tokens": 90, "background": True}
        created.update(client.post("/v1/responses", json=body).json())
        os.kill(os.getpid(), signal.SIGTERM)

    flags = ["--response-store", str(path)]
    assert served(ask, timeout_s=timeout_s, delay_s=delay_s, flags=flags) == 0
    response = ResponseStore(str(path), 2**20).get(created["id"]).response
    assert response["status"] == status
    text = response["output"][0]["content"][0]["text"]
    assert len(text) == 90 if status == "incomplete" else len(text) < 90
    if status == "failed":
        assert response["error"]["code"] == "server_error"
        assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("first", "advice"),
    [(signal.SIGINT, "press Ctrl-C again to stop"), (signal.SIGTERM, "repeat it to")],
)
def test_second_signal_exits_at_once(
    first: signal.Signals,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    codes: list[int] = []
    caplog.set_level("INFO", logger=launcher.__name__)
    path = tmp_path / "socket"

    def leave(code: int) -> None:
        codes.append(code)
        assert not path.exists(), "it would block a restart"

    monkeypatch.setattr(os, "_exit", leave)

    def ask(client: httpx.Client) -> None:
        body = {"prompt": PROMPT, "max_tokens": 20, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as response:
            for number in (first, signal.SIGINT):
                os.kill(os.getpid(), number)
                time.sleep(0.2)
            response.read()

    where: Any = {"flags": ["--uds", str(path)], "uds": str(path)}
    assert served(ask, timeout_s=30, delay_s=0.1, **where) == 0
    assert codes == [128 + signal.SIGINT]
    expected = f"{first.name}: waiting up to 30 s for 1 running request; {advice}"
    assert any(one.startswith(expected) for one in caplog.messages)


def test_server_exits_when_engine_dies():
    def ask(client: httpx.Client) -> None:
        for _ in range(3):
            body = {"prompt": PROMPT, "max_tokens": 5}
            assert client.post(COMPLETIONS, json=body).status_code == 500

    def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.fake_device.FakeRunner.launch", broken)
        assert served(ask, timeout_s=30, delay_s=0) == launcher.ENGINE_DEAD


def test_unusable_addresses_are_reported_before_loading(tmp_path: Path):
    path = tmp_path / "socket"
    path.write_text("somebody's")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for flags, message in (
            (["--port", port], f"127.0.0.1:{port}"),
            (["--uds", str(path)], f"on {path}: .* choose another --uds"),
        ):
            with pytest.raises(ConfigError, match=message):
                launcher.run(read_flags("prog", ["/no/such/model", *flags]))
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [
        ("no-such-host.invalid", "0", "host"),
        ("192.0.2.1", "0", "host"),  # an address reserved for documentation
        ("a" * 80, "0", "host"),
        ("::ffff:1:2:3:4:5:6:7", "0", "host"),
        ("127.0.0.1", "70000", "port"),
    ],
)
def test_rejects_unusable_address(host: str, port: str, name: str):
    options = read_flags("prog", ["m", "--host", host, "--port", port])
    with pytest.raises(ConfigError, match=f"cannot listen on .*--{name}") as refused:
        launcher._bind(options.listening)
    assert refused.value.parameter == name
    assert ".." not in str(refused.value)


def ask_and_end(client: httpx.Client, path: str = COMPLETIONS) -> None:
    """Request a text, whole and as a stream; then stop the server by a signal."""
    body = {"prompt": PROMPT, "max_tokens": 20}
    whole = client.post(path, json=body).raise_for_status().json()
    stream = client.post(path, json=body | {"stream": True}).raise_for_status()
    texts = [one["choices"][0]["text"] for one in events_of(stream.text)]
    assert "".join(texts) == whole["choices"][0]["text"] == letters(said(20))
    os.kill(os.getpid(), signal.SIGTERM)


def test_serves_on_unix_socket(tmp_path: Path):
    path = tmp_path / "socket"
    for _ in range(2):  # the first server has removed its socket file
        assert served(ask_and_end, flags=["--uds", str(path)], uds=str(path)) == 0
        assert not path.exists()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make files: a CA, and the server's certificate and key, joint and apart."""
    folder = tmp_path_factory.mktemp("tls")
    signer = trustme.CA()
    issued = signer.issue_cert("127.0.0.1", "localhost")
    content = {
        "signer": signer.cert_pem.bytes(),
        "certificate": issued.cert_chain_pems[0].bytes(),
        "key": issued.private_key_pem.bytes(),
        "both": issued.private_key_and_cert_chain_pem.bytes(),
        "other_key": signer.issue_cert("other").private_key_pem.bytes(),
    }
    for name, text in content.items():
        (folder / name).write_bytes(text)
    return {name: str(folder / name) for name in content}


def tls_flags(certificates: dict[str, str], given: dict[str, str]) -> list[str]:
    """Return flags whose values are numbers, paths, or names of `certificates`."""
    return [
        word
        for name, value in given.items()
        for word in (f"--ssl-{name}", certificates.get(value, value))
    ]


BY_CLIENTS = {"certfile": "both", "cert-reqs": "2", "ca-certs": "signer"}


@pytest.mark.parametrize(
    "given",
    [{"certfile": "both"}, {"certfile": "certificate", "keyfile": "key"}, BY_CLIENTS],
)
def test_serves_https(certificates: dict[str, str], given: dict[str, str]):
    trusting = ssl.create_default_context(cafile=certificates["signer"])
    # Clients without the CA refuse the server; it refuses those without a certificate.
    other = ssl.create_default_context()
    refused: tuple[type[Exception], ...] = (httpx.ConnectError,)
    if given is BY_CLIENTS:
        trusting.load_cert_chain(certificates["both"])
        other = ssl.create_default_context(cafile=certificates["signer"])
        refused = (httpx.ReadError, httpx.RemoteProtocolError)

    def ask(client: httpx.Client) -> None:
        assert client.base_url.scheme == "https"
        with pytest.raises(refused) as caught:
            httpx.get(f"{client.base_url}/health", verify=other, timeout=30)
        is_untrusted = "CERTIFICATE_VERIFY_FAILED" in str(caught.value)
        assert is_untrusted == (given is not BY_CLIENTS)
        ask_and_end(client)

    flags = tls_flags(certificates, given)
    assert served(ask, flags=flags, verify=trusting) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keyfile": "key"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ca-certs": "signer"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"certfile": "both", "cert-reqs": "2"}, "--ssl-cert-reqs needs --ssl-ca-cer"),
        ({"certfile": "/no/such"}, "'/no/such': .*No such file"),
        ({"certfile": "certificate"}, "PEM files"),
        ({"certfile": "certificate", "keyfile": "other_key"}, "MISMATCH"),
        ({"certfile": "both", "ca-certs": "/no/such"}, "'/no/such': .*No such file"),
    ],
)
def test_invalid_certificates_are_reported_before_loading(
    certificates: dict[str, str], given: dict[str, str], message: str
):
    flags = ["/no/such/model", "--port", "0", *tls_flags(certificates, given)]
    with pytest.raises(ConfigError, match=message):
        launcher.run(read_flags("prog", flags))


@pytest.mark.parametrize("root_path", ["/models/gemma", "models/gemma/"])
def test_root_path_removed_by_proxy_or_not(root_path: str):
    flags = ["--root-path", root_path, "--api-key", "secret"]

    def ask(client: httpx.Client) -> None:
        left = "/models/gemma/v1/models"
        for path in ("/v1/models", left):
            assert client.get(path).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        for path in ("/v1/models", left, "/models/gemma/"):
            assert client.get(path).status_code == 200
        for path in ("/models/v1/models", f"/models/gemma{left}", "/models/gemmas"):
            assert client.get(path).status_code == 404
        described = client.get("/openapi.json").json()
        assert described["servers"] == [{"url": "/models/gemma"}]
        assert "/v1/completions" in described["paths"]
        assert set(described["paths"]["/ping"]) == {"get", "post"}
        for page in (client.get("/").text, client.get("/docs").text):
            assert not re.findall(r'(?:src|href)="/', page)  # links are relative
            for path in re.findall(r'(?:src|href)="([^"]+)"', page):
                assert client.get(f"/{path}").status_code == 200
        assert 'handler="/v1/models"' in client.get("/metrics").text
        ask_and_end(client)

    assert served(ask, flags=flags) == 0


def test_heap_is_frozen():
    # Objects that `pytest_collection_finish` has frozen remain frozen.
    before, here = gc.get_freeze_count(), [[] for _ in range(50_000)]
    assert served(ended_by_signal) == 0
    assert gc.get_freeze_count() > before + len(here) // 2


def test_warm_up_compiles_its_extent(monkeypatch: pytest.MonkeyPatch):
    made, _ = make_fake_engine()
    engine: Any = made
    asked: list[Any] = []
    monkeypatch.setattr(engine, "start_warm_up", lambda params=(): asked.append(params))
    monkeypatch.setattr(engine, "wait_for_programs", lambda: asked.append("wait"))
    launcher.warm_up([engine], "none")
    assert asked == []
    launcher.warm_up([engine], "plain")
    assert asked == [()], "does not wait"
    launcher.warm_up([engine], "all")
    everything, wait = asked[1:]
    assert wait == "wait"
    assert any(params.logprobs is not None for params in everything)
    assert any(params.structured_outputs for params in everything)
    assert any(params.presence_penalty for params in everything)
    # Requests that the engine would refuse are left out of the warm-up.
    engine.tokenizer = NoTokenizer("it was left out")
    launcher.warm_up([engine], "all")
    assert asked[-2]
    assert not any(params.structured_outputs for params in asked[-2])


def test_logs_end_of_first_compile_and_of_warm_up(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger=launcher.__name__)
    engine, _ = make_fake_engine()
    gate = Gate(engine)
    engine.start_warm_up()
    count = engine.num_warming
    serving = AsyncLLMEngine(engine)
    warming = launcher.Warming(serving)
    try:
        warming.update()
        assert caplog.messages == []
        gate.let()
        wait_until(lambda: engine.num_warming < count)
        for _ in range(3):
            warming.update()
        (message,) = caplog.messages
        pattern = r"The server is ready after \S+ s; {} more programs .*"
        assert re.fullmatch(pattern.format(count - 1), message)
        gate.open()
        engine.wait_for_programs()
        before, here = gc.get_freeze_count(), [[] for _ in range(50_000)]
        for _ in range(3):
            warming.update()
        _, message = caplog.messages
        assert re.fullmatch(r"All programs were compiled after \S+ s", message)
        assert gc.get_freeze_count() > before + len(here) // 2
    finally:
        gate.open()
        serving.shutdown(5)
    # Without a warm-up, nothing is logged about it.
    launcher.Warming(serving).update()
    assert len(caplog.messages) == 2


def wait_until(is_so: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_openai_client_with_bundled_pair(tmp_path: Path):
    # The sizes, and therefore the programs, are those of `python -m jaxspec generate`.
    flags = "--port 0 --max-num-seqs 1 --num-speculative-tokens 1 --warm-up none"
    flags += " --served-model-name pair --api-key secret"
    words = ["-m", "jaxspec.serve", *flags.split()]
    with running(Program(words, tmp_path / "log", env=quick_environment())) as program:
        program.wait(lambda: "] Serving " in program.said)
        url = program.said.partition("Serving pair on ")[2].split()[0]
        program.wait(lambda: httpx.get(f"{url}/health").status_code == 200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            _ask_openai(client)
        program.end()


def _ask_openai(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pair"]
    asked: dict[str, Any] = {"model": "pair", "max_tokens": 24, "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "Tell me a story."}]
    whole: Any = client.chat.completions.create(**asked)
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(client.chat.completions.create(**asked, **usage))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert chunks[-1].usage == whole.usage
    response = client.responses.create(
        model="pair", input="Tell me a story.", max_output_tokens=24, temperature=0
    )
    assert response.output_text == text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_logged_text_cannot_forge_records(monkeypatch: pytest.MonkeyPatch):
    made: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **given: made.update(given))
    launcher.set_up_log("info")
    (handler,) = made["handlers"]
    forged = "a\nINFO forged\r\u2028INFO \x1b[2J"
    error = ValueError(forged)
    record = logging.LogRecord(
        "jaxspec", logging.INFO, "", 1, "%s", (forged,), (type(error), error, None)
    )
    first, *others = handler.format(record).splitlines()
    assert first.endswith("[jaxspec] a")
    assert len(others) >= 6
    assert all(line.startswith("    ") and line.isprintable() for line in others)

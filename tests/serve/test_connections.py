"""Limits on connections, with clients of a server in its own process."""

import contextlib
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests

from jaxspec.errors import ConfigError
from jaxspec.serve.connections import find_max_connections
from tests.serve.logged_program import Program, running
from tests.support.fake_engines import letters, said
from tests.support.serving import CHAT, COMPLETIONS, PROMPT, error_of, events_of

HEADERS_S, BODY_S, KEEP_ALIVE_S = 1.0, 1.5, 0.7
# Seconds allowed in addition, because the machine may be busy.
GRACE_S = 8.0
MAX_CONNECTIONS = 12
FLAGS = f"--timeout-read-headers {HEADERS_S} --timeout-read-body {BODY_S}".split()
FLAGS += f"--timeout-keep-alive {KEEP_ALIVE_S} --api-key k".split()
KEY = {"Authorization": "Bearer k"}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
HEAD += "Content-Type: application/json\r\n"
HUGE = b" " * (32 * 2**20)


class Server(Program):
    @property
    def port(self) -> int:
        (port,) = re.findall(r"m on http://127.0.0.1:(\d+)", self.said)
        return int(port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def get(self, path: str) -> httpx.Response:
        # An idle keep-alive connection would count against the limit.
        return httpx.get(f"{self.url}{path}", headers=KEY, timeout=60)

    def count(self, name: str, **labels: str) -> float:
        (line,) = (
            line
            for line in self.get("/metrics").text.splitlines()
            if line.startswith(f"{name}{{")
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )
        return float(line.split()[-1])

    def wait_for_status(self, path: str, status: int) -> None:
        def has_status() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.get(path).status_code == status
            return False

        self.wait(has_status)


def server_fixture(*flags: str, delay_s: float = 0.0, num_files: int = 0) -> Any:
    """Make a fixture: a server in its own process, for all tests of this file."""

    @pytest.fixture(scope="module")
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        words = ["-m", "tests.serve.small_server", str(delay_s), str(num_files)]
        log = tmp_path_factory.mktemp("log") / "log"
        with running(Server([*words, *FLAGS, *flags], log)) as made:
            made.wait(lambda: "] Serving " in made.said)
            yield made
            made.end()

    return started


server = server_fixture()
slow_server = server_fixture(delay_s=0.03, num_files=400)
# Requests may arrive slowly, over few connections.
patient_server = server_fixture(
    *("--timeout-read-headers", "60", "--timeout-read-body", "60"),
    *("--limit-concurrency", str(MAX_CONNECTIONS)),
)


def read_all(client: socket.socket) -> tuple[bytes, float]:
    """Read until the server closes the connection; return the data and the seconds."""
    start, parts = time.monotonic(), []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(2**16):
            parts.append(part)
    return b"".join(parts), time.monotonic() - start


def trickle(client: socket.socket, pieces: bytes) -> float:
    """Send a byte every 0.1 s until the server closes; return the seconds."""
    start = time.monotonic()
    client.settimeout(0.1)
    for at in range(len(pieces)):
        try:
            client.sendall(pieces[at : at + 1])
            if client.recv(2**16) == b"":
                break
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            break
    return time.monotonic() - start


BODY = f"{HEAD}Content-Length: 500\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("half", "limit_s", "named"),
    [
        (b"", HEADERS_S, None),
        (b"P", HEADERS_S, ""),
        (HEAD.encode(), HEADERS_S, ""),
        (BODY, BODY_S, "--timeout-read-body"),
        (
            f"{HEAD}Transfer-Encoding: chunked\r\n\r\n10\r\n{{".encode(),
            BODY_S,
            "--timeout-read-body",
        ),
    ],
    ids=["silent", "one letter", "half of the headers", "no body", "half of the body"],
)
def test_half_sent_request_is_408(
    server: Server, half: bytes, limit_s: float, named: str | None
):
    with server.connect() as client:
        client.sendall(half)
        answer, seconds = read_all(client)
    assert limit_s * 0.8 < seconds < limit_s + GRACE_S
    if named is None:
        assert answer == b""
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 "), answer
    error = json.loads(body)["error"]
    assert error["code"] == 408
    assert named in error["message"]


def test_slow_requests_are_not_extended(server: Server):
    name = "jaxspec:request_timeouts_total"
    before = server.count(name, part="body")
    with server.connect() as client:
        assert trickle(client, HEAD.encode()) < HEADERS_S + GRACE_S
    with server.connect() as client:
        client.sendall(BODY)
        assert trickle(client, b" " * 150) < BODY_S + GRACE_S
    assert server.count(name, part="body") == before + 1
    # If a request is refused before its body has arrived, a body that is sent slowly
    # does not keep the connection open.
    with server.connect() as client:
        client.sendall(BODY.replace(b"Bearer k", b"Bearer no"))
        assert client.recv(2**16).startswith(b"HTTP/1.1 401 ")
        seconds = trickle(client, b" " * 150)
    assert seconds < BODY_S + HEADERS_S + KEEP_ALIVE_S + GRACE_S


def test_closes_idle_connection_after_response(server: Server):
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer, seconds = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    # The flag's value is below uvicorn's default of 5 s, which would show if the flag
    # were ignored.
    assert KEEP_ALIVE_S * 0.8 < seconds < 4.5


def test_connection_may_outlive_all_limits(server: Server):
    end = time.monotonic() + 2 * max(HEADERS_S, BODY_S)
    with server.connect() as client:
        # Each half of the request arrives within the limit, and so does the next
        # request.
        while time.monotonic() < end:
            client.sendall(b"GET /health HTTP/1.1\r\n")
            time.sleep(HEADERS_S / 4)
            client.sendall(b"Host: x\r\n\r\n")
            assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")
            time.sleep(KEEP_ALIVE_S / 4)


def stream_bytes(**changes: object) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "stream": True}
    content = json.dumps(body | changes)
    head = f"{HEAD}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return f"{head}{content}".encode()


def text_of(answer: bytes) -> str:
    lines = [one for one in answer.decode().split("\r\n") if one.startswith("data: ")]
    chunks = events_of("".join(lines))
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_slow_responses_and_readers_are_not_cut_off(slow_server: Server):
    longest_s = max(HEADERS_S, BODY_S, KEEP_ALIVE_S)
    clients = [slow_server.connect() for _ in range(6)]
    start = time.monotonic()
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(stream_bytes())
    # The batch size is two. The clients read nothing until all time limits have passed.
    time.sleep(2 * longest_s)
    texts = [text_of(read_all(client)[0]) for client in clients]
    assert time.monotonic() - start > 4 * longest_s
    assert texts == [letters(said(90))] * 6
    for client in clients:
        client.close()


def test_paused_reader_gets_whole_response(server: Server):
    # With logprobs, the response is larger than the socket buffers of a small window.
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(60)
        client.sendall(stream_bytes(prompt=[PROMPT] * 60, logprobs=5, max_tokens=80))
        time.sleep(2 * max(HEADERS_S, BODY_S, KEEP_ALIVE_S))
        answer, _ = read_all(client)
    assert answer.count(b"data: ") > 60
    assert b"data: [DONE]" in answer


def huge_pieces() -> Iterator[bytes]:
    for start in range(0, len(HUGE), 2**20):
        yield HUGE[start : start + 2**20]


def ask_httpx(url: str, data: Any) -> tuple[int, dict]:
    response = httpx.post(url, content=data, headers=KEY, timeout=60)
    return response.status_code, response.json()


def ask_requests(url: str, data: Any) -> tuple[int, dict]:
    response = requests.post(url, data=data, headers=KEY, timeout=60)
    return response.status_code, response.json()


def ask_urllib(url: str, data: Any) -> tuple[int, dict]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data, KEY), timeout=60)
    return refused.value.code, json.loads(refused.value.read())


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("ask", [ask_httpx, ask_requests, ask_urllib])
def test_clients_read_refusal_of_32_mib(
    patient_server: Server, ask: Callable[..., tuple[int, dict]], is_chunked: bool
):
    data = huge_pieces() if is_chunked else HUGE
    status, body = ask(f"{patient_server.url}{COMPLETIONS}", data)
    assert status == 413
    assert body["error"]["code"] == 413
    assert "--max-body-bytes" in body["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 401), ("/nowhere", 404)])
def test_closing_clients_read_every_refusal(
    patient_server: Server, path: str, status: int
):
    # urllib sends "Connection: close", and writes the whole request before it reads.
    url, key = f"{patient_server.url}{path}", {"Authorization": "Bearer no"}
    request = urllib.request.Request(url, HUGE[:4_000_000], key)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == status
    assert "error" in json.loads(refused.value.read())


def test_requests_over_connection_limit_are_503(patient_server: Server):
    server = patient_server
    idle = [server.connect() for _ in range(MAX_CONNECTIONS)]
    server.wait_for_status("/v1/models", 503)
    for path in (COMPLETIONS, CHAT):
        # Ordinary clients get the refusal, also if they sent a body.
        url = f"{server.url}{path}"
        response = httpx.post(url, content=HUGE[: 2**24], headers=KEY, timeout=60)
        error = error_of(response, 503, "ServiceUnavailableError")
        assert "--limit-concurrency" in error["message"]
        assert int(response.headers["retry-after"]) > 0
    # /health is always served: otherwise monitoring would restart the server.
    assert server.get("/health").status_code == 200
    name = "jaxspec:admission_rejections_total"
    assert server.count(name, reason="connections") >= 3
    # Connections far over the limit are closed without a response.
    more = [server.connect() for _ in range(200)]
    num_closed = 0
    for client in more:
        client.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            num_closed += b"503" in read_all(client)[0][:20]
    assert num_closed >= 100
    for client in [*idle, *more]:
        client.close()
    server.wait_for_status("/v1/models", 200)


def test_reports_descriptor_shortage_and_its_end(slow_server: Server):
    server = slow_server
    assert "permit" in server.said, "fewer connections than by default"
    shortage = "No file descriptor is free"
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
        for number in (1, 2):
            client.get("/health")
            server.process.send_signal(signal.SIGUSR1)
            server.wait(lambda: shortage in server.said)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/health", timeout=2)
            time.sleep(0.3)
            server.process.send_signal(signal.SIGUSR2)
            server.wait_for_status("/health", 200)
            while server.count("jaxspec:descriptor_shortages_total") != number:
                time.sleep(0.02)
            assert client.post(COMPLETIONS, json=body).status_code == 200
    assert server.said.count(shortage) == 1, "once a minute"
    assert "File descriptors are free again" in server.said


def test_refuses_limit_above_descriptors():
    with pytest.raises(ConfigError, match=r"--limit-concurrency.*ulimit -n"):
        find_max_connections(10**9)
    assert find_max_connections(7) == 7
    assert find_max_connections(None) > 0


def test_invented_methods_do_not_grow_metrics(server: Server):
    def ask(methods: list[str]) -> None:
        client = server.connect()
        with client, client.makefile("rb") as answers:
            for method in methods:
                head = f"{method} /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
                client.sendall(head.encode())
                assert answers.readline().startswith(b"HTTP/1.1 401")
                while answers.readline() != b"\r\n":
                    pass
                answers.read(len(b'{"error": "Unauthorized"}'))

    def lines() -> list[str]:
        text = server.get("/metrics").text
        return [line for line in text.splitlines() if not line.startswith("#")]

    ask(["INVENTED"])
    lines()  # the request for the metrics is counted too
    before = lines()
    asked = [[f"M{at}-{n}" for n in range(750)] for at in range(4)]
    asked.append([f"L{n}" + "A" * 15_000 for n in range(104)])
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(ask, asked))
    after = lines()
    assert len(after) == len(before)
    # The later response is longer, because the counts have more digits.
    assert sum(map(len, after)) < sum(map(len, before)) * 1.1
    name = "http_requests_total"
    assert server.count(name, method="other", status="4xx") == 3105

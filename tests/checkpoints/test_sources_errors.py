"""Errors of the hub and of Kaggle are reported, with a remedy."""

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kagglehub.clients
import kagglehub.exceptions
import pytest
from huggingface_hub import file_download

from jaxspec_checkpoints.sources import fetch
from tests.checkpoints.stand_ins import (
    COMMIT,
    Answer,
    Asked,
    HubStandIn,
    KaggleStandIn,
    StandIn,
    fetch_message,
    files_of,
    only_here,
    point_hub_to,
    point_kaggle_to,
    serve,
)

NAME = "google/tiny"


@dataclass(frozen=True)
class Service:
    """A service, and how tests reach it without the network.

    Attributes:
        model: Name of the model.
        alone: Fixture without a stand-in: only requests to this machine are possible.
        download: The library's function that writes a file.
        unexpected: Type and text of the library's error about an answer for which we
            have no message of our own.
    """

    model: str
    alone: str
    download: tuple[Any, str]
    point_to: Callable[[pytest.MonkeyPatch, str], None]
    unexpected: tuple[type[Exception], str]


SERVICES = {
    "hub": Service(
        NAME, "refused", (file_download, "http_get"), point_hub_to, (OSError, "418")
    ),
    "kaggle": Service(
        KaggleStandIn.handle,
        "refused_by_kaggle",
        (kagglehub.clients, "_download_file"),
        point_kaggle_to,
        (kagglehub.exceptions.KaggleApiHTTPError, "out of order"),
    ),
}


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, service: str) -> StandIn:
    return request.getfixturevalue(service)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "google/none"}, "no such repository, or it is private (404)"),
        ({"revision": "v7"}, "no revision 'v7'"),
        ({"token": "hf_wrong"}, "the token is not valid"),
        ({"token": True}, "run `hf auth login`"),
        ({"name": "google/a--b"}, "cannot be the id of a repository"),
    ],
)
def test_wrong_arguments_of_the_hub(
    hub: HubStandIn, arguments: dict[str, Any], expected: str
):
    assert expected in fetch_message(**{"name": NAME} | arguments)
    assert hub.fetched == set()


@pytest.mark.parametrize(
    ("service", "call", "status", "expected"),
    [
        (service, call, status, expected)
        for service, calls, answers in [
            (
                "hub",
                ("main", "model-00002-of-00003.safetensors"),
                {
                    403: "the token does not allow it",
                    429: "busy or fails (429)",
                    503: "busy or fails (503)",
                },
            ),
            (
                "kaggle",
                ("GetModelInstance", "DownloadModelInstanceVersion"),
                {
                    status: f"Kaggle is busy or fails ({status})"
                    for status in (429, 500, 503)
                },
            ),
        ]
        for call in calls
        for status, expected in answers.items()
    ],
)
def test_refused_requests_name_a_remedy(stand_in, service, call, status, expected):
    stand_in.faults[call] = status
    assert expected in fetch_message(SERVICES[service].model)


@pytest.mark.parametrize(
    ("service", "call"), [("hub", "main"), ("kaggle", "GetModelInstance")]
)
def test_unexpected_answers_are_shown_as_they_are(stand_in, service, call):
    stand_in.faults[call] = 418
    kind, text = SERVICES[service].unexpected
    with pytest.raises(kind, match=text):
        fetch(SERVICES[service].model)


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError("timed out"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("service", "texts"),
    [
        ("hub", ["http://x.invalid cannot be reached", "Check network and proxy"]),
        ("kaggle", ["Kaggle cannot be reached", f"{KaggleStandIn.handle}/2"]),
    ],
)
def test_missing_network_is_reported(request, monkeypatch, service, texts, error):
    request.getfixturevalue(SERVICES[service].alone)
    SERVICES[service].point_to(monkeypatch, "http://x.invalid")
    with only_here(monkeypatch, error) as tried:
        message = fetch_message(SERVICES[service].model)
    assert set(tried) == {"x.invalid"}
    for text in (*texts, "pass a model's folder"):
        assert text in message


def fail_downloads(
    monkeypatch: pytest.MonkeyPatch, service: str, error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(*SERVICES[service].download, fail)


@pytest.mark.parametrize(
    ("service", "error", "expected"),
    [
        *(
            (service, error, expected)
            for service in SERVICES
            for error, expected in (
                (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
                (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk is full"),
                (PermissionError(errno.EACCES, "denied"), "cannot be written"),
                (OSError(errno.EROFS, "Read-only"), "cannot be written"),
            )
        ),
        # An error of Xet storage.
        ("hub", RuntimeError("Task error: IO Error: (os error 28)"), "disk is full"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_disk_errors_are_reported(monkeypatch, service, error, expected):
    fail_downloads(monkeypatch, service, error)
    message = fetch_message(SERVICES[service].model)
    assert expected in message
    assert "download_dir" in message


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.usefixtures("stand_in")
def test_a_cache_that_is_a_file(tmp_path: Path, service):
    (tmp_path / "file").write_text("")
    message = fetch_message(SERVICES[service].model, cache_dir=tmp_path / "file")
    assert "cannot be written" in message
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize(
    ("service", "error"),
    [
        ("hub", OSError(errno.EIO, "Input/output error")),
        ("hub", RuntimeError("a bug")),
        ("kaggle", OSError(errno.EIO, "Input/output error")),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_other_errors_are_left_alone(monkeypatch, service, error):
    fail_downloads(monkeypatch, service, error)
    with pytest.raises(type(error)) as caught:
        fetch(SERVICES[service].model)
    assert caught.value is error


class XetStandIn(HubStandIn):
    """A hub whose weights are in Xet storage; the storage refuses to send them."""

    def answer(self, asked: Asked) -> Answer:
        here = f"http://127.0.0.1:{self.port}"
        if "xet-read-token" in asked.path:
            expiry = str(int(time.time()) + 3600)
            headers = {"X-Xet-Cas-Url": here, "X-Xet-Access-Token": "short-lived"}
            return 200, headers | {"X-Xet-Token-Expiration": expiry}, b"{}"
        status, headers, content = super().answer(asked)
        if "X-Linked-Etag" in headers:
            route = f"{here}/api/models/{NAME}/xet-read-token/{COMMIT}"
            headers |= {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": route}
        return status, headers, content


class PortalStandIn(HubStandIn):
    """A network that answers every request with its login page."""

    def answer(self, asked: Asked) -> Answer:
        return 200, {"Content-Type": "text/html"}, b"<html>Please log in</html>"


class PlainStandIn(HubStandIn):
    """A mirror whose answers lack the header that names the commit."""

    def answer(self, asked: Asked) -> Answer:
        status, headers, content = super().answer(asked)
        headers.pop("X-Repo-Commit", None)
        return status, headers, content


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (XetStandIn, "the download broke off (Task error"),
        (
            PortalStandIn,
            "does not respond like the Hugging Face Hub: check HF_ENDPOINT",
        ),
        (PlainStandIn, "does not respond like the Hugging Face Hub: check HF_ENDPOINT"),
    ],
)
def test_answers_of_other_servers_are_reported(
    origin: Path, refused: list[str], monkeypatch, kind, expected
):
    stand_in = kind(files=files_of(origin))
    with serve(stand_in):
        point_hub_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        assert expected in fetch_message(NAME)
    assert refused == []


@pytest.mark.parametrize("names", [["config.json", "pytorch_model.bin"], ["a.gguf"]])
def test_a_repository_without_weights_that_can_be_read(
    hub: HubStandIn, names: list[str]
):
    hub.files = dict.fromkeys(names, b"{}")
    message = fetch_message(NAME)
    assert "has no weights as *.safetensors" in message
    assert "google/tiny:Q4_K_M" in message
    assert hub.fetched <= {"config.json"}

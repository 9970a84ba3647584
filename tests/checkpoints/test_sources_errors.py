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
        alone: Fixture without a stand-in: only requests to this machine are possible.
        download: The library's function that writes a file.
        calls: Requests that may fail.
        busy: Start of the error of a busy service.
        unexpected: Type and text of the library's error about an answer for which we
            have no message of our own.
    """

    model: str
    alone: str
    download: tuple[Any, str]
    point_to: Callable[[pytest.MonkeyPatch, str], None]
    calls: tuple[str, str]
    busy: str
    unexpected: tuple[type[Exception], str]


SERVICES = {
    "hub": Service(
        NAME,
        "refused",
        (file_download, "http_get"),
        point_hub_to,
        ("main", "model-00002-of-00003.safetensors"),
        "busy or fails",
        (OSError, "418"),
    ),
    "kaggle": Service(
        KaggleStandIn.handle,
        "refused_by_kaggle",
        (kagglehub.clients, "_download_file"),
        point_kaggle_to,
        ("GetModelInstance", "DownloadModelInstanceVersion"),
        "Kaggle is busy or fails",
        (kagglehub.exceptions.KaggleApiHTTPError, "out of order"),
    ),
}


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, service: str) -> StandIn:
    return request.getfixturevalue(service)


def test_wrong_arguments_of_the_hub(hub: HubStandIn):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "google/none"}, "no such repository, or it is private (404)"),
        ({"revision": "v7"}, "no revision 'v7'"),
        ({"token": "hf_wrong"}, "the token is not valid"),
        ({"token": True}, "run `hf auth login`"),
        ({"name": "google/a--b"}, "cannot be the id of a repository"),
    ]
    for arguments, expected in cases:
        assert expected in fetch_message(**{"name": NAME} | arguments)
    assert hub.fetched == set()


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("service", SERVICES)
def test_refused_requests_name_a_remedy(stand_in, service, call):
    """An answer for which we have no message is shown as the library shows it."""
    given = SERVICES[service]
    expected = {status: f"{given.busy} ({status})" for status in (429, 503)}
    own = {"hub": {403: "token does not allow it"}}
    own["kaggle"] = {500: f"{given.busy} (500)"}
    expected |= own[service]
    for status, message in expected.items():
        stand_in.faults[given.calls[call]] = status
        assert message in fetch_message(given.model)
    if call == 0:
        stand_in.faults[given.calls[0]] = 418
        kind, text = given.unexpected
        with pytest.raises(kind, match=text):
            fetch(given.model)


@pytest.mark.parametrize(
    ("service", "texts"),
    [
        ("hub", ["http://x.invalid cannot be reached", "Check network and proxy"]),
        ("kaggle", ["Kaggle cannot be reached", f"{KaggleStandIn.handle}/2"]),
    ],
)
def test_missing_network_is_reported(request, monkeypatch, service, texts):
    request.getfixturevalue(SERVICES[service].alone)
    SERVICES[service].point_to(monkeypatch, "http://x.invalid")
    for error in (
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError("timed out"),
    ):
        with only_here(monkeypatch, error) as tried:
            message = fetch_message(SERVICES[service].model)
        assert set(tried) == {"x.invalid"}
        for text in (*texts, "pass a model's folder"):
            assert text in message


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.usefixtures("stand_in")
def test_disk_errors_are_reported(monkeypatch, tmp_path, service):
    """Errors of other kinds are not caught."""
    model = SERVICES[service].model
    (tmp_path / "file").write_text("")
    message = fetch_message(model, cache_dir=tmp_path / "file")
    assert "cannot be written" in message and str(tmp_path / "file") in message

    def fail_with(error: BaseException) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(*SERVICES[service].download, fail)

    for error, expected in (
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk is full"),
        (PermissionError(errno.EACCES, "denied"), "cannot be written"),
        (OSError(errno.EROFS, "Read-only"), "cannot be written"),
    ):
        fail_with(error)
        message = fetch_message(model)
        assert expected in message and "download_dir" in message
    others: list[Exception] = [OSError(errno.EIO, "Input/output error")]
    if service == "hub":
        # An error of Xet storage.
        fail_with(RuntimeError("Task error: IO Error: (os error 28)"))
        assert "disk is full" in fetch_message(model)
        others.append(RuntimeError("a bug"))
    for error in others:
        fail_with(error)
        with pytest.raises(type(error)) as caught:
            fetch(model)
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


class MirrorStandIn(HubStandIn):
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
        (
            MirrorStandIn,
            "does not respond like the Hugging Face Hub: check HF_ENDPOINT",
        ),
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
def test_repository_without_readable_weights_is_refused(hub: HubStandIn, names):
    hub.files = dict.fromkeys(names, b"{}")
    message = fetch_message(NAME)
    assert "has no weights as *.safetensors" in message
    assert "google/tiny:Q4_K_M" in message
    assert hub.fetched <= {"config.json"}

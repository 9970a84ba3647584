"""Whatever keeps a model of the hub away is said in words, with the way out."""

import errno
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import file_download

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.sources import fetch
from tests.checkpoints.stand_ins import (
    COMMIT,
    Answer,
    Asked,
    HubStandIn,
    files_of,
    only_here,
    point_hub_to,
    serve,
)

NAME = "google/tiny"


def message_of(name: str = NAME, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        fetch(name, **arguments)
    message = str(caught.value)
    assert repr(name) in message or name in message
    return message


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
def test_wrong_arguments(hub: HubStandIn, arguments: dict[str, Any], expected: str):
    assert expected in message_of(**arguments)
    assert hub.fetched == set()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (403, "the token does not allow it"),
        (429, "busy or out of order (429)"),
        (503, "busy or out of order (503)"),
    ],
)
@pytest.mark.parametrize("asked", ["main", "model-00002-of-00003.safetensors"])
def test_refusals(hub: HubStandIn, status: int, expected: str, asked: str):
    hub.faults[asked] = status
    assert expected in message_of()


def test_an_answer_that_nobody_expects_is_shown_as_it_is(hub: HubStandIn):
    hub.faults["main"] = 418
    with pytest.raises(OSError, match="418"):
        fetch(NAME)


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
def test_without_network(
    refused: list[str], monkeypatch: pytest.MonkeyPatch, error: OSError
):
    point_hub_to(monkeypatch, "http://hub.invalid")
    with only_here(monkeypatch, error) as tried:
        message = message_of()
    assert set(tried) == {"hub.invalid"}
    assert "http://hub.invalid cannot be reached" in message
    assert "Check network and proxy" in message
    assert "pass a model's folder" in message


class XetStandIn(HubStandIn):
    """Says that the weights lie in Xet storage, which then refuses them."""

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


def test_an_interrupted_download_from_xet(
    origin: Path, refused: list[str], monkeypatch: pytest.MonkeyPatch
):
    stand_in = XetStandIn(files=files_of(origin))
    with serve(stand_in):
        point_hub_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        assert "the download broke off (Task error" in message_of()
    assert refused == []


class PortalStandIn(HubStandIn):
    """A network that answers everything with its login page."""

    def answer(self, asked: Asked) -> Answer:
        return 200, {"Content-Type": "text/html"}, b"<html>Please log in</html>"


class PlainStandIn(HubStandIn):
    """A mirror that leaves out what tells the commit."""

    def answer(self, asked: Asked) -> Answer:
        status, headers, content = super().answer(asked)
        headers.pop("X-Repo-Commit", None)
        return status, headers, content


@pytest.mark.parametrize("kind", [PortalStandIn, PlainStandIn])
def test_something_that_is_no_hub(
    origin: Path,
    refused: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[HubStandIn],
):
    stand_in = kind(files=files_of(origin))
    with serve(stand_in):
        point_hub_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        assert "does not answer like a hub: check HF_ENDPOINT" in message_of()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (RuntimeError("Task error: IO Error: (os error 28)"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written"),
    ],
)
def test_the_disk(
    hub: HubStandIn,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: str,
):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(file_download, "http_get", fail)
    message = message_of()
    assert expected in message
    assert "download_dir" in message


def test_a_cache_that_is_a_file(hub: HubStandIn, tmp_path: Path):
    (tmp_path / "file").write_text("")
    message = message_of(cache_dir=tmp_path / "file")
    assert "cannot be written" in message
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), RuntimeError("a bug")]
)
def test_other_errors_are_left_alone(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(file_download, "http_get", fail)
    with pytest.raises(type(error)) as caught:
        fetch(NAME)
    assert caught.value is error


@pytest.mark.parametrize("names", [["config.json", "pytorch_model.bin"], ["a.gguf"]])
def test_a_repository_without_weights_that_can_be_read(
    hub: HubStandIn, names: list[str]
):
    hub.files = dict.fromkeys(names, b"{}")
    message = message_of()
    assert "has no weights as *.safetensors" in message
    assert "google/tiny:Q4_K_M" in message
    assert hub.fetched <= {"config.json"}

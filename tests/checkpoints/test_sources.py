"""Models of the hub and of Kaggle are fetched whole and open; errors have a remedy.

A tiny model is behind stand-ins of the services, and there is no network.
"""

import errno
import io
import os
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import kagglehub.clients
import kagglehub.exceptions
import orbax.checkpoint as ocp
import pytest
from huggingface_hub import constants, file_download

from jaxspec_checkpoints import CheckpointError, open_checkpoint
from jaxspec_checkpoints.sources import fetch, is_remote
from tests.checkpoints.models import write_tiny
from tests.checkpoints.stand_ins import (
    COMMIT,
    KAGGLE_TOKEN,
    TOKEN,
    Answer,
    Asked,
    HubStandIn,
    KaggleStandIn,
    StandIn,
    fetch_message,
    files_of,
    hub_alone,
    kaggle_alone,
    only_here,
    point_hub_to,
    point_kaggle_to,
    serve,
)

HUB_ID = "google/gemma-2-9b-it"
HANDLE = "google/gemma-2/flax/gemma2-2b-it"
# Models of the stand-ins.
NAME, TINY_HANDLE = HubStandIn.repository, KaggleStandIn.handle
SHARD = "model-00002-of-00003.safetensors"
NOT_REMOTE = (
    *("", "gemma", "./google/gemma", "/google/gemma", "google/", "a/b/c", "./a/b/c"),
    *("google/gemma 2", "google/..", "C:\\google\\gemma"),
    *(HANDLE + "/latest", HANDLE + "/0", HANDLE + "/3/4"),
)
NO_HUB = "does not respond like the Hugging Face Hub: check HF_ENDPOINT"
GGUFS = (
    *("m-Q4_0.gguf", "m-q4_k_m.gguf", "m-Q4_K_M_L.gguf", "mmproj-Q4_K_M.gguf"),
    *("sub/m.Q8_0.gguf", "big/m-BF16-00001-of-00002.gguf"),
    *("big/m-BF16-00002-of-00002.gguf", "config.json", "a-F16.gguf", "b-F16.gguf"),
)
# Files of published folders: `below` them, and in every layout of Orbax.
ORBAX = (
    *("_METADATA", "_sharding", "checkpoint", "manifest.ocdbt", "d/fa0b"),
    *("ocdbt.process_0/manifest.ocdbt", "ocdbt.process_0/d/fa0b"),
    *("array_metadatas/process_0", "params.transformer.layer_0.mlp/.zarray"),
    *("params.transformer.layer_0.mlp/0.0", "params/zarr.json", "params/c/0/0"),
)
# kagglehub fetches up to this many files one by one, and more of them as one archive.
MAX_FILES = 25


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with hub_alone(monkeypatch, tmp_path) as refused:
        yield refused


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "origin", family="2b", shards=3)
    return tmp_path / "origin"


@pytest.fixture
def hub(
    origin: Path, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubStandIn]:
    stand_in = HubStandIn(files=files_of(origin))
    with serve(stand_in):
        point_hub_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        yield stand_in
    assert refused == []


@pytest.fixture
def refused_by_kaggle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    with kaggle_alone(monkeypatch, tmp_path) as refused:
        yield refused


@pytest.fixture
def kaggle(
    origin: Path, refused_by_kaggle: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[KaggleStandIn]:
    stand_in = KaggleStandIn(files=files_of(origin))
    with serve(stand_in):
        point_kaggle_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        yield stand_in
    assert refused_by_kaggle == []


@pytest.mark.parametrize("name", NOT_REMOTE)
def test_only_hub_ids_and_kaggle_handles_are_remote(name: str):
    for remote in (HUB_ID, "a/b", "my_org/Model.v2", HANDLE, HANDLE + "/3"):
        assert is_remote(remote)
    assert not is_remote(name)
    if name:
        with pytest.raises(CheckpointError, match="owner/name.*owner/model/framework"):
            fetch(name)
    with pytest.raises(CheckpointError, match="revision='main'.*fifth part"):
        fetch(HANDLE, revision="main")


@pytest.mark.parametrize("name", [HUB_ID, HANDLE, "plain", "./a/b/c", "~/model"])
def test_existing_folder_takes_precedence(tmp_path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(name).expanduser()
    folder.mkdir(parents=True)
    assert fetch(name, revision="ignored", token="ignored") == folder


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [(HUB_ID, "huggingface_hub", "hub"), (HANDLE, "kagglehub", "kaggle")],
)
def test_missing_extra_error_says_how_to_install_it(monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    module = f"jaxspec_checkpoints.sources.{extra}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(CheckpointError) as caught:
        fetch(name)
    for words in (repr(name), f'"jaxspec-decoding[{extra}]"', "pass its folder"):
        assert words in str(caught.value)
    assert library in str(caught.value.__cause__)


# How tests reach each service. `alone` is a fixture with which only requests to this
# machine are possible, `download` is the library's function that writes a file, and
# `unexpected` is its error about an answer for which we have no message of our own.
SERVICES = {
    "hub": SimpleNamespace(
        model=NAME,
        alone="refused",
        download=(file_download, "http_get"),
        point_to=point_hub_to,
        calls=("main", SHARD),
        busy="busy or fails",
        unexpected=(OSError, "418"),
    ),
    "kaggle": SimpleNamespace(
        model=TINY_HANDLE,
        alone="refused_by_kaggle",
        download=(kagglehub.clients, "_download_file"),
        point_to=point_kaggle_to,
        calls=("GetModelInstance", "DownloadModelInstanceVersion"),
        busy="Kaggle is busy or fails",
        unexpected=(kagglehub.exceptions.KaggleApiHTTPError, "out of order"),
    ),
}


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, service: str) -> StandIn:
    return request.getfixturevalue(service)


def test_wrong_names_and_arguments_are_errors(hub: HubStandIn, kaggle: KaggleStandIn):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "google/none"}, "no such repository, or it is private (404)"),
        ({"revision": "v7"}, "no revision 'v7'"),
        ({"token": "hf_wrong"}, "the token is not valid"),
        ({"token": True}, "run `hf auth login`"),
        ({"name": "google/a--b"}, "cannot be the id of a repository"),
        ({"name": "google/tiny/flax/other"}, "no such model"),
        ({"name": "google/none/flax/tiny-2b"}, "no such model"),
        ({"name": f"{TINY_HANDLE}/7"}, "framework, variation or version (404)"),
        (
            {"name": "google/tiny/keras/tiny-2b"},
            "one of flax, jax, transformers, other",
        ),
        ({"name": "no/such/folder/here"}, "one of flax, jax, transformers, other"),
    ]
    for arguments, expected in cases:
        assert expected in fetch_message(**{"name": NAME} | arguments)
    assert hub.fetched == kaggle.fetched == set()


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("service", SERVICES)
def test_refused_requests_name_a_remedy(stand_in, service, call):
    """An answer for which we have no message is shown as the library shows it."""
    given = SERVICES[service]
    expected = {status: f"{given.busy} ({status})" for status in (429, 503)}
    is_hub = service == "hub"
    expected[403 if is_hub else 500] = (
        "token does not allow it" if is_hub else f"{given.busy} (500)"
    )
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
        ("kaggle", ["Kaggle cannot be reached", f"{TINY_HANDLE}/2"]),
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


def xet_answer(hub: HubStandIn, asked: Asked) -> Answer:
    """Answer like a hub with weights in Xet storage, which refuses to send them."""
    here = f"http://127.0.0.1:{hub.port}"
    if "xet-read-token" in asked.path:
        expiry = str(int(time.time()) + 3600)
        headers = {"X-Xet-Cas-Url": here, "X-Xet-Access-Token": "short-lived"}
        return 200, headers | {"X-Xet-Token-Expiration": expiry}, b"{}"
    status, headers, content = HubStandIn.answer(hub, asked)
    if "X-Linked-Etag" in headers:
        route = f"{here}/api/models/{NAME}/xet-read-token/{COMMIT}"
        headers |= {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": route}
    return status, headers, content


def portal_answer(hub: HubStandIn, asked: Asked) -> Answer:
    """Answer every request with a login page."""
    return 200, {"Content-Type": "text/html"}, b"<html>Please log in</html>"


def mirror_answer(hub: HubStandIn, asked: Asked) -> Answer:
    """Answer without the header that names the commit."""
    status, headers, content = HubStandIn.answer(hub, asked)
    headers.pop("X-Repo-Commit", None)
    return status, headers, content


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (xet_answer, "the download broke off (Task error"),
        (portal_answer, NO_HUB),
        (mirror_answer, NO_HUB),
    ],
)
def test_answers_of_other_servers_are_reported(hub, monkeypatch, answer, expected):
    monkeypatch.setattr(hub, "answer", partial(answer, hub))
    assert expected in fetch_message(NAME)


@pytest.mark.parametrize("names", [["config.json", "pytorch_model.bin"], ["a.gguf"]])
def test_repository_without_readable_weights_is_refused(hub: HubStandIn, names):
    hub.files = dict.fromkeys(names, b"{}")
    message = fetch_message(NAME)
    assert "has no weights as *.safetensors" in message
    assert "google/tiny:Q4_K_M" in message
    assert hub.fetched <= {"config.json"}


def check_same(folder: Path, origin: Path) -> None:
    found = files_of(folder)
    found = {name: data for name, data in found.items() if ".complete" not in name}
    assert found == files_of(origin)
    assert open_checkpoint(folder).config == open_checkpoint(origin).config


def test_downloaded_model_opens(hub: HubStandIn, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = fetch_message(NAME)
    assert "HF_HUB_OFFLINE is set and the cache has no whole copy" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch(NAME)
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "config.json").is_symlink()
    check_same(folder, origin)
    hub.asked.clear()
    assert fetch(NAME) == folder
    assert hub.fetched == set()
    hub.asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch(NAME) == folder
    check_same(folder, origin)
    assert hub.asked == []
    # Move the blobs to a folder that models share, as the library does with all files
    # from Xet storage.
    for blob in (folder.parents[1] / "blobs").iterdir():
        shared = tmp_path / "cache/blobs" / blob.name[:2] / blob.name
        shared.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(shared)
        blob.symlink_to(Path(os.path.relpath(shared, blob.parent)))
    check_same(fetch(NAME), origin)


def test_only_needed_files_are_fetched(hub: HubStandIn, tmp_path: Path):
    more = ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja")
    wanted = {*hub.files, *more, "chat_template.json"}
    never = ("README.md", "pytorch_model.bin", "d/pickle.pt", "gemma.gguf")
    never += ("flax_model.msgpack", "original/model.safetensors")
    others = {*wanted, *never, "original/config.json"} - set(hub.files)
    hub.files |= {name: name.encode() for name in others}
    folder = fetch(NAME)
    assert hub.fetched == wanted
    assert set(files_of(folder)) == wanted
    hub.asked.clear()
    folder = fetch(NAME, weights=False, cache_dir=tmp_path / "other")
    wanted = {name for name in wanted if "safetensors" not in name}
    assert len(wanted) == 8
    assert hub.fetched == set(files_of(folder)) == wanted


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("Q4_0", ["m-Q4_0.gguf"]),
        ("Q4_K_M", ["m-q4_k_m.gguf"]),
        ("q8_0", ["sub/m.Q8_0.gguf"]),
        ("BF16", [name for name in GGUFS if "BF16" in name]),
    ],
)
def test_a_gguf_file_is_fetched_by_its_type(hub: HubStandIn, kind, wanted, monkeypatch):
    hub.files = {name: name.encode() for name in GGUFS}
    path = fetch(f"{NAME}:{kind}")
    assert path.read_bytes() == wanted[0].encode()
    assert hub.fetched == set(wanted)
    fetch(f"{NAME}:Q4_0")  # a file of another type in the same folder is ignored
    assert fetch(f"{NAME}:{kind}") == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(f"{NAME}:{kind}", weights=False) == path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Q5_0", "no .* of type 'Q5_0', but exactly one is needed; found: a-F16"),
        ("F16", "several GGUF files of type 'F16'.* found: a-F16.gguf, b-F16.gguf"),
        ("M", "no GGUF file of type 'M'"),
    ],
)
def test_gguf_type_must_match_one_file(hub: HubStandIn, kind: str, words: str):
    hub.files = {name: name.encode() for name in GGUFS if "K_M" not in name}
    with pytest.raises(CheckpointError, match=words):
        fetch(f"{NAME}:{kind}")
    assert hub.fetched == set()


@pytest.mark.parametrize("below", ["", "weights/"])
def test_every_file_of_an_orbax_folder_is_fetched(hub, tmp_path, below):
    tree = {"transformer/layer_0/mlp": {"w": jnp.ones((4, 3))}}
    names = set(ORBAX)
    storages: Any = [{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}]
    for number, storage in enumerate(storages):
        folder = tmp_path / f"orbax{number}"
        ocp.PyTreeCheckpointer(**storage).save(folder, tree)
        stored = files_of(folder)
        assert len(stored) >= 3
        names |= stored.keys()
    wanted = {"tokenizer.model", *(below + name for name in names)}
    hub.files = {name: name.encode() for name in (*wanted, "README.md")}
    assert set(files_of(fetch(NAME))) == wanted


def test_the_token_goes_to_the_hub_only(hub, origin, tmp_path, monkeypatch):
    hub.gated = True
    message = fetch_message(NAME)
    accept = f"Accept it on {constants.ENDPOINT}/{NAME}"
    for words in ("(401)", accept, "hf_token", "HF_TOKEN"):
        assert words in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_same(fetch(NAME, cache_dir=tmp_path / "other"), origin)
    monkeypatch.delenv("HF_TOKEN")
    hub.asked.clear()
    check_same(fetch(NAME, token=TOKEN), origin)
    sent = hub.sent
    sent["127.0.0.1"].discard("")  # the library's requests about itself
    assert sent == {"127.0.0.1": {f"Bearer {TOKEN}"}, "localhost": {""}}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("cut", "the connection broke"), ("short", "the download broke off")],
)
def test_interrupted_download_is_resumed(hub, origin, monkeypatch, fault, expected):
    hub.faults[SHARD] = fault
    message = fetch_message(NAME)
    assert expected in message and "try again" in message.lower()
    # Without a network, the incomplete folder in the cache is an error and not a model.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = fetch_message(NAME)
    assert "an earlier download of it is unfinished" in message
    assert "HF_HUB_OFFLINE" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.faults.clear()
    hub.asked.clear()
    check_same(fetch(NAME), origin)
    assert SHARD in hub.fetched
    assert "config.json" not in hub.fetched


def calls_of(kaggle: KaggleStandIn) -> list[str]:
    return [asked.path.rsplit("/", 1)[-1] for asked in kaggle.asked]


def test_downloaded_model_of_kaggle_opens(kaggle, origin, tmp_path):
    folder = fetch(TINY_HANDLE)
    assert folder == tmp_path / "cache/models" / TINY_HANDLE / "2"
    check_same(folder, origin)
    assert kaggle.fetched == set(kaggle.files)
    # The newest version must be requested; a version in the cache need not.
    kaggle.asked.clear()
    assert fetch(TINY_HANDLE) == folder
    assert calls_of(kaggle) == ["GetModelInstance"]
    kaggle.asked.clear()
    assert fetch(f"{TINY_HANDLE}/2") == folder
    assert kaggle.asked == []
    assert fetch(f"{TINY_HANDLE}/1") == folder.parent / "1"


def test_many_files_arrive_as_an_archive(kaggle: KaggleStandIn, origin: Path):
    for number in range(MAX_FILES):
        (origin / f"extra{number}").write_text(str(number))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(origin, ".")
    whole, name = archive.getvalue(), "archive.tar.gz"
    # Half of the archive with the checksum of this half: it was damaged before it was
    # sent.
    kaggle.files = files_of(origin) | {name: whole[: len(whole) // 2]}
    for _ in range(2):
        assert "the download is damaged" in fetch_message(TINY_HANDLE)
    kaggle.files[name] = whole
    check_same(fetch(TINY_HANDLE), origin)
    assert kaggle.fetched == {name}


def test_destination_of_the_caller_is_used(kaggle, origin, tmp_path):
    place = tmp_path / "elsewhere"
    folder = fetch(f"{TINY_HANDLE}/1", cache_dir=place)
    assert folder.parent == place
    assert not (tmp_path / "cache").exists()
    check_same(folder, origin)
    newest = fetch(TINY_HANDLE, cache_dir=str(place))
    assert newest != folder
    kaggle.asked.clear()
    assert fetch(f"{TINY_HANDLE}/1", cache_dir=place) == folder
    assert fetch(TINY_HANDLE, cache_dir=place) == newest
    assert calls_of(kaggle) == ["GetModelInstance"]
    # Files of a killed download are kept, and named.
    shutil.rmtree(folder / ".complete")
    kept = files_of(folder)
    message = fetch_message(f"{TINY_HANDLE}/1", cache_dir=place)
    assert str(folder) in message and "delete the folder" in message
    assert files_of(folder) == kept


def test_a_login_is_used_and_sent_to_kaggle_only(kaggle, origin, monkeypatch):
    kaggle.needs_consent, kaggle.accepted = True, False
    message = fetch_message(TINY_HANDLE)
    assert "not logged in, or have not accepted its licence (401)" in message
    assert "kaggle.com/models/google/tiny" in message
    assert "KAGGLE_API_TOKEN" in message
    monkeypatch.setenv("KAGGLE_API_TOKEN", KAGGLE_TOKEN)
    message = fetch_message(TINY_HANDLE)
    assert "have not accepted its licence (403). Accept it on" in message
    kaggle.accepted = True
    kaggle.asked.clear()
    check_same(fetch(TINY_HANDLE, token="of the other service"), origin)
    assert kaggle.sent == {"127.0.0.1": {f"Bearer {KAGGLE_TOKEN}"}, "localhost": {""}}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("cut", "the connection broke"), ("short", "the download is damaged")],
)
@pytest.mark.parametrize("place", [None, "elsewhere"])
def test_interrupted_download_is_fetched_again(
    kaggle, origin, tmp_path, place, fault, expected
):
    cache_dir = None if place is None else tmp_path / place
    given: Any = dict(name=f"{TINY_HANDLE}/2", cache_dir=cache_dir)
    kaggle.faults[SHARD] = fault
    message = fetch_message(**given)
    assert expected in message and "ry again" in message
    if cache_dir is not None:
        assert list(cache_dir.iterdir()) == []
    # The incomplete folder is not taken for a model: kagglehub sends its requests
    # again.
    kaggle.faults.clear()
    kaggle.faults["ListModelInstanceVersionFiles"] = 503
    assert "(503)" in fetch_message(**given)
    kaggle.faults.clear()
    kaggle.asked.clear()
    check_same(fetch(**given), origin)
    assert SHARD in kaggle.fetched


class NotebookStandIn(KaggleStandIn):
    """The service of a Kaggle notebook that attaches models to it."""

    def answer(self, asked: Asked) -> Answer:
        assert asked.path == "/kaggle-jwt-handler/AttachDatasourceUsingJwtRequest"
        return 200, {}, b'{"wasSuccessful": false}'


def test_a_notebook_that_cannot_attach_the_model(refused_by_kaggle, monkeypatch):
    stand_in = NotebookStandIn(files={})
    with serve(stand_in):
        monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
        monkeypatch.setenv("KAGGLE_DATA_PROXY_URL", f"http://127.0.0.1:{stand_in.port}")
        assert "the notebook cannot attach it" in fetch_message(TINY_HANDLE)
        monkeypatch.setenv("KAGGLE_USER_SECRETS_TOKEN", "secret")
        monkeypatch.setenv("KAGGLE_DATA_PROXY_TOKEN", "data")
        message = fetch_message(TINY_HANDLE)
    assert "POST failed" in message
    assert "/kaggle/input" in message
    assert refused_by_kaggle == []

"""Models of Kaggle are fetched whole and open; errors have a remedy."""

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.sources import fetch
from tests.checkpoints.models import write_tiny
from tests.checkpoints.stand_ins import (
    KAGGLE_TOKEN,
    Answer,
    Asked,
    KaggleStandIn,
    fetch_message,
    files_of,
    serve,
)

HANDLE = KaggleStandIn.handle
# kagglehub fetches up to this many files one by one, and more of them as one archive.
MAX_FILES = 25


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "origin", family="2b")
    return tmp_path / "origin"


def check_same(folder: Path, origin: Path) -> None:
    found = files_of(folder)
    found = {name: data for name, data in found.items() if ".complete" not in name}
    assert found == files_of(origin)
    assert open_checkpoint(folder).config == open_checkpoint(origin).config


def calls_of(kaggle: KaggleStandIn) -> list[str]:
    return [asked.path.rsplit("/", 1)[-1] for asked in kaggle.asked]


def test_downloaded_model_opens(kaggle: KaggleStandIn, origin: Path, tmp_path: Path):
    folder = fetch(HANDLE)
    assert folder == tmp_path / "cache/models" / HANDLE / "2"
    check_same(folder, origin)
    assert kaggle.fetched == set(kaggle.files)
    # The newest version must be requested; a version in the cache need not.
    kaggle.asked.clear()
    assert fetch(HANDLE) == folder
    assert calls_of(kaggle) == ["GetModelInstance"]
    kaggle.asked.clear()
    assert fetch(f"{HANDLE}/2") == folder
    assert kaggle.asked == []
    assert fetch(f"{HANDLE}/1") == folder.parent / "1"


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
        assert "the download is damaged" in fetch_message(HANDLE)
    kaggle.files[name] = whole
    check_same(fetch(HANDLE), origin)
    assert kaggle.fetched == {name}


def test_destination_of_the_caller_is_used(kaggle, origin, tmp_path):
    place = tmp_path / "elsewhere"
    folder = fetch(f"{HANDLE}/1", cache_dir=place)
    assert folder.parent == place
    assert not (tmp_path / "cache").exists()
    check_same(folder, origin)
    newest = fetch(HANDLE, cache_dir=str(place))
    assert newest != folder
    kaggle.asked.clear()
    assert fetch(f"{HANDLE}/1", cache_dir=place) == folder
    assert fetch(HANDLE, cache_dir=place) == newest
    assert calls_of(kaggle) == ["GetModelInstance"]
    # Files of a killed download are kept, and named.
    shutil.rmtree(folder / ".complete")
    kept = files_of(folder)
    message = fetch_message(f"{HANDLE}/1", cache_dir=place)
    assert str(folder) in message and "delete the folder" in message
    assert files_of(folder) == kept


def test_a_login_is_used_and_sent_to_kaggle_only(kaggle, origin, monkeypatch):
    kaggle.needs_consent, kaggle.accepted = True, False
    message = fetch_message(HANDLE)
    assert "not logged in, or have not accepted its licence (401)" in message
    assert "kaggle.com/models/google/tiny" in message
    assert "KAGGLE_API_TOKEN" in message
    monkeypatch.setenv("KAGGLE_API_TOKEN", KAGGLE_TOKEN)
    message = fetch_message(HANDLE)
    assert "have not accepted its licence (403). Accept it on" in message
    kaggle.accepted = True
    kaggle.asked.clear()
    check_same(fetch(HANDLE, token="of the other service"), origin)
    sent: dict[str, set[str]] = {}
    for asked in kaggle.asked:
        sent.setdefault(asked.host.split(":")[0], set()).add(asked.authorization)
    assert sent == {"127.0.0.1": {f"Bearer {KAGGLE_TOKEN}"}, "localhost": {""}}


def test_wrong_names_are_errors(kaggle: KaggleStandIn):
    for name, expected in (
        ("google/tiny/flax/other", "no such model"),
        ("google/none/flax/tiny-2b", "no such model"),
        (f"{HANDLE}/7", "no such model, framework, variation or version (404)"),
        ("google/tiny/keras/tiny-2b", "one of flax, jax, transformers, other"),
        ("no/such/folder/here", "one of flax, jax, transformers, other"),
    ):
        assert expected in fetch_message(name)
    assert kaggle.fetched == set()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("cut", "the connection broke"), ("short", "the download is damaged")],
)
@pytest.mark.parametrize("place", [None, "elsewhere"])
def test_interrupted_download_is_fetched_again(
    kaggle, origin, tmp_path, place, fault, expected
):
    cache_dir = None if place is None else tmp_path / place
    given: Any = dict(name=f"{HANDLE}/2", cache_dir=cache_dir)
    kaggle.faults["model.safetensors"] = fault
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
    assert "model.safetensors" in kaggle.fetched


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
        assert "the notebook cannot attach it" in fetch_message(HANDLE)
        monkeypatch.setenv("KAGGLE_USER_SECRETS_TOKEN", "secret")
        monkeypatch.setenv("KAGGLE_DATA_PROXY_TOKEN", "data")
        message = fetch_message(HANDLE)
    assert "POST failed" in message
    assert "/kaggle/input" in message
    assert refused_by_kaggle == []

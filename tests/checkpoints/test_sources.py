"""Names are assigned to services; errors for a missing extra say how to install it."""

import sys
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.sources import fetch, is_remote

HUB_ID = "google/gemma-2-9b-it"
HANDLE = "google/gemma-2/flax/gemma2-2b-it"
NAMES = [HUB_ID, "a/b", "my_org/Model.v2", HANDLE, HANDLE + "/3"]
EXTRAS = [
    (HUB_ID, "huggingface_hub", "hub"),
    (HANDLE, "kagglehub", "kaggle"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_assigned_to_services(name: str):
    assert is_remote(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gemma",
        "./google/gemma",
        "/google/gemma",
        "google/",
        "a/b/c",
        "google/gemma 2",
        "google/..",
        HANDLE + "/latest",
        HANDLE + "/0",
        HANDLE + "/3/4",
        "./a/b/c",
        "C:\\google\\gemma",
    ],
)
def test_other_names_belong_to_no_service(name: str):
    assert not is_remote(name)
    if name:
        with pytest.raises(CheckpointError, match="owner/name.*owner/model/framework"):
            fetch(name)


@pytest.mark.parametrize("name", [HUB_ID, HANDLE, "plain", "./a/b/c"])
def test_existing_folder_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    assert fetch(name, revision="ignored", token="ignored") == Path(name)


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert fetch("~/model") == tmp_path / "model"


@pytest.mark.parametrize(("name", "library", "extra"), EXTRAS)
def test_missing_extra_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str, extra: str
):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(
        sys.modules, f"jaxspec_checkpoints.sources.{extra}", raising=False
    )
    with pytest.raises(CheckpointError) as caught:
        fetch(name)
    message = str(caught.value)
    assert repr(name) in message
    assert f'pip install -e ".[{extra}]"' in message
    assert "pass its folder" in message
    assert library in str(caught.value.__cause__)


def test_a_handle_has_no_revisions():
    with pytest.raises(CheckpointError, match="revision='main'.*fifth part"):
        fetch(HANDLE, revision="main")

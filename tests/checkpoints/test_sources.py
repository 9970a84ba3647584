"""Names are assigned to services; errors for a missing extra say how to install it."""

import sys
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.sources import fetch, is_remote

HUB_ID = "google/gemma-2-9b-it"
HANDLE = "google/gemma-2/flax/gemma2-2b-it"


NOT_REMOTE = (
    *("", "gemma", "./google/gemma", "/google/gemma", "google/", "a/b/c", "./a/b/c"),
    *("google/gemma 2", "google/..", "C:\\google\\gemma"),
    *(HANDLE + "/latest", HANDLE + "/0", HANDLE + "/3/4"),
)


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

"""Models of the hub are fetched whole and open; errors have a remedy."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from huggingface_hub import constants

from jaxspec_checkpoints import CheckpointError, open_checkpoint
from jaxspec_checkpoints.sources import fetch
from tests.checkpoints.stand_ins import (
    TOKEN,
    HubStandIn,
    fetch_message,
    files_of,
)

NAME = "google/tiny"


def check_same(folder: Path, origin: Path) -> None:
    assert files_of(folder) == files_of(origin)
    found, expected = open_checkpoint(folder), open_checkpoint(origin)
    assert found.config == expected.config
    assert sorted(found.tensors) == sorted(expected.tensors)
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor.whole(), expected.tensors[name].whole())


def test_downloaded_model_opens(hub: HubStandIn, origin: Path, tmp_path: Path):
    folder = fetch(NAME)
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "config.json").is_symlink()
    check_same(folder, origin)
    hub.asked.clear()
    assert fetch(NAME) == folder
    assert hub.fetched == set()
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


GGUFS = (
    *("m-Q4_0.gguf", "m-q4_k_m.gguf", "m-Q4_K_M_L.gguf", "mmproj-Q4_K_M.gguf"),
    *("sub/m.Q8_0.gguf", "big/m-BF16-00001-of-00002.gguf"),
    *("big/m-BF16-00002-of-00002.gguf", "config.json", "a-F16.gguf", "b-F16.gguf"),
)


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
        (
            "Q5_0",
            "no GGUF file of type 'Q5_0', but exactly one is needed; found: a-F16",
        ),
        ("F16", "several GGUF files of type 'F16'.* found: a-F16.gguf, b-F16.gguf"),
        ("M", "no GGUF file of type 'M'"),
    ],
)
def test_gguf_type_must_match_one_file(hub: HubStandIn, kind: str, words: str):
    hub.files = {name: name.encode() for name in GGUFS if "K_M" not in name}
    with pytest.raises(CheckpointError, match=words):
        fetch(f"{NAME}:{kind}")
    assert hub.fetched == set()


# Files of published folders: `below` them, and in every layout of Orbax.
ORBAX = (
    *("_METADATA", "_sharding", "checkpoint", "manifest.ocdbt", "d/fa0b"),
    *("ocdbt.process_0/manifest.ocdbt", "ocdbt.process_0/d/fa0b"),
    *("array_metadatas/process_0", "params.transformer.layer_0.mlp/.zarray"),
    *("params.transformer.layer_0.mlp/0.0", "params/zarr.json", "params/c/0/0"),
)


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
    sent = {}
    for asked in hub.asked:
        sent.setdefault(asked.host.split(":")[0], set()).add(asked.authorization)
    sent["127.0.0.1"].discard("")  # the library's requests about itself
    assert sent == {"127.0.0.1": {f"Bearer {TOKEN}"}, "localhost": {""}}


def test_offline_mode_uses_a_cached_copy_or_is_an_error(hub, origin, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = fetch_message(NAME)
    assert "HF_HUB_OFFLINE is set and the cache has no whole copy" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch(NAME)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME) == folder
    check_same(folder, origin)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("cut", "the connection broke"), ("short", "the download broke off")],
)
def test_interrupted_download_is_resumed(hub, origin, monkeypatch, fault, expected):
    shard = "model-00002-of-00003.safetensors"
    hub.faults[shard] = fault
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
    assert shard in hub.fetched
    assert "config.json" not in hub.fetched

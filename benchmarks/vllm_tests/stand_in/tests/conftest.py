"""Fixtures of vLLM's tests, for jaxspec."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.config as config
import vllm.transformers_utils.repo_utils as hub
from stand_in_models import prepare

import jaxspec

PROMPTS = [
    "vLLM is a high-throughput and memory-efficient inference and serving engine.",
    "Briefly describe the major milestones in the history of computers.",
    "Compare and contrast two ways to sort a list.",
    "Once upon a time there was a fox",
]


class Hub:
    """vLLM's access to the Hugging Face Hub, for tests that download adapters."""

    def snapshot_download(self, repo_id: str) -> str:
        return repo_id


class ModelConfig:
    """What vLLM's tests ask its `ModelConfig`."""

    def __init__(self, model: str, **_: object):
        self._folder = Path(prepare(model))

    def get_vocab_size(self) -> int:
        return json.loads((self._folder / "config.json").read_text())["vocab_size"]


hub.hf_api = Hub
config.ModelConfig = ModelConfig


class VllmRunner:
    """An `LLM` in a with statement, with the defaults of vLLM's tests."""

    def __init__(self, model_name: str, **arguments: Any):
        prepare(model_name)
        for name in ("tokenizer_mode", "load_format", "config_format"):
            arguments.pop(name, None)
        if "tokenizer_name" in arguments:
            arguments["tokenizer"] = arguments.pop("tokenizer_name")
        arguments = {"seed": 0, "max_model_len": 1024, **arguments}
        self.llm = jaxspec.LLM(model=model_name, **arguments)

    def __enter__(self) -> "VllmRunner":
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


@pytest.fixture
def example_prompts() -> list[str]:
    return PROMPTS


@pytest.fixture(autouse=True)
def _other_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tests make an `LLM`, or read a tokenizer, of any model."""
    make = jaxspec.LLM.__init__

    def init(llm: Any, model: Any = None, **arguments: Any) -> None:
        if isinstance(model, str):
            prepare(model)
        make(llm, model, **arguments)

    monkeypatch.setattr(jaxspec.LLM, "__init__", init)
    yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optional", action="store_true", default=False)


class LocalAssetServer:
    """vLLM's server of images, which the tests of text do not use."""

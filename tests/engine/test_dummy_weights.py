"""`load_format="dummy"`: random weights from a config alone, and ids without texts."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.engine import loader
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.runner import build_mesh
from jaxspec.errors import ConfigError, RequestError
from jaxspec.models.cpu import NativeMatrix, PanelMatrix
from jaxspec.sampling_params import StructuredOutputsParams
from jaxspec.text.tokenizer import NoTokenizer
from jaxspec_checkpoints import bundled_target
from tests.checkpoints.models import tiny_config, write_tiny
from tests.support.engines import QuickRunner
from tests.support.oracles import forms_of

SIZES: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2, dtype="float32")


def write_config(folder: Path, family: str = "2b", **changes: Any) -> str:
    """Write a model folder that has only a config.json; return its path."""
    folder.mkdir()
    changes = {"num_hidden_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **changes)))
    return str(folder)


def configure(model: Any, draft: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = SIZES | {"load_format": "dummy"} | options
    if draft is not None:
        settings |= dict(speculative_model=str(draft), num_speculative_tokens=2)
    return EngineArgs(model=str(model), **settings).create_engine_config()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_have_the_shapes_and_types_of_loaded_ones(tmp_path, dtype):
    """The target is on four devices, and the draft model on two."""
    write_tiny(tmp_path / "9b", family="9b")
    write_tiny(tmp_path / "2b", family="2b")
    options: dict[str, Any] = dict(
        dtype=dtype,
        tensor_parallel_size=4,
        speculative_config={"draft_tensor_parallel_size": 2},
    )
    made, read = (
        configure(tmp_path / "9b", tmp_path / "2b", load_format=how, **options)
        for how in ("dummy", "auto")
    )
    mesh = build_mesh(made)
    found, expected = (loader.load_weights(one, mesh) for one in (made, read))
    assert forms_of(found) == forms_of(expected)
    tables = [one["embedding"].values for one in found if one]
    embeddings = [np.asarray(table, np.float32) for table in tables]
    assert len(embeddings) == 2
    assert all(np.isfinite(one).all() and one.any() for one in embeddings)


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_float32_weights_on_one_cpu_are_in_panels(tmp_path, load_format):
    write_tiny(tmp_path / "2b", family="2b")
    config = configure(tmp_path / "2b", tmp_path / "2b", load_format=load_format)
    for params in loader.load_weights(config, build_mesh(config)):
        assert params is not None
        assert isinstance(params["embedding"], NativeMatrix | PanelMatrix)


def test_weights_of_head_embedding_and_a_draft_of_equal_size_are_different(tmp_path):
    folder = write_config(tmp_path / "model", tie_word_embeddings=False)
    config = configure(folder, folder)
    target, draft = loader.load_weights(config, build_mesh(config))
    assert draft is not None
    tables = [target["embedding"], target["head"], draft["embedding"]]
    assert len({table.shape for table in tables}) == 1
    for first, second in itertools.combinations(tables, 2):
        assert not np.array_equal(first.values, second.values)
    config = configure(folder)
    assert loader.load_weights(config, build_mesh(config))[1] is None


@pytest.fixture
def llm(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "Runner", QuickRunner)
    # Only the token ids of the bundled models are set.
    target = write_config(tmp_path / "target", "9b")
    draft = write_config(tmp_path / "draft")
    with LLM(
        target,
        speculative_model=draft,
        num_speculative_tokens=2,
        speculative_config={"controller": "fixed"},
        load_format="dummy",
        max_num_batched_tokens=32,
        **SIZES,
    ) as made:
        yield made


def test_config_file_is_sufficient(llm, caplog):
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, logprobs=1)

    def write() -> list[int]:
        (output,) = llm.generate([[2, 5, 9]], params, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert output.outputs[0].logprobs[0]
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.num_spec_steps > 5
        return output.outputs[0].token_ids

    tokens = write()
    assert len(tokens) == 20
    assert len(set(tokens)) > 5
    llm.sleep(2)
    llm.wake_up()
    assert write() == tokens
    for ask, name in [
        (lambda: llm.generate("Hello", use_tqdm=False), "A text"),
        (lambda: llm.chat([{"role": "user", "content": "Hi"}]), "A conversation"),
        (lambda: llm.get_tokenizer().encode("Hi"), "A text"),
    ]:
        with pytest.raises(RequestError, match=f"{name} needs a tokenizer.*no token"):
            ask()
    needs: list[dict[str, Any]] = [
        {"stop": "x"},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ]
    for asked in needs:
        (name,) = asked
        with pytest.raises(RequestError, match=f"{name} needs a tokenizer") as caught:
            llm.generate([[2]], SamplingParams(**asked), use_tqdm=False)
        assert caught.value.parameter == name


def test_log_warns_that_texts_are_meaningless(tmp_path, caplog):
    folder = write_config(tmp_path / "model")
    forced = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    config = configure(folder, folder, speculative_config=forced)
    with caplog.at_level(logging.WARNING):
        loader.make_runner(config)
        assert isinstance(loader.read_tokenizer(config), NoTokenizer)
    assert "load_format='dummy': weights are random" in caplog.text
    assert "'synthetic': drafts are accepted at random" in caplog.text
    assert "(1.0, 0.5)" in caplog.text
    assert "has no tokenizer file: prompts must be token ids" in caplog.text


def test_existing_tokenizer_is_read_unless_skipped():
    assert loader.read_tokenizer(configure(bundled_target())).encode("Hi")
    config = configure(bundled_target(), load_format="auto", skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init=True"):
        loader.read_tokenizer(config).encode("Hi")


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_named_tokenizer_must_exist(tmp_path, load_format):
    """Given a `tokenizer` folder or not, a missing tokenizer is an error."""
    write_config(tmp_path / "empty")
    folder = write_config(tmp_path / "model")
    options = {"tokenizer": str(tmp_path / "empty")} if load_format == "dummy" else {}
    config = configure(folder, load_format=load_format, **options)
    with pytest.raises(ConfigError, match="tokenizer"):
        loader.read_tokenizer(config)

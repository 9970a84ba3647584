"""An engine loads weights, or makes random ones, at the start and after sleep."""

import dataclasses
import functools
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxspec import LLM
from jaxspec.config.hosts import HostsConfig
from jaxspec.engine import loader
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.loader import Sleep
from jaxspec.engine.runner import Runner, build_mesh
from jaxspec.errors import ConfigError, RequestError
from jaxspec.models.cpu import NativeMatrix, PanelMatrix
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.text.tokenizer import NoTokenizer
from jaxspec_checkpoints import bundled_draft, bundled_target, open_checkpoint
from jaxspec_checkpoints.layout import EMBEDDING, HEAD
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import tiny_config, write_tiny
from tests.support import pair
from tests.support.engines import QuickRunner, generate, tokens_of
from tests.support.loops import make_config
from tests.support.model_configs import write_model
from tests.support.oracles import forms_of

SIZES: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2, dtype="float32")
VOCABULARY: dict[str, Any] = dict(vocab_size=8192)  # as the bundled tokenizer
PROMPTS = [[2, 5, 6, 7], [2, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
]


def configure(target: Any, draft: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = SIZES | options
    if draft is not None:
        settings |= dict(speculative_model=str(draft), num_speculative_tokens=2)
    return EngineArgs(model=str(target), **settings).create_engine_config()


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loader, "load_params", fail)


def test_rejects_tokenizer_with_more_pieces_than_the_network(tmp_path):
    """A token id beyond the embedding would silently read its last row."""
    write_tiny(tmp_path / "model", family="2b", vocab_size=8191)
    config = configure(tmp_path / "model")
    with pytest.raises(ConfigError, match="8192 pieces, .* has vocab_size=8191"):
        loader.read_tokenizer(config)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("argument", ["model", "speculative_model"])
def test_damage_of_either_model_is_found_before_a_weight_is_read(tmp_path, argument):
    pair = {"model": tmp_path / "a", "speculative_model": tmp_path / "b"}
    for folder in pair.values():
        write_tiny(folder, family="2b", num_hidden_layers=1, **VOCABULARY)
    path = pair[argument] / "model.safetensors"
    tensors = load_file(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="not a readable safetensors") as error:
        loader.make_runner(configure(*pair.values()))
    assert error.value.parameter == argument
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"^{argument}: .*'model.norm.weight'"):
        loader.make_runner(configure(*pair.values()))


def test_a_draft_needs_no_tokenizer_of_its_own(tmp_path):
    write_tiny(tmp_path / "draft", family="2b", **VOCABULARY)
    (tmp_path / "draft" / "tokenizer.model").unlink()
    config = configure(bundled_target(), tmp_path / "draft")
    assert loader.read_tokenizer(config).vocab_size == 8192


@pytest.mark.usefixtures("nothing_is_read")
def test_trimmed_draft_needs_turn_tokens(tmp_path):
    """Turn tokens are checked before loading, also those of the tokenizer alone."""
    path = tmp_path / "map.json"
    options: dict[str, Any] = dict(
        speculative_model=str(bundled_draft()),
        num_speculative_tokens=2,
        speculative_config={"draft_token_map": str(path)},
    )
    path.write_text(json.dumps([0, 1, 2, 4, 5, 107]))
    config = configure(bundled_target(), **options)
    with pytest.raises(ConfigError, match=r"missing: <start_of_turn> \(106\)\."):
        LLMEngine(config)
    path.write_text(json.dumps([0, 1, 2, 4, 5, 106, 107]))
    config = configure(bundled_target(), **options)
    assert config.draft_token_ids == (0, 1, 2, 4, 5, 106, 107)
    assert loader.read_tokenizer(config).vocab_size == 8192


def write_padded(
    folder: Path, vocab_size: int, rows: Any, *, is_tied: bool = True
) -> None:
    """Write the bundled draft with more embedding rows and, optionally, an LM head."""
    shutil.copytree(bundled_draft(), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    table = tensors[EMBEDDING]
    pads = np.full((vocab_size - len(table), table.shape[1]), rows, table.dtype)
    tensors[EMBEDDING] = np.concatenate([table, pads])
    if not is_tied:
        tensors[HEAD] = np.concatenate([table[::-1], pads])
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = vocab_size
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("role", "is_tied"),
    [
        *(("target", True), ("draft", False)),
        pytest.param("target", False, marks=pytest.mark.slow),
        pytest.param("draft", True, marks=pytest.mark.slow),
    ],
)
def test_padding_rows_of_target_or_draft_are_dropped(tmp_path, role, is_tied):
    write_padded(tmp_path / "padded", 8192 + 128, np.nan, is_tied=is_tied)
    folders = [bundled_target(), tmp_path / "padded"]
    if role == "target":
        folders = [tmp_path / "padded", bundled_draft()]
    config = configure(*folders)
    assert config.model_config.vocab_size == 8192
    assert config.draft_model_config.vocab_size == 8192
    loader.read_tokenizer(config)
    target, (draft,) = loader.make_runner(config).params
    for params in (target, draft):
        assert params is not None
        for name in {"embedding", "head"} & params.keys():
            assert params[name].shape[0] == 8192
            assert np.isfinite(params[name].values).all()
    padded = target if role == "target" else draft
    assert padded is not None and ("head" in padded) is not is_tied


def test_rows_beyond_the_tokenizer_are_kept(tmp_path):
    """A single model's unused rows are kept: as in HuggingFace, nothing marks them."""
    write_padded(tmp_path / "padded", 8192 + 129, 0.0)
    assert configure(tmp_path / "padded").model_config.vocab_size == 8192 + 129
    # More extra rows than padding are another vocabulary.
    with pytest.raises(ConfigError, match="8192 tokens, the draft 8321"):
        configure(bundled_target(), tmp_path / "padded")


@pytest.mark.usefixtures("nothing_is_read")
def test_added_tokens_of_the_target_are_an_error_of_the_pair(tmp_path):
    """The error names the tokenizers: extra embedding rows alone would be dropped."""
    folder = tmp_path / "added"
    write_padded(folder, 8192 + 2, 0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_target())
    tokenizer.add_tokens(["<one>", "<two>"])
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    assert loader.read_tokenizer(configure(folder)).vocab_size == 8192 + 2
    with pytest.raises(ConfigError, match="id 8192 is '<one>'") as error:
        LLMEngine(configure(folder, bundled_draft()))
    for text in (str(folder), str(bundled_draft()), "share one tokenizer", "27b <- 9b"):
        assert text in str(error.value)
    assert error.value.parameter == "speculative_model"


def test_a_flipped_byte_is_found_while_reading(tmp_path):
    write_tiny(tmp_path / "hf", family="2b", **VOCABULARY)
    write_checkpoint(
        open_checkpoint(tmp_path / "hf"), tmp_path / "own", to="orbax", progress=False
    )
    files = [path for path in (tmp_path / "own" / "weights").rglob("d/*")]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = len(jax.live_arrays())
    with pytest.raises(ConfigError, match="sha256|cannot be read"):
        loader.make_runner(configure(tmp_path / "own"))
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    ("to", "right", "wrong"),
    [
        ("hf", "safetensors", "orbax"),
        ("kaggle", "orbax", "safetensors"),
        ("orbax", "auto", "safetensors"),
        ("gguf", "auto", "safetensors"),
        ("gguf", "gguf", "safetensors"),
    ],
)
def test_load_format_must_match_the_folder(tmp_path, to, right, wrong):
    tensors = write_tiny(tmp_path / "hf", family="2b", **VOCABULARY)
    folder = tmp_path / to
    if to == "gguf":
        folder = tmp_path / "m.gguf"
        write_gguf(folder, tiny_config("2b", **VOCABULARY), tensors)
    elif to != "hf":
        source = open_checkpoint(tmp_path / "hf")
        write_checkpoint(source, folder, to=to, progress=False)
    runner = loader.make_runner(configure(folder, load_format=right))
    assert runner.params[1] == ()
    with pytest.raises(ConfigError, match=f"load_format must .* format '{to}'"):
        loader.make_runner(configure(folder, load_format=wrong))


def test_tokenizer_of_a_gguf_file(tmp_path):
    """A draft needs no tokenizer, but if it has one, it must be the target's."""
    tensors = write_tiny(tmp_path / "hf", family="2b", **VOCABULARY)
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("2b", **VOCABULARY), has_tokenizer=False)
    assert loader.read_tokenizer(configure(tmp_path / "hf", path)).vocab_size == 8192
    with pytest.raises(ConfigError, match="m.gguf has no tokenizer .*name a folder"):
        loader.read_tokenizer(configure(path))
    own = configure(path, tokenizer=str(tmp_path / "hf"))
    assert loader.read_tokenizer(own).vocab_size == 8192
    assert loader.read_tokenizer(configure(path, load_format="dummy")).vocab_size == 0
    write_gguf(path, tiny_config("2b", **VOCABULARY), tensors)
    loader.read_tokenizer(configure(tmp_path / "hf", path))
    found = loader.make_runner(configure(path, path)).params
    expected = loader.make_runner(configure(tmp_path / "hf", tmp_path / "hf")).params
    # GGUF files store norms as 1 + w in float32.
    check = functools.partial(np.testing.assert_allclose, rtol=0, atol=1.2e-7)
    jax.tree.map(check, found, expected)
    path.write_bytes(path.read_bytes().replace(b"<pad>", b"<dap>"))
    message = r"id 0 is '<pad>' for the target \(.*hf\) and '<dap>'"
    with pytest.raises(ConfigError, match=message):
        loader.read_tokenizer(configure(tmp_path / "hf", path))


@pytest.mark.parametrize(("has_template", "ends"), [(True, {1, 107}), (False, {1})])
def test_end_of_turn_is_an_end_token(tmp_path, has_template, ends):
    """Some copies of instruction-tuned models list only <eos> as an end token."""
    write_tiny(tmp_path, family="2b", eos_token_id=1, **VOCABULARY)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    if not has_template:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with LLM(str(tmp_path), **SIZES) as llm:
        engine = llm.llm_engine
        engine.add_request("0", "x", SamplingParams(max_tokens=1))
        (request,) = engine.output_processor
        assert set(request.stop_ids) == ends


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """Return an engine that shares no arrays with others, as sleep frees them."""
    return pair.own_engine()


def texts(engine: LLMEngine) -> list[list[int]]:
    return tokens_of(generate(engine, PROMPTS, PARAMS))


def arrays(engine: LLMEngine) -> list[Any]:
    return jax.tree.leaves((engine.runner.params, engine.runner.state))


def test_sleep_frees_the_devices_and_wake_up_restores_all(engine: LLMEngine):
    before = texts(engine)
    # All programs have been compiled by now, also those for prefix hits.
    assert texts(engine) == before
    compiled = engine.runner.num_compiles
    placements = [array.sharding for array in arrays(engine)]
    for _ in range(2):
        engine.sleep()
        engine.sleep()  # sleeping again has no further effect
        assert engine.is_sleeping()
        assert all(array.is_deleted() for array in arrays(engine))
        engine.wake_up()
        assert not engine.is_sleeping()
        assert not any(array.is_deleted() for array in arrays(engine))
        assert [array.sharding for array in arrays(engine)] == placements
        assert texts(engine) == before
    assert engine.runner.num_compiles == compiled


@pytest.mark.parametrize("has_drafts", [True, False])
def test_stopped_draft_model_is_not_read_again(engine, monkeypatch, has_drafts):
    """After sleep level 2, weights are read again; not after drafting has stopped."""
    runner, read = MagicMock(spec=Runner), []
    runner.mesh = engine.runner.mesh
    proposers = engine.runner.program.proposers if has_drafts else ()
    runner.program = dataclasses.replace(engine.runner.program, proposers=proposers)

    def load(config: Any, mesh: Any) -> Any:
        read.append(config)
        return engine.runner.params[0], None

    monkeypatch.setattr(loader, "load_weights", load)
    sleep = Sleep(engine.config, runner)
    sleep.begin(2)
    assert not read
    sleep.end(None)
    [config] = read
    assert (config == engine.config) == has_drafts
    assert (config.draft_model_config is not None) == has_drafts
    assert (config.speculative is not None) == has_drafts


def test_parts_wake_up_one_by_one(engine: LLMEngine):
    before = texts(engine)
    engine.sleep()
    engine.wake_up(tags=["weights"])
    assert engine.is_sleeping()
    assert not any(
        array.is_deleted() for array in jax.tree.leaves(engine.runner.params)
    )
    assert engine.runner.state.rows.num_tokens.is_deleted()
    with pytest.raises(RequestError, match=r"is asleep.* call wake_up\(\)"):
        engine.add_request("0", [2], SamplingParams())
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    assert not engine.is_sleeping()
    assert texts(engine) == before


def test_rejects_sleep_of_running_requests_and_unknown_levels_or_tags(engine):
    for level in (0, 3):
        with pytest.raises(RequestError, match="level must be an integer from 1 to 2"):
            engine.sleep(level)
        assert not engine.is_sleeping()
    wrong: Any = (["weights", "all"], "all"), ("weights", "weights")
    for tags, named in wrong:
        with pytest.raises(RequestError, match=f"'kv_cache'.* got '{named}'"):
            engine.wake_up(tags=tags)
    engine.add_request("0", [2, 3], SamplingParams(max_tokens=20))
    with pytest.raises(RequestError, match="1 requests are running"):
        engine.sleep()
    engine.step()
    engine.abort_request("0")
    while engine.has_unfinished_requests():
        engine.step()
    engine.sleep()
    engine.wake_up()


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, "node_rank=1 is a follower, which has no engine"),
        (0, "hosts_secret_file 'missing' cannot be read"),
    ],
)
def test_rejects_follower_and_leader_without_a_secret(rank: int, message: str):
    hosts = HostsConfig(
        nnodes=2,
        node_rank=rank,
        master_addr="127.0.0.1",
        master_port=1,
        headless=rank > 0,
        secret_file="missing",
    )
    config = dataclasses.replace(make_config(), hosts=hosts)
    with pytest.raises(ConfigError, match=message):
        loader.make_runner(config)


def test_malloc_arenas_are_configured_before_devices_are_used(monkeypatch):
    """The number of arenas is fixed by the time jax has started its threads."""
    calls: list[str] = []

    def build_mesh(*_: object) -> None:
        calls.append("devices")
        raise ConfigError("no device")

    monkeypatch.setattr(loader, "permit_spare_arenas", lambda: calls.append("arenas"))
    monkeypatch.setattr(loader, "build_mesh", build_mesh)
    with pytest.raises(ConfigError, match="no device"):
        loader.make_runner(make_config())
    assert calls == ["arenas", "devices"]


# Random weights from a config alone, and ids without texts.
dummy = functools.partial(configure, load_format="dummy")


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
        make(tmp_path / "9b", tmp_path / "2b", **options) for make in (dummy, configure)
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
    folder = write_model(tmp_path / "model", tie_word_embeddings=False)
    config = dummy(folder, folder)
    target, draft = loader.load_weights(config, build_mesh(config))
    assert draft is not None
    tables = [target["embedding"], target["head"], draft["embedding"]]
    assert len({table.shape for table in tables}) == 1
    for first, second in itertools.combinations(tables, 2):
        assert not np.array_equal(first.values, second.values)
    config = dummy(folder)
    assert loader.load_weights(config, build_mesh(config))[1] is None


@pytest.fixture
def llm(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "Runner", QuickRunner)
    folder = write_model(tmp_path / "model", num_hidden_layers=1)
    with LLM(
        folder,
        speculative_model=folder,
        num_speculative_tokens=2,
        speculative_config={"controller": "fixed"},
        load_format="dummy",
        max_num_batched_tokens=32,
        **SIZES,
    ) as made:
        yield made


def test_config_file_is_sufficient(llm):
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
    needs: dict[str, Any] = {
        "stop": "x",
        "bad_words": ["x"],
        "structured_outputs": StructuredOutputsParams(regex="a"),
    }
    for name, value in needs.items():
        with pytest.raises(RequestError, match=f"{name} needs a tokenizer") as caught:
            llm.generate([[2]], SamplingParams(**{name: value}), use_tqdm=False)
        assert caught.value.parameter == name


def test_log_warns_that_texts_are_meaningless(tmp_path, caplog):
    folder = write_model(tmp_path / "model", num_hidden_layers=1)
    forced = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    config = dummy(folder, folder, speculative_config=forced)
    with caplog.at_level(logging.WARNING):
        loader.make_runner(config)
        assert isinstance(loader.read_tokenizer(config), NoTokenizer)
    assert "load_format='dummy': weights are random" in caplog.text
    assert "'synthetic': drafts are accepted at random" in caplog.text
    assert "(1.0, 0.5)" in caplog.text
    assert "has no tokenizer file: prompts must be token ids" in caplog.text


def test_existing_tokenizer_is_read_unless_skipped():
    assert loader.read_tokenizer(dummy(bundled_target())).encode("Hi")
    config = configure(bundled_target(), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init=True"):
        loader.read_tokenizer(config).encode("Hi")


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_named_tokenizer_must_exist(tmp_path, load_format):
    """Given a `tokenizer` folder or not, a missing tokenizer is an error."""
    empty = write_model(tmp_path / "empty")
    folder = write_model(tmp_path / "model")
    options = {"tokenizer": empty} if load_format == "dummy" else {}
    config = configure(folder, load_format=load_format, **options)
    with pytest.raises(ConfigError, match="tokenizer"):
        loader.read_tokenizer(config)

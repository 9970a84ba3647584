"""GGUF metadata give the config and the tokenizer that the model had."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from jaxspec.errors import ConfigError
from jaxspec.text.tokenizer import Tokenizer, check_same_tokenizer
from jaxspec_checkpoints import CheckpointError, bundled_target, open_checkpoint
from jaxspec_checkpoints.gguf.config import read_config
from jaxspec_checkpoints.gguf.file import GgufFile, read_gguf
from jaxspec_checkpoints.gguf.tokenizer import chat_template, tokenizer_model
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.gguf_files import Q, golden, real_gguf, write_gguf
from tests.checkpoints.models import FAMILIES, tiny_config
from tests.support.texts import SPECIAL, texts

SIZES: dict[str, Any] = dict(context_length=32768, embedding_length=640, block_count=18)
SIZES |= {"feed_forward_length": 2048, "rope.freq_base": 1e6}
SIZES |= {"attention.head_count": 4, "attention.head_count_kv": 1}
SIZES |= {"attention.key_length": 256, "attention.value_length": 256}
SIZES |= {"attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 512}
BUNDLED = bundled_target()
# Gemma 3's own template, shortened.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + ('model' if "
    "message['role'] == 'assistant' else message['role']) + '\n' + message['content'] "
    "| trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}"
)


def config_of(
    architecture: str = "gemma3", **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the configs of a header with the given metadata; None removes a key."""
    metadata: dict[str, Any] = {
        f"{architecture}.{key}": value for key, value in SIZES.items()
    } | {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in changes.items():
        key = key.replace("__", ".")
        is_general = key.startswith(("general.", "tokenizer."))
        metadata[key if is_general else f"{architecture}.{key}"] = value
    present = {key: value for key, value in metadata.items() if value is not None}
    path = Path("m.gguf")
    return read_config(GgufFile(path=path, version=3, metadata=present, tensors={}))


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_gemma2_survives_the_conversion(tmp_path, family):
    config = tiny_config(family, vocab_size=8192)
    write_gguf(tmp_path / "m.gguf", config)
    found, generation = read_config(read_gguf(tmp_path / "m.gguf"))
    # The writer's files have two layers, and only 46 layers identify a 27B, which has
    # another query_pre_attn_scalar. The config has the base model's end token; the
    # tokenizer adds the one that ends a chat turn.
    config |= {"query_pre_attn_scalar": config["head_dim"], "eos_token_id": 1}
    config |= {"rope_scaling": None, "tie_word_embeddings": True}
    del config["hidden_act"]
    assert {name: found.get(name, "absent") for name in config} == config
    assert generation == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def test_config_of_gemma3_is_read():
    expected: dict[str, Any] = dict(model_type="gemma3_text", vocab_size=4)
    expected |= dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=18)
    expected |= dict(num_attention_heads=4, num_key_value_heads=1, head_dim=256)
    expected |= dict(query_pre_attn_scalar=256, max_position_embeddings=32768)
    expected |= dict(rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4)
    expected |= dict(rope_scaling=None, sliding_window=512, sliding_window_pattern=6)
    expected |= dict(attn_logit_softcapping=None, final_logit_softcapping=None)
    expected |= dict(tie_word_embeddings=True, attention_bias=False)
    expected |= dict(hidden_activation="gelu_pytorch_tanh", eos_token_id=1)
    changes = {"general__sampling__top_k": 64, "general__sampling__top_p": 0.95}
    config, generation = config_of(**changes)
    assert {name: config[name] for name in expected} == expected
    assert (generation["top_k"], generation["top_p"]) == (64, 0.95)
    assert generation["do_sample"] and "temperature" not in generation


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "heads", "key_length", "expected"),
    [
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
        ("gemma3", 48, 3840, 16, 256, 256),
        # The number of layers and the architecture together identify the size.
        ("gemma3", 46, 4608, 32, 128, 128),
    ],
)
def test_attention_scale_equals_llama_cpps(
    architecture, layers, width, heads, key_length, expected
):
    sizes = dict(block_count=layers, embedding_length=width)
    sizes |= dict(attention__head_count=heads, attention__key_length=key_length)
    config, _ = config_of(architecture, attention__value_length=key_length, **sizes)
    assert config["query_pre_attn_scalar"] == expected


@pytest.mark.parametrize(
    ("kind", "factor", "expected"),
    [
        *(("linear", 8.0, 8.0), (None, 8.0, 8.0), ("none", 8.0, None)),
        *(("linear", 1.0, None), ("yarn", None, None)),
    ],
)
def test_position_scaling_is_read(kind, factor, expected):
    given: Any = dict(rope__scaling__type=kind, rope__scaling__factor=factor)
    found = config_of(**given)[0]["rope_scaling"]
    assert found == (expected and {"rope_type": "linear", "factor": expected})
    assert config_of(rope__scale_linear=8.0)[0]["rope_scaling"]["factor"] == 8.0


def test_missing_values_default_to_llama_cpps():
    attention = ("head_count_kv", "key_length", "value_length", "sliding_window")
    missing = {f"attention__{name}": None for name in attention}
    config, _ = config_of(
        "gemma2", rope__freq_base=None, embedding_length=1024, **missing
    )
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 256
    assert config["sliding_window"] == 4096 and config["rope_theta"] == 10000.0
    assert config["attn_logit_softcapping"] == 50.0
    assert config["final_logit_softcapping"] == 30.0
    given: Any = dict(rope__freq_base_swa=500.0, final_logit_softcapping=20.0)
    config, _ = config_of(attention__sliding_window_pattern=3, **given)
    assert config["sliding_window_pattern"] == 3
    assert config["rope_local_base_freq"] == 500.0
    assert config["final_logit_softcapping"] == 20.0


def test_end_tokens_are_read():
    for name, token, expected in (
        ("eos", 3, [1, 3]),
        ("eot", 3, [1, 3]),
        ("eos", None, 1),
    ):
        changes: Any = {f"tokenizer__ggml__{name}_token_id": token}
        config, generation = config_of(**changes)
        assert config["eos_token_id"] == generation["eos_token_id"] == expected


def test_values_for_each_layer_must_agree():
    heads = np.full(18, 4, np.uint32)
    config, _ = config_of(attention__head_count=heads)
    assert config["num_attention_heads"] == 4
    heads[3] = 8
    with pytest.raises(CheckpointError, match="head_count' must be the same integer"):
        config_of(attention__head_count=heads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "'gemma3.block_count' must be an integer, got nothing"),
        ({"block_count": "many"}, "must be an integer, got 'many'"),
        ({"block_count": True}, "must be an integer, got True"),
        ({"attention__head_count": 0}, "head_count' must be at least 1, got 0"),
        ({"attention__head_count": -4}, "must be an integer of at least 0, got -4"),
        ({"attention__value_length": 128}, "must be 256, as key_length, got 128"),
        ({"general__architecture": None}, "general.architecture' must be a string"),
        ({"general__architecture": "gemma4"}, "'gemma2' or 'gemma3', got 'gemma4'"),
        ({"general__architecture": "gemma3n"}, "got 'gemma3n'"),
        ({"general__architecture": "gemma-embedding"}, "got 'gemma-embedding'"),
        ({"general__architecture": "llama"}, "got 'llama'"),
        ({"attention__sliding_window": None}, "sliding_window' must be an integer"),
        ({"tokenizer__ggml__tokens": None}, "no tensor 'token_embd.weight'"),
        ({"rope__freq_base": [1.0]}, "freq_base' must be a number"),
    ],
)
def test_unusable_metadata_are_an_error(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path


def test_tokenizer_equals_the_bundled_one(path):
    found, expected = Tokenizer.from_folder(path), Tokenizer.from_folder(BUNDLED)
    check_same_tokenizer(expected, found)
    assert found.vocab_size == expected.vocab_size
    assert found.pieces.named == expected.pieces.named
    assert found.pieces.special == expected.pieces.special
    every_id = range(expected.vocab_size)
    assert list(map(found.is_byte, every_id)) == list(map(expected.is_byte, every_id))
    assert not found.can_chat and not found.turn_end_ids
    given = [*texts(), *SPECIAL, " " * 40 + "x", "a\n\n\n\nb"]
    assert len(given) > 10_000
    for text in given:
        ids = expected.encode(text)
        assert found.encode(text) == ids, text
        plain = expected.encode(text, parse_special_tokens=False)
        assert found.encode(text, parse_special_tokens=False) == plain, text
        assert found.decode(ids) == expected.decode(ids), text


def test_template_comes_from_the_caller_the_metadata_or_a_file(path, tmp_path):
    messages = [{"role": "user", "content": "Tell me a story."}]
    bundled = Tokenizer.from_folder(BUNDLED)
    expected = bundled.apply_chat_template(messages)
    without = Tokenizer.from_folder(path)
    with pytest.raises(ConfigError, match="no chat template"):
        without.apply_chat_template(messages)
    given = Tokenizer.from_folder(path, TEMPLATE)
    assert given.can_chat and given.apply_chat_template(messages) == expected
    assert without.apply_chat_template(messages, chat_template=TEMPLATE) == expected
    write_gguf(tmp_path / "m.gguf", tokenizer__chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_folder(tmp_path / "m.gguf")
    assert tokenizer.apply_chat_template(messages) == expected
    assert tokenizer.turn_end_ids == bundled.turn_end_ids != ()
    text = json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    (tmp_path / "tokenizer_config.json").write_text(text)
    beside, named = (
        Tokenizer.from_folder(one).chat_template
        for one in (tmp_path, tmp_path / "m.gguf")
    )
    assert beside is not None and beside.text == "{{ messages[0]['content'] }}"
    assert named is not None and named.text == TEMPLATE
    assert named.source == "chat_template in m.gguf"


def test_conversion_writes_the_tokenizer(tmp_path):
    path, made = tmp_path / "m.gguf", tmp_path / "model"
    sampling: Any = dict(general__sampling__top_k=64)
    write_gguf(path, tokenizer__chat_template=TEMPLATE, default=Q.Q8_0, **sampling)
    source = open_checkpoint(path)
    write_checkpoint(source, made, to="hf", progress=False)
    written = open_checkpoint(made)
    assert written.generation_config == source.generation_config
    assert written.generation_config["top_k"] == 64
    assert written.config["torch_dtype"] == "float32"
    for name, tensor in source.tensors.items():
        np.testing.assert_array_equal(written.tensors[name].whole(), tensor.whole())
    found = Tokenizer.from_folder(made)
    assert found.digest == Tokenizer.from_folder(path).digest
    assert found.chat_template is not None and found.chat_template.text == TEMPLATE
    config = json.loads((made / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<bos>", "<eos>")
    assert config["add_bos_token"] is True


def test_file_without_a_tokenizer_is_an_error(tmp_path):
    write_gguf(tmp_path / "m.gguf", has_tokenizer=False)
    message = r"m.gguf has no tokenizer \(tokenizer.ggml.tokens\): name a folder"
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(tmp_path / "m.gguf")
    source = open_checkpoint(tmp_path / "m.gguf")
    write_checkpoint(source, tmp_path / "model", to="hf", progress=False)
    assert not (tmp_path / "model" / "tokenizer.model").exists()


def changed(path: Path, **changes: Any) -> GgufFile:
    """Return a header with changed metadata; a value of None removes its key."""
    file = read_gguf(path)
    given = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    merged = {**file.metadata, **given}
    present = {key: value for key, value in merged.items() if value is not None}
    return replace(file, metadata=present)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt2"}, "tokenizer.ggml.model' must be 'llama'.*got 'gpt2'"),
        ({"model": None}, "must be 'llama' .* got nothing"),
        ({"tokens": []}, "has no tokenizer"),
        ({"scores": None}, "scores' must be 8,192 numbers, one for each token"),
        ({"scores": np.zeros(7, np.float32)}, "must be 8,192 numbers"),
        ({"token_type": np.ones(8191, np.int32)}, "must be 8,192 numbers"),
        ({"token_type": np.full(8192, 9)}, "token 4, .* has the unknown type 9"),
        ({"bos_token_id": None}, "the tokenizer has no bos token: its id is -1 of"),
        ({"unknown_token_id": 8192}, "no unk token: its id is 8192 of 8,192"),
        ({"eos_token_id": "1"}, "eos_token_id' must be an integer, got '1'"),
    ],
)
def test_bad_tokenizer_metadata_are_an_error(path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_model(changed(path, **changes))


def processor_of(file: GgufFile) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(tokenizer_model(file))
    return processor


def test_metadata_change_the_tokenizer(path, monkeypatch):
    token = read_gguf(path).metadata["tokenizer.ggml.tokens"].index("<end_of_turn>")
    found = processor_of(changed(path, eos_token_id=token, padding_token_id=None))
    # The end of a turn is not the end of a text.
    assert (found.eos_id(), found.bos_id()) == (1, 2)
    for has_prefix, expected in ((True, "\u2581a"), (False, "a")):
        found = processor_of(changed(path, add_space_prefix=has_prefix))
        assert "".join(found.encode("a", out_type=str)) == expected
    file = read_gguf(path)
    broken = replace(file, metadata={**file.metadata, "tokenizer.chat_template": 7})
    with pytest.raises(CheckpointError, match="chat_template' must be a string, got 7"):
        chat_template(broken)
    # Pieces for images are left out.
    module = "jaxspec_checkpoints.gguf.tokenizer"
    monkeypatch.setattr(f"{module}.GEMMA3_VOCAB_SIZE", 8192 - 64)
    monkeypatch.setattr(f"{module}.IMAGE_ROWS", 64)
    assert Tokenizer.from_folder(path).vocab_size == 8192 - 64


def test_real_tokenizer_gives_the_ids_of_llama_cpp_and_huggingface():
    """Compare with ids that llama.cpp and HuggingFace gave for Gemma 3's own files."""
    tokenizer, recorded = Tokenizer.from_folder(real_gguf()), golden()
    assert tokenizer.vocab_size == 262144
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    turns = {"<start_of_turn>": 105, "<end_of_turn>": 106}
    assert tokenizer.pieces.special == special | turns
    assert tokenizer.chat_template is None
    assert len(recorded["tokenizer_checks"]) == 18 and len(recorded["prompts"]) == 7
    checks = [(one["text"], one["ids"]) for one in recorded["tokenizer_checks"]]
    checks += [(one["text"], one["token_ids"]) for one in recorded["prompts"]]
    checks += [(one["text"], [2, *one["ids"]]) for one in recorded["tokenizer_texts"]]
    assert len(checks) == 59
    for text, ids in checks:
        assert [2, *tokenizer.encode(text, add_special_tokens=False)] == ids, text
    # Runs of spaces are spelled as in the files of other formats.
    assert tokenizer.id_to_piece(138) == "\u2581\u2581"
    assert tokenizer.decode([236776, 138, 236763]) == "A  b"

"""GGUF metadata give the tokenizer that the model had, with the same ids and pieces."""

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
from jaxspec_checkpoints.gguf.file import GgufFile, read_gguf
from jaxspec_checkpoints.gguf.tokenizer import chat_template, tokenizer_model
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.gguf_files import Q, real_gguf, write_gguf
from tests.support.texts import SPECIAL, texts

BUNDLED = bundled_target()
# Gemma 3's own template, shortened.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + ('model' if "
    "message['role'] == 'assistant' else message['role']) + '\n' + message['content'] "
    "| trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}"
)


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


def test_rejects_chat_without_template(path):
    tokenizer = Tokenizer.from_folder(path)
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.apply_chat_template(messages)
    given = Tokenizer.from_folder(path, TEMPLATE)
    expected = Tokenizer.from_folder(BUNDLED).apply_chat_template(messages)
    assert given.can_chat and given.apply_chat_template(messages) == expected
    assert tokenizer.apply_chat_template(messages, chat_template=TEMPLATE) == expected


def test_template_comes_from_the_metadata_or_a_file_next_to_it(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, tokenizer__chat_template=TEMPLATE)
    tokenizer, expected = Tokenizer.from_folder(path), Tokenizer.from_folder(BUNDLED)
    messages = [{"role": "user", "content": "Tell me a story."}]
    found = tokenizer.apply_chat_template(messages)
    assert found == expected.apply_chat_template(messages)
    assert tokenizer.turn_end_ids == expected.turn_end_ids != ()
    text = json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    (tmp_path / "tokenizer_config.json").write_text(text)
    beside, named = (
        Tokenizer.from_folder(one).chat_template for one in (tmp_path, path)
    )
    assert beside is not None and beside.text == "{{ messages[0]['content'] }}"
    assert named is not None and named.text == TEMPLATE
    assert named.source == f"chat_template in {path.name}"


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


def test_real_tokenizer_gives_the_ids_of_llama_cpp_and_huggingface(golden):
    """Compare with ids that llama.cpp and HuggingFace gave for Gemma 3's own files."""
    tokenizer = Tokenizer.from_folder(real_gguf())
    assert tokenizer.vocab_size == 262144
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    turns = {"<start_of_turn>": 105, "<end_of_turn>": 106}
    assert tokenizer.pieces.special == special | turns
    assert tokenizer.chat_template is None
    assert len(golden["tokenizer_checks"]) == 18 and len(golden["prompts"]) == 7
    checks = [(one["text"], one["ids"]) for one in golden["tokenizer_checks"]]
    checks += [(one["text"], one["token_ids"]) for one in golden["prompts"]]
    checks += [(one["text"], [2, *one["ids"]]) for one in golden["tokenizer_texts"]]
    assert len(checks) == 59
    for text, ids in checks:
        assert [2, *tokenizer.encode(text, add_special_tokens=False)] == ids, text
    # Runs of spaces are spelled as in the files of other formats.
    assert tokenizer.id_to_piece(138) == "\u2581\u2581"
    assert tokenizer.decode([236776, 138, 236763]) == "A  b"

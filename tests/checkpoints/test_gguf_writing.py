"""Files that are written are read alike by our reader and by llama.cpp's library."""

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, bundled_target, open_checkpoint
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.reading import is_gguf
from jaxspec_checkpoints.gguf.tokenizer import tokenizer_model
from jaxspec_checkpoints.gguf.writing import (
    model_metadata,
    tokenizer_metadata,
    write_gguf,
)
from jaxspec_checkpoints.tensor import in_memory
from tests.checkpoints import gguf_files
from tests.checkpoints.models import tiny_config, tiny_tensors

Q = gguf.GGMLQuantizationType
GEMMA3: dict[str, Any] = dict(model_type="gemma3_text", vocab_size=262_144)
GEMMA3 |= dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=4)
GEMMA3 |= dict(num_attention_heads=4, num_key_value_heads=1, head_dim=256)
GEMMA3 |= dict(query_pre_attn_scalar=256, max_position_embeddings=32_768)
GEMMA3 |= dict(rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4)
GEMMA3 |= dict(sliding_window=512, attn_logit_softcapping=None)
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def whole_config() -> dict[str, Any]:
    """Return the config of a tiny model with the bundled tokenizer's vocabulary."""
    tokens = tokenizer_metadata(bundled_target())["tokenizer.ggml.tokens"]
    return {**tiny_config("2b"), "vocab_size": len(tokens), "head_dim": 8}


def test_written_file_is_read_by_both_libraries(tmp_path):
    config = whole_config()
    arrays = {
        name: array.astype(np.float32) for name, array in tiny_tensors(config).items()
    }
    tokenizer = tokenizer_metadata(bundled_target())
    path = write_gguf(
        tmp_path / "draft",
        config,
        in_memory(arrays),
        tokenizer=tokenizer,
        made_files={"notes.json": lambda: b"{}"},
    )
    assert {one.name for one in path.parent.iterdir()} == {"draft.gguf", "notes.json"}
    assert is_gguf(path.parent)
    found = open_checkpoint(path.parent)
    for name in ("num_hidden_layers", "hidden_size", "sliding_window", "head_dim"):
        assert found.config[name] == config[name], name
    assert found.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        wanted = array
        if array.ndim == 2:
            wanted = array.astype(ml_dtypes.bfloat16).astype(np.float32)
        stored = found.tensors[name].whole().astype(np.float32)
        np.testing.assert_allclose(stored, wanted, atol=1e-6, err_msg=name)
    reader = gguf.GGUFReader(path)
    theirs = {one.name: one for one in reader.tensors}
    assert theirs.keys() == {gguf_files.llama_name(name) for name in arrays}
    for name, array in arrays.items():
        one = theirs[gguf_files.llama_name(name)]
        assert one.tensor_type == (Q.F32 if array.ndim == 1 else Q.BF16)
        assert tuple(reversed(one.shape.tolist())) == array.shape
        values = gguf.dequantize(one.data, one.tensor_type).reshape(array.shape)
        wanted = gguf_files.stored_values(name, array)
        np.testing.assert_allclose(values, wanted, rtol=2**-8)
    for key, value in {**model_metadata(config), **tokenizer}.items():
        contents = reader.fields[key].contents()
        if isinstance(value, str | bool | int):
            assert contents == value, key
        else:
            np.testing.assert_array_equal(
                contents, value if isinstance(value, list) else np.float32(value)
            )


def test_tokenizer_survives_the_way_there_and_back(tmp_path):
    import sentencepiece  # noqa: PLC0415

    path = write_gguf(
        tmp_path / "draft",
        (config := whole_config()),
        in_memory(tiny_tensors(config)),
        tokenizer=tokenizer_metadata(bundled_target()),
    )
    content = (bundled_target() / "tokenizer.model").read_bytes()
    ours, theirs = (
        sentencepiece.SentencePieceProcessor(model_proto=one)
        for one in (tokenizer_model(read_gguf(path)), content)
    )
    for text in ("Two  dogs,\n\tand a\u2581cat: <start_of_turn>", "\u00fc\u4e16 1234"):
        assert ours.encode(text) == theirs.encode(text)
    for name in ("pad_id", "eos_id", "bos_id", "unk_id"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    # The metadata of a GGUF file are copied.
    again, first = tokenizer_metadata(path), tokenizer_metadata(bundled_target())
    assert again.keys() == first.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(again[key], value)


def test_8_bit_blocks_are_copied_unchanged(tmp_path):
    config = {**tiny_config("2b"), "hidden_size": 64}
    source = tmp_path / "source.gguf"
    gguf_files.write_gguf(
        source, config, tiny_tensors(config), default=Q.Q8_0, has_tokenizer=False
    )
    tensors = open_checkpoint(source).tensors
    path = write_gguf(tmp_path / "copy", config, tensors, tokenizer={})
    theirs, copies = (
        {one.name: one for one in gguf.GGUFReader(one).tensors}
        for one in (source, path)
    )
    assert theirs.keys() == copies.keys()
    assert {one.tensor_type for one in copies.values()} == {Q.F32, Q.Q8_0}
    for name, one in theirs.items():
        if one.tensor_type == Q.Q8_0:
            np.testing.assert_array_equal(copies[name].data, one.data)


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        (None, None),
        ([LOCAL] * 4, None),
        ([LOCAL, LOCAL, LOCAL, GLOBAL], 4),
        ([LOCAL, GLOBAL, LOCAL, GLOBAL], 2),
    ],
)
def test_pattern_of_layers_is_stored(kinds, period):
    config = GEMMA3 if kinds is None else GEMMA3 | dict(layer_types=kinds)
    found = model_metadata(config)
    assert found.get("gemma3.attention.sliding_window_pattern") == period
    assert found["gemma3.rope.freq_base_swa"] == 1e4
    assert found["gemma3.attention.sliding_window"] == 512


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(model_type="llama"), "model_type='llama'"),
        # 168 is the scale of 27B, which llama.cpp derives from its 62 layers.
        (dict(query_pre_attn_scalar=168), "query_pre_attn_scalar=168: .* 256 only"),
        (dict(layer_types=[GLOBAL, LOCAL, LOCAL, GLOBAL]), "every Nth is global"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2}), "linear scaling"),
        (
            dict(rope_parameters={GLOBAL: {"rope_type": "yarn"}}),
            "rope_parameters=.*linear scaling",
        ),
    ],
)
def test_models_without_a_gguf_form_are_refused(tmp_path, change, named):
    with pytest.raises(CheckpointError, match=named):
        write_gguf(tmp_path / "out", GEMMA3 | change, {}, tokenizer={})
    assert not list(tmp_path.iterdir())


def test_both_spellings_of_rotary_embeddings_are_stored():
    old = GEMMA3 | dict(rope_scaling={"rope_type": "linear", "factor": 8.0})
    whole = dict(rope_type="linear", factor=8.0, rope_theta=1e6)
    new = {name: value for name, value in GEMMA3.items() if "rope" not in name}
    new["rope_parameters"] = {GLOBAL: whole, LOCAL: dict(rope_theta=1e4)}
    assert model_metadata(old) == model_metadata(new)
    assert model_metadata(new)["gemma3.rope.scaling.factor"] == 8.0


def test_missing_tokenizer_and_existing_folder_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer.model, which a GGUF"):
        tokenizer_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        write_gguf(tmp_path, GEMMA3, {}, tokenizer={})

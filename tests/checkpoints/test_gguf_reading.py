"""A GGUF file is read as the model that was written into it.

Every type is dequantized to the same numbers as by llama.cpp's library.
"""

import tracemalloc
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxspec.models.families import config_from_folder
from jaxspec_checkpoints import (
    CheckpointError,
    lists_head,
    model_files,
    open_checkpoint,
    read_config,
)
from jaxspec_checkpoints.gemma.published import PAD_ROWS
from jaxspec_checkpoints.gguf.blocks import OTHER_TYPES, TYPES, BlockType
from jaxspec_checkpoints.gguf.reading import find_gguf
from jaxspec_checkpoints.layout import EMBEDDING, HEAD
from jaxspec_checkpoints.quantization import (
    GGUF_SCHEMES,
    INT4,
    QuantizedTensor,
    dequantize,
)
from jaxspec_checkpoints.report import describe
from tests.checkpoints.gguf_files import (
    Q,
    llama_name,
    stored_values,
    write_arrays,
    write_gguf,
)
from tests.checkpoints.models import tiny_config, tiny_tensors, write_tiny

# Types that llama.cpp's library can write. Other types are tested block by block.
WRITABLE = (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
PACKED = {Q.Q4_0: "int4", Q.Q5_0: "int8", Q.Q8_0: "int8"}
PACKED |= {Q.Q4_1: "uint4", Q.Q5_1: "int8"}  # with minima
Q = gguf.GGMLQuantizationType
QUANTIZED = {n: kind for n, kind in TYPES.items() if kind.dequantize is not None}


@pytest.mark.parametrize("kind", [Q.F16, Q.Q8_0], ids=lambda kind: kind.name)
def test_embedding_rows_past_the_vocabulary_are_dropped(tmp_path, kind):
    config = tiny_config("2b", hidden_size=256, intermediate_size=512)
    config["vocab_size"] = 8192 + PAD_ROWS
    expected = write_gguf(tmp_path / "m.gguf", config, kinds={"token_embd": kind})
    embedding = open_checkpoint(tmp_path / "m.gguf").tensors[EMBEDDING]
    assert embedding.shape == (8192, 256)
    np.testing.assert_array_equal(embedding.whole(), expected[EMBEDDING][:8192])


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_tensors_equal_those_that_were_written(tmp_path, kind):
    """Matrices of quantized types remain packed."""
    expected = write_gguf(tmp_path / "m.gguf", default=kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.format == "gguf"
    assert checkpoint.tensors.keys() == expected.keys()
    for name, values in expected.items():
        tensor = checkpoint.tensors[name]
        assert tensor.dtype == values.dtype
        np.testing.assert_array_equal(tensor.whole(), values)
        np.testing.assert_array_equal(tensor.read(3, 7), values[3:7])
        is_packed = kind in PACKED and values.ndim == 2
        assert isinstance(tensor, QuantizedTensor) == is_packed
        if isinstance(tensor, QuantizedTensor):
            assert tensor.values.dtype.name == PACKED[kind]
            scales = tensor.scales.whole()
            minima = (2,) if kind in (Q.Q4_1, Q.Q5_1) else ()
            assert scales.shape == (len(values), values.shape[1] // 32, *minima)
            numbers = tensor.values.whole().astype(np.float32)
            numbers = numbers.reshape(len(values), -1, 32)
            numbers = numbers * scales.reshape(*scales.shape[:2], -1)[:, :, :1]
            numbers += scales[:, :, 1:] if minima else 0
            np.testing.assert_array_equal(numbers.reshape(values.shape), values)
            head = tensor.head(5)
            np.testing.assert_array_equal(head.whole(), values[:5])
            np.testing.assert_array_equal(head.scales.whole(), scales[:5])
    report = describe(checkpoint)
    assert "gguf (llama.cpp GGUF)" in report
    assert "tokenizer.model (from metadata)" in report
    assert ("int4" in report) == (kind in (Q.Q4_0, Q.Q4_1))


def test_fused_queries_keys_and_values_are_split(tmp_path):
    config = tiny_config("2b", hidden_size=256, vocab_size=512, num_hidden_layers=1)
    tensors = tiny_tensors(config)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    parts = [tensors[name] for name in names]
    rest = {name: each for name, each in tensors.items() if name not in names}
    arrays = {llama_name(name): values for name, values in rest.items()}
    fused = arrays | {"blk.0.attn_qkv.weight": np.concatenate(parts)}
    write_arrays(tmp_path / "m.gguf", config, fused)
    read = open_checkpoint(tmp_path / "m.gguf").tensors
    for name, part in zip(names, parts, strict=True):
        np.testing.assert_array_equal(read[name].whole(), part)
        np.testing.assert_array_equal(read[name].read(1, 3), part[1:3])
    fused = arrays | {"blk.0.attn_qkv.weight": parts[0]}
    write_arrays(tmp_path / "m.gguf", config, fused)
    with pytest.raises(CheckpointError, match=r"attn_qkv.*expected 128 rows"):
        open_checkpoint(tmp_path / "m.gguf")


def test_folder_with_one_gguf_file_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    expected = write_gguf(path)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"a projector of images")
    (tmp_path / "README.md").write_text("hello")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "gguf" and checkpoint.folder == tmp_path
    assert checkpoint.tensors.keys() == expected.keys()
    assert model_files(tmp_path) == model_files(path) == {"model.gguf": path}
    assert read_config(tmp_path) == read_config(path)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several models: name one .* m.gguf, o"):
        open_checkpoint(tmp_path)
    # A file that a user names may be in any folder.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.gguf").symlink_to(path)
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_checkpoint(tmp_path / "folder")
    assert open_checkpoint(tmp_path / "folder" / "m.gguf").format == "gguf"


def test_precedence_of_files_next_to_a_gguf_file(tmp_path):
    """The file's config precedes a config.json, and safetensors precede the file."""
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    config, generation = read_config(tmp_path)
    assert config["model_type"] == "gemma2" and config["num_hidden_layers"] == 2
    assert generation == {"top_k": 7}
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.config, checkpoint.generation_config) == (config, generation)
    write_tiny(tmp_path, family="2b", num_hidden_layers=1)
    assert open_checkpoint(tmp_path).format == "hf"
    assert "model.gguf" not in model_files(tmp_path)
    assert read_config(tmp_path)[0]["num_hidden_layers"] == 1


def test_shards_are_read_as_one_model(tmp_path):
    config = tiny_config("2b", vocab_size=512)
    tensors = tiny_tensors(config)
    arrays = {
        llama_name(name): stored_values(name, values)
        for name, values in tensors.items()
    }
    write_arrays(tmp_path / "m.gguf", config, arrays, split_max_tensors=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    for path in (tmp_path, *files):
        read = open_checkpoint(path).tensors
        assert read.keys() == tensors.keys()
        for name, values in tensors.items():
            np.testing.assert_allclose(read[name].whole(), values, atol=1.2e-7)
    assert find_gguf(tmp_path) == files[0]
    files[1].rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match="00002-of-00003.gguf is missing"):
        open_checkpoint(files[0])
    files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 shards, but 1 were found"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_unsupported_models_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    change: Any = dict(
        gemma2__rope__scaling__type="yarn", gemma2__rope__scaling__factor=2.0
    )
    write_gguf(path, has_tokenizer=False, **change)
    message = "rope.scaling.type.*'linear' or 'none', got 'yarn'"
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    arrays = {
        "token_embd.weight": np.zeros((512, 72), np.float32),
        "blk.0.ffn_gate_exps.weight": np.zeros((2, 8), np.float32),
    }
    write_arrays(path, tiny_config("2b", vocab_size=512), arrays)
    with pytest.raises(CheckpointError, match="0.ffn_gate_exps.weight' is not part"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1], ids=lambda kind: kind.name)
def test_matrix_is_read_in_blocks(tmp_path, kind):
    config = tiny_config("2b", hidden_size=1024, intermediate_size=64)
    config |= dict(vocab_size=16384, num_hidden_layers=1)
    rows = np.zeros((config["vocab_size"], 1024), np.float32)
    rows[::7] = 1
    tensors = tiny_tensors(config) | {EMBEDDING: rows}
    write_gguf(tmp_path / "m.gguf", config, tensors, default=kind, has_tokenizer=False)
    del tensors
    embedding = open_checkpoint(tmp_path / "m.gguf").tensors[EMBEDDING]
    tracemalloc.start()
    try:
        for start, found in embedding.blocks():
            expected = rows[start : start + len(found), ::64]
            np.testing.assert_allclose(found[:, ::64], expected, atol=3e-4)
        # The matrix takes 64 MiB. Reading holds only two blocks of 4 MiB, and the bytes
        # from which they are read.
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("default", [Q.F32, Q.Q8_0])
@pytest.mark.parametrize("is_tied", [True, False])
def test_output_tensor_that_differs_from_the_embedding_is_the_head(
    tmp_path, is_tied, default
):
    config = tiny_config("2b", hidden_size=256, intermediate_size=512)
    tensors = tiny_tensors(config)
    assert not lists_head(tmp_path)
    table = tensors[EMBEDDING]
    tensors[HEAD] = table if is_tied else table[::-1].copy()
    options: dict[str, Any] = dict(has_tokenizer=False, default=default)
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, config, tensors, **options)
    assert lists_head(path) and lists_head(tmp_path)
    found = open_checkpoint(path).resolved()
    assert (HEAD not in found.tensors) is is_tied
    assert found.config["tie_word_embeddings"] is is_tied
    assert config_from_folder(tmp_path).tie_word_embeddings is is_tied
    if not is_tied:
        np.testing.assert_array_equal(found.tensors[HEAD].whole(), expected[HEAD])


def test_types_are_mixed_in_one_file(tmp_path):
    kinds = {"token_embd": Q.F16, "ffn_down": Q.Q8_0, "attn_v": Q.BF16}
    expected = write_gguf(tmp_path / "m.gguf", kinds=kinds, default=Q.Q4_0)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name].whole(), values)
    assert tensors["model.embed_tokens.weight"].dtype == np.float16
    assert tensors["model.layers.0.self_attn.v_proj.weight"].dtype == ml_dtypes.bfloat16


def random_blocks(kind: BlockType, count: int) -> np.ndarray:
    """Return blocks of random bytes: any value and scale, infinities and NaN too."""
    random = np.random.default_rng(sum(kind.name.encode()))
    return random.integers(0, 256, (count, kind.num_bytes), np.uint8)


def test_names_and_sizes_of_types_are_those_of_ggml():
    for number, kind in TYPES.items():
        sizes = gguf.GGML_QUANT_SIZES[Q(number)]
        assert (Q(number).name, *sizes) == (
            kind.name,
            kind.num_elements,
            kind.num_bytes,
        )
    # Other types are not read, or not split.
    theirs = {kind.value: kind.name for kind in Q}
    assert {n: OTHER_TYPES.get(n, name) for n, name in theirs.items()} == theirs
    assert not OTHER_TYPES.keys() & TYPES.keys()
    assert len(OTHER_TYPES) >= 20
    split = {kind.name for kind in TYPES.values() if kind.split is not None}
    assert split == set(GGUF_SCHEMES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].name)
def test_numbers_are_equal_to_the_last_bit(number):
    kind = QUANTIZED[number]
    assert kind.dequantize is not None
    blocks = random_blocks(kind, 2000)
    found = kind.dequantize(blocks)
    expected = gguf.dequantize(blocks, Q(number))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    # Compare bits, which distinguish -0.0 from 0.0, except for NaN, whose sign may
    # differ.
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(
        np.signbit(found)[is_number], np.signbit(expected)[is_number]
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", GGUF_SCHEMES)
def test_integers_times_scales_equal_the_dequantized_numbers(name):
    [(number, kind)] = [item for item in TYPES.items() if item[1].name == name]
    assert kind.split is not None
    blocks = random_blocks(kind, 1000)
    values, scales = kind.split(blocks)
    assert values.dtype == np.int8 and scales.dtype == np.float32
    scheme = GGUF_SCHEMES[name]
    assert values.shape[1] // scales.shape[1] == scheme.group_size
    assert (scales.ndim == 3) == scheme.has_minima
    expected = gguf.dequantize(blocks, Q(number))
    np.testing.assert_array_equal(dequantize(values, scales), expected)
    if scheme.kind == INT4:
        least, largest = (0, 15) if scheme.has_minima else (-8, 7)
        assert least <= values.min() and values.max() <= largest
        np.testing.assert_array_equal(values.astype(scheme.value_type), values)

"""Writes GGUF files for the comparison at real sizes: converted or random weights.

They go to a temporary folder or to that of `--models`; no weights are in git.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.layout import EMBEDDING

Q = gguf.GGMLQuantizationType
# Standard deviation of random weights.
DEVIATION = 0.02
# For each type: the byte offset of the scale in a block (-2: two before its end), and
# the standard deviation of the values of random bits with a scale of 1.
_SCALES = {Q.Q4_0: (0, 4.6), Q.Q8_0: (0, 74.0), Q.Q6_K: (-2, 1370.0)}


def convert(source: Path, path: Path, kind: Q) -> None:
    """Write the dequantized weights of a file again, all matrices as one type."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    copy_metadata(reader, writer)
    arrays: list[Callable[[], np.ndarray]] = []
    for tensor in reader.tensors:
        own = kind if len(tensor.shape) == 2 else Q.F32

        def make(tensor: Any = tensor, own: Q = own) -> np.ndarray:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            return gguf.quantize(values, own)

        _declare(writer, tensor.name, tuple(tensor.shape[::-1].tolist()), own)
        arrays.append(make)
    _write(writer, arrays)


def write_random(
    path: Path, config: Mapping[str, Any], kind: Q, head: Q, source: Path
) -> None:
    """Write random weights of a Gemma 2 config.

    Args:
        kind: Type of the matrices, except the embedding.
        head: Type of the embedding, which is also the LM head.
        source: A file whose first pieces become the tokenizer.
    """
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    reader = gguf.GGUFReader(source)
    copy_metadata(reader, writer, "tokenizer.", config["vocab_size"])
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA2, layers)
    rng = np.random.default_rng(0)
    arrays: list[Callable[[], np.ndarray]] = []
    for name, shape in tensor_shapes(Sizes.from_config(config)).items():
        own = Q.F32 if len(shape) == 1 else head if name == EMBEDDING else kind

        def make(shape: tuple[int, ...] = shape, own: Q = own) -> np.ndarray:
            if len(shape) == 1:
                return np.ones(shape, np.float32)
            return random_blocks(rng, shape, own)

        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        _declare(writer, theirs, shape, own)
        arrays.append(make)
    _write(writer, arrays)


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: Q
) -> np.ndarray:
    """Return the blocks of a random matrix: random bits, and one scale for all."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    place, deviation = _SCALES[kind]
    rows, features = shape
    found = rng.integers(0, 256, (rows, features // block, num_bytes), np.uint8)
    scale = np.array([DEVIATION / deviation], np.float16).view(np.uint8)
    place %= num_bytes
    found[:, :, place : place + 2] = scale
    return found.reshape(rows, -1)


def copy_metadata(
    reader: gguf.GGUFReader,
    writer: gguf.GGUFWriter,
    prefix: str = "",
    most: int | None = None,
) -> None:
    """Copy the metadata whose keys begin with `prefix`.

    Args:
        most: Maximum length of arrays.
    """
    for name, one in reader.fields.items():
        is_written = name == "general.architecture" or name.startswith("GGUF.")
        if is_written or not name.startswith(prefix):
            continue
        value, kind, sub_type = one.contents(), one.types[0], None
        if kind == gguf.GGUFValueType.ARRAY:
            value, sub_type = value[:most], one.types[-1]
        writer.add_key_value(name, value, kind, sub_type=sub_type)


def _declare(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Q
) -> None:
    """Add the header of a tensor, whose values follow later."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape))
    dtype = np.dtype(np.float16 if kind == Q.F16 else np.float32)
    writer.add_tensor_info(name, shape, dtype, count // block * num_bytes, kind)


def _write(writer: gguf.GGUFWriter, arrays: list[Callable[[], np.ndarray]]) -> None:
    """Write header and tensors one by one, so that memory holds only one of them."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in arrays:
        writer.write_tensor_data(make())
    writer.close()

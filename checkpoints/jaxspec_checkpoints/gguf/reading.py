"""Opens a GGUF file as a `Checkpoint`, with canonical names and numbers (`open_gguf`).

Blocks of rows are read from the file on demand and dequantized to float32. Types whose
numbers are integers times scales, with or without minima, are also kept as these: see
`QuantizedTensor`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, read_json, readable, side_files
from jaxspec_checkpoints.gguf.config import read_config
from jaxspec_checkpoints.gguf.file import (
    SUFFIX,
    GgufFile,
    GgufTensor,
    read_gguf,
    shards,
)
from jaxspec_checkpoints.gguf.tokenizer import (
    has_tokenizer,
    tokenizer_config,
    tokenizer_model,
)
from jaxspec_checkpoints.layout import (
    EMBEDDING,
    HEAD,
    Layout,
    Sizes,
    check_tensors,
    layout_of,
    must_be_tied,
)
from jaxspec_checkpoints.quantization import GGUF, GGUF_SCHEMES, QuantizedTensor
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
# Names within `blk.{i}.`, and names within `model.layers.{i}.`
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)", re.DOTALL)
# Parts of a fused matrix: queries, keys, values.
_FUSED = "attn_qkv.weight"


def stored_name(name: str) -> str:
    """Return llama.cpp's name of a tensor, given its canonical name."""
    for stored, canonical in _NAMES.items():
        if name == canonical:
            return stored
    _, _, number, part = name.split(".", 3)
    (stored,) = (one for one, other in _LAYER_NAMES.items() if other == part)
    return f"blk.{number}.{stored}"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at a path, or in a folder with one model; else None.

    Raises:
        CheckpointError: A folder holds several models.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    # Image projectors accompany a model and are not models.
    models = {shards(one)[0] for one in found if not one.name.startswith("mmproj")}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise CheckpointError(
            f"{path} holds several models: name one of the files, {names}"
        )
    return check_inside(path, models.pop()) if models else None


def is_gguf(path: Path) -> bool:
    """Return whether it is a GGUF file, or a folder that holds one."""
    return find_gguf(path) is not None


def open_gguf(path: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    """Check a file, or the one in a folder, and describe it; no weight is read.

    Raises:
        CheckpointError: The file is damaged, has an unsupported architecture or type,
            or its tensors do not match its metadata.
    """
    found = find_gguf(path)
    assert found is not None, path
    file = read_gguf(found)
    config, generation = read_config(file)
    existing = side_files(path) if path.is_dir() else {}
    if "generation_config.json" in existing:
        generation = read_json(existing["generation_config.json"])
    layout = layout_of(config, layouts)
    config["vocab_size"] = layout.text_config(config)["vocab_size"]
    sizes = Sizes.from_config(config)
    stored = _canonical(file, sizes)
    for name in (EMBEDDING, HEAD):
        matrix, num_rows = stored.get(name), sizes.vocab_size
        if matrix is not None and matrix.shape[0] == num_rows + layout.pad_rows:
            stored[name] = _rows_of(matrix, 0, num_rows)
    tensors = {name: _described(one) for name, one in stored.items()}
    check_tensors(layout, sizes, tensors, is_tied=must_be_tied(config))
    types = {name: one.type.name for name, one in stored.items() if len(one.shape) == 2}
    if any(one.type.dequantize for one in stored.values()):
        config["quantization_config"] = {"quant_method": GGUF, "tensor_types": types}
    made = {
        **tokenizer_files(file),
        "generation_config.json": lambda: _json(generation),
    }
    return Checkpoint(
        format="gguf",
        layout=layout,
        folder=path,
        config=config,
        generation_config=generation,
        tensors=tensors,
        side_files=existing,
        made_files={name: made[name] for name in made.keys() - existing.keys()},
    )


def tokenizer_files(file: GgufFile) -> dict[str, Callable[[], bytes]]:
    """Return functions that make the tokenizer files of other formats; may be empty.

    The functions read the header again: its tokens would take 30 MB if kept.
    """
    path = file.path
    if not has_tokenizer(file):
        return {}
    return {
        "tokenizer.model": lambda: tokenizer_model(read_gguf(path)),
        "tokenizer_config.json": lambda: _json(tokenizer_config(read_gguf(path))),
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _canonical(file: GgufFile, sizes: Sizes) -> dict[str, GgufTensor]:
    """Return all tensors by canonical name; a fused QKV matrix becomes three."""
    tensors: dict[str, GgufTensor] = {}
    for name, stored in file.tensors.items():
        for canonical, tensor in _named(name, stored, sizes):
            if canonical in tensors:
                raise CheckpointError(
                    f"{stored.path}: tensor {name!r} is a second {canonical!r}"
                )
            tensors[canonical] = tensor
    return tensors


def _named(
    name: str, stored: GgufTensor, sizes: Sizes
) -> Iterator[tuple[str, GgufTensor]]:
    if name in _NAMES:
        yield _NAMES[name], stored
        return
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        yield f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}", stored
        return
    if layer is None or layer[2] != _FUSED:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r:.80} is not part of a Gemma model"
        )
    queries = sizes.num_q_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    if len(stored.shape) != 2 or stored.shape[0] != queries + 2 * keys:
        raise CheckpointError(
            f"{stored.path}: tensor {name!r} has shape {stored.shape}, expected "
            f"{queries + 2 * keys} rows of queries, keys and values"
        )
    first = 0
    for part, num_rows in (("q", queries), ("k", keys), ("v", keys)):
        tensor = _rows_of(stored, first, num_rows)
        yield f"model.layers.{layer[1]}.self_attn.{part}_proj.weight", tensor
        first += num_rows


def _rows_of(stored: GgufTensor, first: int, num_rows: int) -> GgufTensor:
    row_bytes = stored.num_bytes // stored.shape[0]
    shape = num_rows, *stored.shape[1:]
    return replace(stored, shape=shape, offset=stored.offset + first * row_bytes)


def _described(stored: GgufTensor) -> Tensor:
    kind = stored.type
    source = f"{stored.path}:{stored.name}"
    if stored.name.endswith("norm.weight"):
        # llama.cpp stores 1 + w in all Gemma files.
        def read_norm(start: int, stop: int) -> np.ndarray:
            return _numbers(stored, start, stop).astype(np.float32) - np.float32(1)

        return Tensor(
            shape=stored.shape,
            dtype=np.dtype(np.float32),
            source=source,
            read=read_norm,
        )
    whole = Tensor(
        shape=stored.shape,
        dtype=kind.dtype,
        source=source,
        read=lambda start, stop: _numbers(stored, start, stop),
    )
    if kind.split is None or len(stored.shape) != 2:
        return whole
    return _packed(stored, kind.split, whole)


def _packed(
    stored: GgufTensor,
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    whole: Tensor,
) -> Tensor:
    """Describe a matrix whose numbers are integers times scales, plus any minima."""
    num_rows, scheme = stored.shape[0], GGUF_SCHEMES[stored.type.name]
    dtype, form = scheme.value_type, scheme.scales_shape(stored.shape)

    def read_values(start: int, stop: int) -> np.ndarray:
        values, _ = split(_blocks(stored, start, stop))
        return values.reshape(stop - start, -1).astype(dtype, copy=False)

    def read_scales(start: int, stop: int) -> np.ndarray:
        # Read more rows at a time for scales, which are a small part of the bytes read.
        step = max(1, BLOCK_BYTES * num_rows // stored.num_bytes)
        parts = [
            split(_blocks(stored, first, min(first + step, stop)))[1].reshape(
                -1, *form[1:]
            )
            for first in range(start, stop, step)
        ]
        return np.concatenate(parts)

    values = Tensor(
        shape=stored.shape,
        dtype=dtype,
        source=f"{whole.source} (values)",
        read=read_values,
    )
    scales = Tensor(
        shape=form,
        dtype=np.dtype(np.float32),
        source=f"{whole.source} (scales)",
        read=read_scales,
    )
    return _PackedTensor(
        shape=whole.shape,
        dtype=whole.dtype,
        source=whole.source,
        read=whole.read,
        values=values,
        scales=scales,
    )


@dataclass(frozen=True, kw_only=True)
class _PackedTensor(QuantizedTensor):
    """Dequantizes blocks directly, without an array of all scales."""

    def head(self, num_rows: int) -> "_PackedTensor":
        """Return the first rows only."""
        return replace(
            self,
            shape=(num_rows, *self.shape[1:]),
            values=self.values.head(num_rows),
            scales=self.scales.head(num_rows),
        )

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        return Tensor.blocks(self)


def _numbers(stored: GgufTensor, start: int, stop: int) -> np.ndarray:
    """Return rows in the tensor's dtype."""
    kind = stored.type
    if kind.dequantize is None:
        raw = _read(stored, start, stop)
        little = raw.view(kind.dtype.newbyteorder("<"))
        return little.reshape(stop - start, *stored.shape[1:])
    if len(stored.shape) == 1:
        # A single row of blocks, whose elements are the tensor's rows.
        row = replace(stored, shape=(1, *stored.shape))
        return _numbers(row, 0, 1)[0, start:stop]
    numbers = kind.dequantize(_blocks(stored, start, stop))
    return numbers.reshape(stop - start, *stored.shape[1:])


def _blocks(stored: GgufTensor, start: int, stop: int) -> np.ndarray:
    return _read(stored, start, stop).reshape(-1, stored.type.num_bytes)


def _read(stored: GgufTensor, start: int, stop: int) -> np.ndarray:
    """Read the bytes of rows, without mapping: mapped pages would count as memory."""
    row_bytes = stored.num_bytes // stored.shape[0]
    num_bytes = (stop - start) * row_bytes
    with readable(stored.path), stored.path.open("rb", buffering=0) as stream:
        raw = np.fromfile(
            stream, np.uint8, num_bytes, offset=stored.offset + start * row_bytes
        )
    if len(raw) != num_bytes:
        raise CheckpointError(
            f"{stored.path} became shorter after it was opened: fetch it again"
        )
    return raw

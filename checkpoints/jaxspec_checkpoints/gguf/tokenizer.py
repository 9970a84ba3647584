"""Converts tokenizers: GGUF metadata to a `tokenizer.model`, and the reverse.

The metadata list the pieces of a SentencePiece model, their scores and types. They are
written as a `tokenizer.model`, which loads in a tenth of a second; another library
would need BPE merges, which would first have to be searched.
Source: sentencepiece_model.proto; `_set_vocab_sentencepiece` of llama.cpp's converter.
"""

import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.gemma.published import GEMMA3_VOCAB_SIZE, IMAGE_ROWS
from jaxspec_checkpoints.gguf.config import Metadata
from jaxspec_checkpoints.gguf.file import GgufFile

_TOKENS = "tokenizer.ggml.tokens"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# The converter marks these as control tokens because of their spelling; in the model's
# own files a text can contain them.
_SPELLED = re.compile(r"<unused\d+>|<mask>|<2mass>|\[@BOS@\]")
# Special tokens in the order of their fields in TrainerSpec, by metadata name.
_SPECIAL = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
# Fields: number << 3 | type; 0 is a varint, 2 has a length and bytes, 5 four bytes.
_PIECES, _TRAINER, _NORMALIZER = b"\x0a", b"\x12", b"\x1a"
_PIECE, _SCORE, _TYPE = b"\x0a", b"\x15", b"\x18"
_BPE = 2


def has_tokenizer(file: GgufFile) -> bool:
    """Return whether the metadata contain a tokenizer, of any kind."""
    return bool(isinstance(file.metadata.get(_TOKENS), list) and file.metadata[_TOKENS])


def tokenizer_model(file: GgufFile) -> bytes:
    """Return the content of the `tokenizer.model` that the file was made from.

    Raises:
        CheckpointError: The file has no tokenizer, or one of another kind.
    """
    metadata = Metadata(file)
    if not has_tokenizer(file):
        raise CheckpointError(
            f"{file.path} has no tokenizer ({_TOKENS}): name a folder with one as "
            "tokenizer"
        )
    tokens = file.metadata[_TOKENS]
    kind = metadata.text("tokenizer.ggml.model", None)
    if kind != "llama":
        allowed = "'llama' (SentencePiece, as all Gemma 2 and 3 have)"
        raise metadata.wrong("tokenizer.ggml.model", allowed, kind)
    kinds = _numbers(file, metadata, "tokenizer.ggml.token_type", "iu").tolist()
    if len(tokens) == GEMMA3_VOCAB_SIZE + IMAGE_ROWS:
        tokens = tokens[:GEMMA3_VOCAB_SIZE]  # the tokens after these represent images
    scores = _numbers(file, metadata, "tokenizer.ggml.scores", "f").astype("<f4")
    ids = {
        name: metadata.size(f"tokenizer.ggml.{key}_token_id", -1)
        for name, key in _SPECIAL.items()
    }
    for name in ("bos", "eos", "unk"):
        if not 0 <= ids[name] < len(tokens):
            raise CheckpointError(
                f"{file.path}: the tokenizer has no {name} token: its id is "
                f"{ids[name]} of {len(tokens):,}"
            )
    # Instruction-tuned files name the end of a turn here; its piece identifies it.
    if "<eos>" in tokens[:512]:
        ids["eos"] = tokens.index("<eos>")
    for name, token in ids.items():
        if 0 <= token < len(tokens):
            kinds[token] = _UNKNOWN if name == "unk" else _CONTROL
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    return b"".join(
        [
            _pieces(file, tokens, scores, kinds),
            _message(_TRAINER, _trainer(tokens, ids)),
            _message(_NORMALIZER, _normalizer(has_prefix)),
        ]
    )


def tokenizer_metadata(model: bytes) -> dict[str, Any]:
    """Return the metadata of a `tokenizer.model`: the inverse of `tokenizer_model`.

    Raises:
        CheckpointError: It is no SentencePiece model.
    """
    tokens, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, content in _fields(model):
        if number == 1:
            piece = dict(_fields(content))
            text, kind = bytes(piece.get(1, b"")).decode(), piece.get(3, _NORMAL)
            if kind == _USER_DEFINED:
                # llama.cpp finds these pieces in the text itself, which has spaces.
                text = text.replace("\u2581", " ")
            tokens.append(text)
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            kinds.append(kind)
        elif number == 2:
            trainer = dict(_fields(content))
        elif number == 3:
            normalizer = dict(_fields(content))
    if not tokens:
        raise CheckpointError("tokenizer.model has no pieces: it is damaged")
    # Defaults of TrainerSpec.
    defaults = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
    ids = {}
    for offset, (name, key) in enumerate(_SPECIAL.items()):
        token = trainer.get(40 + offset, defaults[name])
        if 0 <= token < len(tokens):  # -1 is stored as 2**64 - 1
            ids[f"tokenizer.ggml.{key}_token_id"] = token
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        _TOKENS: tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        **ids,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: varints as int, others as bytes."""
    position = 0
    try:
        while position < len(content):
            tag, position = _read_varint(content, position)
            kind = tag & 7
            if kind == 0:
                value, position = _read_varint(content, position)
                yield tag >> 3, value
                continue
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                if kind != 2:
                    raise CheckpointError(
                        f"tokenizer.model has a field of type {kind}: it is damaged"
                    )
                size, position = _read_varint(content, position)
            yield tag >> 3, content[position : position + size]
            position += size
    except IndexError as error:
        raise CheckpointError("tokenizer.model is truncated: fetch it again") from error


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def chat_template(file: GgufFile) -> str | None:
    """Return the chat template; None if the file has none, as for base models."""
    return Metadata(file).text("tokenizer.chat_template", None)


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`."""
    metadata, tokens = Metadata(file), file.metadata[_TOKENS]
    config: dict[str, Any] = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": metadata.flag("tokenizer.ggml.add_bos_token", True),
        "add_eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    for name, key in _SPECIAL.items():
        token = metadata.size(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    template = chat_template(file)
    return config if template is None else {**config, "chat_template": template}


def _numbers(file: GgufFile, metadata: Metadata, key: str, kinds: str) -> np.ndarray:
    """Return one number per token."""
    count, values = len(file.metadata[_TOKENS]), file.metadata.get(key)
    if (
        not isinstance(values, np.ndarray)
        or values.dtype.kind not in kinds
        or len(values) != count
    ):
        raise metadata.wrong(key, f"{count:,} numbers, one for each token", values)
    return values


def _pieces(
    file: GgufFile, tokens: list[str], scores: np.ndarray, kinds: list[int]
) -> bytes:
    data, written = scores.tobytes(), []
    for token, piece in enumerate(tokens):
        kind = kinds[token]
        if not _NORMAL <= kind <= _BYTE:
            raise CheckpointError(
                f"{file.path}: token {token}, {piece!r:.40}, has the unknown type "
                f"{kind}; types go from {_NORMAL} to {_BYTE}. The file may be damaged: "
                "fetch it again"
            )
        if kind == _CONTROL and _SPELLED.fullmatch(piece):
            kind = _USER_DEFINED
        if kind == _USER_DEFINED:
            piece = piece.replace(" ", "\u2581")
        text = piece.encode()
        body = b"".join(
            (
                _PIECE,
                _varint(len(text)),
                text,
                _SCORE,
                data[4 * token : 4 * token + 4],
                _TYPE,
                _BYTES[kind],
            )
        )
        written += (_PIECES, _varint(len(body)), body)
    return b"".join(written)


def _trainer(tokens: list[str], ids: dict[str, int]) -> bytes:
    """Return the fields of TrainerSpec, in which pieces name special tokens."""
    # model_type, vocab_size, byte_fallback
    fields = _varints({3: _BPE, 4: len(tokens), 35: 1})
    for offset, name in enumerate(_SPECIAL):
        if 0 <= ids[name] < len(tokens):
            piece = tokens[ids[name]].encode()
            fields += _varints({40 + offset: ids[name]})
            fields += _message(_varint((45 + offset) << 3 | 2), piece)
    return fields


def _normalizer(has_prefix: bool) -> bytes:
    """Return fields of NormalizerSpec: only spaces are replaced."""
    name = _message(b"\x0a", b"identity")
    # add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    return name + _varints({3: int(has_prefix), 4: 0, 5: 1})


def _message(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varints(fields: dict[int, int]) -> bytes:
    return b"".join(
        _varint(number << 3) + _varint(value) for number, value in fields.items()
    )


_BYTES = [bytes([value]) for value in range(128)]


def _varint(value: int) -> bytes:
    if value < 128:
        return _BYTES[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)

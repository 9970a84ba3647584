"""Owns the two tokenizer libraries, behind one interface: `Pieces`.

`encode` treats special pieces in a text as ordinary text; `jaxspec.text.tokenizer`
decides where they become special tokens.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import sentencepiece
import tokenizers

from jaxspec.errors import ConfigError, NativePanicError, wrong_argument
from jaxspec.exit import call_native
from jaxspec_checkpoints import CheckpointError, model_files
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.tokenizer import tokenizer_model
from jaxspec_checkpoints.reading import GGUF

_SPACE = "\u2581"  # how pieces spell a space
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_IMAGE_PIECE = "<image_soft_token>"


@runtime_checkable
class Pieces(Protocol):
    """A vocabulary, and the splitting of text into its pieces.

    Attributes:
        size: Number of pieces; their ids are 0 to `size - 1`.
        named: Ids of the pieces bos, eos, pad and unk; -1 for a missing one.
        special: Ids of the special pieces, by piece.
        digest: Digest of the file: equal digests mean equal tokenizers.
    """

    size: int
    named: dict[str, int]
    special: dict[str, int]
    digest: bytes

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, none of which may be special.

        Every byte that is not part of a valid character becomes U+FFFD.
        """
        ...

    def id_to_piece(self, token_id: int) -> str: ...

    def is_byte(self, token_id: int) -> bool: ...


class SentencePieces:
    """A `tokenizer.model`: the file with which Gemma was trained."""

    def __init__(self, model: bytes, markers: Sequence[str]):
        self.digest = hashlib.sha256(model).digest()
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(_without_turns(model, markers))
        self._processor = processor
        self.size = processor.vocab_size()
        self.named = {
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "pad": processor.pad_id(),
            "unk": processor.unk_id(),
        }
        turns = [processor.piece_to_id(piece) for piece in markers]
        ids = {token for token in self.named.values() if token >= 0}
        if processor.unk_id() not in turns:
            if not all(map(processor.is_control, turns)):
                raise ValueError("its turn markers are neither control nor symbol")
            ids.update(turns)
        self.special = {processor.id_to_piece(token): token for token in sorted(ids)}

    def encode(self, text: str) -> list[int]:
        return call_native(self._processor.encode, text)

    def decode(self, ids: list[int]) -> str:
        return call_native(self._processor.decode, ids)

    def id_to_piece(self, token_id: int) -> str:
        return self._processor.id_to_piece(token_id)

    def is_byte(self, token_id: int) -> bool:
        return self._processor.is_byte(token_id)


def _without_turns(model: bytes, markers: Sequence[str]) -> bytes:
    """Change the turn markers to control pieces, which `encode` never returns.

    In Gemma's files the markers are user-defined symbols, which SentencePiece
    recognizes in every text. The serialized model stores a piece as: 0x0a, the length,
    the text, 0x15, four bytes of score, 0x18, the kind.
    """
    symbol, control = b"\x04", b"\x03"
    for piece in map(str.encode, markers):
        start = re.escape(b"\x0a" + bytes([len(piece)]) + piece + b"\x15")
        kind = b"(" + start + b".{4}\x18)" + symbol
        model = re.sub(kind, rb"\g<1>" + control, model, flags=re.DOTALL)
    return model


class JsonPieces:
    """A `tokenizer.json`, read with HuggingFace's library.

    It differs from SentencePiece in two cases: runs of spaces or newlines longer than
    the longest such piece, which it splits at other places, and symbols of the model
    (`<unused0>`) that the file does not list as added tokens.
    """

    def __init__(self, content: bytes, markers: Sequence[str]):
        self.digest = hashlib.sha256(content).digest()
        library = call_native(tokenizers.Tokenizer.from_buffer, content)
        model = library.model
        if not isinstance(model, tokenizers.models.BPE) or not model.byte_fallback:
            raise ValueError("it is not a BPE model with byte fallback")
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # encodes them as ordinary text
        self._library = library
        self.size = library.get_vocab_size(with_added_tokens=True)
        # Gemma 3's files list a piece for images after the vocabulary. It never occurs
        # in texts, and its row of the embedding is not read.
        if self._find(_IMAGE_PIECE) == self.size - 1:
            self.size -= 1
        self.named = {
            name: self._find(f"<{name}>") for name in ("bos", "eos", "pad", "unk")
        }
        ids = {token for token in self.named.values() if token >= 0}
        turns = [self._find(piece) for piece in markers]
        ids.update(turns if min(turns, default=0) >= 0 else ())
        added = library.get_added_tokens_decoder().items()
        ids.update(
            token for token, piece in added if piece.special and token < self.size
        )
        self.special = {self.id_to_piece(token): token for token in sorted(ids)}

    def _find(self, piece: str) -> int:
        token = self._library.token_to_id(piece)
        return -1 if token is None else token

    def encode(self, text: str) -> list[int]:
        encode = self._library.encode
        return call_native(encode, text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        # The library's own decoder is not used, because it also replaces valid
        # characters next to an incomplete one: streamed text would then change
        # afterwards.
        data = b"".join(map(self._bytes_of, ids))
        text = data.decode("utf-8", errors="surrogateescape")
        return re.sub("[\udc80-\udcff]", "\ufffd", text)

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self.id_to_piece(token_id)
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes.fromhex(byte[1])
        return piece.replace(_SPACE, " ").encode()

    def id_to_piece(self, token_id: int) -> str:
        return self._library.id_to_token(token_id) or ""

    def is_byte(self, token_id: int) -> bool:
        return _BYTE.fullmatch(self.id_to_piece(token_id)) is not None


def folder_files(folder: Path) -> dict[str, Path]:
    """Return the files of a tokenizer and of its model's config, by name.

    Args:
        folder: The model's folder, or a GGUF file.

    Raises:
        ConfigError: A file is a symlink that leads outside the folder.
    """
    try:
        return model_files(folder)
    except CheckpointError as error:
        raise _wrong_tokenizer(error, folder) from error


def _wrong_tokenizer(error: CheckpointError, path: Path) -> ConfigError:
    return ConfigError(f"{error}.", parameter="tokenizer", value=str(path))


def _gguf_model(path: Path) -> bytes:
    return tokenizer_model(read_gguf(path))


def read_pieces(folder: Path, markers: Sequence[str]) -> Pieces:
    """Read `tokenizer.model`, or else `tokenizer.json`, or else a GGUF's metadata.

    Args:
        markers: Turn markers, which are special pieces whatever their kind in the file.

    Raises:
        ConfigError: None of these files exists, or the first that does cannot be read.
    """
    files = folder_files(folder)
    for name, kind, content_of, read in (
        ("tokenizer.model", "a SentencePiece model", Path.read_bytes, SentencePieces),
        ("tokenizer.json", "a tokenizer like Gemma's", Path.read_bytes, JsonPieces),
        (GGUF, "a GGUF file with Gemma's tokenizer", _gguf_model, SentencePieces),
    ):
        if name not in files:
            continue
        try:
            pieces = read(content_of(files[name]), markers)
        except CheckpointError as error:
            raise _wrong_tokenizer(error, files[name]) from error
        except (NativePanicError, OSError, RuntimeError, ValueError) as error:
            raise _unreadable(files[name], kind, str(error)) from error
        if min(pieces.named["bos"], pieces.named["eos"]) < 0:
            raise _unreadable(files[name], kind, "it has no bos piece or no eos piece")
        return pieces
    allowed = "a folder with a tokenizer.model or a tokenizer.json, or a GGUF file"
    hint = "There is no such file."
    raise wrong_argument(ConfigError, "tokenizer", allowed, str(folder), hint)


def _unreadable(path: Path, kind: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} must be {kind}: {reason}. Fetch the file again.",
        parameter="tokenizer",
        value=str(path.parent),
    )

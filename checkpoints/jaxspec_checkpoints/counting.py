"""Counts how often tokens occur in texts, for `python -m jaxspec_checkpoints trim`.

A draft that proposes only frequent tokens needs a fraction of its head and loses few
accepted drafts. Texts should resemble those of users; the target's own are best.

References: Zhao et al. 2025, arXiv:2502.14856 (FR-Spec).
"""

import json
import lzma
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tqdm.auto import tqdm

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand, readable
from jaxspec_checkpoints.trimming import IDS

# Number of characters that are tokenized in one call.
_BATCH_CHARACTERS = 1 << 20
# Keys of a JSON line: either a text, or a prompt and its completion.
_KEYS = ("text", "prompt", "completion")
Encode = Callable[[list[str]], Iterable[list[int]]]
# The report lists the coverage of 1/16, 1/8, 1/4 and 1/2 of the vocabulary.
_SHARES = (16, 8, 4, 2)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of occurrences of every token.

    Attributes:
        special: Tokens that come first in a map whatever their frequency: those that
            begin, end and pad texts, and that mark turns.
        frequency: [token], int64.
        num_texts: Texts that were counted.
    """

    special: list[int]
    frequency: np.ndarray
    num_texts: int

    @property
    def ranked(self) -> list[int]:
        """All tokens: special ones, then by frequency; the lower id first on ties.

        Tokens that never occurred are last. Their ids say nothing about frequency in a
        user's texts, as ids follow the order in which the tokenizer learned the pieces.
        """
        rest = np.argsort(-self.frequency, kind="stable").tolist()
        return list(dict.fromkeys([*self.special, *rest]))

    def share_of(self, size: int) -> float:
        """Return which fraction of all counted tokens the first `size` ids cover."""
        total = self.frequency.sum()
        return float(self.frequency[self.ranked[:size]].sum() / total)

    def report(self) -> str:
        """Describe which fraction of the texts' tokens smaller vocabularies cover."""
        vocab_size = len(self.frequency)
        lines = [
            f"{self.frequency.sum():,} tokens of {self.num_texts:,} texts; "
            f"{np.count_nonzero(self.frequency):,} of the vocabulary's "
            f"{vocab_size:,} tokens occur"
        ]
        for share in _SHARES:
            size = vocab_size // share
            lines.append(
                f"draft_vocab_size {size:>7,} covers "
                f"{100 * self.share_of(size):6.2f} % of them"
            )
        return "\n".join(lines)


def count_tokens(
    checkpoint: Checkpoint, paths: Sequence[str | Path], *, progress: bool = True
) -> Counts:
    """Count the tokens of texts with a model's tokenizer.

    Args:
        paths: `.jsonl` files of objects with a `text`, or with `prompt` and
            `completion`; any other file is one UTF-8 text. Both may be `.xz`.

    Raises:
        CheckpointError: The model has no tokenizer, or a file is malformed.
    """
    encode, special = _tokenizer(checkpoint)
    vocab_size = checkpoint.sizes.vocab_size
    frequency, num_texts = np.zeros(vocab_size, np.int64), 0
    texts = (text for path in paths for text in read_texts(path))
    with tqdm(desc="Counting", unit=" texts", disable=not progress) as bar:
        for some in _batches(texts):
            ids = np.fromiter((one for row in encode(some) for one in row), np.int64)
            beyond = ids[ids >= vocab_size]
            if beyond.size:
                raise CheckpointError(
                    f"the tokenizer of {checkpoint.folder} gives token id "
                    f"{beyond[0]}, but the model has a vocabulary of {vocab_size}: "
                    "the tokenizer belongs to another model"
                )
            frequency += np.bincount(ids, minlength=vocab_size)
            num_texts += len(some)
            bar.update(len(some))
    if not frequency.any():
        raise CheckpointError("the texts are empty: give files with text")
    special = [one for one in special if 0 <= one < vocab_size]
    return Counts(special=special, frequency=frequency, num_texts=num_texts)


def read_texts(path: str | Path) -> Iterator[str]:
    """Yield the texts of a file, one after the other.

    Raises:
        CheckpointError: The file cannot be read, or a line is not an object with a
            text.
    """
    path = expand(path)
    is_packed = path.suffix == ".xz"
    is_json = path.suffixes[-2 if is_packed else -1 :][:1] == [".jsonl"]
    with readable(path):
        try:
            with (lzma.open if is_packed else open)(
                path, "rt", encoding="utf-8"
            ) as lines:
                for number, line in enumerate(lines, start=1):
                    if is_json and line.strip():
                        yield _text_of(line, f"{path}, line {number},")
                    elif not is_json:
                        yield line
        except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def _text_of(line: str, where: str) -> str:
    try:
        document: Any = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    document = document if isinstance(document, dict) else {}
    found = [document.get(key) for key in _KEYS]
    parts = [one for one in found if isinstance(one, str)]
    if not parts:
        raise CheckpointError(
            f"{where} must be a JSON object with one of {', '.join(_KEYS)}, got "
            f"{line.strip():.80}"
        )
    return "".join(parts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, length = list[str](), 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _tokenizer(checkpoint: Checkpoint) -> tuple[Encode, list[int]]:
    """Return a function that tokenizes texts, and the ids of special tokens."""
    files = {
        **checkpoint.made_files,
        **{name: path.read_bytes for name, path in checkpoint.side_files.items()},
    }
    named = ("<pad>", "<eos>", "<bos>", "<unk>", *checkpoint.layout.turn_markers)
    try:
        if "tokenizer.model" in files:
            encode, special = _of_model(files["tokenizer.model"](), named)
        elif "tokenizer.json" in files:
            encode, special = _of_json(files["tokenizer.json"](), named)
        else:
            raise CheckpointError(
                f"{checkpoint.folder} has no tokenizer.model and no tokenizer.json, "
                "which are needed to tokenize texts"
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.folder} cannot be read: {error}"
        ) from error
    for source in (checkpoint.config, checkpoint.generation_config):
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            given = source.get(name)
            special += given if isinstance(given, list) else [given]
    return encode, [one for one in dict.fromkeys(special) if isinstance(one, int)]


def _of_model(content: bytes, named: Sequence[str]) -> tuple[Encode, list[Any]]:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    unknown = processor.unk_id()
    found = [processor.piece_to_id(piece) for piece in named]
    special = [processor.pad_id(), processor.eos_id(), processor.bos_id(), unknown]
    return processor.encode, special + [one for one in found if one != unknown]


def _of_json(content: bytes, named: Sequence[str]) -> tuple[Encode, list[Any]]:
    library = tokenizers.Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()

    def encode(texts: list[str]) -> Iterable[list[int]]:
        rows = library.encode_batch_fast(texts, add_special_tokens=False)
        return (row.ids for row in rows)

    return encode, [library.token_to_id(piece) for piece in named]


def check_is_new(path: str | Path) -> None:
    """Reject an existing path before texts are counted for it.

    Raises:
        CheckpointError: The path exists.
    """
    if os.path.lexists(expand(path)):
        raise CheckpointError(
            f"{path} exists already: name another file with --output, or delete it"
        )


def write_token_map(path: str | Path, counts: Counts) -> None:
    """Write a map of all tokens to a new file, atomically.

    Raises:
        CheckpointError: The file exists already, or cannot be written.
    """
    path = expand(path).absolute()
    check_is_new(path)
    content = {
        "num_texts": counts.num_texts,
        "num_tokens": int(counts.frequency.sum()),
        IDS: counts.ranked,
    }
    with readable(path):
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trim.") as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(content) + "\n", encoding="utf-8")
            os.link(made, path)  # not `rename`, which would replace a file

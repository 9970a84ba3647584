"""The text that is trained on: prompts from a file, and what the target writes to them.

A head proposes what the target would say, so it learns best from what the target does
say. A row is one document: a prompt with its continuation, cut or filled to a length.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, no_type_check, runtime_checkable

import numpy as np

from jaxspec.errors import ConfigError, EngineGenerateError, wrong_argument
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

# Where the answer begins in a conversation that is written out in Gemma's turns.
ANSWER = "<start_of_turn>model\n"
# Tokens of a text without turns that are its prompt: as many as one of these, drawn.
PROMPT_TOKENS = 16, 64
# How documents are continued, and which share of them: (temperature, top_p).
WAYS = ((0.4, 0.0, 1.0), (0.4, 0.8, 0.95), (0.2, 1.0, 1.0))


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Text:
    """Rows of tokens.

    Attributes:
        tokens: [row, token], int32; what follows a document are zeros.
        sizes: Tokens of each document.
        starts: The first token of each that counts: that the target has written.
    """

    tokens: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray

    def __post_init__(self):
        assert (self.starts <= self.sizes).all()
        assert (self.sizes <= self.tokens.shape[1]).all()

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, numbers: Any) -> "Text":
        """Some of the rows."""
        return Text(
            tokens=self.tokens[numbers],
            sizes=self.sizes[numbers],
            starts=self.starts[numbers],
        )

    @property
    def num_written(self) -> int:
        """Tokens that count."""
        return int((self.sizes - self.starts).sum())

    def save(self, path: Path) -> None:
        """Write the rows, whole or not at all."""
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **vars(self))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Text":
        with np.load(path) as arrays:
            return cls(**arrays)


def pack(documents: Sequence[tuple[list[int], int]], length: int) -> Text:
    """Rows of documents, each with the number of its first token that counts."""
    tokens = np.zeros((len(documents), length), np.int32)
    sizes = np.array([min(len(ids), length) for ids, _ in documents], np.int32)
    starts = np.array([start for _, start in documents], np.int32)
    for row, (ids, _) in enumerate(documents):
        tokens[row, : sizes[row]] = ids[:length]
    return Text(tokens=tokens, sizes=sizes, starts=np.minimum(starts, sizes))


def read_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a `.jsonl` or `.jsonl.xz` file.

    Raises:
        ConfigError: The file is missing, or a line is no JSON object.
    """
    if not path.is_file():
        raise wrong_argument(ConfigError, "data", "a file of JSON lines", str(path))
    with (lzma.open if path.suffix == ".xz" else open)(
        path, "rt", encoding="utf-8"
    ) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{path}, line {number}, is no JSON: {error}", parameter="data"
                ) from error
            if not isinstance(document, dict):
                allowed = "a JSON object"
                where = f"{path}, line {number},"
                raise wrong_argument(ConfigError, where, allowed, document)
            yield document


def read_prompts(
    path: Path, tokenizer: Tokenizer, *, length: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Every document of a file as a prompt and what follows there, in a drawn order.

    A document has a `text`, or a `prompt` with, if it is known, its `completion`. The
    prompt of a text is what comes before its first answer, or its first tokens.

    Raises:
        ConfigError: No document has room for an answer in `length` tokens.
    """
    random = np.random.default_rng(seed)
    found: list[tuple[list[int], list[int]]] = []
    for number, document in enumerate(read_documents(path), start=1):
        if isinstance(document.get("prompt"), str):
            prompt, rest = document["prompt"], document.get("completion") or ""
        elif isinstance(document.get("text"), str):
            before, marker, rest = document["text"].partition(ANSWER)
            prompt = before + marker if marker else ""
            rest = rest if marker else before
        else:
            raise ConfigError(
                f"{path}, document {number}, has neither 'text' nor 'prompt': "
                f"{', '.join(sorted(document)) or 'it is empty'}",
                parameter="data",
            )
        head = tokenizer.encode(prompt)
        tail = tokenizer.encode(rest, add_special_tokens=False)
        if not prompt:
            cut = int(random.integers(*PROMPT_TOKENS, endpoint=True))
            cut = min(cut, length // 2)
            head, tail = (head + tail)[:cut], (head + tail)[cut:]
        if len(head) + 1 < length:
            found.append((head, tail))
    if not found:
        raise ConfigError(
            f"{path} has no document with room for an answer in length={length} tokens",
            parameter="data",
            value=str(path),
        )
    return [found[index] for index in random.permutation(len(found))]


def given_text(prompts: Sequence[tuple[list[int], list[int]]], length: int) -> Text:
    """The documents as the file has them; of a text all tokens count."""
    return pack([(head + tail, 0) for head, tail in prompts], length)


@runtime_checkable
class Writer(Protocol):
    """What continues prompts of token ids: `jaxspec.LLM`."""

    def generate(self, prompts: Any, sampling_params: Any) -> Any: ...


def write_text(
    llm: Writer,
    prompts: Sequence[tuple[list[int], list[int]]],
    *,
    length: int,
    num_tokens: int,
    seed: int,
) -> Text:
    """Let the target continue prompts until it has written so many tokens.

    Greedily, and drawn, as `WAYS` says: a head is asked by both kinds of request.

    Raises:
        EngineGenerateError: A request ended with an error.
    """
    random = np.random.default_rng(seed)
    shares, documents, written = [way[0] for way in WAYS], [], 0
    # As many at a time as would do if every answer were half a row.
    count = max(64, 2 * num_tokens // length)
    for start in range(0, len(prompts), count):
        some = prompts[start : start + count]
        ways = random.choice(len(WAYS), size=len(some), p=shares)
        params = [
            SamplingParams(
                temperature=WAYS[way][1],
                top_p=WAYS[way][2],
                seed=seed + start + number,
                max_tokens=length - len(head),
                detokenize=False,
            )
            for number, ((head, _), way) in enumerate(zip(some, ways, strict=True))
        ]
        outputs = llm.generate([head for head, _ in some], params)
        for (head, _), output in zip(some, outputs, strict=True):
            (completion,) = output.outputs
            if completion.finish_reason == "error":
                raise EngineGenerateError(completion.stop_reason)
            answer = list(completion.token_ids)
            documents.append((head + answer, len(head)))
            written += len(answer)
        if written >= num_tokens:
            break
    return pack(documents, length)


def frequent_tokens(text: Text, count: int, vocab_size: int) -> np.ndarray:
    """The tokens that the target writes most often, for a trimmed vocabulary."""
    place = np.arange(text.tokens.shape[1])[None]
    counts = (place >= text.starts[:, None]) & (place < text.sizes[:, None])
    frequency = np.bincount(text.tokens[counts], minlength=vocab_size)
    # Of those that never came, the lowest ids: they are the shortest pieces.
    return np.sort(np.argsort(-frequency, kind="stable")[:count])

"""Owns the prompts of a benchmark: data sets and their encoding.

Offline runs use token ids, runs against a server use texts.
"""

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.text.tokenizer import Tokenizer

FILES = ("bundled", "custom")  # data sets that are files
DATASETS = ("bundled", "random", "custom", "prefix_repetition")
BUNDLED = Path(__file__).with_name("prompts.jsonl")
# Format of a line of a prompts file, for error messages: a text, or a conversation, of
# which the first turn is used.
LINE = (
    'a line of JSON with "prompt" (a text) or "turns" (a list of texts, the first of '
    "which is sent as a user's turn)"
)
# Words of random prompts. Each is at least one token in any vocabulary.
WORDS = (
    "time year people way day man thing woman life child world school state family "
    "student group country problem hand part place case week company system program "
    "question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city"
).split()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        is_turn: A user's turn to be answered, not a text to be continued.
        num_tokens: Truncate the prompt to this number of tokens; None does not.
    """

    text: str
    is_turn: bool = False
    category: str = ""
    num_tokens: int | None = None

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids to pass to an engine."""
        if self.is_turn and tokenizer.has_turns:
            turn = {"role": "user", "content": self.text}
            return tokenizer.write_chat([turn])[1]
        return list(tokenizer.encode(self.text))[: self.num_tokens]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set of prompts, with the names of vLLM's flags.

    Attributes:
        path: For "custom": a file with `LINE` on every line.
        input_len: For "random": tokens per prompt (words, without a tokenizer).
        prefix_len: For "prefix_repetition": tokens of the shared prefix.
        suffix_len: For "prefix_repetition": tokens of each prompt after the prefix.
        num_prefixes: For "prefix_repetition": number of different prefixes.
    """

    name: str = "bundled"
    path: Path | None = None
    input_len: int = 32
    prefix_len: int = 256
    suffix_len: int = 32
    num_prefixes: int = 4
    seed: int = 0

    def __post_init__(self):
        if self.name not in DATASETS:
            allowed = "one of " + ", ".join(DATASETS)
            raise wrong_argument(ConfigError, "--dataset-name", allowed, self.name)
        for name in ("input_len", "suffix_len", "num_prefixes"):
            check_integer(ConfigError, _flag(name), getattr(self, name), low=1)
        check_integer(ConfigError, _flag("prefix_len"), self.prefix_len, low=0)
        if (self.path is not None) != (self.name == "custom"):
            allowed = "a file with prompts if and only if --dataset-name is custom"
            raise wrong_argument(ConfigError, "--dataset-path", allowed, self.path)

    def prompts(self, count: int) -> list[Prompt]:
        """Return `count` prompts; a file with fewer prompts is repeated.

        Raises:
            ConfigError: The file cannot be read, or has an invalid line.
        """
        if self.name in FILES:
            found = read_prompts(self.path or BUNDLED)
            return list(itertools.islice(itertools.cycle(found), count))
        draw = random.Random(self.seed)
        if self.name == "random":
            return [_words(draw, self.input_len) for _ in range(count)]
        stems = [_words(draw, self.prefix_len).text for _ in range(self.num_prefixes)]
        total = self.prefix_len + self.suffix_len
        return [
            Prompt(
                text=f"{stems[i % len(stems)]} {_words(draw, self.suffix_len).text}",
                category=self.name,
                num_tokens=total,
            )
            for i in range(count)
        ]

    def categories(self, key: str) -> dict[str, list[Prompt]]:
        """Return the prompts of a file by category, in the order of the file.

        Args:
            key: As for `read_prompts`.

        Raises:
            ConfigError: As for `read_prompts`; a prompt has no category; or the data
                set is not a file.
        """
        if self.name not in FILES:
            allowed = f"{' or '.join(FILES)} with --by-category"
            raise wrong_argument(ConfigError, "--dataset-name", allowed, self.name)
        found: dict[str, list[Prompt]] = {}
        for number, prompt in enumerate(read_prompts(self.path or BUNDLED, key), 1):
            if not prompt.category:
                allowed = f'a key of every line; prompt {number} has no "{key}"'
                raise wrong_argument(ConfigError, "--by-category", allowed, key)
            found.setdefault(prompt.category, []).append(prompt)
        return found


def read_prompts(path: Path, key: str = "category") -> list[Prompt]:
    """Read a file of prompts.

    Args:
        key: Key of a line with the prompt's category; without it, "domain" is read.

    Raises:
        ConfigError: The file cannot be read, is empty, or has an invalid line.
    """
    try:
        # Not `splitlines`: a JSON string may contain U+2028 and other line separators.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--dataset-path must be a file with prompts, got {str(path)!r}: {error}",
            parameter="dataset_path",
            value=str(path),
        ) from error
    found = [
        _prompt(line, f"Line {number} of {path.name}", key)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        allowed = "a file with at least one prompt"
        raise wrong_argument(ConfigError, "--dataset-path", allowed, str(path))
    return found


def _prompt(line: str, where: str, key: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong_argument(ConfigError, where, LINE, line, str(error)) from error
    if not isinstance(entry, dict):
        raise wrong_argument(ConfigError, where, LINE, entry)
    turns = entry.get("turns")
    if turns is not None and not (isinstance(turns, list) and turns):
        raise wrong_argument(ConfigError, where, LINE, entry)
    text = entry.get("prompt") if turns is None else turns[0]
    if not isinstance(text, str) or not text:
        raise wrong_argument(ConfigError, where, LINE, entry)
    category = entry.get(key) or entry.get("domain") or ""
    return Prompt(text=text, is_turn=turns is not None, category=str(category))


def _words(draw: random.Random, count: int) -> Prompt:
    text = " ".join(draw.choices(WORDS, k=count))
    return Prompt(text=text, category="random", num_tokens=count)


def _flag(name: str) -> str:
    repeated = ("prefix_len", "suffix_len", "num_prefixes")
    stem = f"prefix_repetition_{name}" if name in repeated else name
    return "--" + stem.replace("_", "-")

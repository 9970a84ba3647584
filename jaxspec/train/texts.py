"""A folder of texts that the target wrote: `python -m jaxspec.train text`.

Several heads and drafts can be trained on one folder, and share the target's hidden
states in it. No held-out text has the prompt of a text to train on.
"""

import argparse
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.engine.model_folders import model_folder
from jaxspec.errors import ConfigError, check_integer, check_number, wrong_argument
from jaxspec.llm import LLM
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.target import replace_text
from jaxspec.train.text import Text, read_prompts, temperatures_between, write_text

_log = logging.getLogger(__name__)

SETTINGS = "settings.json"
FORMAT = 1
# Bytes at both ends of a file that identify its content, with its size.
_END_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The content of a folder.

    Attributes:
        settings: Arguments that the texts were written with.
        digest: Digest of all rows.
    """

    folder: Path
    settings: dict[str, Any]
    trained: Text
    held_out: Text
    digest: str


def model_digest(path: Path) -> str:
    """Return a digest of a model's files: names, sizes, and both ends of each file."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_END_BYTES))
            stream.seek(max(0, size - _END_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def text_digest(*texts: Text) -> str:
    """Return a digest of the rows of texts."""
    digest = hashlib.sha256()
    for text in texts:
        for part in (text.tokens, text.sizes, text.starts):
            digest.update(part.tobytes())
    return digest.hexdigest()


def check_same(
    path: Path, given: dict[str, Any], holds: str, *, parameter: str | None = None
) -> None:
    """Check that a folder's settings are those given; a missing file has none.

    Args:
        holds: What the folder holds, for the error.

    Raises:
        ConfigError: A setting differs.
    """
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted(given.keys() | before.keys()):
        if given.get(name) != before.get(name):
            raise ConfigError(
                f"{path.parent} holds {holds} with {name}={before.get(name)!r}, got "
                f"{given.get(name)!r}: give the same value, or another folder.",
                parameter=parameter or name,
                value=given.get(name),
            )


def write_texts(options: argparse.Namespace) -> Texts:
    """Let the target write a folder of texts; continue if it was interrupted.

    Raises:
        ConfigError: An option is invalid, the folder was begun with others, or a prompt
            to train on is also held out; nothing has been computed then.
    """
    folder, target = Path(options.out), model_folder(options.target, "target")
    for name, low in (("length", 8), ("tokens", 1), ("held_out_tokens", 1)):
        check_integer(ConfigError, name, getattr(options, name), low=low)
    low, high = options.temperatures
    check_number(ConfigError, "temperatures", low, low=0)
    check_number(ConfigError, "temperatures", high, low=low)
    tokenizer = Tokenizer.from_folder(str(target))
    length, seed = options.length, options.seed
    prompts = {
        "train": read_prompts(Path(options.data), tokenizer, length=length, seed=seed),
        "held-out": read_prompts(
            Path(options.held_out_data), tokenizer, length=length, seed=seed + 1
        ),
    }
    held_out = {tuple(head) for head, _ in prompts["held-out"]}
    shared = [head for head, _ in prompts["train"] if tuple(head) in held_out]
    if shared:
        raise ConfigError(
            f"held_out_data has {len(shared)} prompts of data, for example "
            f"{tokenizer.decode(shared[0])!r:.80}: acceptance must be measured on "
            "prompts that no draft was trained on. Remove them from one of the files.",
            parameter="held_out_data",
            value=options.held_out_data,
        )
    settings = {
        "format": FORMAT,
        "target": model_digest(target),
        "target_name": options.target,
        "data": _file_digest(options.data),
        "held_out_data": _file_digest(options.held_out_data),
        "tokens": options.tokens,
        "held_out_tokens": options.held_out_tokens,
        "length": length,
        "temperatures": [low, high],
        "seed": seed,
        "dtype": options.dtype,
    }
    path = folder / SETTINGS
    check_same(path, settings, "texts")
    parts = folder / "parts"
    for name in prompts:
        (parts / name).mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(settings, indent=2) + "\n")
    counts = {"train": options.tokens, "held-out": options.held_out_tokens}
    names = [name for name in prompts if not (folder / f"{name}.npz").exists()]
    if names:
        with LLM(
            str(target),
            dtype=options.dtype,
            max_model_len=length,
            max_num_seqs=options.max_num_seqs,
            tensor_parallel_size=options.tensor_parallel_size,
        ) as llm:
            for name in names:
                text = write_text(
                    _Quiet(llm),
                    prompts[name],
                    length=length,
                    num_tokens=counts[name],
                    seed=seed if name == "train" else seed + 2**20,
                    draw=temperatures_between(low, high),
                    parts=parts / name,
                )
                text.save(folder / f"{name}.npz")
    texts = open_texts(folder)
    for name, text in (("train", texts.trained), ("held-out", texts.held_out)):
        _log.info("%s: %d rows, %d tokens", name, len(text), text.num_written)
        if text.num_written < counts[name]:
            _log.warning(
                "%s: the prompts ended before %d tokens were written: give more "
                "prompts",
                *(name, counts[name]),
            )
    return texts


@dataclass(frozen=True)
class _Quiet:
    """Generates without a progress bar of its own."""

    llm: Any

    def generate(self, prompts: Any, sampling_params: Any) -> Any:
        return self.llm.generate(prompts, sampling_params, use_tqdm=False)


def open_texts(folder: Path) -> Texts:
    """Read a folder of texts.

    Raises:
        ConfigError: It is no such folder, is incomplete, or has an unknown format.
    """
    path = folder / SETTINGS
    if not path.is_file():
        allowed = "a folder that `python -m jaxspec.train text` wrote"
        raise wrong_argument(ConfigError, "texts", allowed, str(folder))
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format={settings.get('format')!r}, but only {FORMAT} is "
            "supported: write the texts again.",
            parameter="texts",
            value=str(folder),
        )
    found = []
    for name in ("train", "held-out"):
        file = folder / f"{name}.npz"
        if not file.exists():
            raise ConfigError(
                f"{folder} has no {file.name}: writing it was interrupted. Run the "
                "command that writes it again.",
                parameter="texts",
                value=str(folder),
            )
        found.append(Text.load(file))
    trained, held_out = found
    digest = text_digest(trained, held_out)
    return Texts(
        folder=folder,
        settings=settings,
        trained=trained,
        held_out=held_out,
        digest=digest,
    )


def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

"""Which prompts are measured: valid documents of a corpus, or our own short list."""

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxspec.bench.data import read_prompts

HERE = Path(__file__).parent
DOMAINS = ("math", "shell", "stories", "fiction", "code")
OPEN_TURN = "<start_of_turn>model\n"
# How much of a document without turns becomes the prompt.
PLAIN_CHARACTERS = 320
# A question longer than this is passed over: prompts should cost alike.
MAX_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a run, by domain, and where they come from."""

    source: str
    by_domain: dict[str, list[str]]

    @property
    def digest(self) -> str:
        """Tells two sets of prompts apart in a result, without their text."""
        text = json.dumps(self.by_domain, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_prompts(corpus: Path | None, per_domain: int) -> PromptSet:
    """Take prompts from `corpus`, or from `prompts.jsonl` beside this file.

    Raises:
        SystemExit: `corpus` has no valid.jsonl.xz, or too few prompts of a domain.
    """
    beside = HERE.parents[1] / "shared" / "corpus"
    path = (corpus or beside) / "valid.jsonl.xz"
    source, given = "valid documents of the corpus", _of_corpus(path)
    if corpus is None and not path.is_file():
        source, given = "benchmarks/prompts.jsonl", bundled("prompts.jsonl")
    elif not path.is_file():
        raise SystemExit(f"--corpus must be a folder with valid.jsonl.xz, got {corpus}")
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for domain, prompt in given:
        found[domain].append(prompt)
    short = {domain: len(found[domain]) for domain in DOMAINS}
    short = {domain: count for domain, count in short.items() if count < per_domain}
    if short:
        raise SystemExit(
            f"--prompts-per-domain {per_domain}: {source} has fewer of {short}"
        )
    # Spread over the set: neighbours are often of one kind.
    chosen = {
        domain: prompts[:: len(prompts) // per_domain][:per_domain]
        for domain, prompts in found.items()
    }
    return PromptSet(source=source, by_domain=chosen)


def bundled(name: str) -> Iterator[tuple[str, str]]:
    """Domain and text of the prompts in a file beside this one."""
    return ((one.category, one.text) for one in read_prompts(HERE / name))


def _of_corpus(path: Path) -> Iterator[tuple[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            prompt = prompt_of(document["text"])
            if prompt is not None:
                yield document["domain"], prompt


def prompt_of(text: str) -> str | None:
    """The part of a document that is given; the model goes on from there.

    A conversation is cut where the model's first turn opens, any other text at the end
    of a word. None for what is too short or too long to measure with.
    """
    question, opening, answer = text.partition(OPEN_TURN)
    if opening:
        prompt = question + opening
        return prompt if answer and len(prompt) <= MAX_CHARACTERS else None
    if len(text) < 2 * PLAIN_CHARACTERS:
        return None
    cut = text[:PLAIN_CHARACTERS]
    end = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[:end] if end > 0 else None

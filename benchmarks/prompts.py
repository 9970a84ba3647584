"""Which prompts are measured: valid documents of a corpus, or our own short list."""

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

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
    if corpus is None:
        corpus = HERE.parents[1] / "shared" / "corpus"
        if not (corpus / "valid.jsonl.xz").is_file():
            return _checked("benchmarks/prompts.jsonl", _bundled(), per_domain)
    path = corpus / "valid.jsonl.xz"
    if not path.is_file():
        raise SystemExit(f"--corpus must be a folder with valid.jsonl.xz, got {corpus}")
    return _checked("valid documents of the corpus", _of_corpus(path), per_domain)


def _bundled() -> dict[str, list[str]]:
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for entry in map(json.loads, lines):
        found[entry["domain"]].append(entry["prompt"])
    return found


def _of_corpus(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            prompt = prompt_of(document["text"])
            if prompt is not None:
                found[document["domain"]].append(prompt)
    return found


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


def _checked(source: str, found: dict[str, list[str]], per_domain: int) -> PromptSet:
    short = {domain: len(found[domain]) for domain in DOMAINS}
    short = {domain: count for domain, count in short.items() if count < per_domain}
    if short:
        raise SystemExit(
            f"--prompts-per-domain {per_domain}: {source} has fewer of {short}"
        )
    chosen = {}
    for domain in DOMAINS:
        # Spread over the set: neighbours are often of one kind.
        stride = len(found[domain]) // per_domain
        chosen[domain] = found[domain][::stride][:per_domain]
    return PromptSet(source=source, by_domain=chosen)

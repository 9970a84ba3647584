"""Prompts by domain for drafts of a pretrained target: to train on, and held out.

    python checkpoints/recipes/drafter_prompts.py --corpus CORPUS --out FOLDER

writes `train.jsonl` and `held_out.jsonl`, `{"domain", "prompt"}` a line. The held-out
prompts are made from the corpus's validation documents and from subjects of their own,
so no prompt is in both files. A pretrained target continues texts, so that a task is
written as the beginning of a document.
"""

import argparse
import ast
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ANSWER = "<start_of_turn>model\n"
TURNS = re.compile(r"<start_of_turn>user\n(.*?)<end_of_turn>", re.DOTALL)
# Longest part of a document in a prompt, in characters: about 80 tokens.
MAX_CHARACTERS = 320
# The last ones are held out.
SUBJECTS = (
    "volcanoes, the printing press, photosynthesis, the Roman Empire, jazz music, the "
    "human heart, electric cars, chess, the Moon, honey bees, bridges, the French "
    "Revolution, vaccines, coral reefs, bread, the Amazon river, steam engines, "
    "democracy, black holes, the violin, rice farming, the Olympic Games, glaciers, "
    "computer networks, tea, the Great Wall of China, antibiotics, whales, the stock "
    "market, poetry, solar power, the Silk Road, earthquakes, dinosaurs, football, "
    "cathedrals, the water cycle, satellites, chocolate, the Renaissance, owls, "
    "recycling, the telephone, gravity, markets, the Sahara, ballet, sleep, salt, "
    "wolves, trains, the periodic table, cheese, sailing, museums, cotton, the brain, "
    "clocks, lighthouses, paper, penguins, the theatre, memory, wine, tides, DNA, "
    "maps, kites, the guitar, soap, elephants, the alphabet, windmills, gold, lakes"
).split(", ")
NUM_HELD_OUT_SUBJECTS = 15
QUESTIONS = (
    "Question: What is the most important fact about {}?\nAnswer:",
    "Question: Where and when did people first learn about {}?\nAnswer:",
    "Q: Why are {} interesting?\nA:",
    "What are {} and how do they work?",
    "who discovered {}",
)
TASKS = (
    "Write a short blog post about {}.\n\n",
    "Write an essay about {} for students.\n\n",
    "Explain {} to a child.\n\n",
    "Imagine that you are an expert on {}. Describe your day.\n\n",
    "List five facts about {}:\n\n1.",
    "Dear friend,\n\nI am writing to you about {}.",
    "# {}\n\n## Introduction\n\n",
)
LANGUAGES = ("German", "French", "Spanish")


def read(path: Path) -> dict[str, list[str]]:
    """Return a corpus's texts by domain."""
    found: dict[str, list[str]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            found.setdefault(document["domain"], []).append(document["text"])
    return found


def turns(text: str) -> tuple[str, str]:
    """Return the first request and the first answer of a conversation."""
    request = TURNS.search(text)
    answer = text.partition(ANSWER)[2].partition("<end_of_turn>")[0]
    return ("" if request is None else request[1].strip()), answer.strip()


def passage(text: str, draw: random.Random) -> str:
    """Return some whole sentences of a text."""
    text = turns(text)[1] or text
    starts = [found.end() for found in re.finditer(r"[.!?]\s+", text)]
    start = draw.choice([0, *starts[:-6]])
    cut = text[start : start + MAX_CHARACTERS]
    stop = max(cut.rfind(mark) for mark in ".!?") + 1
    return cut[: stop or None].strip()


def functions(text: str) -> Iterator[str]:
    """Yield signatures and docstrings of a module's functions."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            start, stop = node.lineno - 1, node.body[0].end_lineno
            indent = node.col_offset
            found = "\n".join(line[indent:] for line in lines[start:stop]) + "\n"
            if len(found) <= 2 * MAX_CHARACTERS:
                yield found


def code(text: str, draw: random.Random) -> str:
    """Return some lines of a module."""
    lines = text.splitlines(keepends=True)
    start = draw.randrange(max(1, len(lines) - 20))
    return "".join(lines[start : start + 8])[:MAX_CHARACTERS]


def sentence(text: str, draw: random.Random) -> str:
    """Return one sentence of a text."""
    found = [one for one in re.split(r"(?<=[.!?])\s+", passage(text, draw)) if one]
    return draw.choice(found or [text[:80]])


def make(
    corpus: dict[str, list[str]],
    subjects: Sequence[str],
    count: int,
    draw: random.Random,
) -> Iterator[tuple[str, str]]:
    """Yield (domain, prompt), at most `count` of each domain."""

    def text_of(*domains: str) -> str:
        return draw.choice(corpus[draw.choice(domains)])

    known = [found for text in corpus["code"] for found in functions(text)]
    prose = "stories", "fiction"
    makers: dict[str, Callable[[], str]] = {
        "stories": lambda: passage(text_of("stories"), draw)[: draw.randint(40, 200)],
        "fiction": lambda: passage(text_of("fiction"), draw)[: draw.randint(80, 320)],
        "code": lambda: code(text_of("code"), draw),
        "functions": lambda: draw.choice(known),
        "math": lambda: (
            f"Question: {turns(text_of('math'))[0][:MAX_CHARACTERS]}\nAnswer:"
        ),
        "shell": lambda: turns(text_of("shell"))[1][: draw.randint(60, 200)],
        "questions": lambda: draw.choice(QUESTIONS).format(draw.choice(subjects)),
        "writing": lambda: draw.choice(TASKS).format(draw.choice(subjects)),
        "translation": lambda: (
            "Translate the following sentence from English to "
            f"{(language := draw.choice(LANGUAGES))}.\n"
            f"English: {sentence(text_of(*prose), draw)}\n{language}:"
        ),
        "summaries": lambda: f"Summarize: {passage(text_of(*prose), draw)}\nTL;DR:",
        "passages": lambda: (
            f"Passage: {passage(text_of(*prose), draw)}\n"
            f"Question: {draw.choice(('Who is this about?', 'What happened?'))}\n"
            "Answer:"
        ),
        "copying": lambda: (
            f"{(kept := passage(text_of(*prose, 'code'), draw)[:240])}\n\n{kept[:40]}"
        ),
    }
    for domain, maker in makers.items():
        found: dict[str, None] = {}
        for _ in range(4 * count):
            if len(found) < count:
                found.setdefault(maker())
        for prompt in found:
            if len(prompt) >= 8:
                yield domain, prompt


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write prompts by domain.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-domain", type=int, default=400)
    parser.add_argument("--held-out-per-domain", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = (
        ("held_out", "valid", SUBJECTS[-NUM_HELD_OUT_SUBJECTS:]),
        ("train", "train", SUBJECTS[:-NUM_HELD_OUT_SUBJECTS]),
    )
    counts = {"train": options.per_domain, "held_out": options.held_out_per_domain}
    taken: set[str] = set()
    for number, (name, split, subjects) in enumerate(parts):
        draw = random.Random(options.seed + number)
        corpus = read(options.corpus / f"{split}.jsonl.xz")
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for domain, prompt in make(corpus, subjects, counts[name], draw):
                if prompt not in taken:
                    taken.add(prompt)
                    line = json.dumps({"domain": domain, "prompt": prompt})
                    out.write(line + "\n")


if __name__ == "__main__":
    main()
